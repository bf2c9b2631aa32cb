"""A full ``/dev/shm``: named before the start, and an error in the rank where a worker's batch is lost."""

from __future__ import annotations

import multiprocessing.reduction
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_megatron.cli.main import main
from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.data.loader.shared_memory import micro_batch_bytes, shared_memory_problem
from mt_megatron.errors import ConfigError, DataError
from mt_megatron.host import limits
from mt_megatron.training.preflight import loader_notes
from tests.data.test_batches import Numbered
from tests.data.test_datasets import LENGTH
from tests.data.test_loading import Documents, batches_of
from tests.launch import ROOT, run_ranks

HERE = "tests.data.test_shared_memory:"
MIB = 2**20
FLAGS = (
    "--model llama3_tiny --mock-data --tokenizer-type NullTokenizer --vocab-size 4200 --train-iters 20 "
    "--lr 1e-3 --lr-warmup-iters 0 --backend cpu --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 4"
)
MASKED = f"{FLAGS} --reset-attention-mask --no-packed-sequences"


def config(flags: str) -> TrainingConfig:
    return load_config(flags.split())


class Filling(Numbered):
    """A worker's second batch does not fit: the kernel refuses its shared memory a larger file."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= 2 and torch.utils.data.get_worker_info() is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
        return super().__getitem__(index)


class Unsendable(Numbered):
    """A batch that is shared and cannot be sent."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= 2 and torch.utils.data.get_worker_info() is not None:
            multiprocessing.reduction.DupFd = _refuse
        return super().__getitem__(index)


def _refuse(descriptor: int) -> None:
    raise OSError(24, "Too many open files")


def lost(kind: str) -> dict[str, Any]:
    """Two batches, the second of which a worker cannot hand over."""
    batches = batches_of({"Filling": Filling, "Unsendable": Unsendable}[kind](64), workers=1)
    try:
        # The queue's thread may send the first one after the worker has come to the second.
        next(batches), next(batches)
    except DataError as error:
        return {"said": str(error)}
    return {"said": ""}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Filling", ("into /dev/shm: unable to", "File too large", "--shm-size", "--num-workers")),
        ("Unsendable", ("DataLoader worker (pid", "ended with exit code 1")),
    ],
)
def test_a_batch_that_a_worker_loses_is_an_error_in_the_rank(kind: str, said: tuple[str, ...]) -> None:
    (found,) = run_ranks(1, HERE + "lost", kind, timeout=60)
    assert all(each in found["said"] for each in said), found["said"]


@pytest.mark.parametrize(
    ("dataset", "flags"),
    [
        (Documents(1, 0.1, masks=True), "--reset-attention-mask --no-packed-sequences"),
        (Documents(1, 0.1), "--reset-attention-mask"),
        (Numbered(64), ""),
    ],
)
def test_the_need_is_that_of_a_real_batch(dataset: Any, flags: str) -> None:
    (batch,) = islice(batches_of(dataset, micro=2), 1)
    if isinstance(dataset, Numbered):
        # Its samples are of another length and hold the sample's number alone.
        batch = {
            name: torch.zeros(2, LENGTH, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")
        }
        batch["loss_mask"] = torch.zeros(2, LENGTH)
    whole = FLAGS.replace("--seq-length 2048", f"--seq-length {LENGTH}").replace(
        "--micro-batch-size 4", "--micro-batch-size 2"
    )
    pages = sum(-(-tensor.nbytes // 4096) * 4096 for tensor in batch.values())
    assert micro_batch_bytes(config(f"{whole} {flags}")) == pages


def test_too_little_shared_memory_is_named_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "shared_memory", lambda: limits.Space(total=64 * MIB, available=60 * MIB))
    masked = config(MASKED)
    each = micro_batch_bytes(masked)
    assert 16 * MIB < each < 17 * MIB
    line = shared_memory_problem(masked, 2)
    assert line is not None
    assert f"need {2 * 9 * each / MIB:.1f} MiB of /dev/shm" in line and "60.0 of 64.0 MiB free" in line
    assert "--no-packed-sequences" in line and "--num-workers" in line and "--shm-size" in line
    for fits in (f"{MASKED} --num-workers 0", FLAGS):
        assert shared_memory_problem(config(fits), 2) is None
    exactly = limits.Space(total=18 * each, available=18 * each)
    monkeypatch.setattr(limits, "shared_memory", lambda: exactly)
    assert shared_memory_problem(masked, 2) is None and shared_memory_problem(masked, 3) is not None


def test_the_start_is_refused_or_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "shared_memory", lambda: limits.Space(total=64 * MIB, available=64 * MIB))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"/dev/shm.*2 loader.*--no-check-memory starts all the same"):
        loader_notes(config(MASKED))
    (warning,) = loader_notes(config(f"{MASKED} --no-check-memory"))
    assert warning.startswith("WARNING: data loader workers need")
    # On the launching machine, before torchrun starts.
    monkeypatch.setattr(
        "mt_megatron.launching.jobs.supervise.supervise", lambda *_, **__: pytest.fail("started")
    )
    assert main(["launch", "--gpus-per-node", "2", "--", *MASKED.split()]) == 2
    assert "/dev/shm" in capsys.readouterr().err


def _may_mount() -> bool:
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.daily
@pytest.mark.skipif(not _may_mount(), reason="a mount namespace needs root")
def test_a_run_ends_by_itself_and_says_why(tmp_path: Path) -> None:
    save = tmp_path / "saved"
    tiny = (
        "--num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --num-query-groups 2 "
        "--global-batch-size 8 --eval-iters 0 --distributed-timeout-minutes 1 --no-check-memory "
        f"--save {save}"
    )
    words = [sys.executable, "-m", "mt_megatron.cli", "launch", "--gpus-per-node", "2", "--"]
    command = " ".join([*words, *MASKED.split(), *tiny.split()])
    began = time.monotonic()
    process = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {command}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0 and "into /dev/shm: unable to allocate shared memory" in output, output
    assert time.monotonic() - began < 90
