"""``--pipeline-schedule auto`` against Megatron-Core's schedules over a slow and a healthy link, really
run.

python benchmarks/pipeline/slow_link.py --record

Two ranks in two network namespaces train one model with the trainer's own steps over Gloo. Over the slow
link every packet arrives 20 ms later, each way; the healthy one is a veth pair. Two pairs of processes, one
with one model chunk per rank and one with two, run blocks of steps in turns, in an order drawn anew in
every round: 1F1B and ``auto`` on the first, interleaved and ``auto`` on the second. Compared are the blocks
of one round."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from namespaces import Link, linked, namespaces, netem_problem  # noqa: E402
from recording import machine, median_interval, record, spread, table  # noqa: E402

HERE = Path(__file__).resolve().parent
DELAY = 0.020
ARMS = {
    "1f1b": (1, "upstream"),
    "auto, 1 chunk": (1, "auto"),
    "interleaved": (2, "upstream"),
    "auto, 2 chunks": (2, "auto"),
}
"""Name -> chunks per rank, and which schedule."""

SHAPE = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 --num-query-groups 4 "
    "--vocab-size 4096 --seq-length 256 --position-embedding-type rope --normalization RMSNorm "
    "--activation-func silu --gated-linear-unit --no-add-bias-linear --untie-embeddings-and-output-weights "
    "--hidden-dropout 0 --attention-dropout 0 --lr 1e-4 --train-iters 100000 --micro-batch-size 1 "
    "--mock-data --tokenizer-type NullTokenizer --pipeline-model-parallel-size 2 --backend cpu"
)


PACED_SHAPE = SHAPE.replace("--ffn-hidden-size 704", "--ffn-hidden-size 64").replace(
    "--vocab-size 4096", "--vocab-size 256"
)
"""Messages of the same size, and little to compute."""


class Pair:
    """Two ranks with some chunks each."""

    def __init__(self, link: Link, chunks: int, options: argparse.Namespace, log: str) -> None:
        shape = PACED_SHAPE if options.pace else SHAPE
        flags = [*shape.split(), "--global-batch-size", str(options.microbatches)]
        if chunks > 1:
            flags += ["--virtual-pipeline-model-parallel-size", str(chunks)]
        self._processes: list[subprocess.Popen[str]] = []
        for rank in range(2):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2",
                "MASTER_ADDR": link.addresses[0], "MASTER_PORT": str(29600 + chunks), "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": link.devices[rank], "PYTHONPATH": str(HERE.parents[1]),
            }  # fmt: skip
            command = ["ip", "netns", "exec", link.namespaces[rank], sys.executable]
            command += [str(HERE / "slow_link_worker.py"), "--log", log]
            command += ["--pace", str(options.pace), *flags]
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
                )
            )
        for process in self._processes:
            _answer(process)

    def run(self, arm: str, steps: int) -> dict[str, Any]:
        """Measurements of rank 0 in a block of ``steps``."""
        for process in self._processes:
            _stream(process.stdin).write(f"{arm} {steps}\n")
            _stream(process.stdin).flush()
        return [_answer(process) for process in self._processes][0]

    def close(self) -> None:
        for process in self._processes:
            _stream(process.stdin).close()
        for process in self._processes:
            process.wait(60)


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    line = _stream(process.stdout).readline()
    if not line:
        raise RuntimeError("a rank ended; see its messages above")
    found: dict[str, Any] = json.loads(line)
    return found


def measure(delay: float, options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Median seconds of a step of each arm in each round, and what ``auto`` ran."""
    order = random.Random(0)
    blocks: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with ExitStack() as stack:
        names = stack.enter_context(namespaces())
        link = stack.enter_context(linked(names, delay, subnet=1))
        pairs: dict[int, Pair] = {}
        for chunks in (1, 2):
            folder = log / f"{chunks}"
            pairs[chunks] = Pair(link, chunks, options, str(folder))
            stack.callback(pairs[chunks].close)
        for chunks, kind in ARMS.values():
            pairs[chunks].run(kind, options.warm_up)
        runs: dict[str, str] = {}
        sums: dict[str, int] = {}
        for number in range(options.rounds):
            arms = list(ARMS)
            order.shuffle(arms)
            for arm in arms:
                chunks, kind = ARMS[arm]
                found = pairs[chunks].run(kind, options.steps)
                blocks[arm].append(statistics.median(found["seconds"]))
                if kind == "auto":
                    runs[arm], sums[arm] = found["runs"], found["sums"]
            print(
                f"# {number + 1}: " + ", ".join(f"{arm} {blocks[arm][-1] * 1e3:.1f} ms" for arm in ARMS),
                flush=True,
            )
    return {"delay": delay, "link": link.how, "blocks": blocks, "auto_runs": runs, "sums": sums}


def rows(found: dict[str, Any]) -> list[list[str]]:
    """One line for each arm: against the better of upstream's two, block by block."""
    blocks = found["blocks"]
    best = better(found)
    lines = []
    for arm, seconds in blocks.items():
        ratios = [one / other for one, other in zip(blocks[best], seconds, strict=True)]
        middle = spread(ratios)
        _, low, high = median_interval(ratios)
        lines.append(
            [
                f"{found['delay'] * 1e3:g} ms",
                arm,
                f"{statistics.median(seconds) * 1e3:.1f} ms",
                f"{middle['median'] - 1:+.1%}",
                f"{low - 1:+.1%} to {high - 1:+.1%}",
                found["auto_runs"].get(arm, "(upstream)" + (" the better" if arm == best else "")),
            ]
        )
    return lines


def better(found: dict[str, Any]) -> str:
    """The quicker of upstream's schedules."""
    return min(("1f1b", "interleaved"), key=lambda arm: statistics.median(found["blocks"][arm]))


HEADER = (
    "delay each way",
    "schedule",
    "median step",
    "faster than the better",
    "95 % interval",
    "runs at the end",
)


def _named(options: argparse.Namespace) -> str:
    """Kinds of links that were run, each with its own file where they are run apart."""
    return "-".join(dict.fromkeys("slow" if delay else "healthy" for delay in options.delays))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--delays", type=float, nargs="*", default=[DELAY, 0.0])
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of an F, spent asleep")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    problem = netem_problem()
    print(f"# tc netem: {'works' if problem is None else problem}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for delay in options.delays:
            log = Path(folder) / f"{delay:g}"
            results.append(measure(delay, options, log))
    text = table(HEADER, [line for found in results for line in rows(found)])
    print(text)
    if options.record:
        figures = {
            "machine": machine(),
            "netem": problem or "works",
            "options": vars(options),
            "results": results,
        }
        folder_ = HERE.parents[1] / "results"
        for path in record(
            folder_,
            f"pipeline-{_named(options)}-link{'-paced' if options.pace else ''}",
            f"auto over a {_named(options).replace('-', ' and a ')} link, really run",
            figures,
            text,
        ):
            print(path)


if __name__ == "__main__":
    main()
