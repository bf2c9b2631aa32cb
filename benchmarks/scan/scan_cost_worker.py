"""One rank of the training that ``scan_cost.py`` traces and does not trace in turn."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scan_cost_held import HeldSession

from mt_megatron.scan.record.levels import Level

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # For the modules that all benchmarks share.

from paired_blocks import SETTLE_SECONDS, Cores, agreed, pilot, together, write  # noqa: E402
from throughput_sides import Case, Ours, token_ids  # noqa: E402

LEVEL_OF: dict[str, Level] = {"off again": "off", "base": "base", "full": "full"}
ROUNDS = (("off again", "base") * 3, ("full",))
"""One kind of round after the other, as what a block has queued may be written in a later one: at level base
that must not be what was heard at level full. The closer the bound, the more blocks."""

_MOST = max(map(len, ROUNDS))
_WARM_UP_ROUNDS = 2
_ZERO = "--use-distributed-optimizer"

SHAPE = Case(
    name="L4 h256 V4096",
    layers=4,
    hidden=256,
    ffn=704,
    heads=8,
    groups=4,
    vocabulary=4096,
    dtype=torch.bfloat16,
    sequence=256,
    micro_batch=2,
)
"""What one data-parallel rank does; tensor-parallel ones share it."""


class Training:
    """Steps of one training."""

    def __init__(self, ranks: int, layout: str) -> None:
        """``layout``: ``dp`` with the optimizer's state spread, as the launch scripts', or ``tp``."""
        import mt_megatron

        warnings.filterwarnings("ignore")
        mt_megatron.patch("cpu")
        if layout == "dp":
            self.case, spread = replace(SHAPE, micro_batch=ranks * SHAPE.micro_batch), (_ZERO,)
        else:
            self.case, spread = SHAPE, ("--tensor-model-parallel-size", str(ranks))
        copies = ranks if layout == "dp" else 1
        self.ours = Ours(self.case, token_ids(self.case), spread, copies)
        self.iteration = 0

    def timed(self, count: int) -> tuple[float, float]:
        """Seconds of ``count`` steps, which begin together on all ranks: by the wall, and of processors."""
        from mt_megatron.seams import events

        together()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.iteration += 1
            with events.span("step", iteration=self.iteration):
                self.ours.step()
        return time.perf_counter() - began, time.process_time() - used


def blocks(
    training: Training, session: HeldSession, rounds: int, steps: int, seconds: float
) -> dict[str, list[Any]]:
    """Untraced and other blocks in turn, ``rounds`` of each kind; the others of a round in random order, the
    same on all ranks.

    Returns per arm lists of [seconds, processor seconds, background's processor seconds, first iteration]
    of the block, and the same of the untraced ones before and after it.
    """
    rng = np.random.default_rng(0)
    found: dict[str, list[Any]] = {arm: [] for arm in LEVEL_OF}
    traced = 0

    def block(level: Level) -> list[float]:
        nonlocal traced
        together()
        # By what it should have taken: so the ranks agree. An untraced block has the same done before it.
        session.release(level if level != "off" else "base", round(1e9 * traced * seconds))
        # The background thread has heard of it and sleeps again before the clock starts.
        time.sleep(SETTLE_SECONDS)
        if level == "off":
            session.hold()
        else:
            traced += 1
        background, first = session.background_ns(), training.iteration + 1
        wall, used = training.timed(steps)
        background = session.background_ns() - background
        if level != "off":
            session.hold()
        return [wall, used, background / 1e9, first]

    before = block("off")
    for kind in ROUNDS:
        for number in range(-_WARM_UP_ROUNDS * _MOST // len(kind), rounds):
            for arm in rng.permutation(kind).tolist():
                own = block(LEVEL_OF[arm])
                after = block("off")
                if number >= 0:
                    found[arm].append([before, own, after])
                before = after
    return found


def main() -> None:
    """Take the rounds; each rank writes what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--layout", choices=("dp", "tp"), required=True)
    parser.add_argument("--block-seconds", type=float, required=True)
    parser.add_argument("--pin", choices=("auto", "yes", "no"), required=True)
    args = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    training = Training(ranks, args.layout)
    training.timed(5)
    unrest = pilot(training, rank) if args.pin == "auto" else {}
    pinned = unrest["pinned"] < unrest["free"] if unrest else args.pin == "yes"
    Cores().pin(rank if pinned else None)
    step = agreed(statistics.median(training.timed(2)[0] / 2 for _ in range(8)))
    steps = max(1, round(args.block_seconds / step))
    session = HeldSession(args.scratch / "run", training.ours)
    found = blocks(training, session, args.rounds, steps, steps * step)
    session.close()
    about = {
        "shape": SHAPE.name,
        "layout": f"{args.layout}{ranks}",
        "tokens_per_step": training.case.tokens,
        "ranks": ranks,
        "pinned": pinned,
        "unrest_percent": unrest,
        "threads": torch.get_num_threads(),
        "step_seconds": step,
        "steps_per_block": steps,
        "events_per_step": {
            arm: events_per_step(args.scratch / "run", rank, [own[3] for _, own, _ in found[arm]])
            for arm in ("base", "full")
        },
    }
    write(args.scratch, rank, found, about)
    training.ours.close()


def events_per_step(run: Path, rank: int, steps: list[int]) -> float:
    """Begins and ends recorded in one of ``steps``, mean."""
    from mt_megatron.scan.format.records import KIND
    from mt_megatron.scan.format.run_files import run_files
    from mt_megatron.scan.format.segments import read_rank

    spans = read_rank(run_files(run).rank_folder(rank)).spans
    spans = spans[spans["kind"] != KIND["pause"]]
    return 2 * int(np.isin(spans["iteration"], steps).sum()) / len(steps)


if __name__ == "__main__":
    main()
