"""Error of the pipeline simulator: steps predicted from one traced run, against steps that were run.

python benchmarks/pipeline/simulator_error.py --record              # 2 ranks, real computation
python benchmarks/pipeline/simulator_error.py --paced --record      # 4 ranks, computation spent asleep

One layout is traced (``zb_h1``, equal stages, 8 micro-batches) and read as ``mt-megatron pipeline simulate
--from`` does. From its costs every other layout is predicted: other schedules, Megatron-Core's own blocking
or overlapped exchanges among them, other numbers of micro-batches and chunks, and uneven stages, whose times
are cut anew by layers. Then every layout is run without a trace, in rounds and a new order in each. Compared
are medians of the time from the first rank's begin of a step to the last rank's end."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from recording import machine, record, table  # noqa: E402

from mt_megatron.pipeline.actions import Placement, Style  # noqa: E402
from mt_megatron.pipeline.choice import parse  # noqa: E402
from mt_megatron.pipeline.simulate.costs import Costs, Link  # noqa: E402
from mt_megatron.pipeline.simulate.program import Program  # noqa: E402
from mt_megatron.pipeline.upstream import upstream_calls  # noqa: E402
from mt_megatron.scan.analysis.pipeline_steps import MeasuredPipeline, measured_pipelines  # noqa: E402
from mt_megatron.scan.analysis.trace import open_trace  # noqa: E402

HERE = Path(__file__).resolve().parent

COMMON = (
    "--position-embedding-type rope --normalization RMSNorm --activation-func silu --gated-linear-unit "
    "--no-add-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--lr 1e-4 --train-iters 100000 --micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer "
    "--backend cpu"
)
REAL = (
    f"{COMMON} --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 --num-query-groups 4 "
    "--vocab-size 2048 --seq-length 256 --pipeline-model-parallel-size 2"
)
PACED = (
    f"{COMMON} --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --num-query-groups 2 "
    "--vocab-size 64 --seq-length 32 --pipeline-model-parallel-size 4"
)


@dataclass(frozen=True)
class Layout:
    """A schedule with its sizes; ``upstream`` runs Megatron-Core's own."""

    schedule: str
    units: tuple[int, ...]
    """Of each stage: layers, or with a pace how many times ``--pace`` an F takes."""

    microbatches: int
    upstream: bool = False

    def chunks(self, ranks: int) -> int:
        return len(self.units) // ranks

    @property
    def title(self) -> str:
        sizes = ", ".join(map(str, self.units))
        return f"{self.schedule}{' (upstream)' if self.upstream else ''}; {sizes}; {self.microbatches}"


CALIBRATED = {2: Layout("zb_h1", (4, 4), 8), 4: Layout("zb_h1", (2, 2, 2, 2), 8)}

LAYOUTS = {
    2: (
        Layout("1f1b", (4, 4), 8, True),
        Layout("1f1b", (4, 4), 16, True),
        Layout("1f1b", (5, 3), 8, True),
        Layout("interleaved", (2, 2, 2, 2), 8, True),
        Layout("interleaved", (2, 2, 2, 2), 4, True),
        Layout("interleaved", (3, 1, 2, 2), 8, True),
        Layout("breadth_first", (4, 4), 8),
        Layout("breadth_first", (5, 3), 4),
        Layout("depth_first", (4, 4), 16),
        Layout("depth_first", (3, 5), 8),
        Layout("zb_h1", (5, 3), 8),
        Layout("zb_h1", (4, 4), 16),
        Layout("memory_capped:4", (4, 4), 8),
        Layout("breadth_first", (2, 2, 2, 2), 8),
        Layout("depth_first", (2, 2, 2, 2), 8),
        Layout("depth_first", (3, 1, 2, 2), 4),
        Layout("hybrid:4", (2, 2, 2, 2), 8),
        Layout("zb_h1", (2, 2, 2, 2), 8),
        Layout("zbv", (2, 2, 2, 2), 8),
        Layout("dualpipev", (2, 2, 2, 2), 8),
    ),
    4: (
        Layout("1f1b", (2, 2, 2, 2), 8, True),
        Layout("1f1b", (2, 2, 2, 2), 16, True),
        Layout("1f1b", (1, 2, 3, 2), 8, True),
        Layout("interleaved", (1,) * 8, 8, True),
        Layout("interleaved", (1, 1, 2, 1, 1, 1, 1, 1), 8, True),
        Layout("breadth_first", (2, 2, 2, 2), 8),
        Layout("breadth_first", (3, 2, 2, 1), 4),
        Layout("depth_first", (2, 2, 2, 2), 16),
        Layout("depth_first", (2, 1, 2, 3), 8),
        Layout("zb_h1", (1, 2, 3, 2), 8),
        Layout("zb_h1", (2, 2, 2, 2), 16),
        Layout("memory_capped:6", (2, 2, 2, 2), 8),
        Layout("breadth_first", (1,) * 8, 8),
        Layout("breadth_first", (2, 1, 1, 1, 1, 1, 1, 1), 4),
        Layout("depth_first", (1,) * 8, 8),
        Layout("hybrid:6", (1,) * 8, 8),
        Layout("zb_h1", (1,) * 8, 8),
        Layout("zb_h1", (1, 1, 2, 1, 1, 1, 1, 1), 8),
        Layout("zbv", (1,) * 8, 8),
        Layout("dualpipev", (1,) * 8, 8),
    ),
}


class Ranks:
    """The processes of one pipeline on this machine."""

    def __init__(self, ranks: int, flags: str, port: int) -> None:
        self.ranks = ranks
        self._processes: list[subprocess.Popen[str]] = []
        for rank in range(ranks):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(HERE.parents[1]),
            }  # fmt: skip
            command = [sys.executable, str(HERE / "simulator_worker.py"), *flags.split()]
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
                )
            )
        self._answers()

    def run(self, layout: Layout, options: argparse.Namespace, trace: Path | None = None) -> dict[str, Any]:
        """Seconds of each step of a block, and whether Megatron-Core's exchanges overlap."""
        chunks = layout.chunks(self.ranks)
        layers = [1] * len(layout.units) if options.paced else list(layout.units)
        flags = ["--num-layers", str(sum(layers))]
        flags += ["--pipeline-model-parallel-layout", ",".join(map(str, layers))]
        if chunks > 1:
            flags += ["--virtual-pipeline-model-parallel-size", str(chunks)]
        if not layout.upstream:
            flags += ["--pipeline-schedule", layout.schedule]
        asked = {
            "flags": flags,
            "microbatches": layout.microbatches,
            "warm_up": options.warm_up,
            "steps": options.steps if trace is None else options.traced_steps,
            "pace": [units * options.pace for units in layout.units] if options.paced else None,
            "trace": None if trace is None else str(trace),
        }
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        answers = self._answers()
        steps = zip(*(each["times"] for each in answers), strict=True)
        seconds = [max(end for _, end in step) - min(begin for begin, _ in step) for step in steps]
        return {"seconds": seconds, "overlap": answers[0]["overlap"]}

    def _answers(self) -> list[dict[str, Any]]:
        found = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("a rank ended; see its messages above")
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(60)


def cut_anew(costs: Costs, before: Sequence[int], after: Sequence[int]) -> Costs:
    """``costs`` of stages of ``before`` layers as those of ``after`` layers. A layer costs what it does on
    the stages but the last; what the last stage costs above that belongs to the output layer."""

    def cut(value: Any) -> list[float]:
        seconds = np.asarray(value, dtype=np.float64).reshape(len(before), -1).mean(axis=1)
        layer = float(np.mean(seconds[:-1] / np.asarray(before[:-1])))
        output = max(0.0, float(seconds[-1]) - layer * before[-1])
        return [layer * count + output * (stage == len(after) - 1) for stage, count in enumerate(after)]

    # The exchange alone is not linear in the layers; links without a measurement have the usual one.
    links = list(costs.links.values())
    usual = Link(
        latency=float(np.mean([each.latency for each in links])),
        bandwidth=float(np.median([each.bandwidth for each in links])),
    )
    backward, weight = cut(costs.backward), cut(costs.weight)
    return replace(
        costs,
        forward=cut(costs.forward),
        backward=backward,
        weight=weight,
        input=None,
        link=usual,
    )


def predicted(layout: Layout, measured: MeasuredPipeline, overlap: bool) -> float:
    """Simulated seconds of a step of ``layout``, from the costs of the traced run."""
    ranks = len(measured.ranks)
    choice = parse(layout.schedule)
    costs = cut_anew(measured.costs, CALIBRATED[ranks].units, layout.units)
    schedule = choice.schedule(ranks, layout.chunks(ranks), layout.microbatches)
    assert schedule.placement == Placement(
        ranks, layout.chunks(ranks), Style.V if choice.is_v else Style.LOOP
    )
    if layout.upstream:
        return Program(schedule, calls=upstream_calls(schedule, overlap=overlap)).makespan(costs)
    return Program(schedule, rendezvous=measured.rendezvous).makespan(costs)


HEADER = ("schedule; layers or units of each stage; micro-batches", "measured", "simulated", "error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--paced", action="store_true", help="4 ranks whose computation is spent asleep")
    parser.add_argument("--pace", type=float, default=0.012, help="seconds of an F of one unit, asleep")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--traced-steps", type=int, default=14)
    parser.add_argument("--only", type=int, default=None, help="the first layouts alone")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    ranks = 4 if options.paced else 2
    layouts = list(LAYOUTS[ranks][: options.only])
    seconds: dict[Layout, list[float]] = {each: [] for each in (CALIBRATED[ranks], *layouts)}
    overlaps: dict[Layout, bool] = {}
    order = random.Random(0)
    group = Ranks(ranks, PACED if options.paced else REAL, 29710 + ranks)
    try:
        with tempfile.TemporaryDirectory() as folder:
            group.run(CALIBRATED[ranks], options)
            group.run(CALIBRATED[ranks], options, Path(folder) / "run")
            (measured,) = measured_pipelines(open_trace(Path(folder) / "run"))
        for number in range(options.rounds):
            turn = list(seconds)
            order.shuffle(turn)
            for each in turn:
                found = group.run(each, options)
                seconds[each] += found["seconds"]
                overlaps[each] = found["overlap"]
            print(f"# round {number + 1} of {options.rounds}", flush=True)
    finally:
        group.close()
    rows, figures = [], []
    for each, times in seconds.items():
        real, simulated = statistics.median(times), predicted(each, measured, overlaps[each])
        error = simulated / real - 1
        title = each.title + (" (the traced one, again)" if each == CALIBRATED[ranks] else "")
        rows.append([title, f"{real * 1e3:.1f} ms", f"{simulated * 1e3:.1f} ms", f"{error:+.1%}"])
        figures.append({"layout": title, "seconds": times, "simulated": simulated, "error": error})
    errors = sorted(abs(each["error"]) for each in figures[1:])
    traced, again = measured.pipeline_seconds * 1e3, measured.seconds(measured.program()) * 1e3
    summary = (
        f"{len(errors)} layouts beside the traced one: median error {statistics.median(errors):.1%}, largest "
        f"{errors[-1]:.1%}. Traced: {measured.schedule.name}, pipeline of a step {traced:.1f} ms measured, "
        f"{again:.1f} ms simulated from its own steps; sends "
        f"{'wait' if measured.rendezvous else 'do not wait'} for the receiver."
    )
    text = f"{summary}\n\n{table(HEADER, rows)}"
    print(text)
    if options.record:
        name = f"pipeline-simulator-error-{'paced' if options.paced else 'real'}"
        title = f"Pipeline simulator against steps that were run, {ranks} ranks"
        about = {"machine": machine(), "options": vars(options), "summary": summary, "layouts": figures}
        for path in record(HERE.parents[1] / "results", name, title, about, text):
            print(path)


if __name__ == "__main__":
    main()
