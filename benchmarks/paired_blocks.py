"""Paired blocks of steps: what two ways to train differ by, measured in turn within one set of processes.

``ranks_of`` starts a worker on every rank and reads what they wrote; the workers take blocks
(``alternating``) and write them (``write``), and ``difference`` judges them. For benchmarks of costs of a
percent or less.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent

RESAMPLES = 4_000
TRIMMED = 0.25
"""Share of the pairs that is left out on either side."""

SETTLE_SECONDS = 0.002
_WARM_UP_ROUNDS = 2
_PILOT_VISITS, _PILOT_STEPS = 2, 16

Took = Sequence[float]
"""Seconds of a block: by the wall, of the process's processors, and what a benchmark adds."""

Blocks = dict[str, list[list[Took]]]
"""Per arm the blocks before, of it and after."""


class Timed(Protocol):
    """A training whose steps can be timed."""

    def timed(self, count: int) -> tuple[float, float]:
        """Seconds of ``count`` steps that begin together on all ranks: by the wall, and of processors."""


# The process that starts the ranks.


def ranks_of(
    script: Path, ranks: int, threads: int, arguments: Sequence[str], timeout: float
) -> dict[str, Any]:
    """Results of the ``ranks`` processes of ``script`` (first argument: a folder of their own): ``blocks`` of
    each, and ``about``.

    Ends them after ``timeout`` seconds and when this process is told to end, and takes what they had written
    until then. Raises ``SystemExit`` without any.
    """
    from mt_megatron.backends.distributed.rendezvous import loopback_store

    store, port = loopback_store()
    until = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="paired_blocks_") as scratch, _ended_by_a_signal():
        processes = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "PYTHONPATH": f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": str(threads),
            }
            processes.append(
                subprocess.Popen([sys.executable, str(script), scratch, *arguments], env=environment)
            )
        ended: list[Any] = []
        try:
            ended += [process.wait(max(0.0, until - time.monotonic())) for process in processes]
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            ended = [type(error).__name__]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        del store
        files = [Path(scratch, f"blocks-{rank}.json") for rank in range(ranks)]
        if not all(file.exists() for file in files):
            raise SystemExit(f"workers ended with {ended}")
        found = [json.loads(file.read_text()) for file in files]
    if any(ended):
        print(f"workers ended with {ended}; what they had written is taken", file=sys.stderr, flush=True)
    about = {**found[0]["about"], "cut_off": any(ended)}
    return {"blocks": _in_step([each["blocks"] for each in found]), "about": about}


@contextlib.contextmanager
def _ended_by_a_signal() -> Iterator[None]:
    """SIGTERM as Ctrl-C: a benchmark that runs out of its time still judges what it has."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _in_step(blocks: Sequence[Blocks]) -> list[Blocks]:
    """As many of each arm as every rank wrote."""
    counts = {arm: min(len(each[arm]) for each in blocks) for arm in blocks[0]}
    return [{arm: each[arm][:count] for arm, count in counts.items()} for each in blocks]


# The ranks.


def alternating(
    block: Callable[[str], Took],
    reference: str,
    others: Sequence[str],
    rounds: int,
    *,
    seconds: float = float("inf"),
    each_round: Callable[[Blocks], None] = lambda found: None,
) -> Blocks:
    """Blocks of ``reference`` and of ``others`` in turn, the others of a round in random order, the same on
    all ranks; collective. Ends after ``rounds``, or with the round in which ``seconds`` are over."""
    rng = np.random.default_rng(0)
    found: Blocks = {arm: [] for arm in dict.fromkeys(others)}
    began = time.monotonic()
    before = block(reference)
    for number in range(-_WARM_UP_ROUNDS, rounds):
        for arm in rng.permutation(list(others)).tolist():
            time.sleep(SETTLE_SECONDS)
            own = block(arm)
            time.sleep(SETTLE_SECONDS)
            after = block(reference)
            if number >= 0:
                found[arm].append([before, own, after])
            before = after
        each_round(found)
        if agreed(time.monotonic() - began) > seconds:
            break
    return found


def write(scratch: Path, rank: int, blocks: Blocks, about: Mapping[str, Any]) -> None:
    """Leave what ``rank`` measured so far for ``ranks_of``."""
    file = scratch / f"blocks-{rank}.json"
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"blocks": blocks, "about": dict(about)}))
    part.replace(file)


def pilot(training: Timed, rank: int) -> dict[str, float]:
    """By how many percent a step differs from the mean of its neighbours, robustly: with the processes on any
    core, and each on one of its own. Collective; the same on all ranks."""
    cores = Cores()
    apart: dict[str, list[float]] = {"free": [], "pinned": []}
    for _ in range(_PILOT_VISITS):
        for where, found in apart.items():
            cores.pin(rank if where == "pinned" else None)
            took = np.array([training.timed(1)[0] for _ in range(_PILOT_STEPS)])[1:]
            found += (100 * (took[1:-1] / ((took[:-2] + took[2:]) / 2) - 1)).tolist()
    cores.pin(None)
    return {where: agreed(1.4826 * float(np.median(np.abs(found)))) for where, found in apart.items()}


class Cores:
    """The cores this process may use: all it was given, or one of them."""

    def __init__(self) -> None:
        self._given = sorted(os.sched_getaffinity(0))

    def pin(self, number: int | None) -> None:
        """Keep all threads of this process, and what they start, on one core; None: on all of them."""
        self._keep(os.getpid(), set(self._given) if number is None else {self._core(number)})

    def others(self, number: int, process: int) -> None:
        """Keep all threads of ``process``, and what they start, off the core ``number``. What a pinned
        process starts is pinned to the same core, and would take its time. Raises ``SystemExit`` where there
        is no other core."""
        cores = {*self._given} - {self._core(number)}
        if not cores:
            raise SystemExit(f"found core {self._core(number)} alone; give it a second one (taskset)")
        self._keep(process, cores)

    def _core(self, number: int) -> int:
        return self._given[number % len(self._given)]

    @staticmethod
    def _keep(process: int, cores: set[int]) -> None:
        for task in os.listdir(f"/proc/{process}/task"):
            # A thread that has ended meanwhile needs none.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), cores)


def together() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def agreed(seconds: float) -> float:
    """Rank 0's figure on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seconds
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.broadcast(told, 0)
    return float(told)


# The judgement.


def difference(blocks: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Percent by which the middle one of three ``blocks`` [pairs, 3] is larger than the others.

    Trimmed mean of the logarithms of its ratios to the one before and to the one after, with a 95 % bootstrap
    interval over the pairs. A ratio to the mean of both would be too small: times have one long tail, and the
    mean of two is rarely as short as one often is.
    """
    ratios = 100.0 * np.log(blocks[:, 1:2] / blocks[:, [0, 2]])
    slower = ratios.mean(axis=1)
    rng = np.random.default_rng(seed)
    drawn = [
        _trimmed_mean(ratios[rng.integers(0, len(ratios), size=len(ratios))].ravel())
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {
        "percent": float(_trimmed_mean(ratios.ravel())),
        "low": float(low),
        "high": float(high),
        "mean": float(slower.mean()),
        "median": float(np.median(slower)),
        "deviation": float(slower.std(ddof=1)),
        "pairs": len(slower),
    }


def _trimmed_mean(values: np.ndarray) -> np.ndarray:
    """Of the last axis, without the lowest and highest ``TRIMMED``."""
    cut = int(TRIMMED * values.shape[-1])
    ordered = np.sort(values, axis=-1)
    return np.asarray(ordered[..., cut : values.shape[-1] - cut].mean(axis=-1))
