"""Time that a checkpoint keeps a run from training, and that a kill does.

    python benchmarks/checkpoint_stall.py [--shape small|large] [--threads N] [--record FOLDER]

One process trains the shape twice, with saves in the background and with saves that are waited for.
Steps with and without a save take turns, and a step's time is from the end of one to the end of
the next, so that whatever a save costs is in it:

    blocked    in which the loop stood still: snapshot, agreement, the wait where there is one
    extra      time of all steps from the beginning of a save until it is complete, beyond as many steps
               just before the next save: what is blocked, and what the writing thread takes from the rest
    control    the same difference between steps of which neither has a save: what the machine does

Then torchrun runs two ranks of a tiny model, one of them is killed, and the seconds count until the
first step that had not been made before. Last, checksums: bytes per second of what a manifest holds.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import psutil

SHAPES = {
    "small": "--num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 "
    "--num-query-groups 4 --vocab-size 4352 --seq-length 256 --micro-batch-size 8 --global-batch-size 8",
    "large": "--num-layers 4 --hidden-size 512 --ffn-hidden-size 1792 --num-attention-heads 8 "
    "--num-query-groups 4 --vocab-size 32000 --seq-length 512 --micro-batch-size 2 --global-batch-size 8",
}
COMMON = (
    "--make-vocab-size-divisible-by 64 --position-embedding-type rope --normalization RMSNorm "
    "--activation-func silu --gated-linear-unit --no-add-bias-linear --untie-embeddings-and-output-weights "
    "--hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --eval-iters 0 --log-interval 1 --mock-data "
    "--tokenizer-type NullTokenizer --num-workers 0 --bf16 --use-distributed-optimizer"
)
INTERVAL, SAVES, WARM = 12, 9, 12
ROOT = Path(__file__).resolve().parent.parent


def measure_saves(shape: str, *, background: bool) -> dict[str, Any]:
    """Train in this process and time its steps."""
    from mt_megatron.config.parse import load_config
    from mt_megatron.seams import events
    from mt_megatron.training.loop import train
    from mt_megatron.training.validate import validate

    ends: list[float] = []
    begins: dict[int, float] = {}

    def listen(phase: str, name: str, attrs: Any) -> None:
        if name == "step" and phase == "end":
            ends.append(time.monotonic())
        elif name == "checkpoint" and phase == "begin" and "op" not in attrs:
            begins[attrs["iteration"]] = time.monotonic()

    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"{SHAPES[shape]} {COMMON} --train-iters {WARM + INTERVAL * SAVES} --save {folder}/saved "
            f"--save-interval {INTERVAL} --save-keep-last 2 --metrics-path {folder}/metrics.jsonl"
        )
        config = load_config([*flags.split(), *(["--async-save"] if background else [])])
        validate(config)
        stop = events.subscribe(listen)
        train(config)
        stop()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    saves = [record for record in map(json.loads, lines) if record["event"] == "checkpoint"]
    return _shares(ends, begins, saves)


def _shares(ends: list[float], begins: dict[int, float], saves: list[dict[str, Any]]) -> dict[str, Any]:
    # cycle i: from the end of step i to the end of step i + 1 (steps count from 1)
    cycles = {i: later - earlier for i, (earlier, later) in enumerate(zip(ends, ends[1:], strict=False), 1)}
    within: dict[int, list[int]] = {}
    for save in saves:
        step = save["iteration"]
        if step not in begins or step not in cycles or step < WARM:
            continue
        complete = begins[step] + save["seconds"]
        within[step] = [i for i in cycles if i >= step and (i == step or ends[i - 1] < complete)]
    busy = {i for spans in within.values() for i in spans}
    step_seconds = statistics.median(s for i, s in cycles.items() if i not in busy and i >= WARM)
    blocked = [save["stall_seconds"] for save in saves if save["iteration"] in within]
    extra, control = [], []
    for step, spans in within.items():
        before_next = [i for i in range(step + INTERVAL - len(spans), step + INTERVAL) if i in cycles]
        earlier = [i - len(spans) for i in before_next]
        if len(before_next) == len(spans) and not busy & set(before_next):
            extra.append(sum(cycles[i] for i in spans) - sum(cycles[i] for i in before_next))
            if not busy & set(earlier):
                control.append(sum(cycles[i] for i in before_next) - sum(cycles[i] for i in earlier))
    return {
        "step_seconds": step_seconds,
        "first_blocked_seconds": saves[0]["stall_seconds"],
        "blocked_seconds": statistics.median(blocked),
        "blocked_share": statistics.median(blocked) / step_seconds,
        "extra_seconds": statistics.median(extra),
        "extra_share": statistics.median(extra) / step_seconds,
        "control_share": statistics.median(control) / step_seconds if control else None,
        "steps_under_way": statistics.median(len(spans) for spans in within.values()),
        "complete_after_seconds": statistics.median(s["seconds"] for s in saves if s["iteration"] in within),
        "megabytes": saves[-1]["bytes"] / 1e6,
        "saves": len(within),
    }


def measure_restart() -> dict[str, float]:
    """Kill one of two ranks below torchrun; seconds until training is where it was, and beyond."""
    tiny = (
        "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
        "--vocab-size 4352 --seq-length 32 --micro-batch-size 2 --global-batch-size 4"
    )
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        flags = (
            f"{tiny} {COMMON} --train-iters 100000 --save {folder}/saved --save-interval 20 --async-save "
            f"--save-keep-last 2 --metrics-path {metrics} --backend cpu"
        )
        launcher = (
            "-m torch.distributed.run --nproc-per-node 2 --nnodes 1 --max-restarts 2 --rdzv-backend c10d"
        )
        launcher += " --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 -m mt_megatron.cli pretrain"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        log = open(Path(folder) / "log", "w+b")  # noqa: SIM115 (closed below)
        run = subprocess.Popen(
            [sys.executable, "-W", "ignore", *launcher.split(), *flags.split()],
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            _wait_for(metrics, 50, run)
            victim = psutil.Process(run.pid).children()[-1]
            victim.send_signal(signal.SIGKILL)
            killed = time.time()
            before = _steps(metrics)[-1][0]
            _wait_for(metrics, before + 1, run)
            records = _steps(metrics)
        finally:
            run.terminate()
            run.wait(60)
            log.close()
    return {
        "first_step_seconds": min(when for _, when in records if when > killed + 0.5) - killed,
        "new_step_seconds": next(when for step, when in records if step > before) - killed,
    }


def _steps(metrics: Path) -> list[tuple[int, float]]:
    if not metrics.exists():
        return []
    records = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return [(r["iteration"], r["time"]) for r in records if r["event"] == "train"]


def _wait_for(metrics: Path, step: int, run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while max((s for s, _ in _steps(metrics)), default=0) < step:
        if run.poll() is not None or time.monotonic() > deadline:
            said = (metrics.parent / "log").read_text(errors="replace")[-3000:]
            raise SystemExit(f"the run below torchrun came to no step {step}: {said}")
        time.sleep(0.05)


def measure_checksums() -> dict[str, float]:
    """GB/s of one thread, best of five, over 64 MB."""
    content = os.urandom(1 << 20) * 64
    functions: dict[str, Any] = {
        "crc32": zlib.crc32,
        "blake2b": lambda data: hashlib.blake2b(data).digest(),
        "sha256": lambda data: hashlib.sha256(data).digest(),
    }
    found = {}
    for name, function in functions.items():
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            function(content)
            best = min(best, time.perf_counter() - started)
        found[name] = len(content) / best / 1e9
    return found


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        f"{found['date']}; {found['machine']['processor']}, {found['machine']['threads']} threads, torch "
        f"{found['machine']['torch']}; shape {found['shape']}, {found['saves']['async']['megabytes']:.0f} MB",
        "",
        "| save | step, s | blocked, s | of a step | extra, s | of a step | control | steps | complete, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, values in found["saves"].items():
        lines.append(
            f"| {name} | {values['step_seconds']:.3f} | {values['blocked_seconds']:.4f} | "
            f"{values['blocked_share']:.1%} | {values['extra_seconds']:.4f} | {values['extra_share']:.1%} | "
            f"{values['control_share'] or 0:.1%} | {values['steps_under_way']:.0f} | "
            f"{values['complete_after_seconds']:.2f} |"
        )
    first = found["saves"]["async"]["first_blocked_seconds"]
    lines += ["", f"The first save of a run also plans and allocates: blocked {first:.3f} s."]
    if "restart" in found:
        lines += [
            "",
            f"A killed rank below torchrun: {found['restart']['first_step_seconds']:.1f} s to the first "
            f"step, {found['restart']['new_step_seconds']:.1f} s to the first new one.",
        ]
    speeds = ", ".join(f"{name} {speed:.2f} GB/s" for name, speed in found["checksums"].items())
    return "\n".join([*lines, "", f"Checksums of one thread: {speeds}."])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-restart", action="store_true", help="leave out the killed rank")
    parser.add_argument("--record", type=Path, help="folder that also gets the figures as JSON and Markdown")
    options = parser.parse_args()
    import torch

    import mt_megatron

    torch.set_num_threads(options.threads)
    mt_megatron.patch("cpu")
    now = datetime.datetime.now(datetime.timezone.utc)
    found: dict[str, Any] = {
        "date": now.isoformat(timespec="minutes"),
        "shape": options.shape,
        "machine": {
            "processor": mt_megatron.backend().device_name(mt_megatron.backend().current_device()),
            "threads": options.threads,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "load_before": os.getloadavg()[0],
        },
        "saves": {
            "async": measure_saves(options.shape, background=True),
            "synchronous": measure_saves(options.shape, background=False),
        },
        "checksums": measure_checksums(),
    }
    if not options.no_restart:
        found["restart"] = measure_restart()
    print(table(found))
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        stem = options.record / f"checkpoint-stall-{options.shape}-{now.date().isoformat()}"
        stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(f"# Checkpoints\n\n{table(found)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
