"""A request to save and end, in every way it reaches a run with loader workers: no finished step is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mt_megatron.checkpoint import files
from mt_megatron.training.logging.metrics import read_records
from tests.launch import ROOT

TIMEOUT = 200.0
TRAINING = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 4096 --seq-length 32 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --lr 1e-3 --mock-data --train-iters 100000 "
    "--tokenizer-type NullTokenizer --backend cpu --eval-iters 0 --log-interval 1 --num-workers 2 "
    "--global-batch-size 4 --save-keep-last 2 --scan off --scope off"
)
# Sends its signal on to everything below it, as Slurm does with the processes of a job step.
SRUN = """
import signal, subprocess, sys
import psutil
task = subprocess.Popen(sys.argv[1:])
def to_all(number, frame):
    for process in psutil.Process(task.pid).children(recursive=True) + [psutil.Process(task.pid)]:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            pass
signal.signal(signal.SIGTERM, to_all)
signal.signal(signal.SIGUSR1, to_all)
sys.exit(task.wait())
"""
WAYS = {
    "SIGTERM to torchrun": ("torchrun", signal.SIGTERM, {1}),
    "SIGTERM to launch": ("launch", signal.SIGTERM, {0}),
    # torchrun hears it as well, and reports it although its processes end with 0.
    "SIGTERM to all processes of a step": ("srun", signal.SIGTERM, {1}),
    "SIGUSR1 to all processes of a step": ("srun", signal.SIGUSR1, {0}),
}
TERMINAL = {"Ctrl-C in a terminal": ("alone", signal.SIGINT, {0})}
"""What starts the run, the signal to it, and the exit codes that are right."""


def command(starter: str, ranks: int) -> list[str]:
    python = [sys.executable, "-W", "ignore"]
    if starter == "alone":
        return [*python, "-m", "mt_megatron.cli", "pretrain"]
    if starter == "torchrun":
        words = f"-m torch.distributed.run --nproc-per-node {ranks} --nnodes 1 --rdzv-backend c10d "
        words += "--rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 -m mt_megatron.cli pretrain"
        return [*python, *words.split()]
    launch = [*python, *f"-m mt_megatron.cli launch --gpus-per-node {ranks} --".split()]
    return launch if starter == "launch" else [*python, "-c", SRUN, *launch]


class Run:
    """One run in a folder, started and stopped as often as needed."""

    def __init__(self, folder: Path) -> None:
        self.save, self._metrics, self._log = folder / "saved", folder / "metrics.jsonl", folder / "log"
        self._places = (
            f"--save {self.save} --metrics-path {self._metrics} --data-cache-path {folder / 'cache'}"
        )

    def steps(self) -> list[int]:
        """Every step that was finished, in the order of their records."""
        if not self._metrics.exists():
            return []
        return [int(r["iteration"]) for r in read_records(self._metrics) if r["event"] == "train"]

    @contextlib.contextmanager
    def started(self, starter: str, ranks: int) -> Iterator[subprocess.Popen[bytes]]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            environment.pop(name, None)
        words = [*command(starter, ranks), *TRAINING.split(), *self._places.split()]
        with open(self._log, "wb") as log:
            process = subprocess.Popen(
                words,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # A shell's background job ignores SIGINT, and so does everything below it.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        try:
            yield process
        finally:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for each in (process, *below):
                with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                    each.kill()
            process.wait()

    def output(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    def stop(self, way: str, ranks: int) -> dict[str, Any]:
        """Start the run, or continue it, and stop it in its third step or later; what was found."""
        starter, number, right = {**WAYS, **TERMINAL}[way]
        before = self.steps()
        with self.started(starter, ranks) as process:
            self._wait_for_steps(len(before) + 2, process)
            children = psutil.Process(process.pid).children(recursive=True)
            if way in TERMINAL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            code = process.wait(timeout=TIMEOUT)
        output = self.output()
        assert code in right, f"exit code {code}\n{output}"
        assert f"{ranks} process" in self._log.read_text(errors="replace")
        # torch looks for a worker's parent every five seconds.
        gone, left = psutil.wait_procs(children, timeout=30)
        assert not left and len(gone) >= (2 if starter == "alone" else 3 * ranks), (
            "the ranks and two workers of each were there, and ended"
        )
        after = self.steps()
        assert after[: len(before)] == before and after == list(range(1, after[-1] + 1)), (
            "each step is made once, the first after the checkpoint of the stop before"
        )
        newest = files.latest_checkpoint(self.save)
        assert newest is not None, output
        assert files.iteration_of(newest) == after[-1], "no finished step is lost"
        assert files.damaged_files(newest, files.read_manifest(newest)) == []
        assert not list(self.save.glob(".*")), "nothing is half written"
        return {"exit code": code, "first step": after[len(before)], "checkpoint": after[-1]}

    def resume(self, ranks: int) -> None:
        """Continue from the newest checkpoint for one step."""
        last = self.steps()[-1]
        with self.started("launch", ranks) as process:
            self._wait_for_steps(last + 1, process)
        assert self.steps()[: last + 1] == list(range(1, last + 2))

    def _wait_for_steps(self, count: int, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while len(self.steps()) < count:
            assert process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.05)


def test_each_request_saves_the_last_finished_step(tmp_path: Path) -> None:
    """Each run continues what the one before it saved."""
    run = Run(tmp_path)
    run.stop("SIGUSR1 to all processes of a step", 2)
    run.stop("Ctrl-C in a terminal", 1)


@pytest.mark.daily
def test_a_request_to_torchrun_itself_saves_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.stop("SIGTERM to torchrun", 2)
    run.resume(2)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_no_request_of_many_loses_a_step(tmp_path: Path, way: str, ranks: int, record_property: Any) -> None:
    run = Run(tmp_path)
    found = []
    try:
        for _ in range(5):
            found.append(run.stop(way, ranks))
        run.resume(ranks)
    finally:
        record_property("complete checkpoints", f"{len(found)} of 5")
        record_property("exit codes", [each["exit code"] for each in found])
        record_property("stopped after step", [each["checkpoint"] for each in found])
        record_property("resumed at step", [each["first step"] for each in found])
