"""Two processes over real verbs: messages, a full receive queue, and every way in which a link ends.

Runs inside the guest of ``run.sh``, or on any machine with an RDMA device. Each scenario prints one line,
``RESULT`` and JSON: its name, whether it passed, its figures or its error. The processes are forked after
torch was imported, once, and before a device is opened.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mt_megatron.comm.errors import PeerLost, TransferTimeout
from mt_megatron.comm.rdma import ports
from mt_megatron.comm.rdma.completions import RdmaError
from mt_megatron.comm.rdma.transport import RdmaTransport, RingSize
from mt_megatron.comm.transport import Edge
from tests.comm.rdma.message_traffic import FolderBootstrap, exchange

FORTH, BACK = Edge(0, 1, 0), Edge(1, 0, 0)
LIMIT_SECONDS = 2.0
"""Within which a peer's end has to be noticed."""

_SMALL = RingSize(slots=4, slot_bytes=4096)

Scenario = Callable[[argparse.Namespace], dict[str, Any]]


class Ranks:
    """Forked processes 0 and 1, each running ``work(rank, folder)`` and returning JSON."""

    def __init__(self, *works: Callable[[int, Path], Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rdma-scenario-"))
        self.pids = [self._fork(rank, work) for rank, work in enumerate(works)]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def wait_for(self, name: str, timeout: float = 60.0) -> None:
        """Return when a rank has called ``mark`` with ``name``."""
        deadline = time.monotonic() + timeout
        while not (self.folder / name).exists():
            if time.monotonic() > deadline or any("failed" in each for each in self._said()):
                raise AssertionError(f"no rank reached {name!r}: {self.results(5.0)}")
            time.sleep(0.005)

    def _said(self) -> list[str]:
        files = [self.folder / f"result{rank}" for rank in range(len(self.pids))]
        return [file.read_text()[:12] for file in files if file.exists()]

    def results(self, timeout: float = 120.0) -> list[Any]:
        """What each rank returned; None for one that was killed. Raises AssertionError for a failure."""
        deadline = time.monotonic() + timeout
        left = dict(enumerate(self.pids))
        while left and time.monotonic() < deadline:
            for rank, pid in list(left.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del left[rank]
            time.sleep(0.01)
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        found: list[Any] = []
        for rank in range(len(self.pids)):
            file = self.folder / f"result{rank}"
            found.append(json.loads(file.read_text()) if file.exists() else None)
        failures = [each for each in found if isinstance(each, dict) and "failed" in each]
        if left or failures:
            raise AssertionError(f"hung: {sorted(left)}; {failures}")
        return found

    def _fork(self, rank: int, work: Callable[[int, Path], Any]) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            result: Any = work(rank, self.folder)
        except BaseException as error:  # noqa: BLE001 - told to the parent
            result = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
        temporary = self.folder / f".result{rank}"
        temporary.write_text(json.dumps(result))
        temporary.rename(self.folder / f"result{rank}")
        sys.stdout.flush()
        os._exit(0)


def mark(folder: Path, name: str) -> None:
    (folder / name).touch()


def open_transport(rank: int, folder: Path, **options: Any) -> RdmaTransport:
    settings: dict[str, Any] = {"timeout": 60.0, **options}
    return RdmaTransport(FolderBootstrap(folder, rank), **settings)


def expect(kind: type[BaseException], part: str, work: Callable[[], Any]) -> str:
    """The message of the ``kind`` that ``work`` must raise; it must have ``part`` in it."""
    try:
        work()
    except kind as error:
        if part not in str(error):
            raise AssertionError(f"{part!r} is missing in: {error}") from error
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def messages(options: argparse.Namespace) -> dict[str, Any]:
    """Random messages of all dtypes, three lanes each way, 4 threads a rank, with a CRC; all compared."""

    def work(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder, crc=True, size=RingSize(slots=8, slot_bytes=1 << 16))
        found = exchange(transport, rank, messages=options.messages, producers=4, seed=options.seed)
        transport.close()
        return {**found, "port": transport.where}

    one, other = Ranks(work, work).results(timeout=options.limit)
    return {
        "messages": one["received"] + other["received"],
        "wrong": one["wrong"] + other["wrong"],
        "MB": round((one["bytes"] + other["bytes"]) / 1e6, 1),
        "seconds": round(max(one["seconds"], other["seconds"]), 2),
        "port": one["port"],
    }


def two_jobs(options: argparse.Namespace) -> dict[str, Any]:
    """Two pairs of processes at once on one port."""

    def work(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder, crc=True, size=_SMALL)
        found = exchange(transport, rank, messages=options.messages // 10, producers=4, seed=options.seed)
        transport.close()
        return found

    jobs = [Ranks(work, work) for _ in range(2)]
    found = [each for job in jobs for each in job.results(timeout=options.limit)]
    return {
        "messages": sum(each["received"] for each in found),
        "wrong": sum(each["wrong"] for each in found),
        "MB": round(sum(each["bytes"] for each in found) / 1e6, 1),
    }


def full_receive_queue(options: argparse.Namespace) -> dict[str, Any]:
    """A receiver that takes nothing: the sender's posts return, its waits time out, nothing is lost."""
    count = 64

    def send(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder, size=_SMALL)
        transport.prepare([FORTH])
        handles = [transport.post_send(FORTH, torch.full((900,), float(i))) for i in range(count)]
        staged = sum(handle.test() for handle in handles)
        message = expect(TransferTimeout, "rank 1", lambda: handles[-1].wait(0.5))
        mark(folder, "full")
        handles[-1].wait()
        transport.finish()
        transport.close()
        return {"staged": staged, "message": message}

    def receive(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder, size=_SMALL)
        transport.prepare([FORTH])
        while not (folder / "full").exists():
            time.sleep(0.01)
        for i in range(count):
            found = transport.post_recv(FORTH, (900,), torch.float32).wait()
            assert torch.equal(found, torch.full((900,), float(i))), i
        transport.close()
        return count

    sent, received = Ranks(send, receive).results()
    assert sent["staged"] == _SMALL.slots, sent
    return {"staged before the peer takes any": sent["staged"], "received": received, "said": sent["message"]}


def _until_lost(rank: int, folder: Path, sends: bool) -> Any:
    """Exchange with the peer until it is lost; when that was noticed (monotonic) and what was said."""
    transport = open_transport(rank, folder, size=_SMALL)
    transport.prepare([FORTH, BACK])
    try:
        for i in range(1_000_000):
            if i == 20:
                mark(folder, f"busy{rank}")
            if sends:
                transport.post_send(FORTH, torch.zeros(2000)).wait()
            else:
                transport.post_recv(BACK, (2000,), torch.float32).wait()
    except PeerLost as error:
        return {"at": time.monotonic(), "said": str(error), "rank": error.rank, "pid": error.pid}
    finally:
        transport.close()
    raise AssertionError("the peer was never lost")


def _peer(sends: bool) -> Callable[[int, Path], Any]:
    def work(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder, size=_SMALL)
        transport.prepare([FORTH, BACK])
        while True:
            if sends:
                transport.post_send(BACK, torch.zeros(2000)).wait()
            else:
                transport.post_recv(FORTH, (2000,), torch.float32).wait()

    return work


def killed_peer(options: argparse.Namespace) -> dict[str, Any]:
    """SIGKILL of the peer at random points, of a sender's and of a receiver's."""
    random.seed(options.seed)
    delays, said = [], ""
    for trial in range(options.kills):
        sends = bool(trial % 2)
        ranks = Ranks(lambda rank, folder, s=sends: _until_lost(rank, folder, s), _peer(not sends))
        ranks.wait_for("busy0")
        time.sleep(random.random() * 0.3)
        killed = time.monotonic()
        ranks.kill(1)
        found, _ = ranks.results()
        assert found["rank"] == 1 and found["pid"] == ranks.pids[1], found
        delays.append(found["at"] - killed)
        said = found["said"]
    assert max(delays) < LIMIT_SECONDS, delays
    return {
        "trials": len(delays),
        "seconds, median": round(statistics.median(delays), 3),
        "seconds, longest": round(max(delays), 3),
        "said": said,
    }


def idle_peer_killed(options: argparse.Namespace) -> dict[str, Any]:
    """SIGKILL while nothing is on its way: only the probes can tell."""

    def wait(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder)
        transport.prepare([BACK])
        mark(folder, "ready0")
        said = expect(PeerLost, "rank 1", transport.post_recv(BACK, (1,), torch.float32).wait)
        noticed = time.monotonic()
        transport.close()
        return [noticed, said]

    def sleep(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder)
        transport.prepare([BACK])
        mark(folder, "ready1")
        time.sleep(60)

    ranks = Ranks(wait, sleep)
    ranks.wait_for("ready0")
    ranks.wait_for("ready1")
    time.sleep(1.0)
    killed = time.monotonic()
    ranks.kill(1)
    (noticed, said), _ = ranks.results()
    assert noticed - killed < LIMIT_SECONDS, noticed - killed
    return {"seconds": round(noticed - killed, 3), "said": said}


def stopped_peer(options: argparse.Namespace) -> dict[str, Any]:
    """SIGSTOP for 3 s is no end: the control of the two before. The wait times out, then all arrives."""

    def wait(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder)
        transport.prepare([BACK])
        mark(folder, "ready0")
        expected = transport.post_recv(BACK, (1,), torch.float32)
        said = expect(TransferTimeout, "while its adapter answers", lambda: expected.wait(2.5))
        mark(folder, "timed out")
        assert expected.wait().item() == 7.0
        transport.close()
        return said

    def send(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder)
        transport.prepare([BACK])
        mark(folder, "ready1")
        while not (folder / "timed out").exists():
            time.sleep(0.01)
        transport.post_send(BACK, torch.tensor([7.0]))
        transport.finish()
        transport.close()
        return 1

    ranks = Ranks(wait, send)
    ranks.wait_for("ready0")
    ranks.wait_for("ready1")
    ranks.kill(1, signal.SIGSTOP)
    time.sleep(3.0)
    ranks.kill(1, signal.SIGCONT)
    return {"said": ranks.results()[0]}


def too_few_receive_requests(options: argparse.Namespace) -> dict[str, Any]:
    """A receiver with two requests, stopped: the third write finds none (RNR)."""

    def send(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder, size=_SMALL, receives=2)
        transport.prepare([FORTH])
        mark(folder, "ready0")
        while not (folder / "stopped").exists():
            time.sleep(0.01)
        for _ in range(4):
            transport.post_send(FORTH, torch.zeros(1))
        said = expect(RdmaError, "RNR_RETRY_EXC_ERR: the peer had no receive request left", transport.finish)
        transport.close()
        return said

    def receive(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder, size=_SMALL, receives=2)
        transport.prepare([FORTH])
        mark(folder, "ready1")
        while not (folder / "result0").exists():
            time.sleep(0.01)
        transport.abandon()
        transport.close()
        return 1

    ranks = Ranks(send, receive)
    ranks.wait_for("ready0")
    ranks.wait_for("ready1")
    ranks.kill(1, signal.SIGSTOP)
    mark(ranks.folder, "stopped")
    ranks.wait_for("result0")
    ranks.kill(1, signal.SIGCONT)
    return {"said": ranks.results()[0]}


def wrong_key(options: argparse.Namespace) -> dict[str, Any]:
    """A write to memory that the peer's key does not open."""

    def send(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder)
        transport.prepare([FORTH])
        outgoing = transport._links[1].outgoing[0]
        outgoing._payload = (outgoing._payload[0], outgoing._payload[1] ^ 1)
        transport.post_send(FORTH, torch.zeros(1))
        said = expect(RdmaError, "REM_ACCESS_ERR", transport.finish)
        transport.close()
        mark(folder, "over")
        return said

    def receive(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder)
        transport.prepare([FORTH])
        while not (folder / "over").exists():
            time.sleep(0.01)
        transport.abandon()
        transport.close()
        return 1

    return {"said": Ranks(send, receive).results()[0]}


def peer_closes(options: argparse.Namespace) -> dict[str, Any]:
    """What was sent before a close arrives; what was not is named at once."""

    def wait(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder)
        transport.prepare([BACK])
        while not (folder / "closed").exists():
            time.sleep(0.01)
        assert transport.post_recv(BACK, (3,), torch.int64).wait().tolist() == [1, 2, 3]
        began = time.monotonic()
        said = expect(PeerLost, "closed its channels", transport.post_recv(BACK, (3,), torch.int64).wait)
        seconds = time.monotonic() - began
        transport.close()
        return [seconds, said]

    def send(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder)
        transport.prepare([BACK])
        transport.post_send(BACK, torch.tensor([1, 2, 3]))
        transport.finish()
        began = time.monotonic()
        transport.close()
        mark(folder, "closed")
        return time.monotonic() - began

    (seconds, said), closing = Ranks(wait, send).results()
    return {"seconds": round(seconds, 4), "seconds of close": round(closing, 3), "said": said}


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Half a round trip of 8 bytes and the rate of 8 MiB: an emulated machine's, no adapter's."""

    def work(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder)
        transport.prepare([FORTH, BACK])
        own, other = (FORTH, BACK) if rank == 0 else (BACK, FORTH)
        times = []
        for _ in range(200):
            began = time.perf_counter()
            if rank == 0:
                transport.post_send(own, torch.zeros(1, dtype=torch.int64))
            transport.post_recv(other, (1,), torch.int64).wait()
            if rank == 1:
                transport.post_send(own, torch.zeros(1, dtype=torch.int64))
            times.append((time.perf_counter() - began) / 2)
        transport.finish()
        big = torch.zeros(8 << 20, dtype=torch.uint8)
        began = time.perf_counter()
        for _ in range(4):
            if rank == 0:
                transport.post_send(own, big)
            else:
                transport.post_recv(other, big.shape, big.dtype).wait()
        transport.finish()
        seconds = time.perf_counter() - began
        transport.close()
        return [statistics.median(times), 4 * big.nbytes / seconds]

    (half, _), (_, rate) = Ranks(work, work).results()
    return {"8 B, half a round trip, us": round(half * 1e6, 1), "8 MiB, MB/s": round(rate / 1e6, 1)}


def port_goes_down(options: argparse.Namespace) -> dict[str, Any]:
    """The own network interface is taken down: the port is to blame, not the peer. The last scenario."""
    if options.interface is None:
        return {"left out": "no --interface was given to take down"}

    def wait(rank: int, folder: Path) -> Any:
        transport = open_transport(rank, folder)
        transport.prepare([FORTH, BACK])
        mark(folder, f"ready{rank}")
        edge = BACK if rank == 0 else FORTH
        said = expect(
            RdmaError, "the port of this machine is down", transport.post_recv(edge, (1,), torch.int8).wait
        )
        noticed = time.monotonic()
        transport.close()
        return [noticed, said]

    ranks = Ranks(wait, wait)
    ranks.wait_for("ready0")
    ranks.wait_for("ready1")
    time.sleep(0.5)
    subprocess.run(["ip", "link", "set", options.interface, "down"], check=True)
    down = time.monotonic()
    found = ranks.results()
    reason = ports.usable()
    subprocess.run(["ip", "link", "set", options.interface, "up"], check=True)
    return {
        "seconds": round(max(at for at, _ in found) - down, 3),
        "said": found[0][1],
        "usable() while it is down": reason,
    }


SCENARIOS: tuple[Scenario, ...] = (
    messages,
    full_receive_queue,
    killed_peer,
    idle_peer_killed,
    stopped_peer,
    too_few_receive_requests,
    wrong_key,
    peer_closes,
    two_jobs,
    speed,
    port_goes_down,
)


def main() -> int:
    """Run what is named, by default all. Returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scenarios; all if none is named")
    parser.add_argument("--messages", type=int, default=2000, help="per rank")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for the messages")
    parser.add_argument("--interface", help="network interface of the port, which may be taken down")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for scenario in SCENARIOS:
        if options.names and scenario.__name__ not in options.names:
            continue
        began = time.monotonic()
        result: dict[str, Any] = {"scenario": scenario.__name__, "passed": True}
        try:
            result["figures"] = scenario(options)
        except Exception as error:  # noqa: BLE001 - a scenario that fails is a result
            result.update(passed=False, error=f"{type(error).__name__}: {error}")
            failed += 1
        result["seconds"] = round(time.monotonic() - began, 2)
        print("RESULT", json.dumps(result), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
