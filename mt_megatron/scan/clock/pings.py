"""Compares the ranks' clocks while they train: a few dozen exchanges now and then, in a thread of its own.

Machines form a tree below rank 0, with a check beside it; a machine has one clock.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mt_megatron.backends.threads import RankThread
from mt_megatron.host.peers import is_loopback
from mt_megatron.scan.clock.machine import LOOPBACK, address_towards, boot_id
from mt_megatron.scan.clock.ping_wire import TOKEN_BYTES, Now, PingServer, ask
from mt_megatron.scan.clock.store_messages import Board, wait_for

FANOUT = 16
"""Machines that ping the same one: two levels reach 273 machines, three 4,369."""


@dataclass(frozen=True, kw_only=True)
class PingPlan:
    """What every rank does. Plain enough for JSON."""

    asks: Mapping[int, tuple[int, ...]]
    """Rank -> ranks it sends pings to. The first one carries the clock, further ones only check it."""

    listens: Mapping[int, bool]
    """Ranks that answer -> whether other machines have to reach them."""

    same_machine: frozenset[int]
    """Ranks that only ask the one that speaks for their own machine."""


def ping_plan(machines: Sequence[str]) -> PingPlan:
    """The plan for ranks 0, 1, ... that run on ``machines`` (equal text, equal machine).

    The lowest rank of a machine speaks for it: it pings the one of its parent in a tree of ``FANOUT``
    children, and that of the machine before its own, which closes a triangle. The machine's other ranks
    ping it, which shows whether they share its clock.
    """
    speakers: dict[str, int] = {}
    for rank, machine in enumerate(machines):
        speakers.setdefault(machine, rank)
    order = list(speakers.values())
    asks: dict[int, tuple[int, ...]] = {}
    listens: dict[int, bool] = {}
    for rank, machine in enumerate(machines):
        speaker = speakers[machine]
        if rank != speaker:
            asks[rank] = (speaker,)
            listens.setdefault(speaker, False)
            continue
        number = order.index(rank)
        if number == 0:
            continue
        parent = (number - 1) // FANOUT
        targets = dict.fromkeys(order[each] for each in (parent, number - 1))
        asks[rank] = tuple(targets)
        listens.update(dict.fromkeys(targets, True))
    same = frozenset(range(len(machines))) - set(order)
    return PingPlan(asks=asks, listens=listens, same_machine=same)


FIRST_PAUSE = 2.0
"""Seconds between the first two rounds; each pause is twice the one before, up to ``period``."""

_PER_ROUND = 64
_PER_CHECK = 16
_PATIENCE = 120.0
_QUIET = 0.3

_log = logging.getLogger("mt_megatron")


class ClockPings:
    """One rank's part. Every rank of the job makes one; none waits for another but in its own thread.

    Whatever fails is said once and ends the pings, never the training.
    """

    def __init__(
        self,
        board: Board,
        record: Callable[[np.ndarray], None],
        *,
        rank: int,
        world_size: int,
        master: str | None = None,
        machine: str | None = None,
        period: float = 180.0,
        now: Now = time.perf_counter_ns,
    ) -> None:
        """``record`` takes ``PING`` records, from the pings' thread. ``master`` is the host that all
        machines reach (``MASTER_ADDR``), ``machine`` this one's name for the comparison, ``period`` the
        longest pause between rounds in seconds, ``now`` the clock."""
        self._board = board
        self._record = record
        self._rank = rank
        self._world_size = world_size
        self._master = master or os.environ.get("MASTER_ADDR", LOOPBACK)
        self._machine = machine or boot_id()
        self._period = period
        self._now = now
        self._stopped = threading.Event()
        self._server: PingServer | None = None
        self._missed: set[int] = set()
        self._only_checks = False
        self._serves_others = False
        self.rounds = 0
        """Rounds that are over."""
        self._thread = RankThread(target=self._run, name="scan-pings", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def close(self, *, seconds: float = 1.0) -> None:
        """One last round, so that the end of the run lies between two; waits at most ``seconds`` for it,
        and for other machines' as long again."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        if self._server is not None:
            if self._serves_others:
                # They end as well, and have a last round of their own.
                self._server.linger(quiet=_QUIET, at_most=seconds)
            self._server.close()

    def _run(self) -> None:
        try:
            plan = self._agree()
            if plan is None:
                return
            addresses, token = plan
            pause = self._period if self._only_checks else min(FIRST_PAUSE, self._period)
            while True:
                self._round(addresses, token)
                if self._stopped.is_set() or not addresses:
                    return
                self._stopped.wait(pause)
                pause = min(2 * pause, self._period)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            if not self._stopped.is_set():
                _log.warning(
                    "scan: rank %d compares clocks no more (%s: %s); training goes on",
                    self._rank,
                    type(error).__name__,
                    error,
                )

    def _agree(self) -> tuple[dict[int, tuple[str, int]], bytes] | None:
        """Where those are that this rank asks, and the token; None when the job is over before."""
        about = {"machine": self._machine, "address": address_towards(self._master)}
        self._board.write(f"who/{self._rank}", json.dumps(about))
        if self._rank == 0:
            self._publish()
        said = self._wait("plan")
        if said is None:
            return None
        plan, token = _plan_from(said)
        if self._rank in plan.listens:
            self._listen(plan, json.loads(said)["others"], token)
        # One clock, in all likelihood: a look now and then is enough.
        self._only_checks = self._rank in plan.same_machine
        addresses = {}
        for peer in plan.asks.get(self._rank, ()):
            where = self._wait(f"address/{peer}")
            if where is None:
                return None
            address, port = json.loads(where)
            if address is not None:
                addresses[peer] = (address, port)
        return addresses, token

    def _publish(self) -> None:
        found = []
        for rank in range(self._world_size):
            about = self._wait(f"who/{rank}")
            if about is None:
                return
            found.append(json.loads(about))
        plan = ping_plan([each["machine"] for each in found])
        here = found[0]["machine"]
        others = next((each["address"] for each in found if each["machine"] != here), None)
        said = {
            "asks": {str(rank): peers for rank, peers in plan.asks.items()},
            "listens": {str(rank): wide for rank, wide in plan.listens.items()},
            "same_machine": sorted(plan.same_machine),
            "others": others,
            "token": secrets.token_hex(TOKEN_BYTES),
        }
        self._board.write("plan", json.dumps(said))

    def _listen(self, plan: PingPlan, others: str | None, token: bytes) -> None:
        address: str | None = LOOPBACK
        if plan.listens[self._rank]:
            address = address_towards(self._master)
            if others is not None and (address is None or is_loopback(address)):
                # The master's own machine: the name may mean loopback there.
                address = address_towards(others)
        try:
            if address is None:
                raise OSError("this machine has no address on the way to the others")
            self._server = PingServer(address, token, now=self._now)
        except OSError as error:
            _log.warning(
                "scan: rank %d cannot answer pings (%s): clocks are known less well", self._rank, error
            )
            self._board.write(f"address/{self._rank}", json.dumps([None, 0]))
            return
        self._serves_others = plan.listens[self._rank]
        if self._serves_others:
            _log.warning(
                "scan: rank %d answers clock pings of other machines at %s port %d, with a random token",
                self._rank,
                address,
                self._server.port,
            )
        self._board.write(f"address/{self._rank}", json.dumps([address, self._server.port]))

    def _round(self, addresses: dict[int, tuple[str, int]], token: bytes) -> None:
        for index, (peer, (address, port)) in enumerate(addresses.items()):
            try:
                count = _PER_CHECK if index or self._only_checks else _PER_ROUND
                self._record(ask(address, port, token, peer=peer, count=count, now=self._now))
            except OSError as error:
                if peer not in self._missed and not self._stopped.is_set():
                    self._missed.add(peer)
                    _log.warning("scan: rank %d: no pings with rank %d (%s)", self._rank, peer, error)
        self.rounds += 1

    def _wait(self, key: str) -> str | None:
        text = wait_for(self._board, key, stopped=self._stopped.wait, seconds=_PATIENCE)
        if text is None and not self._stopped.is_set():
            raise TimeoutError(f"nobody left {key!r} within {_PATIENCE:g} s")
        return text


def _plan_from(text: str) -> tuple[PingPlan, bytes]:
    said = json.loads(text)
    plan = PingPlan(
        asks={int(rank): tuple(peers) for rank, peers in said["asks"].items()},
        listens={int(rank): bool(wide) for rank, wide in said["listens"].items()},
        same_machine=frozenset(said["same_machine"]),
    )
    return plan, bytes.fromhex(said["token"])
