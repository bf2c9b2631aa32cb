"""A run that no longer gets on ends by itself, with the name of who holds it up; others are left alone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from mt_megatron.backends.distributed.rendezvous import loopback_store
from mt_megatron.backends.torch_version import torch_is_before
from mt_megatron.errors import DataError
from mt_megatron.training.health.watchdog import EXIT_CODE, Channel, Watchdog
from mt_megatron.training.health.watchdog_evidence import Evidence, Sign, Waiting, evidence_from, verdict
from tests.launch import ROOT, RankError, run_ranks, start_command

if TYPE_CHECKING:
    from tests.launch import Process

FAULTS = {"none": "none 0 0", "sleep": "sleep 1 5", "stop": "stop 1 5", "die": "die 1 5"}
MORE_FAULTS = {"stop_main": "stop 0 5", "other": "other 1 5", "error": "error 1 5"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(folder: Path, arguments: str) -> list[Process]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    processes = []
    for rank in range(2):
        environment = {**os.environ, **common, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(ROOT)
        environment.pop("LOCAL_RANK", None)
        # As on two nodes of which one alone saw a worker fail.
        environment["TORCHELASTIC_RESTART_COUNT"] = str(rank)
        with open(folder / f"{arguments.split()[0]}{arguments.split()[1]}.{rank}", "wb") as output:
            command = [sys.executable, "-W", "ignore", "-m", "tests.training.health.watchdog_worker", "4"]
            processes.append(
                start_command(
                    [*command, *arguments.split()], slot=rank, cwd=ROOT, env=environment, output=output
                )
            )
    return processes


def _end_of(faults: dict[str, str], folder: Path) -> dict[str, Any]:
    """Every fault at once, each in two processes: exit codes and what they wrote."""
    running = {name: _start(folder, arguments) for name, arguments in faults.items()}
    found: dict[str, Any] = {}
    try:
        for name, processes in running.items():
            codes = [process.wait(timeout=240) for process in processes]
            first, second = faults[name].split()[:2]
            texts = [(folder / f"{first}{second}.{rank}").read_text() for rank in range(2)]
            found[name] = {"codes": codes, "texts": texts, "pids": [process.pid for process in processes]}
        return found
    finally:
        for process in (process for processes in running.values() for process in processes):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _end_of(FAULTS, tmp_path_factory.mktemp("watchdog"))


@pytest.fixture(scope="module")
def more_ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _end_of(MORE_FAULTS, tmp_path_factory.mktemp("watchdog"))


def test_a_run_that_gets_on_is_left_alone(ended: dict[str, Any]) -> None:
    assert ended["none"]["codes"] == [0, 0]
    assert all("watchdog" not in text for text in ended["none"]["texts"])


def test_a_rank_stuck_in_python_is_named_with_its_stack(ended: dict[str, Any]) -> None:
    found = ended["sleep"]
    assert found["codes"] == [EXIT_CODE, EXIT_CODE]
    for text in found["texts"]:
        assert "the run is stuck: rank 1 is in no collective while the others wait" in text
        assert "watchdog_worker.py" in text and "in _stick" in text
        assert f"pid {found['pids'][1]}" in text and "step 5" in text
        assert "waits for" in text and "all_reduce" in text


def test_the_collective_is_named_with_number_group_and_sizes(ended: dict[str, Any]) -> None:
    if torch_is_before(2, 13):
        pytest.skip("this torch keeps no record of Gloo's collectives")
    for text in ended["sleep"]["texts"]:
        assert "gloo:all_reduce number 5 in group 0 of ranks 0, 1 on Float [4, 3]" in text


def test_a_stopped_rank_is_named_by_the_other_and_does_not_stay_behind(ended: dict[str, Any]) -> None:
    found = ended["stop"]
    assert found["codes"][0] == EXIT_CODE and found["codes"][1] in (EXIT_CODE, -signal.SIGKILL)
    assert (
        f"rank 1 (host {socket.gethostname()}, pid {found['pids'][1]}) does not answer" in found["texts"][0]
    )
    # Woken up for it, it says where it is: by then its main thread may have gone on by a line.
    assert "watchdog_worker.py" in found["texts"][1]


@pytest.mark.soak
def test_a_stopped_rank_that_holds_the_store_is_named(more_ended: dict[str, Any]) -> None:
    found = more_ended["stop_main"]
    assert found["codes"][1] == EXIT_CODE and found["codes"][0] in (EXIT_CODE, -signal.SIGKILL)
    assert f"pid {found['pids'][0]}) is stopped or gone" in found["texts"][1]


@pytest.mark.soak
def test_ranks_in_different_collectives_are_told_apart(more_ended: dict[str, Any]) -> None:
    found = more_ended["other"]
    assert found["codes"] == [EXIT_CODE, EXIT_CODE]
    for text in found["texts"]:
        assert "all_reduce" in text and "broadcast" in text
    if not torch_is_before(2, 13):
        said = "do different things at number 5: rank 0 is in gloo:all_reduce, rank 1 is in gloo:broadcast"
        assert said in found["texts"][0]


def test_no_rank_outlives_one_that_was_killed(ended: dict[str, Any]) -> None:
    codes = ended["die"]["codes"]
    assert codes[0] not in (0, None) and codes[1] == -signal.SIGKILL


@pytest.mark.soak
def test_no_rank_outlives_one_that_ended_with_an_error(more_ended: dict[str, Any]) -> None:
    codes = more_ended["error"]["codes"]
    assert codes[0] not in (0, None) and codes[1] == 1


def _watched(limit: float, **options: Any) -> tuple[Watchdog, list[str], threading.Event]:
    said: list[str] = []
    ended = threading.Event()

    def end(code: int, message: str) -> NoReturn:
        said.append(message)
        ended.set()
        while True:  # the thread is a daemon; a real end does not return either
            time.sleep(1)

    watchdog = Watchdog(**{"rank": 0, "world_size": 1, **options}, limit=limit, end=end)
    watchdog.start()
    return watchdog, said, ended


def test_what_takes_long_has_the_longer_limit(capfd: pytest.CaptureFixture[str]) -> None:
    watchdog, said, ended = _watched(1.0, closing_seconds=4.0)
    watchdog.long_progress("after step 1")
    for _ in range(3):
        assert not ended.wait(1.5), "what gets on has no end"
        watchdog.touch()
    began = time.monotonic()
    assert ended.wait(30) and time.monotonic() - began > 3.0
    watchdog.stop()
    assert "after step 1" in said[0] and "limit 4 s" in capfd.readouterr().err


def test_a_pause_does_not_trip_it_and_a_step_does(capfd: pytest.CaptureFixture[str]) -> None:
    watchdog, said, ended = _watched(1.5, closing_seconds=0.5)
    watchdog.progress("step 1")
    watchdog.unlimited("paused by command")
    assert not ended.wait(3.0)
    watchdog.progress("step 2")
    assert ended.wait(30)
    watchdog.stop()
    assert "step 2" in said[0] and "no progress for" in said[0]
    assert "Python stacks of this rank" in capfd.readouterr().err


@dataclass
class _Ranks:
    """Watchdogs of several ranks in threads of this process, with channels over one store of torch's."""

    watchdogs: list[Watchdog] = field(default_factory=list)
    said: list[list[str]] = field(default_factory=list)
    ended: list[threading.Event] = field(default_factory=list)
    killed: list[Sign] = field(default_factory=list)

    def start(self, world_size: int, *, limit: float = 4.0, **options: Any) -> list[Watchdog]:
        for rank in range(world_size):
            channel = Channel(rank, world_size)
            watchdog, said, ended = _watched(
                limit, rank=rank, world_size=world_size, channel=channel, **options
            )
            self.watchdogs.append(watchdog)
            self.said.append(said)
            self.ended.append(ended)
        return self.watchdogs

    def close(self) -> None:
        for watchdog, ended in zip(self.watchdogs, self.ended, strict=True):
            if ended.is_set():
                watchdog._threads.pop(0)  # It sleeps in `end`.
            watchdog.stop()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Ranks]:
    store, _ = loopback_store()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    # One thread makes all channels, one after another: none may wait for the others.
    monkeypatch.setattr("mt_megatron.training.health.watchdog.fresh_name", lambda *_: "ranks")
    made = _Ranks()
    monkeypatch.setattr(
        "mt_megatron.training.health.watchdog._end_silent", lambda silent, own: made.killed.extend(silent)
    )
    yield made
    made.close()


def test_a_rank_that_is_ending_is_neither_waited_for_nor_killed(
    ranks: _Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mt_megatron.training.health.watchdog._SECONDS_TO_LEAVE", 0.2)
    ending, leaving, waiting = ranks.start(3)
    waiting.progress("step 1")
    ending.ending("after DataError")
    leaving.stop(DataError("no samples left"))
    before = time.monotonic()
    assert ranks.ended[2].wait(30)
    assert time.monotonic() - before < waiting._patience
    text = ranks.said[2][0]
    assert "rank 0, 1 has left it (after DataError; it still saves and closes)" in text
    assert "rank 1 has left: DataError: no samples left" in text and "does not answer" not in text
    assert ranks.killed == [] and not ranks.ended[0].wait(0.5)


def test_a_stuck_rank_is_not_held_up_by_one_that_is_ending(ranks: _Ranks) -> None:
    ending, stuck = ranks.start(2, limit=0.5)
    ending.ending("after DataError")
    stuck.progress("step 2")
    assert ranks.ended[1].wait(30)
    assert "rank 0 has left it (after DataError; it still saves and closes)" in ranks.said[1][0]
    assert ranks.killed == [] and not ranks.ended[0].wait(0.5)


def test_a_rank_that_closes_for_too_long_ends(ranks: _Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    ending, leaving = ranks.start(2, closing_seconds=0.3)
    ending.ending("after DataError")
    assert not ranks.ended[0].wait(0.5), "it has as long as it likes while no rank waits"
    leaving.stop(DataError("no samples left"))
    assert ranks.ended[0].wait(30)
    assert "rank 1 has left it (DataError: no samples left)" in ranks.said[0][0]
    assert "still closing" in capfd.readouterr().err


def test_touching_is_progress() -> None:
    watchdog, _, ended = _watched(3.0)
    watchdog.progress("step 1")
    for _ in range(80):
        watchdog.touch()
        time.sleep(0.05)
    assert not ended.is_set()
    watchdog.stop()


def _evidence(rank: int, number: int, op: str = "all_reduce", waits: bool = True) -> Evidence:
    waiting = Waiting(op=op, group="7", number=number, ranks=[0, 1, 2], sizes="Float [8]")
    return Evidence(
        sign=Sign(host="node", pid=100 + rank, machine="m", started=1, where="step 9", at=0.0),
        silent_for=5.0,
        waiting=[waiting] if waits else [],
        entered={"7": number},
        stack=["model.py:1 in forward"],
    )


def test_who_has_not_come_to_a_collective_is_found() -> None:
    found = {0: _evidence(0, 12), 1: _evidence(1, 11), 2: _evidence(2, 12)}
    text = verdict(found, {}, {}, 3)
    assert "rank 1 has not come to a collective that others wait in" in text
    assert (
        "rank 1 (host node, pid 101): step 9, no progress for 5.0 s; waits for all_reduce number 11" in text
    )


def test_an_error_of_a_rank_that_left_is_told() -> None:
    text = verdict({0: _evidence(0, 3)}, {}, {1: "DataError: no samples left"}, 2)
    assert "rank 1 has left it (DataError: no samples left)" in text


def test_evidence_survives_the_store() -> None:
    before = _evidence(1, 3)
    assert evidence_from(before.to_json()) == before


def test_a_run_whose_data_does_not_come_ends(tmp_path: Path) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(
            2, "tests.training.health.watchdog_cases:data_that_does_not_come", str(tmp_path), timeout=200
        )
    text = str(error.value)
    assert "is in no collective while the others wait" in text
    assert "rank 1 (host" in text and "watchdog_cases.py" in text and "step 3" in text
    assert f"exit code {EXIT_CODE}" in text


def test_every_part_of_a_run_is_limited(tmp_path: Path) -> None:
    (found,) = run_ranks(
        1, "tests.training.health.watchdog_cases:limits_in_a_run", str(tmp_path), timeout=200
    )
    assert found["step"] == [60, 300, 300], "the first one compiles kernels and starts the loader"
    assert len(found["validation"]) == 3 and set(found["validation"]) == {60}
    assert len(found["saving"]) > 3 and set(found["saving"]) == {60}
