"""Below torchrun's elastic restart a killed worker costs the steps since the last checkpoint, no more."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mt_megatron.checkpoint import files
from mt_megatron.training.logging.metrics import read_records
from tests.launch import ROOT
from tests.resume.campaign import LAYOUTS, MODEL, TRAINING

LAUNCHER = (
    "-W ignore -m torch.distributed.run --nproc-per-node 2 --nnodes 1 --rdzv-backend c10d "
    "--rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"
)
KILL_EVERY_SECONDS = 30.0


class Job:
    """A run of two ranks below torchrun."""

    def __init__(self, folder: Path, flags: str, *, restarts: int) -> None:
        folder.mkdir()
        self.save, self.metrics, self._log = folder / "saved", folder / "metrics.jsonl", folder / "log"
        command = f"{LAUNCHER} --max-restarts {restarts} -m mt_megatron.cli pretrain --backend cpu {MODEL} "
        command += f"{TRAINING} {flags} --save {self.save} --save-keep-last 2 --metrics-path {self.metrics}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            environment.pop(name, None)
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command.split()],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def steps(self) -> list[tuple[int, str, str]]:
        """Number, loss and gradient norm of every step so far, repeated ones as often as they ran."""
        if not self.metrics.exists():
            return []
        return [
            (r["iteration"], float(r["loss"]).hex(), float(r["grad_norm"]).hex())
            for r in read_records(self.metrics)
            if r["event"] == "train"
        ]

    def newest(self) -> int:
        """The last step that was made."""
        return max((step for step, *_ in self.steps()), default=0)

    def wait_for(self, step: int, seconds: float) -> None:
        """Until the run has made ``step``."""
        deadline = time.monotonic() + seconds
        while self.newest() < step and self.process.poll() is None:
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def kill_one(self, index: int) -> None:
        """SIGKILL one worker, if there is one just now."""
        workers = psutil.Process(self.process.pid).children()
        if workers:
            workers[index % len(workers)].send_signal(signal.SIGKILL)

    def end(self, seconds: float) -> None:
        """Wait for its own end, which must be a good one."""
        try:
            assert self.process.wait(seconds) == 0, self.log()
        finally:
            self.stop()

    def stop(self) -> None:
        """Leave nothing behind: torchrun ends its workers on SIGTERM."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def log(self) -> str:
        """The end of what everybody said."""
        return self._log.read_text(errors="replace")[-6000:]


def assert_equal_runs(killed: Job, whole: Job, total: int) -> None:
    """Every step, also a repeated one, is the other run's to the bit."""
    expected = {step: rest for step, *rest in whole.steps()}
    assert sorted(expected) == list(range(1, total + 1))
    found = killed.steps()
    assert {step for step, *_ in found} == set(expected)
    assert [step for step, *rest in found if expected[step] != rest] == []
    ends = [files.latest_checkpoint(job.save) for job in (killed, whole)]
    assert [end.name for end in ends if end is not None] == [files.folder_name(total)] * 2


@pytest.mark.daily
def test_a_killed_worker_leads_to_a_restart_that_ends_at_the_right_step(tmp_path: Path) -> None:
    flags = f"{LAYOUTS['dp2']} --train-iters 80 --save-interval 10 --async-save"
    whole = Job(tmp_path / "whole", flags, restarts=0)
    whole.end(200)
    killed = Job(tmp_path / "killed", flags, restarts=2)
    try:
        killed.wait_for(25, 200)
        killed.kill_one(1)
        killed.end(200)
    finally:
        killed.stop()
    assert_equal_runs(killed, whole, 80)
    assert len(killed.steps()) > 80, "nothing was repeated: the kill came too late"


@pytest.mark.soak
def test_two_thousand_steps_with_a_kill_every_so_often(tmp_path: Path, record_property: Any) -> None:
    total, seed = 2000, random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    flags = f"{LAYOUTS['dp2']} --train-iters {total} --save-interval 25 --async-save"
    whole = Job(tmp_path / "whole", flags, restarts=0)
    whole.end(900)
    killed, began, kills = Job(tmp_path / "killed", flags, restarts=100), time.monotonic(), 0
    try:
        while killed.process.poll() is None:
            before, until = killed.newest(), time.monotonic() + chance.uniform(0.5, 1.5) * KILL_EVERY_SECONDS
            while time.monotonic() < until and killed.process.poll() is None:
                time.sleep(0.2)
            if killed.process.poll() is None and killed.newest() > before:
                killed.kill_one(chance.randrange(2))
                kills += 1
            assert time.monotonic() - began < 3600, killed.log()
        killed.end(10)
    finally:
        killed.stop()
    seconds = time.monotonic() - began
    record_property("seed", seed)
    record_property("kills", kills)
    record_property("seconds", round(seconds, 1))
    record_property("repeated steps", len(killed.steps()) - total)
    assert_equal_runs(killed, whole, total)
    assert kills >= 3
