"""Limits of the policy's gain on its own histories, simulated: what perfect knowledge would bring.

    policy_limits.py [--mechanism markov] [--seeds 0 40] [--microbatches 16 32] [--delays 1 2] [--record]

Beside the policy, which sees noisy measurements of past steps, over the same best named static schedule:

- ``true times``: the adapted schedule of each step's own true times, which no policy can know;
- ``one step late``: that of the true times of the step before, without noise: as soon as a policy that
  decides between steps can know them. ``keeping`` takes it only where it is better than what runs, at the
  times of the step before;
- ``bound``: ``least_step`` of ``policy_gain.py``, which no schedule of the placement can go below.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.link_histories import History, draw  # noqa: E402
from pipeline.policy_gain import CHUNKS, RANKS, STEPS, Static, cap_of, finalists, run_policy  # noqa: E402
from recording import machine, record, table  # noqa: E402

from mt_megatron.pipeline.actions import Placement  # noqa: E402
from mt_megatron.pipeline.policy.candidates import Candidate, adapted  # noqa: E402

HEADER = (
    "micro-batches", "d / F", "histories", "policy", "one step late", "keeping", "true times", "bound",
    "wanted",
)  # fmt: skip
WANTED = {0.25: "0%", 0.5: "1%", 1.0: "10%", 2.0: "25%"}


def steps(history: History, chunks: int) -> dict[str, float]:
    """Mean step of ``history`` by column."""
    placement = Placement(history.ranks, chunks)
    costs = [history.costs(placement, step) for step in range(history.steps)]
    best: list[Candidate] = []
    for each in costs:
        found = adapted(placement, history.microbatches, each, cap_of(placement), split=True)
        assert found is not None
        best.append(found)
    late = [best[0], *best[:-1]]
    kept = [best[0]]
    for step in range(1, history.steps):
        known, running, new = costs[step - 1], kept[-1], best[step - 1]
        better = new.program.makespan(known) < running.program.makespan(known)
        kept.append(new if better else running)
    policy = run_policy(history, chunks)

    def mean(chosen: Sequence[Candidate]) -> float:
        return float(np.mean([one.program.makespan(each) for one, each in zip(chosen, costs, strict=True)]))

    return {
        "policy": float(policy.seconds.mean()),
        "one step late": mean(late),
        "keeping": mean(kept),
        "true times": mean(best),
        "bound": policy.least,
    }


def gains(
    mechanism: str, seeds: Sequence[int], microbatches: int, delay: float
) -> dict[str, npt.NDArray[np.float64]]:
    """Gain in steps per second of each history, by column, over the named static schedule that is best on
    average over ``seeds``."""
    histories = [
        draw(mechanism, seed, ranks=RANKS, microbatches=microbatches, steps=STEPS, delay=delay)
        for seed in seeds
    ]
    named = [each for each in finalists(mechanism, microbatches, delay, RANKS, STEPS) if each.kind == 0]
    best = min((_means(each, histories) for each in named), key=np.mean)
    found = [steps(history, CHUNKS[delay]) for history in histories]
    return {name: best / np.array([each[name] for each in found]) - 1 for name in found[0]}


def _means(static: Static, histories: Sequence[History]) -> npt.NDArray[np.float64]:
    placement = static.program.schedule.placement
    return np.array(
        [
            static.program.makespans([each.costs(placement, step) for step in range(each.steps)]).mean()
            for each in histories
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mechanism", choices=("dwell", "markov"), default="markov")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 40), metavar=("FIRST", "END"))
    parser.add_argument("--microbatches", type=int, nargs="*", default=(16, 32))
    parser.add_argument("--delays", type=float, nargs="*", default=(1.0, 2.0))
    parser.add_argument("--record", action="store_true", help="write a dated result")
    options = parser.parse_args()

    def lines() -> Iterator[tuple[str, ...]]:
        for microbatches in options.microbatches:
            for delay in options.delays:
                found = gains(options.mechanism, range(*options.seeds), microbatches, delay)
                medians = (f"{np.median(each):+.1%}" for each in found.values())
                count = str(options.seeds[1] - options.seeds[0])
                yield (str(microbatches), f"{delay:g}", count, *medians, WANTED.get(delay, ""))

    rows = list(lines())
    text = table(HEADER, rows)
    print(text)
    if options.record:
        folder = Path(__file__).resolve().parents[2] / "results"
        data = {"machine": machine(), "mechanism": options.mechanism, "seeds": list(options.seeds)}
        data["rows"] = [dict(zip(HEADER, row, strict=True)) for row in rows]
        title = "Limits of the policy's gain, simulated (medians)"
        print(*record(folder, f"pipeline-policy-limits-{options.mechanism}", title, data, text), sep="\n")


if __name__ == "__main__":
    main()
