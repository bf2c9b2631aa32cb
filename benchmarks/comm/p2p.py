"""Point-to-point transfers between two processes: memcpy, Gloo, shared memory copied out and in place.

    python benchmarks/comm/p2p.py [--mib 64] [--rounds 15] [--record results/]
    python benchmarks/comm/p2p.py --toy      # see that it runs

All sides are measured in every round, in an order that turns; ratios are of the same round. A large transfer
is timed on the sending rank, from its post until an 8-byte answer of the receiver, sent over shared memory
when all of the message is there (in place: after its last element was read). Destinations are reused and
touched before, for Gloo too. Both ranks copy a message that is copied out, one into the ring and one out of
it, so ``memcpy of both``, where each copies as much on its own, bounds it: they share the memory's bandwidth.

8 bytes: half of a round trip, mean of a round's trips. Window: the receiver gives each message's memory back
only after an injected latency; the ring holds one message or four. Each rank computes with one thread and is
not bound to a core, as in training (``--pin``: it is).
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from recording import machine, record, spread, table
from torch import Tensor

from mt_megatron.backends.distributed.rendezvous import loopback_store
from mt_megatron.comm.bootstrap import default_bootstrap
from mt_megatron.comm.shared_memory.ring import RingSize
from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport
from mt_megatron.comm.transport import Edge

THERE, BACK = Edge(0, 1, 0), Edge(1, 0, 0)


class Rank:
    """Process, of two; ``channels``: by what they are used for."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self.rank, self.args = rank, args
        count = args.mib * 2**20 // 4
        self.source = torch.arange(count, dtype=torch.float32)
        self.target = torch.zeros(count)
        self.spare = torch.zeros(count)
        self.small = torch.zeros(1, dtype=torch.int64)
        # Message larger than the caches in one copy, which goes past them.
        in_place = RingSize(args.mib * 2**20, 2)
        held = args.window_kib * 1024 // 2
        sizes = {
            "copied out": RingSize(args.slot_kib * 1024, args.slots),
            "in place": in_place,
            "window 1": RingSize(held, 2),
            "window 4": RingSize(held, 8),
        }
        self.channels = {
            name: SharedMemoryTransport(default_bootstrap(f"bench/{name}"), size=size, helper=args.helper)
            for name, size in sizes.items()
        }
        for channel in self.channels.values():
            channel.prepare([THERE, BACK])
        self.helper = self.channels["copied out"].helper

    def answer(self) -> None:
        """The receiver says that it has everything."""
        channel = self.channels["copied out"]
        if self.rank:
            channel.post_send(BACK, self.small)
        else:
            channel.post_recv(BACK, (1,), torch.int64).wait()

    def meet(self) -> None:
        self.answer()
        dist.barrier()

    def memcpy(self) -> None:
        if not self.rank:
            self.target.copy_(self.source)

    def memcpy_of_both(self) -> None:
        self.spare.copy_(self.source)
        self.answer()

    def gloo(self) -> None:
        if self.rank:
            dist.recv(self.target, 0)
        else:
            dist.send(self.source, 1)
        self.answer()

    def copied_out(self) -> None:
        channel = self.channels["copied out"]
        if self.rank:
            channel.post_recv(THERE, self.target.shape, self.target.dtype, out=self.target).wait()
        else:
            channel.post_send(THERE, self.source)
        self.answer()

    def in_place(self) -> None:
        channel = self.channels["in place"]
        if self.rank:
            with channel.post_recv(THERE, self.target.shape, self.target.dtype).lease() as got:
                assert got[-1] == self.source[-1]
        else:
            channel.post_send(THERE, self.source)
        self.answer()

    def trips(self, send: Callable[[], Any], receive: Callable[[], Any]) -> None:
        for _ in range(self.args.trips):
            if self.rank:
                receive()
                send()
            else:
                send()
                receive()

    def small_gloo(self) -> None:
        other = 1 - self.rank
        self.trips(lambda: dist.send(self.small, other), lambda: dist.recv(self.small, other))

    def small_ours(self) -> None:
        channel = self.channels["copied out"]
        there, back = (BACK, THERE) if self.rank else (THERE, BACK)
        self.trips(
            lambda: channel.post_send(there, self.small),
            lambda: channel.post_recv(back, (1,), torch.int64).wait(),
        )

    def window(self, name: str) -> None:
        """Messages that fill the ring's share; leases end after the latency."""
        channel, count = self.channels[name], self.args.window_messages
        part = self.source[: self.args.window_kib * 1024 // 4]
        if not self.rank:
            for _ in range(count):
                channel.post_send(THERE, part)
            channel.finish()
        else:
            held: queue.Queue[Any] = queue.Queue()
            returning = threading.Thread(target=_give_back, args=(held,))
            returning.start()
            for _ in range(count):
                lease = channel.post_recv(THERE, part.shape, part.dtype).lease()
                lease.__enter__()
                held.put((time.perf_counter() + self.args.latency_ms / 1e3, lease))
            held.put(None)
            returning.join()
        self.answer()


def _give_back(held: queue.Queue[Any]) -> None:
    while (item := held.get()) is not None:
        due, lease = item
        time.sleep(max(0.0, due - time.perf_counter()))
        lease.__exit__(None, None, None)


SIDES: dict[str, Callable[[Rank], None]] = {
    "memcpy": Rank.memcpy,
    "memcpy of both": Rank.memcpy_of_both,
    "gloo": Rank.gloo,
    "copied out": Rank.copied_out,
    "in place": Rank.in_place,
    "8 B gloo": Rank.small_gloo,
    "8 B ours": Rank.small_ours,
    "window 1": lambda rank: rank.window("window 1"),
    "window 4": lambda rank: rank.window("window 4"),
}


def run(rank: int, store: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every side and round, on rank 0."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1 and args.pin:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    own = Rank(rank, args)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for round_ in range(args.rounds + 1):
        order = list(SIDES)
        turn = round_ % len(order)
        for side in order[turn:] + order[:turn]:
            own.meet()
            began = time.perf_counter()
            SIDES[side](own)
            if round_:
                times[side].append(time.perf_counter() - began)
    if rank:
        _check(own)
    own.meet()
    for channel in own.channels.values():
        channel.close()
    dist.destroy_process_group()
    return {"helper": own.helper, "times": times}


def _check(rank: Rank) -> None:
    target: Tensor = rank.target
    if not torch.equal(target, rank.source):
        raise AssertionError("what arrived is not what was sent")


def figures(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Speeds, half round trips and ratios of the same round: smallest, median, largest."""
    times = found["times"]
    nbytes = args.mib * 2**20
    large = {side: spread([nbytes / each / 1e9 for each in times[side]]) for side in LARGE}
    small = {side: spread([each / args.trips / 2 * 1e6 for each in times[side]]) for side in SMALL}
    ratios = {
        name: spread([a / b for a, b in zip(times[slow], times[fast], strict=True)])
        for name, (slow, fast) in RATIOS.items()
    }
    return {"helper": found["helper"], "GB/s": large, "half round trip, us": small, "ratios": ratios}


LARGE = ("memcpy", "memcpy of both", "gloo", "copied out", "in place")
SMALL = ("8 B gloo", "8 B ours")
RATIOS = {
    "copied out / Gloo": ("gloo", "copied out"),
    "copied out / memcpy": ("memcpy", "copied out"),
    "copied out / memcpy of both": ("memcpy of both", "copied out"),
    "in place / memcpy": ("memcpy", "in place"),
    "8 B: Gloo's time / ours": ("8 B gloo", "8 B ours"),
    "window 4 / window 1": ("window 1", "window 4"),
}
"""Speed of the second side in units of the first, or of the slower in units of the faster."""

WANTED = {
    "copied out / Gloo": 3.0,
    "copied out / memcpy": 0.55,
    "in place / memcpy": 0.8,
    "8 B: Gloo's time / ours": 8.0,
    "window 4 / window 1": 2.0,
}


def shown(result: dict[str, Any]) -> str:
    """Both tables."""

    def cells(name: str, each: dict[str, float]) -> list[str]:
        return [name, f"{each['median']:.2f}", f"{each['min']:.2f} to {each['max']:.2f}"]

    rows = [cells(f"{side}, GB/s", each) for side, each in result["GB/s"].items()]
    rows += [cells(f"{side}, us", each) for side, each in result["half round trip, us"].items()]
    ratios = []
    for name, each in result["ratios"].items():
        wanted = WANTED.get(name)
        reached = "" if wanted is None else "yes" if each["median"] >= wanted else "no"
        ratios.append([*cells(name, each), "" if wanted is None else f"{wanted:g}", reached])
    return "\n\n".join(
        [
            table(["side", "median", "range"], rows),
            table(["ratio", "median", "range", "wanted", "reached"], ratios),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--slot-kib", type=int, default=512)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--trips", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--window-kib", type=int, default=256)
    parser.add_argument("--window-messages", type=int, default=24)
    parser.add_argument("--latency-ms", type=float, default=2.0)
    parser.add_argument("--pin", action="store_true", help="each rank on a core of its own")
    parser.add_argument("--helper", choices=["auto", "native", "python"], default="auto")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    if args.toy:
        args.mib, args.trips, args.rounds, args.window_messages = 2, 20, 2, 8
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    before = machine()
    store, port = loopback_store()
    child = os.fork()
    if not child:
        code = 1
        try:
            client = dist.TCPStore("127.0.0.1", port)  # type: ignore[attr-defined]
            run(1, client, args)
            code = 0
        finally:
            os._exit(code)
    result = figures(run(0, store, args), args)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"the other rank failed with status {status}")
    text = shown(result)
    print(text)
    if args.record:
        options = {name: value for name, value in vars(args).items() if name not in ("record", "toy")}
        title = f"Point to point between two processes, {args.mib} MiB and 8 B, helper: {result['helper']}"
        record(args.record, "p2p", title, {"machine": before, "options": options, **result}, text)


if __name__ == "__main__":
    main()
