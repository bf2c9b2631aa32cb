"""The ring's protocol: no execution that C11 allows loses a message or a wake-up; planted errors show."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mt_megatron.comm.shared_memory import native, plain
from mt_megatron.comm.shared_memory.protocol import NATIVE, PLAIN, Do, Order, Step
from tests.comm.ring.ring_model import Run, Table, explore
from tests.second_lane import DAILY

RUNS = (
    Run(1, (1, 1)),
    Run(2, (1, 1, 1)),
    Run(2, (3, 1)),
    # The second message does not fit behind the first: the slot between is passed over.
    Run(2, (1, 2, 1)),
    Run(2, (1, 2, 1), leases=True),
)


@pytest.mark.parametrize("table", [NATIVE, PLAIN], ids=["native", "plain"])
def test_no_execution_of_the_protocol_is_wrong(
    table: Table, record_property: Callable[[str, object], None]
) -> None:
    states = 0
    for run in RUNS:
        found = explore(table, run)
        assert not found.errors, (run, found)
        states += found.states
    assert states > 5000
    record_property("states", states)
    record_property("errors", 0)


def ordered(name: str, order: Order) -> Callable[[Table], Table]:
    """A table in which the step ``name`` has another memory order."""

    def changed(table: Table) -> Table:
        return {
            part: tuple(step._replace(order=order) if step.name == name else step for step in steps)
            for part, steps in table.items()
        }

    return changed


def without(name: str) -> Callable[[Table], Table]:
    def changed(table: Table) -> Table:
        return {part: tuple(step for step in steps if step.name != name) for part, steps in table.items()}

    return changed


def earlier(part: str, first: str, second: str) -> Callable[[Table], Table]:
    """A table in which the step ``second`` of ``part`` comes right before ``first``."""

    def changed(table: Table) -> Table:
        steps = [step for step in table[part] if step.name != second]
        moved = next(step for step in table[part] if step.name == second)
        steps.insert([step.name for step in steps].index(first), moved)
        return {**table, part: tuple(steps)}

    return changed


PLANTED: dict[str, tuple[Callable[[Table], Table], str]] = {
    "no release when published": (
        ordered("producer.publish", Order.RELAXED),
        "wrong message",
    ),
    "no acquire before it is read": (
        ordered("consumer.message", Order.RELAXED),
        "wrong message",
    ),
    "credit given before the payload is read": (
        earlier("consumer.chunk", "consumer.payload", "consumer.credit"),
        "overwritten while it is read",
    ),
    "published before the payload is written": (
        earlier("producer.chunk", "producer.payload", "producer.publish"),
        "wrong message",
    ),
    "no release when credit is given": (
        ordered("consumer.credit", Order.RELAXED),
        "overwritten while it is read",
    ),
    "no acquire before it is written": (
        ordered("producer.credit", Order.RELAXED),
        "overwritten while it is read",
    ),
    "no fence between publishing and looking for sleepers": (
        without("producer.publish_fence"),
        "nobody wakes",
    ),
    "no fence between the consumer's flag and its sleep": (without("consumer.flag_fence"), "nobody wakes"),
    "no fence between the producer's flag and its sleep": (without("producer.flag_fence"), "nobody wakes"),
    "no fence between credit and looking for sleepers": (
        without("consumer.credit_fence"),
        "nobody wakes",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(name: str, record_property: Callable[[str, object], None]) -> None:
    change, kind = PLANTED[name]
    # The protocol without errors is explored to its end above; here one is enough.
    errors = explore(change(NATIVE), Run(2, (1, 1, 1)), until=None if DAILY else kind).errors
    assert kind in errors, errors
    record_property("found", kind)


@pytest.mark.parametrize("table", [NATIVE, PLAIN], ids=["native", "plain"])
def test_sleep_without_a_second_look_is_found(table: Table) -> None:
    run = Run(2, (1, 1, 1), compares=False)
    assert "nobody wakes" in explore(table, run, until="nobody wakes").errors


def test_a_lease_that_keeps_the_slots_passed_over_is_found() -> None:
    run = Run(2, (1, 2, 1), leases=True, returns_passed_over=False)
    assert set(explore(NATIVE, run).errors) == {"nobody wakes"}


@pytest.mark.parametrize("name", ["producer.wake", "consumer.wake"])
def test_in_python_alone_every_wake_counts(name: str) -> None:
    found = explore(without(name)(PLAIN), Run(2, (1, 1, 1)), until="nobody wakes")
    assert "nobody wakes" in found.errors


_ACCESS = {
    Do.LOAD: r"atomic_load_explicit\(at\(end, {place}\), memory_order_{order}\)",
    Do.STORE: r"atomic_store_explicit\(at\(end, {place}\), .*, memory_order_{order}\)",
    Do.FENCE: r"atomic_thread_fence\(memory_order_{order}\)",
    Do.READ: r"(memcpy|copy)\(",
    Do.WRITE: r"(memcpy|copy)\(",
    Do.SLEEP: r"futex_wait\(at\(end, {place}\), seen, ",
    Do.WAKE: r"futex_wake\(at\(end, {place}\)\)",
}


def in_c(source: str) -> list[tuple[str, str]]:
    """Name and access of each STEP of the C source, in its order."""
    text = " ".join(source.split())
    found = []
    for match in re.finditer(r'STEP\("([a-z_.]+)", ', text):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        found.append((match[1], text[match.end() : end - 1]))
    return found


def agrees(found: list[tuple[str, str]], table: Table) -> list[str]:
    """What differs between the steps of a source and the table."""
    wrong = []
    for part, steps in table.items():
        end, kind = part.split(".")
        names = [name for name, _ in found if name.startswith(f"{end}.")]
        positions = [names.index(step.name) for step in steps if step.name in names]
        if len(positions) != len(steps) or positions != sorted(positions):
            wrong.append(f"{part}: {names}")
    accesses = dict(found)
    for step in (step for steps in table.values() for step in steps):
        pattern = _ACCESS[step.do].format(place=step.place.upper(), order=step.order.value)
        if not re.match(pattern, accesses.get(step.name, "")):
            wrong.append(f"{step}: {accesses.get(step.name)}")
    return wrong


def test_the_c_source_performs_the_table() -> None:
    found = in_c(native.SOURCE.read_text())
    assert len(found) == len(dict(found)) == sum(map(len, NATIVE.values()))
    assert not agrees(found, NATIVE)


def test_credit_is_given_after_each_copy() -> None:
    source = native.SOURCE.read_text()
    take = source[source.index("API int mtc_take(") :]
    take = take[: take.index("\n}\n")]
    assert take.index("wait_published(") < take.index('STEP("consumer.payload"') < take.index("took(")
    took = source[source.rindex("static void took(") :]
    assert took.index("end->taken = counter;") < took.index("give(end);") < took.index("\n}\n")


def test_stores_past_the_caches_are_fenced_before_a_release() -> None:
    copy = native.SOURCE.read_text().split("static void copy(")[1].split("\n}\n")[0]
    assert copy.rindex("_mm_stream_si128(") < copy.index("_mm_sfence();") < copy.index("return;")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(uint32_t)(counter + 1), memory_order_release", "(uint32_t)(counter + 1), memory_order_relaxed"),
        ("at(end, HEAD), memory_order_acquire", "at(end, HEAD), memory_order_relaxed"),
        ('STEP("producer.publish_fence", atomic_thread_fence(memory_order_seq_cst));', ""),
    ],
)
def test_a_change_of_the_c_source_shows(old: str, new: str) -> None:
    source = native.SOURCE.read_text()
    assert source.count(old) == 1
    assert agrees(in_c(source.replace(old, new)), NATIVE)


def test_the_c_source_touches_shared_words_in_steps_alone() -> None:
    source = re.sub(r"/\*.*?\*/", "", native.SOURCE.read_text(), flags=re.DOTALL)
    bare = re.sub(r'STEP\("[^"]*", ', "STEP(", source)
    lines = [line for line in source.splitlines() if re.search(r"at\(end, (HEAD|TAIL|\w+_WAITS)\)", line)]
    outside = [line.strip() for line in lines if "STEP(" not in line]
    # The drainer's: it only ever looks, and sleeps for a limited time.
    assert len(outside) == 4 and all("PRODUCER_WAITS" in line for line in outside), outside
    assert bare.count("STEP(") == sum(map(len, NATIVE.values())) + 1


def test_the_python_source_performs_its_table() -> None:
    lines = Path(plain.__file__).read_text().splitlines()
    found: dict[str, str] = {}
    for line in lines:
        code, marked, name = line.partition("  # step: ")
        if marked:
            assert name not in found
            found[name] = code.strip()
    steps: list[Step] = [step for steps in PLAIN.values() for step in steps]
    assert set(found) == {step.name for step in steps}
    for step in steps:
        word = f"{step.place.upper()} // 4]"
        pattern = {
            Do.LOAD: f"seen = self._words[{word}",
            Do.STORE: f"self._words[{word} = ",
            Do.SLEEP: f"futex_wait(self._mapping.address + {step.place.upper()}, seen, ",
            Do.WAKE: f"futex_wake(self._mapping.address + {step.place.upper()})",
            Do.WRITE: "self._memory[self._header()] = header"
            if step.place == "header"
            else "ctypes.memmove(self._slot(counter), address",
            Do.READ: "return bytes(self._memory[self._header()])"
            if step.place == "header"
            else "ctypes.memmove(address + offset, self._slot(counter)",
        }[step.do]
        assert found[step.name].startswith(pattern), (step, found[step.name])
    for part, steps_of_part in PLAIN.items():
        order = [name for name in found if name in {step.name for step in steps_of_part}]
        expected = [step.name for step in steps_of_part]
        assert order == expected, part
