"""Ends a run in which some rank no longer gets on, after every rank that still can has said where it is.

Two threads per rank. One looks at this rank alone: when it shows no progress for longer than the limit,
it writes all Python stacks to stderr and raises the alarm. The other talks to the other ranks: it leaves
signs of life, hears alarms, and gets the verdict: who holds up the run, in which collective the others
wait. Then every rank ends with ``EXIT_CODE``; ranks of the same machine that do not answer are killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from mt_megatron.backends.distributed.rendezvous import fresh_name
from mt_megatron.backends.threads import RankThread
from mt_megatron.training.health.watchdog_evidence import (
    Evidence,
    Sign,
    evidence,
    evidence_from,
    sign_of_life,
    started_at,
    verdict,
)
from mt_megatron.training.signals import end_process

_POLL_SECONDS = 0.1
_SECONDS_TO_READ = 10.0
_TO_MEET = timedelta(minutes=10)
_generation = 0


class Channel:
    """One rank's end. Methods block and may raise ``RuntimeError`` when the store is gone."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Collective in so far as every rank has to make its channels in the same order."""
        global _generation
        _generation += 1
        self.rank = rank
        self.world_size = world_size
        # The launcher's store outlives a restart of the ranks, which not every node counts.
        own = PrefixStore(f"mt_megatron/watchdog/{_generation}", dist.distributed_c10d._get_default_store())
        name = fresh_name(own, rank, world_size, _TO_MEET)
        self._store = PrefixStore(f"mt_megatron/watchdog/{name}", _connection())
        self.beat(sign_of_life("starting"))
        self.store_owner = Sign(**json.loads(self._store.get("sign/0")))
        """Rank 0, in whose process the store is unless a launcher keeps it."""

    def beat(self, sign: Sign) -> None:
        """Leave a sign of life."""
        self._store.set(f"sign/{self.rank}", json.dumps(asdict(sign)))

    def sign(self, rank: int) -> Sign | None:
        """The last sign of life of ``rank``."""
        text = self._read(f"sign/{rank}")
        return None if text is None else Sign(**json.loads(text))

    def alarm(self) -> str | None:
        """Why some rank raised the alarm; None when none did."""
        return self._read("alarm")

    def ending(self, where: str) -> None:
        """Say that this rank saves and closes after an error: a conference counts it as one that left. No
        alarm."""
        self._store.compare_set(f"left/{self.rank}", "", f"{where}; it still saves and closes")

    def leave(self, reason: str) -> None:
        """Say that this rank ends with an error."""
        self._store.set(f"left/{self.rank}", reason)
        self._store.compare_set("alarm", "", json.dumps({"rank": self.rank, "left": True}))

    def raise_alarm(self) -> None:
        """Call all ranks to say where they are."""
        self._store.compare_set("alarm", "", json.dumps({"rank": self.rank, "left": False}))

    def confer(self, own: Evidence, patience: float) -> tuple[str, list[Sign]]:
        """Give ``own`` evidence and get the verdict of the rank that asks all others, which is the first
        to come here. Takes up to ``patience`` seconds. Also returns who did not answer."""
        self._store.set(f"evidence/{self.rank}", own.to_json())
        speaker = self._store.compare_set("speaker", "", str(self.rank)).decode()
        if speaker == str(self.rank):
            return self._ask_all(patience)
        deadline = time.monotonic() + patience + _SECONDS_TO_READ
        while time.monotonic() < deadline:
            said = self._read("verdict")
            if said is not None:
                told = json.loads(said)
                text: str = told["text"]
                self._have_read(told["readers"])
                # Once per node is enough to read.
                whole = os.environ.get("LOCAL_RANK", "0") == "0"
                return text if whole else text.partition("\n")[0], []
            time.sleep(_POLL_SECONDS)
        return verdict({self.rank: own}, {}, {}, self.world_size), []

    def _ask_all(self, patience: float) -> tuple[str, list[Sign]]:
        found: dict[int, Evidence] = {}
        left: dict[int, str] = {}
        deadline = time.monotonic() + patience
        # A rank that closes for too long gives evidence, and is in both then.
        while len(found.keys() | left.keys()) < self.world_size and time.monotonic() < deadline:
            for rank in range(self.world_size):
                if rank not in found and (text := self._read(f"evidence/{rank}")) is not None:
                    found[rank] = evidence_from(text)
                if rank not in found and (reason := self._read(f"left/{rank}")) is not None:
                    left[rank] = reason
            time.sleep(_POLL_SECONDS)
        missing = [rank for rank in range(self.world_size) if rank not in found]
        signs = {rank: sign for rank in missing if (sign := self.sign(rank)) is not None}
        text = verdict(found, signs, left, self.world_size)
        self._store.set("verdict", json.dumps({"text": text, "readers": list(found)}))
        self._have_read(list(found))
        return text, [sign for rank, sign in signs.items() if rank not in left]

    def _have_read(self, readers: list[int]) -> None:
        """Say that this rank knows the verdict. Rank 0, in whose process the store may be, leaves last."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"read/{self.rank}", "")
            deadline = time.monotonic() + _SECONDS_TO_READ
            keys = [f"read/{rank}" for rank in readers]
            while self.rank == 0 and not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def _read(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        text: str = self._store.get(key).decode()
        return text


def _connection() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return store
    return TCPStore(
        store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


EXIT_CODE = 75
"""``EX_TEMPFAIL`` of sysexits.h: the run may be started again."""

_SECONDS_TO_LEAVE = 15.0
_SECONDS_FOR_STACKS = 0.5
CLOSING_SECONDS = 600.0
"""Default of ``Watchdog``'s ``closing_seconds``; that of ``--distributed-timeout-minutes``."""


class Watchdog:
    """Watches one rank. Collective: all ranks make one, or none does."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        limit: float,
        channel: Channel | None = None,
        end: Callable[[int, str], NoReturn] = end_process,
        closing_seconds: float = CLOSING_SECONDS,
    ) -> None:
        """``limit`` in seconds; ``channel`` is None for a run of one process. ``closing_seconds``: the limit
        of ``long_progress``, and how long this rank may save and close after an error of its own once another
        rank has raised the alarm."""
        self.limit = limit
        self._closing_seconds = closing_seconds
        self.period = min(5.0, max(0.2, limit / 20))
        self._patience = 2 * self.period + 8.0
        self._rank = rank
        self._world_size = world_size
        self._channel = channel
        self._end = end
        self._state: tuple[float, str, float] = (time.monotonic(), "starting", math.inf)
        """Time of the last progress, where, and the seconds until the next."""

        self._stopped = threading.Event()
        self._is_ending = False
        self._alarm: str | None = None
        self._alarm_heard = 0.0
        self._to_confer: queue.SimpleQueue[Evidence | None] = queue.SimpleQueue()
        self._conferred: queue.SimpleQueue[tuple[str, list[Sign]]] = queue.SimpleQueue()
        self._stacks_on_signal = False
        self._threads = [RankThread(target=self._watch, name="watchdog", daemon=True)]
        if channel is not None:
            self._threads.append(
                RankThread(target=self._talk, args=(channel,), name="watchdog-channel", daemon=True)
            )

    def start(self) -> None:
        """Watch from now on; nothing is limited before ``progress`` or ``long_progress`` is called."""
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        ):
            # Needs no interpreter: also for a rank that holds on to it.
            faulthandler.register(signal.SIGUSR2, all_threads=True)
            self._stacks_on_signal = True
        for thread in self._threads:
            thread.start()

    def progress(self, where: str) -> None:
        """The main thread has got to ``where``; it must show progress again within the limit."""
        self._state = (time.monotonic(), where, self.limit)

    def long_progress(self, where: str) -> None:
        """As ``progress``, of what takes longer than a step: a start's first one, saving, validation."""
        self._state = (time.monotonic(), where, self._closing_seconds)

    def touch(self) -> None:
        """The main thread gets on within what it was doing."""
        _, where, limit = self._state
        self._state = (time.monotonic(), where, limit)

    def unlimited(self, where: str) -> None:
        """The main thread is at ``where``, which may take as long as it likes."""
        self._state = (time.monotonic(), where, math.inf)

    def ending(self, where: str) -> None:
        """The main thread met an error and saves, closes and leaves. Other ranks hear of it, and neither wait
        for this one nor kill it; from an alarm on, as of a rank that left, it has ``closing_seconds``."""
        self.unlimited(where)
        self._is_ending = True
        # Wakes the channel's thread, which tells the others.
        self._to_confer.put(None)

    def stop(self, error: BaseException | None = None) -> None:
        """The run is over. With ``error`` the other ranks are told that this one leaves."""
        self._stopped.set()
        self._to_confer.put(None)
        if self._stacks_on_signal:
            faulthandler.unregister(signal.SIGUSR2)
        if error is not None and self._channel is not None:
            reason = f"{type(error).__name__}: {error}"
            leaving = RankThread(target=self._leave, args=(reason,), daemon=True)
            leaving.start()
            leaving.join(2.0)
        for thread in self._threads:
            # The channel's may wait for a store that is gone.
            thread.join(self.period + 2.0)

    def _leave(self, reason: str) -> None:
        with contextlib.suppress(Exception):
            assert self._channel is not None
            self._channel.leave(reason)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self.period):
            now = time.monotonic()
            if now - before > 5 * self.period + 2:
                # The whole process was stopped and goes on (a debugger, a suspended machine).
                since, where, limit = self._state
                self._state = (now, where, limit)
            before = now
            since, where, limit = self._state
            if self._alarm is not None:
                self._answer(self._alarm, now)
            elif now - since > limit:
                self._give_evidence(f"no progress for {now - since:.1f} s (limit {limit:g} s)")

    def _answer(self, alarm: str, now: float) -> None:
        waited = now - self._alarm_heard
        if self._is_ending:
            # A conference counts this rank as one that left, so that it holds up nobody.
            if waited > self._closing_seconds:
                self._give_evidence(
                    f"still closing {waited:.1f} s after another rank raised the alarm (limit "
                    f"{self._closing_seconds:g} s)"
                )
        # After an error of one rank the others usually have the same, or lose their connection to it.
        elif '"left": true' not in alarm or waited >= _SECONDS_TO_LEAVE:
            self._give_evidence("another rank raised the alarm")

    def _give_evidence(self, reason: str) -> None:
        since, where, _ = self._state
        own = evidence(where, time.monotonic() - since)
        head = f"watchdog: rank {self._rank} ({own.sign.name()}): {where}: {reason}"
        with contextlib.suppress(OSError, ValueError):
            os.write(2, f"{head}; Python stacks of this rank:\n".encode())
            faulthandler.dump_traceback(file=2, all_threads=True)
        self._end(EXIT_CODE, f"watchdog: rank {self._rank}: {self._verdict(own)}")

    def _verdict(self, own: Evidence) -> str:
        if self._channel is None:
            return verdict({self._rank: own}, {}, {}, 1)
        self._to_confer.put(own)
        try:
            text, silent = self._conferred.get(timeout=self._patience + 12.0)
        except queue.Empty:
            owner = self._channel.store_owner
            text = (
                f"the store that the ranks talk through does not answer; rank 0 ({owner.name()}) is stopped "
                "or gone\n" + verdict({self._rank: own}, {0: owner}, {}, self._world_size)
            )
            silent = [owner]
        _end_silent(silent, own.sign)
        return text

    def _talk(self, channel: Channel) -> None:
        said_ending = False
        with contextlib.suppress(RuntimeError, ValueError):  # the store is gone: _verdict says so
            while not self._stopped.is_set():
                channel.beat(sign_of_life(self._state[1]))
                if self._is_ending and not said_ending:
                    channel.ending(self._state[1])
                    said_ending = True
                if self._alarm is None and (alarm := channel.alarm()) is not None:
                    self._alarm_heard, self._alarm = time.monotonic(), alarm
                with contextlib.suppress(queue.Empty):
                    own = self._to_confer.get(timeout=self.period)
                    if own is not None:
                        channel.raise_alarm()
                        self._conferred.put(channel.confer(own, self._patience))


def _end_silent(silent: list[Sign], own: Sign) -> None:
    """Kill what does not answer on this machine, so that nothing is left behind; its stacks first."""
    local = [
        sign
        for sign in silent
        if sign.machine == own.machine and sign.pid != own.pid and started_at(sign.pid) == sign.started
    ]
    for sign in local:
        for number in (signal.SIGUSR2, signal.SIGCONT):
            with contextlib.suppress(OSError):
                os.kill(sign.pid, number)
    if local:
        time.sleep(_SECONDS_FOR_STACKS)
    for sign in local:
        with contextlib.suppress(OSError):
            os.kill(sign.pid, signal.SIGKILL)


class NoWatchdog:
    """In place of a ``Watchdog`` when there is no limit."""

    def start(self) -> None:
        """Nothing."""

    def progress(self, where: str) -> None:
        """Nothing."""

    def long_progress(self, where: str) -> None:
        """Nothing."""

    def touch(self) -> None:
        """Nothing."""

    def unlimited(self, where: str) -> None:
        """Nothing."""

    def ending(self, where: str) -> None:
        """Nothing."""

    def stop(self, error: BaseException | None = None) -> None:
        """Nothing."""


@contextmanager
def watched(
    limit: float, *, rank: int, world_size: int, closing_seconds: float = CLOSING_SECONDS
) -> Iterator[Watchdog | NoWatchdog]:
    """A watchdog of this rank in the default process group, for as long as the block lasts; one that does
    nothing when ``limit`` is 0. An error that leaves the block is told to the other ranks."""
    watchdog: Watchdog | NoWatchdog = NoWatchdog()
    if limit > 0:
        channel = Channel(rank, world_size) if world_size > 1 else None
        watchdog = Watchdog(
            rank=rank,
            world_size=world_size,
            limit=limit,
            channel=channel,
            closing_seconds=closing_seconds,
        )
    watchdog.start()
    try:
        yield watchdog
    except BaseException as error:
        watchdog.stop(error)
        raise
    watchdog.stop()
