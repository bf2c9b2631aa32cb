"""Exhaustive exploration of a ring's protocol under the C11 memory model.

The explorer executes the step tables of ``mt_megatron.comm.shared_memory.protocol``, from which the two
implementations are checked line by line (test_ring_model.py). Memory is that of the promise-free operational
semantics of C11 (Kang et al., POPL 2017, without promises): each location keeps all its writes, each with the
view that a release publishes; each thread has a view below which it cannot read. A load may return any write
that its view allows, so stale values, delayed stores and loads out of order all occur; acquire, release and
sequentially consistent fences move views. Accesses of header and payload are not atomic: one that is not
ordered with a conflicting one by happens-before is an error of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from mt_megatron.comm.shared_memory.protocol import Do, Order, Step
from mt_megatron.comm.shared_memory.ring import RingSize

Table = dict[str, tuple[Step, ...]]
View = tuple[int, ...]

WORDS = ("tail", "head", "producer_waits", "consumer_waits")


@dataclass(frozen=True)
class Run:
    """What is explored. ``messages``: chunks of each. ``leases``: credits are given after a message's last
    chunk was read, instead of after each. ``compares``: the kernel looks at the word before it sleeps."""

    slots: int
    messages: tuple[int, ...]
    leases: bool = False
    compares: bool = True
    returns_passed_over: bool = True
    """Whether a lease gives back the slots before its message as soon as the header was read."""


@dataclass
class Found:
    """``states``: distinct ones. ``errors``: kinds of error, with how many states showed each."""

    states: int
    errors: dict[str, int]


class _Op(NamedTuple):
    """One step with its numbers. ``value``: stored, or for a load the counter that is waited for. ``then``:
    where a load goes on that need not wait; ``back``: where the last step of a wait goes."""

    step: Step
    place: int
    value: int = 0
    then: int = -1
    back: int = -1


class _Thread(NamedTuple):
    pc: int
    seen: int
    asleep: int  # A word's place, or -1.
    view: View
    acquired: View  # By a fence to come.
    released: View  # At the last fence.


class _State(NamedTuple):
    memory: tuple[tuple[tuple[int, View], ...], ...]
    fenced: View
    threads: tuple[_Thread, ...]


def explore(table: Table, run: Run, *, most_states: int = 2_000_000, until: str | None = None) -> Found:
    """Every state that the two ends can reach; with ``until`` no further than to an error of this kind."""
    places = _places(run.slots)
    programs = (_producer(table, run, places), _consumer(table, run, places))
    zero = (0,) * (2 * len(places))  # The second half counts reads.
    memory = tuple(((0, zero),) for _ in places)
    start = _State(memory, zero, (_Thread(0, 0, -1, zero, zero, zero),) * 2)
    found = Found(0, {})
    reached, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        found.states += 1
        moved = False
        for which in (0, 1):
            for following in _moves(state, which, programs[which], run, len(places), found.errors):
                moved = True
                following = _canonical(following, programs)
                if following not in reached:
                    reached.add(following)
                    frontier.append(following)
                    if len(reached) > most_states:
                        raise RuntimeError(f"more than {most_states} states")
        ended = all(each.pc == len(program) for each, program in zip(state.threads, programs, strict=True))
        if not moved and not ended:
            _count(found.errors, "nobody wakes")
        if until in found.errors:
            break
    return found


def _places(slots: int) -> dict[str, int]:
    names = [*WORDS, *(f"{kind} {slot}" for kind in ("header", "payload") for slot in range(slots))]
    return {name: place for place, name in enumerate(names)}


def _layout(run: Run) -> list[list[int]]:
    """Counters of each message's chunks; the first element is where its header lies."""
    size, position, found = RingSize(4096, run.slots), 0, []
    for chunks in run.messages:
        first = position + size.passed_over(position, chunks)
        found.append([position, *range(first, first + chunks)])
        position = first + chunks
    return found


def _producer(table: Table, run: Run, places: dict[str, int]) -> list[_Op]:
    program: list[_Op] = []
    for number, (header, *counters) in enumerate(_layout(run), 1):
        for counter in counters:
            _wait(program, table["producer.wait"], places, counter + 1 - run.slots)
            slots = {"header": header % run.slots, "payload": counter % run.slots}
            for step in table["producer.chunk"]:
                if step.place == "header" and counter != counters[0]:
                    continue
                value = counter + 1 if step.place == "head" else number
                _append(program, step, places, slots, value)
    return program


def _consumer(table: Table, run: Run, places: dict[str, int]) -> list[_Op]:
    program: list[_Op] = []
    for number, (header, *counters) in enumerate(_layout(run), 1):
        for counter in counters:
            _wait(program, table["consumer.wait"], places, counter + 1)
            slots = {"header": header % run.slots, "payload": counter % run.slots}
            if run.leases and run.returns_passed_over and counter == counters[0] > header:
                # The message's last chunks may wait for the credit of the slots passed over.
                steps = [step for step in table["consumer.chunk"] if step.place != "payload"]
                for step in steps:
                    _append(program, step, places, slots, counter if step.place == "tail" else number)
            for step in table["consumer.chunk"]:
                if step.place == "header" and counter != counters[0]:
                    continue
                if run.leases and counter != counters[-1] and step.do is not Do.READ:
                    continue
                value = counter + 1 if step.place == "tail" else number
                _append(program, step, places, slots, value)
    return program


def _wait(program: list[_Op], steps: Sequence[Step], places: dict[str, int], wanted: int) -> None:
    start, end = len(program), len(program) + len(steps)
    for step in steps:
        op = _Op(step, places.get(step.place, -1))
        if step.do is Do.LOAD:
            op = op._replace(value=wanted, then=end)
        elif step.do is Do.STORE:
            op = op._replace(value=int(step.name.endswith(".flag")))
        program.append(op)
    program[-1] = program[-1]._replace(back=start)


def _append(
    program: list[_Op], step: Step, places: dict[str, int], slots: dict[str, int], value: int
) -> None:
    name = f"{step.place} {slots[step.place]}" if step.place in slots else step.place
    op = _Op(step, places.get(name, -1), value)
    if step.do is Do.LOAD:
        # Nobody sleeps: the wake after it is left out.
        op = op._replace(value=-1, then=len(program) + 2)
    program.append(op)


def _moves(
    state: _State, which: int, program: list[_Op], run: Run, places: int, errors: dict[str, int]
) -> list[_State]:
    """The states after one more step of a thread, and all its steps on header and payload that follow."""
    thread = state.threads[which]
    if thread.asleep >= 0 or thread.pc == len(program):
        return []
    following = []
    for after in _step(state, which, program[thread.pc], run, places, errors):
        # Steps that are not atomic need no interleaving: conflicting ones are found by their order alone.
        pending = [after]
        while pending:
            each = pending.pop()
            pc = each.threads[which].pc
            if pc < len(program) and program[pc].step.do in (Do.READ, Do.WRITE):
                pending += _step(each, which, program[pc], run, places, errors)
            else:
                following.append(each)
    return following


def _step(state: _State, which: int, op: _Op, run: Run, places: int, errors: dict[str, int]) -> list[_State]:
    thread, do = state.threads[which], op.step.do
    following = thread.pc + 1 if op.back < 0 else op.back
    if do is Do.LOAD:
        return _load(state, which, op)
    if do is Do.STORE:
        time = len(state.memory[op.place])
        view = _at(thread.view, op.place, time)
        published = view if op.step.order in (Order.RELEASE, Order.SEQ_CST) else thread.released
        published = _at(published, op.place, time)
        memory = _appended(state.memory, op.place, (op.value, published))
        return [_with(state, which, thread._replace(pc=following, view=view), memory=memory)]
    if do is Do.FENCE:
        view = _join(_join(thread.view, thread.acquired), state.fenced)
        moved = thread._replace(pc=following, view=view, released=view)
        return [_with(state, which, moved)._replace(fenced=view)]
    if do is Do.SLEEP:
        latest = len(state.memory[op.place]) - 1
        if run.compares and state.memory[op.place][latest][0] != thread.seen:
            view = _at(thread.view, op.place, latest)
            return [_with(state, which, thread._replace(pc=following, view=view))]
        return [_with(state, which, thread._replace(pc=following, asleep=op.place))]
    if do is Do.WAKE:
        state = _with(state, which, thread._replace(pc=following))
        other = state.threads[1 - which]
        return [_with(state, 1 - which, other._replace(asleep=-1)) if other.asleep == op.place else state]
    if do is Do.WRITE:
        return [_write(state, which, op, places, errors)]
    return _read(state, which, op, places, errors)


def _load(state: _State, which: int, op: _Op) -> list[_State]:
    thread, found = state.threads[which], []
    for time in range(thread.view[op.place], len(state.memory[op.place])):
        value, published = state.memory[op.place][time]
        view, acquired = _at(thread.view, op.place, time), _join(thread.acquired, published)
        if op.step.order in (Order.ACQUIRE, Order.SEQ_CST):
            view = _join(view, published)
        # In a wait the counter that is wanted; else whether somebody sleeps.
        done = value >= op.value if op.value >= 0 or op.step.place in ("tail", "head") else not value
        pc = op.then if done else thread.pc + 1
        found.append(_with(state, which, thread._replace(pc=pc, seen=value, view=view, acquired=acquired)))
    return found


def _write(state: _State, which: int, op: _Op, places: int, errors: dict[str, int]) -> _State:
    thread = state.threads[which]
    # Reads of the other end come in its view at the place behind those of the writes.
    if state.threads[1 - which].view[places + op.place] > thread.view[places + op.place]:
        _count(errors, "overwritten while it is read")
    time = len(state.memory[op.place])
    moved = thread._replace(pc=thread.pc + 1, view=_at(thread.view, op.place, time))
    return _with(state, which, moved, memory=_appended(state.memory, op.place, (op.value, thread.released)))


def _read(state: _State, which: int, op: _Op, places: int, errors: dict[str, int]) -> list[_State]:
    thread = state.threads[which]
    writes = state.memory[op.place]
    if thread.view[op.place] < len(writes) - 1:
        _count(errors, "read before it is written")
    for time in range(thread.view[op.place], len(writes)):
        if writes[time][0] != op.value:
            _count(errors, "wrong message")
    view = _at(thread.view, places + op.place, thread.view[places + op.place] + 1)
    return [_with(state, which, thread._replace(pc=thread.pc + 1, view=view))]


def _canonical(state: _State, programs: Sequence[Sequence[_Op]]) -> _State:
    """``state`` without what no later step depends on: writes that nobody can read any more, with times
    counted anew, what a thread saw and does not use, and the views of a thread that has ended."""
    memory, threads, count = state.memory, list(state.threads), len(state.memory)
    latest = tuple(len(writes) - 1 for writes in memory)
    for which, program in enumerate(programs):
        thread = threads[which]
        if thread.pc == len(program):
            view = latest + threads[1 - which].view[count:]
            threads[which] = _Thread(thread.pc, 0, -1, view, view, view)
        else:
            # What a fence will join with the view may as well hold the view.
            acquired = _join(thread.acquired, thread.view)
            seen = thread.seen if program[thread.pc].step.name.startswith(_USE_SEEN) else 0
            threads[which] = thread._replace(acquired=acquired, seen=seen)
    oldest = tuple(map(min, threads[0].view, threads[1].view))

    def moved(view: View) -> View:
        return _moved(view, oldest)

    kept = tuple(
        tuple([(value, moved(view)) for value, view in writes[oldest[place] :]])
        for place, writes in enumerate(memory)
    )
    counted = [
        each._replace(view=moved(each.view), acquired=moved(each.acquired), released=moved(each.released))
        for each in threads
    ]
    return _State(kept, moved(state.fenced), (counted[0], counted[1]))


@lru_cache(maxsize=1 << 14)  # The same few come again and again.
def _moved(view: View, oldest: View) -> View:
    return tuple([time - old if time > old else 0 for time, old in zip(view, oldest, strict=True)])


_USE_SEEN = tuple(
    f"{end}.{name}" for end in ("producer", "consumer") for name in ("flag", "flag_fence", "sleep")
)


def _with(state: _State, which: int, thread: _Thread, memory: Any = None) -> _State:
    threads = (thread, state.threads[1]) if which == 0 else (state.threads[0], thread)
    return _State(state.memory if memory is None else memory, state.fenced, threads)


def _appended(memory: Any, place: int, write: tuple[int, View]) -> Any:
    return (*memory[:place], (*memory[place], write), *memory[place + 1 :])


def _at(view: View, place: int, time: int) -> View:
    return (*view[:place], time, *view[place + 1 :])


def _join(one: View, other: View) -> View:
    return one if one == other else tuple(map(max, one, other))


def _count(errors: dict[str, int], kind: str) -> None:
    errors[kind] = errors.get(kind, 0) + 1
