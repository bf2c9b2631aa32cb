"""One rank of the training that ``cost.py`` watches in turn with other ways, or not at all."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "scan")]

import cost_browsers  # noqa: E402
from paired_blocks import Blocks, Cores, Took, agreed, alternating, pilot, together, write  # noqa: E402
from scan_cost_worker import SHAPE as BF16_SHAPE  # noqa: E402
from throughput_sides import Case, Ours, token_ids  # noqa: E402

if TYPE_CHECKING:
    from mt_megatron.scope.session import Session

_LARGE = Case(
    name="L8 h2048 V32000, bf16",
    layers=8,
    hidden=2048,
    ffn=5504,
    heads=16,
    groups=16,
    vocabulary=32000,
    dtype=torch.bfloat16,
    sequence=2048,
    micro_batch=1,
    micro_batches=4,
)
SHAPES = {
    "small": replace(BF16_SHAPE, dtype=torch.float32),
    "tiny": Case(
        name="L2 h64 V512",
        layers=2,
        hidden=64,
        ffn=128,
        heads=4,
        groups=2,
        vocabulary=512,
        dtype=torch.float32,
        sequence=64,
        micro_batch=2,
    ),
    "large": _LARGE,
    "full": replace(_LARGE, name=f"{_LARGE.name}, 8 sequences", micro_batch=8, micro_batches=2),
}
"""Work of one data-parallel rank, in fp32: many processors have no bf16 arithmetic and take seconds a step.
``tiny`` is there to try the script with. ``large`` is for an accelerator, which mostly waits for launches;
``full`` has micro-batches of 16,384 tokens, which keep it busy."""

INTERVAL = 20
_LIVE = 7
"""Steps of this number show attention."""

_BOTH = INTERVAL * _LIVE
_ZERO = "--use-distributed-optimizer"
_REST_LOOK_SECONDS, _MOST_REST_SECONDS = 0.1, 5.0
"""Processes rest that use no tick of a processor between two looks; who does not in time is counted."""

_DIES_AFTER_SECONDS = 0.05
"""From the beginning of a block, in its first step."""

_MEMORY_ROUNDS = 20
"""Of a block of each kind of browsers, whose memory is looked at, before those whose time is."""

_MOST_BLOCKS = 40
"""Until the queue to a sidecar that takes too little is full, and something is dropped."""

_DRAIN = """
import os, selectors, socket, sys, time
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.bind(sys.argv[1])
server.listen(64)
ready = selectors.DefaultSelector()
ready.register(server, selectors.EVENT_READ)
while os.getppid() == int(sys.argv[2]):
    for key, _ in ready.select(1.0):
        if key.fileobj is server:
            ready.register(server.accept()[0], selectors.EVENT_READ)
        elif not key.fileobj.recv(int(sys.argv[3])):
            ready.unregister(key.fileobj)
            key.fileobj.close()
    time.sleep(float(sys.argv[4]))
"""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One kind of block."""

    session: str = "drained"
    steps: tuple[int | None, ...]
    """Numbers of the steps, as the session is told them; None: it is told of none."""


WATCHING = {
    "off again": Arm(steps=(None, None)),
    "unsampled": Arm(steps=(1, 1)),
    "sampled": Arm(steps=(INTERVAL, 1)),
    "attention": Arm(steps=(_LIVE, _LIVE)),
}
WATCHING_ROUND = ("off again", "unsampled", "unsampled", "sampled", "attention")
SIDECARS = {
    "drained again": Arm(steps=(_BOTH, 1)),
    **{name: Arm(session=name, steps=(_BOTH, 1)) for name in ("frozen", "slow", "dead")},
}
"""Everything is watched in the first step of a block; whoever takes it differs."""

BROWSERS = {
    name: Arm(session="served", steps=(_BOTH, _BOTH + 1))
    for name in ("no browser again", cost_browsers.UNCONNECTED, *cost_browsers.KINDS)
}
"""The same, by a sidecar as in a real job; who looks at its page differs."""


class Drain:
    """Takes what ranks send and does nothing with it: in a real job the sidecar has a core of its own."""

    def __init__(self, kind: str) -> None:
        self.socket = Path(tempfile.mkdtemp(prefix="scope_cost_")) / "s"
        # A slow one takes 40 KiB a second.
        self._pace = ("4096", "0.1") if kind == "slow" else (str(1 << 20), "0")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", _DRAIN, str(self.socket), str(os.getpid()), *self._pace]
        self._process = subprocess.Popen(command)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def has_told(self, seconds: float) -> bool:
        return False

    def become(self, kind: str) -> None:
        """Freeze it, or kill it; the other kinds are what they are from the start."""
        assert self._process is not None
        if kind == "frozen":
            self._process.send_signal(signal.SIGSTOP)
        elif kind == "dead":
            self._process.kill()

    def close(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class Training:
    """Steps of one training, watched by one of several sessions or by none."""

    def __init__(
        self, backend: str, shape: Case, ranks: int, layout: str, run: Path, kinds: Sequence[str]
    ) -> None:
        """``kinds`` of sidecars: a session each, which is ``drained`` until ``end_sidecar``, or ``served`` by
        a real one."""
        import mt_megatron

        warnings.filterwarnings("ignore")
        mt_megatron.patch(backend)
        if layout == "dp":
            case, spread = replace(shape, micro_batch=ranks * shape.micro_batch), (_ZERO,)
        else:
            case, spread = shape, ("--tensor-model-parallel-size", str(ranks))
        spread = (*spread, "--backend", backend)
        copies = ranks if layout == "dp" else 1
        self.case = case
        self.ours = Ours(case, token_ids(case), spread, copies)
        self.drains: dict[str, Drain] = {}
        watch = "attention@decoder.layers.0"
        self._told = 0
        """Number that is added to those of a served session's steps, which only grow."""

        if len(kinds) > 1:
            # Some MiB a step and rank, which fill a queue soon.
            watch = "attention@decoder.layers.*"
            watch += ":heads=0-3:samples=0,2" if layout == "dp" else ""
        watch += f":every={_LIVE}"
        self.sessions = {kind: self._session(kind, run / kind, watch) for kind in kinds}
        for session in self.sessions.values():
            session.start()

    def _session(self, kind: str, run: Path, watch: str) -> Session:
        from mt_megatron.scope.interfaces import Facts, Options
        from mt_megatron.scope.session import Session

        def sidecar(*given: Any, **options: Any) -> Drain:
            self.drains[kind] = Drain(kind)
            return self.drains[kind]

        job, trainable, case = self.ours.job, self.ours.trainable, self.case
        return Session(
            run,
            rank=job.rank,
            layout=job.layout,
            backend=job.backend,
            chunks=trainable.chunks,
            optimizer=trainable.optimizer,
            options=Options(live=kind == "served", interval=INTERVAL, watch=(watch,)),
            facts=Facts(
                micro_batch_size=case.micro_batch // job.layout.dp,
                seq_length=case.sequence,
                vocab_size=case.vocabulary,
                model={"name": case.name},
            ),
            **({} if kind == "served" else {"sidecar": sidecar}),
        )

    def end_sidecar(self, kind: str) -> float:
        """Freeze or kill the one of session ``kind``, or let it be slow, and train until something is
        dropped; MiB by which this rank's peak memory grew."""
        session = self.sessions[kind]
        before = most = peak_mib(lambda: self.block(SIDECARS["drained again"]))
        together()
        if kind in self.drains:
            self.drains[kind].become(kind)
        for _ in range(_MOST_BLOCKS):
            most = max(most, peak_mib(lambda: self.block(SIDECARS[kind])))
            if agreed(session.dropped[0]):
                break
        return most - before

    def block(self, arm: Arm) -> Took:
        """Seconds of ``arm``'s steps that begin together on all ranks: by the wall, and of the process's
        processors. Where somebody takes what they send, it ends once that is encoded."""
        session = self.sessions.get(arm.session)
        synchronize = self.ours.job.backend.synchronize
        together()
        synchronize()
        began, used = time.perf_counter(), time.process_time()
        for number in arm.steps:
            self._step(session, None if number is None else number + self._told)
        while session is not None and arm.session in ("drained", "served") and session.waiting:
            time.sleep(0.0002)
        synchronize()
        took = time.perf_counter() - began, time.process_time() - used
        if arm.session == "served":
            self._told += _BOTH
        return took

    def timed(self, count: int) -> tuple[float, float]:
        """The same of ``count`` unwatched steps."""
        wall, used = self.block(Arm(steps=(None,) * count))
        return wall, used

    def _step(self, session: Session | None, number: int | None) -> None:
        from mt_megatron.scope.interfaces import StepFigures

        if session is None or number is None:
            self.ours.step()
            return
        session.begin_step(number)
        result = self.ours.observed_step(session)
        figures = StepFigures(
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.tokens,
            skipped=result.skipped,
        )
        session.end_step(number, figures)

    def collectives_of(self, arm: Arm) -> int:
        """Collectives of a block of ``arm`` on this rank, as the process groups themselves number them."""
        before = _collectives()
        self.block(arm)
        # Less the barrier with which a block begins.
        return _collectives() - before - 1

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()
        self.ours.close()


def _collectives() -> int:
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def kept_mib() -> float:
    """Resident memory of this process once what it has freed is given back (Linux with glibc).

    A trainer on the cpu backend keeps what it frees (``keep_freed_memory``). How much depends on where
    the tensors of a step happened to lie, and grows by tens of MiB now and then, watched or not.
    """
    ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_info().rss) / 2**20


def peak_mib(take: Callable[[], object]) -> float:
    """The most that is resident while ``take`` runs, from ``kept_mib`` on."""
    kept_mib()
    # 5: the peak is what is resident now (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    take()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    """Take the rounds; each rank writes what they took, after each of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--layout", choices=("dp", "tp"), required=True)
    parser.add_argument("--pin", choices=("auto", "yes", "no"), required=True)
    parser.add_argument("--shape", choices=tuple(SHAPES), required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--sidecars", action="store_true")
    parser.add_argument("--browsers", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    arms = SIDECARS if args.sidecars else BROWSERS if args.browsers else WATCHING
    reference = next(iter(arms))
    kinds = list(dict.fromkeys(arm.session for arm in arms.values()))
    shape = SHAPES[args.shape]
    training = Training(args.backend, shape, ranks, args.layout, args.scratch / "run", kinds)
    training.timed(3)
    for arm in arms.values():
        training.block(arm)
    collectives = {name: training.collectives_of(arm) for name, arm in arms.items()}
    collectives["unwatched"] = training.collectives_of(WATCHING["off again"])
    pin = "yes" if arms is not WATCHING and ranks == 1 and args.pin == "auto" else args.pin
    unrest = pilot(training, rank) if pin == "auto" else {}
    pinned = unrest["pinned"] < unrest["free"] if unrest else pin == "yes"
    cores = Cores()
    place: Callable[[int], None] = (lambda process: cores.others(rank, process)) if pinned else _anywhere
    cores.pin(rank if pinned else None)
    step = agreed(statistics.median(training.timed(2)[0] / 2 for _ in range(4)))
    ended = [kind for kind in kinds if kind not in ("drained", "served")]
    browsers = None
    if args.browsers:
        place(_sidecar().pid)
        browsers = cost_browsers.Browsers(args.scratch / "run" / "served", place)
    if ranks == 1:
        for drain in training.drains.values():
            place(drain.pid)
    growth = {kind: training.end_sidecar(kind) for kind in ended}
    looked_at = None if browsers is None else LookedAt(training, browsers)
    if looked_at is not None:
        growth |= looked_at.growth(reference)
    kept = kept_mib()
    about: dict[str, Any] = {
        "shape": shape.name,
        "layout": f"{args.layout}{ranks}",
        "tokens_per_step": training.case.tokens,
        "ranks": ranks,
        "pinned": pinned,
        "unrest_percent": unrest,
        "device": training.ours.job.backend.device_name(training.ours.job.backend.current_device()),
        "threads": torch.get_num_threads(),
        "step_seconds": step,
        "collectives": collectives,
        "growth_mib": growth,
    }

    def each_round(found: Blocks) -> None:
        if looked_at is not None:
            about["restless_blocks"] = looked_at.restless
        if arms is not WATCHING:
            about["dropped_frames"] = {
                kind: session.dropped[0] for kind, session in training.sessions.items()
            }
        write(args.scratch, rank, found, about)

    block: Callable[[str], Took] = lambda name: training.block(arms[name])  # noqa: E731
    if looked_at is not None:
        block = looked_at.block
    others = WATCHING_ROUND if arms is WATCHING else tuple(arms)
    left = args.seconds - (time.monotonic() - began)
    found = alternating(block, reference, others, args.rounds, seconds=left, each_round=each_round)
    growth["kept"] = kept_mib() - kept
    each_round(found)
    if browsers is not None:
        browsers.kill()
    training.close()


class LookedAt:
    """Blocks on the only rank, beside browsers. They begin and end when the sidecar and the browsers rest, so
    that none pays for what another has left, and neither for browsers that come and go."""

    def __init__(self, training: Training, browsers: cost_browsers.Browsers) -> None:
        self._training = training
        self._browsers = browsers
        self.restless = 0
        """Blocks that began although somebody did not rest."""

    def block(self, name: str) -> Took:
        """A block with browsers of kind ``name``. Adds to its seconds the processor time of the sidecar in
        it, and up to the rest after it."""
        self._browsers.be(name)
        self.restless += not _rested()
        before = _used_by_the_sidecar()
        if name in cost_browsers.DYING:
            self._browsers.die(_DIES_AFTER_SECONDS)
        took = self._training.block(BROWSERS[name])
        if name in cost_browsers.DYING:
            self._browsers.wait()
        within = _used_by_the_sidecar() - before
        _rested()
        return *took, within, _used_by_the_sidecar() - before

    def growth(self, nobody: str) -> dict[str, float]:
        """MiB by which the peak of the blocks beside each kind of browsers is above that of ``nobody``'s."""
        peaks = dict.fromkeys((nobody, *cost_browsers.KINDS), 0.0)
        for _ in range(_MEMORY_ROUNDS):
            for name in peaks:
                peaks[name] = max(peaks[name], peak_mib(lambda name=name: self.block(name)))  # type: ignore[misc]
        return {kind: peaks[kind] - peaks[nobody] for kind in cost_browsers.KINDS}


def _used() -> dict[int, float]:
    """Seconds of processors that each process which this one has started used, by its number."""
    found = {}
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[each.pid] = sum(each.cpu_times()[:2])
    return found


def _rested() -> bool:
    """Wait until none of them uses a processor; False where one still did at the end."""
    until = time.monotonic() + _MOST_REST_SECONDS
    before = _used()
    while time.monotonic() < until:
        time.sleep(_REST_LOOK_SECONDS)
        now = _used()
        if now == before:
            return True
        before = now
    return False


def _used_by_the_sidecar() -> float:
    return float(sum(_sidecar().cpu_times()[:2]))


def _sidecar() -> psutil.Process:
    name = "mt_megatron.scope.sidecar"
    return next(each for each in psutil.Process().children() if name in each.cmdline())


def _anywhere(process: int) -> None:
    """Leave ``process`` on the cores it was given."""


if __name__ == "__main__":
    main()
