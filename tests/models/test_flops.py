"""Operations per token against torch's own count of an executed step, and against hand-made figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mt_megatron.models.flops import forward_flops
from mt_megatron.training.arguments import load_config
from mt_megatron.training.memory_estimate import padded_shape

COMMON = (
    "--num-layers 4 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 96 --make-vocab-size-divisible-by 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --train-iters 1 --lr 1e-3 --mock-data --hidden-dropout 0 "
    "--attention-dropout 0"
)
CASES = [
    "--swiglu",
    "--no-gated-linear-unit --activation-func gelu --num-query-groups 4 --kv-channels 20",
    "--swiglu --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--swiglu --recompute-granularity full --recompute-method block --recompute-num-layers 3",
    "--swiglu --recompute-granularity selective",
]


@pytest.fixture(scope="module")
def measured() -> list[dict[str, float]]:
    lines = json.dumps([[*COMMON.split(), *case.split()] for case in CASES])
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.flops_counted", lines],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("flops:"))
    found: list[dict[str, float]] = json.loads(line.removeprefix("flops:"))
    return found


@pytest.mark.parametrize("index", range(len(CASES)), ids=CASES)
def test_torch_counts_the_same(measured: list[dict[str, float]], index: int) -> None:
    found = measured[index]
    assert found["counted"] == found["executed"]
    assert found["family"] == found["training"], "MFU counts by the same definition"
    assert (found["executed"] > found["training"]) == ("recompute" in CASES[index])


def test_by_hand() -> None:
    flops = forward_flops(padded_shape(load_config([*COMMON.split(), "--swiglu"])), 32)
    # Query 48, keys and values 2 x 24, projection 48, and three matrices of 80 for SwiGLU, all times 48.
    assert flops.layer_matrices == 2 * 48 * (48 + 48 + 48 + 3 * 80)
    assert flops.layer_attention == 2 * 2 * 32 * 48, "scores and weighted values over 32 tokens"
    assert flops.head == 2 * 48 * 96
    assert flops.training == 3 * (4 * (flops.layer_matrices + flops.layer_attention) + flops.head)


def test_llama_3_8b_takes_6_per_parameter_and_its_attention() -> None:
    config = load_config(["--model", "llama3_8b"])
    flops = forward_flops(padded_shape(config), 8192)
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # The embedding is looked up, norms are no matrices.
    assert flops.training == 6 * matrices + 12 * 32 * 8192 * 4096
