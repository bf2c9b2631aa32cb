"""One run of an unmodified script of Megatron-LM under ``mt-megatron run`` below torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launch import ROOT

_SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 4 --seed 1234"
)
# Tokens of mock data go up to 4095; 4352 needs no padding under any layout here.
MODELS = {
    "pretrain_gpt.py": f"{_SIZES} --tokenizer-type NullTokenizer --vocab-size 4351 --transformer-impl local",
    "pretrain_bert.py": f"{_SIZES} --tokenizer-type BertWordPieceLowerCase",
    "pretrain_t5.py": f"{_SIZES} --tokenizer-type BertWordPieceLowerCase --vocab-extra-ids 256 "
    "--decoder-seq-length 32",
}
"""Script -> the arguments of its model."""
SCHEDULE = (
    "--train-iters 20 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 --lr-decay-iters 20 "
    "--lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --eval-interval 1000 "
    "--eval-iters 1"
)
ONE_RANK = Path(__file__).with_name("one_rank.py")
ONE_DEVICE = "MT_MEGATRON_TEST_ONE_DEVICE"
"""Set where every process sees one device of its own, as the emulator's do: all are then number 0."""
_LOSS = re.compile(r"iteration\s+(\d+)/.*? lm loss: (\S+).*?grad norm: (\S+)")


class JobError(AssertionError):
    """The script failed; the message holds the end of what it wrote."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a run printed."""

    losses: Mapping[int, str]
    """Iteration -> the loss, to all digits that are printed."""
    norms: Mapping[int, str]
    text: str


def pretrain(
    checkout: Path,
    log: Path,
    arguments: Sequence[str],
    *,
    backend: str,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout: float = 400,
    script: str = "pretrain_gpt.py",
) -> Output:
    """Run ``script`` of ``checkout`` to train; everything it writes goes to ``log``. Raises JobError."""
    found = run_script(
        checkout,
        log,
        [script, *MODELS[script].split(), *SCHEDULE.split(), *arguments],
        backend=backend,
        ranks=ranks,
        environment=environment,
        timeout=timeout,
    )
    steps = [(int(iteration), loss, norm) for iteration, loss, norm in _LOSS.findall(found)]
    return Output(
        losses={iteration: loss for iteration, loss, _ in steps},
        norms={iteration: norm for iteration, _, norm in steps},
        text=found,
    )


def run_script(
    checkout: Path,
    log: Path,
    command: Sequence[str],
    *,
    backend: str,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout: float = 400,
) -> str:
    """Run the script that ``command`` begins with in ``checkout``; what it wrote, which goes to ``log`` too.
    Raises JobError."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONDONTWRITEBYTECODE": "1",
        # Megatron asks for it with sequence parallelism, whatever the device.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **(environment or {}),
    }
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    with open(log, "w") as file:
        done = subprocess.run(
            [sys.executable, *launcher, str(ONE_RANK), "--backend", backend, "--", *command],
            cwd=checkout, env=variables, stdout=file, stderr=subprocess.STDOUT, timeout=timeout, check=False,
        )  # fmt: skip
    text = log.read_text(errors="replace")
    if done.returncode:
        raise JobError(f"exit code {done.returncode}: {' '.join(command)}\n{text[-6000:]}")
    return text
