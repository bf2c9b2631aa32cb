"""Bad input as a user meets it: exit code 2, one message, no traceback, no rank left behind."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launch import ROOT, run_command

VALID = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 4352 --seq-length 32 "
    "--position-embedding-type rope --train-iters 2 --lr 1e-3 --tokenizer-type NullTokenizer --mock-data"
)
SECONDS = 5.0
"""Of processor time, on a machine that has nothing else to do."""

IMPORTS = 1.7
"""Beside other processes a core takes longer for the same work: as much processor time as so many imports of
torch take at the same moment is allowed."""


def _environment() -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return environment


def command(words: list[str], variables: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], float]:
    return _timed([sys.executable, "-m", "mt_megatron.cli", "pretrain", *words], variables)


def _timed(words: list[str], variables: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        words,
        env={**_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ("--num-attention-heads 3", {}, "hidden_size 32 is no multiple of num_attention_heads 3"),
        ("--num-layer 3", {}, "Did you mean --num-layers"),
        ("--lr nan", {}, "lr is 'nan'; expected number"),
        ("--config /nonexistent.yaml", {}, "the configuration file /nonexistent.yaml cannot be read"),
        ("", {"RANK": "0"}, "WORLD_SIZE is not set"),
        ("", {"WORLD_SIZE": "two"}, "the variable WORLD_SIZE is 'two'"),
        ("--hidden-size 131072 --ffn-hidden-size 8388608", {}, "GiB per process"),
        ("--backend abacus", {}, "no backend is called 'abacus'"),
    ],
)
def test_the_command_ends_with_one_message(flags: str, variables: dict[str, str], expected: str) -> None:
    done, seconds = command([*VALID.split(), *flags.split()], variables)
    assert done.returncode == 2
    assert expected in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.startswith("mt-megatron: ")
    if seconds >= SECONDS:
        _, imported = _timed([sys.executable, "-c", "import torch"], {})
        assert seconds < IMPORTS * imported


def test_no_rank_is_left_behind_below_torchrun(tmp_path: Path) -> None:
    marker = str(tmp_path / "marker.jsonl")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    words = [*VALID.split(), "--global-batch-size", "3", "--metrics-path", marker]
    done = run_command(
        [sys.executable, *launcher, "--rdzv-endpoint", "127.0.0.1:0", "-m", "mt_megatron.cli", "pretrain"]
        + words,
        env=_environment(),
    )
    assert done.returncode != 0
    assert (
        "global_batch_size is 3; expected a multiple of micro_batch_size x data-parallel size = 2"
        in done.stderr
    )
    assert "exitcode  : 2" in done.stderr, "torchrun reports the ranks' own exit code"
    assert left_behind(marker) == []


@pytest.mark.parametrize("flags", ["--pipeline-model-parallel-size 2 --num-layers 3", "--unknown-flag 1"])
def test_ranks_that_never_meet_still_end(flags: str, tmp_path: Path) -> None:
    """Two ranks whose meeting point does not exist: they must not even look for it."""
    marker = str(tmp_path / "marker.jsonl")
    processes = []
    for rank in range(2):
        variables = {
            **os.environ,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        argv = [*VALID.split(), *flags.split(), "--metrics-path", marker]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "mt_megatron.cli", "pretrain", *argv],
                env=variables,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        answers = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [2, 2]
    assert all("Traceback" not in answer and answer for answer in answers)
    assert left_behind(marker) == []


def left_behind(marker: str) -> list[list[str]]:
    """Command lines of living processes that name ``marker``."""
    deadline = time.monotonic() + 5
    while True:
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if marker in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(words)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
