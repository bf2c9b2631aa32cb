"""Pings between ranks: who asks whom, that strangers learn nothing, that failures end no training."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from mt_megatron.host.peers import is_loopback
from mt_megatron.scan.clock.fit import fit_clocks
from mt_megatron.scan.clock.machine import address_towards, boot_id
from mt_megatron.scan.clock.ping_wire import TOKEN_BYTES, PingServer, ask
from mt_megatron.scan.clock.pings import FANOUT, ClockPings, ping_plan
from mt_megatron.scan.clock.store_messages import wait_for
from mt_megatron.scan.format.records import PING

from .clock_data import Rank, rank_on

TOKEN = bytes(range(TOKEN_BYTES))


class Board:
    """Messages of threads of one process."""

    def __init__(self, *, gone_after: int | None = None) -> None:
        self._texts: dict[str, str] = {}
        self._left = gone_after

    def _use(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("the store is gone")

    def write(self, key: str, text: str) -> None:
        self._use()
        self._texts[key] = text

    def read(self, key: str) -> str | None:
        self._use()
        return self._texts.get(key)


@contextmanager
def serving(**options: object) -> Iterator[PingServer]:
    server = PingServer("127.0.0.1", TOKEN, **options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize("machines", [1, 2, 3, 40, 300])
def test_every_machine_reaches_the_first(machines: int) -> None:
    names = [f"machine {rank // 4}" for rank in range(4 * machines)]
    plan = ping_plan(names)
    assert plan.asks.get(0) is None
    for rank in range(1, len(names)):
        hops, at = 0, rank
        while at:
            at, hops = plan.asks[at][0], hops + 1
        assert hops <= (2 if machines <= FANOUT + 1 else 4)
    asked = [peer for rank, peers in plan.asks.items() for peer in peers if names[rank] != names[peer]]
    assert all(plan.listens[peer] for peer in asked)
    assert max((asked.count(peer) for peer in set(asked)), default=0) <= FANOUT + 1
    assert plan.same_machine == {rank for rank in range(len(names)) if rank % 4}


def test_a_machine_alone_needs_no_listener_beyond_itself() -> None:
    assert set(ping_plan(["a"] * 8).listens.values()) == {False}
    assert ping_plan(["a"]).listens == {}


def test_third_machines_close_triangles() -> None:
    plan = ping_plan(["a", "b", "c"])
    assert plan.asks == {1: (0,), 2: (0, 1)}


def test_four_timestamps_come_back_in_their_order() -> None:
    with serving() as server:
        found = ask("127.0.0.1", server.port, TOKEN, peer=7, count=20)
    assert found.dtype == PING and len(found) == 20 and set(found["peer"].tolist()) == {7}
    # One machine, one clock: cause before effect.
    times = np.stack([found[name] for name in ("sent", "received", "answered", "returned")])
    assert (np.diff(times, axis=0) >= 0).all()


def test_without_the_token_nobody_is_answered() -> None:
    with serving() as server:
        with pytest.raises(OSError):
            ask("127.0.0.1", server.port, bytes(TOKEN_BYTES), peer=0, count=3)
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(TOKEN_BYTES))
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(64) == b""
        assert len(ask("127.0.0.1", server.port, TOKEN, peer=0, count=3)) == 3


def test_strangers_keep_nobody_waiting_however_many_and_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    # Were they waited for one after the other, or for as long as they like, nobody would be answered here.
    monkeypatch.setattr("mt_megatron.scan.clock.ping_wire._PATIENCE", 600.0)
    with serving() as server, contextlib.ExitStack() as visits:
        for number in range(100):
            stranger = socket.create_connection(("127.0.0.1", server.port), timeout=5)
            visits.enter_context(stranger)
            if number % 3:
                with contextlib.suppress(OSError):  # the first of many have gone already
                    stranger.sendall(TOKEN[: number % TOKEN_BYTES])
        assert len(ask("127.0.0.1", server.port, TOKEN, peer=0, count=20)) == 20


def test_a_stranger_has_half_a_second_in_all_not_for_each_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    def bytes_taken() -> int:
        with serving() as server, socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
            for number in range(TOKEN_BYTES - 1):
                stranger.settimeout(0.1)
                try:
                    if stranger.recv(1) == b"":
                        return number
                except TimeoutError:
                    pass
                except ConnectionError:
                    return number
                with contextlib.suppress(OSError):
                    stranger.sendall(b"x")
        return TOKEN_BYTES

    assert bytes_taken() < TOKEN_BYTES - 1
    monkeypatch.setattr("mt_megatron.scan.clock.ping_wire._PATIENCE", 600.0)
    assert bytes_taken() == TOKEN_BYTES, "the control: it is the time that ends the visit"


def test_a_wrong_token_ends_the_visit_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_megatron.scan.clock.ping_wire._PATIENCE", 600.0)
    with serving() as server, socket.create_connection(("127.0.0.1", server.port), timeout=60) as stranger:
        stranger.sendall(bytes(TOKEN_BYTES))
        assert stranger.recv(1) == b""


def test_several_who_know_the_token_are_all_answered() -> None:
    with serving() as server:
        found: list[np.ndarray] = []
        asking = [
            threading.Thread(
                target=lambda: found.append(ask("127.0.0.1", server.port, TOKEN, peer=0, count=30))
            )
            for _ in range(5)
        ]
        for each in asking:
            each.start()
        for each in asking:
            each.join()
    assert [len(each) for each in found] == [30] * 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("scan-ping")]


def test_a_server_that_closes_leaves_what_was_answered() -> None:
    answered = itertools.count()
    some = threading.Event()

    def now() -> int:
        if next(answered) > 10:
            some.set()
        return time.perf_counter_ns()

    server = PingServer("127.0.0.1", TOKEN, now=now)
    closing = threading.Thread(target=lambda: (some.wait(60), server.close()))
    closing.start()
    found = ask("127.0.0.1", server.port, TOKEN, peer=0, count=100_000)
    closing.join()
    assert 0 < len(found) < 100_000
    with pytest.raises(OSError):
        ask("127.0.0.1", server.port, TOKEN, peer=0, count=1)


def test_those_who_still_come_are_waited_for_and_not_for_ever() -> None:
    with serving() as server:
        began = time.monotonic()
        server.linger(quiet=30.0, at_most=0.05)
        assert time.monotonic() - began < 20
        ask("127.0.0.1", server.port, TOKEN, peer=0, count=1)
        began = time.monotonic()
        server.linger(quiet=0.05, at_most=30.0)
        assert 0.05 <= time.monotonic() - began < 20


def test_ranks_with_false_clocks_are_put_right() -> None:
    """Real sockets: the error is bounded by the round trips, however busy this machine is."""
    offsets = {0: 0, 1: 10**9, 2: -(10**9), 3: 0}
    board = Board()
    found: dict[int, list[np.ndarray]] = {rank: [] for rank in offsets}
    machines = {0: "a", 1: "b", 2: "c", 3: "a"}
    ranks = [
        ClockPings(
            board,
            found[rank].append,
            rank=rank,
            world_size=4,
            master="127.0.0.1",
            machine=machines[rank],
            period=0.05,
            now=lambda ahead=offset: time.perf_counter_ns() + ahead,  # type: ignore[misc]
        )
        for rank, offset in offsets.items()
    ]
    for each in ranks:
        each.start()
    until = time.monotonic() + 30
    while min(each.rounds for each in ranks[1:]) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    for each in reversed(ranks):
        each.close(seconds=10.0)
    traces: dict[int, Rank] = {
        rank: rank_on(machines[rank], pings=np.concatenate([np.zeros(0, PING), *pings]))
        for rank, pings in found.items()
    }
    assert {int(peer) for peer in traces[2].pings["peer"]} == {0, 1}
    clocks = fit_clocks(traces)
    for rank, offset in offsets.items():
        now = np.array([time.perf_counter_ns()])
        wrong = abs(int(clocks.to_reference(rank, now + offset)[0] - now[0]))
        assert wrong <= clocks.residuals[rank].uncertainty + 200_000 or np.isnan(
            clocks.residuals[rank].uncertainty
        )
        assert wrong < 10**8
    assert clocks.residuals[3].source == "same clock"
    assert clocks.residuals[1].pings >= 64


def test_a_store_that_goes_is_said_once_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    pings = ClockPings(Board(gone_after=2), lambda found: None, rank=1, world_size=2, machine="a")
    with caplog.at_level(logging.WARNING, logger="mt_megatron"):
        pings.start()
        until = time.monotonic() + 10
        while not caplog.messages and time.monotonic() < until:
            time.sleep(0.01)
        pings.close()
    (line,) = caplog.messages
    assert "compares clocks no more" in line and "the store is gone" in line


def test_closing_does_not_wait_for_ranks_that_never_came() -> None:
    pings = ClockPings(Board(), lambda found: None, rank=0, world_size=2, machine="a")
    pings.start()
    began = time.monotonic()
    pings.close(seconds=20.0)
    assert time.monotonic() - began < 15.0


def test_waiting_ends_with_what_is_left_or_with_the_time() -> None:
    board, stopped = Board(), threading.Event()
    assert wait_for(board, "key", stopped=stopped.wait, seconds=0.05) is None
    board.write("key", "text")
    assert wait_for(board, "key", stopped=stopped.wait, seconds=5) == "text"


def test_this_machine_has_a_name_and_an_address() -> None:
    assert boot_id() == boot_id() != ""
    assert address_towards("127.0.0.1") == "127.0.0.1" and is_loopback("127.0.0.1")
    assert address_towards("no such host.invalid") is None
    assert not is_loopback("10.0.0.1")
