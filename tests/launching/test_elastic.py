"""A run that cannot start is refused by the launching machine; one that fails has one report."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.checkpoint.run_lock import RunLock
from tests.launch import ROOT, run_command

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
MOCK = (
    "--model llama3_tiny --mock-data --vocab-size 4096 --backend cpu --train-iters 1 --global-batch-size 2 "
    "--lr 1e-3"
)


def launch(*words: str) -> Any:
    command = [sys.executable, "-m", "mt_megatron.cli", "launch", "--gpus-per-node", "2", "--"]
    return run_command([*command, *MOCK.split(), *words], env=ENVIRONMENT)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--load /nonexistent", "/nonexistent"),
        ("--init-from-hf /nonexistent", "/nonexistent"),
        ("--wandb-project mine", "package wandb is not installed"),
    ],
)
def test_the_launching_machine_says_what_every_rank_would(tmp_path: Path, flags: str, says: str) -> None:
    done = launch("--save", str(tmp_path / "saved"), *flags.split())
    assert done.returncode == 2 and says in done.stderr
    assert "torch.distributed.run" not in done.stderr and "Traceback" not in done.stderr


def test_a_folder_that_another_run_saves_to_is_refused_before_ranks_start(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    try:
        done = launch("--save", str(tmp_path))
    finally:
        lock.close()
    assert done.returncode == 2 and "another run saves to" in done.stderr
    assert "torch.distributed.run" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("code", [2, 79])
def test_the_code_of_the_rank_that_failed_is_the_launchs(tmp_path: Path, code: int) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        f"import os, sys, time\nif os.environ['RANK'] == '1': sys.exit({code})\ntime.sleep(60)\n"
    )
    words = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    done = run_command(
        [sys.executable, "-m", "mt_megatron.launching.jobs.elastic", *words, str(script)], env=ENVIRONMENT
    )
    assert done.returncode == code
    assert f"process 1 of this machine ended with {code}; it says why above" in done.stderr
    assert "Traceback" not in done.stderr and "exitcode" not in done.stderr


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "is_host=true"]
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_command(
            [
                sys.executable,
                "-m",
                "mt_megatron.launching.jobs.elastic",
                *words,
                "--rdzv-endpoint",
                endpoint,
                str(tmp_path / "rank.py"),
            ],
            env=ENVIRONMENT,
        )
    assert done.returncode == 1 and "address already in use" in done.stderr and "--master-port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_a_signal_ended_has_torchruns_report(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    words = ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    done = run_command(
        [sys.executable, "-m", "mt_megatron.launching.jobs.elastic", *words, str(script)], env=ENVIRONMENT
    )
    assert done.returncode == 1 and "exitcode  : -9" in done.stderr


LOADING = """
import os, signal
from torch.utils.data import DataLoader
from mt_megatron.backends.loader_workers import starting
with starting(None):
    batches = iter(DataLoader(range(64), batch_size=4, num_workers=1))
next(batches)
# Else torch raises in this process when it hears of the worker's end, and whether it does first is chance.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
os.kill(batches._workers[0].pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.daily
def test_a_launch_leaves_nothing_of_its_own_in_the_temporary_folder(tmp_path: Path) -> None:
    """torchrun's logs, and sockets of loader workers whose trainer was killed; others' folders stay."""
    script, temporary = tmp_path / "rank.py", tmp_path / "temporary"
    script.write_text(LOADING)
    (temporary / "pymp-of-others").mkdir(parents=True)
    run = "import os, sys; from mt_megatron.launching.jobs.supervise import supervise as run; "
    words = [
        "-m",
        "mt_megatron.launching.jobs.elastic",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
    ]
    done = run_command(
        [
            sys.executable,
            "-c",
            f"{run}sys.exit(run(sys.argv[1:], os.environ))",
            sys.executable,
            *words,
            str(script),
        ],
        env={
            **ENVIRONMENT,
            "TMPDIR": str(temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),  # torch's, for later runs
        },
    )
    assert done.returncode == 1 and "exitcode  : -9" in done.stderr
    assert [each.name for each in temporary.iterdir()] == ["pymp-of-others"]
