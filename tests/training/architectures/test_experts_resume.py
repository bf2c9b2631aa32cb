"""Runs of models with experts continue to the bit, and stages without experts wait for nobody."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.second_lane import of_lane
from tests.training.architectures.experts_cases import STEPS

CASES = "tests.training.architectures.experts_cases"
# The bias moves far enough to change the choice of experts within a few steps, which are an odd number:
# steps up and down cannot come out even.
EXPERTS = (
    "--family deepseek --num-moe-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001 "
    f"--train-iters {STEPS} --moe-token-dispatcher-type alltoall --hidden-dropout 0 --attention-dropout 0"
)
MIXED = f"{EXPERTS} --moe-layer-freq [0,1,1,1]"
LATENT = (
    "--multi-latent-attention --num-query-groups none --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --rope-type yarn --rotary-scaling-factor 4 "
    "--original-max-position-embeddings 32"
)
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EP2 = "--expert-model-parallel-size 2"
TWO = of_lane({"ep2": f"{MIXED} {EP2}", "ep2_zero1_bf16": f"{MIXED} {EP2} {ZERO1} --bf16"}, "ep2")
TWO_MORE = {
    "ep2_sequential_bf16": f"{MIXED} {EP2} --bf16 --no-moe-grouped-gemm",
    "ep2_allgather_uniform": f"{EXPERTS} {EP2} --moe-token-dispatcher-type allgather",
    "dp2": MIXED,
    "tp2_latent_further": f"{MIXED} {LATENT} --mtp-num-layers 1 --tensor-model-parallel-size 2 "
    "--sequence-parallel",
    "vpp2_latent": f"{MIXED} {LATENT} --pipeline-model-parallel-size 2 "
    "--virtual-pipeline-model-parallel-size 2",
    "uneven_latent_further_bf16": f"{MIXED} {LATENT} --mtp-num-layers 1 --pipeline-model-parallel-size 2 "
    "--pipeline-model-parallel-layout 3,1 --bf16 --use-distributed-optimizer",
    "ep2_latent_further_zero1_bf16": f"{MIXED} {LATENT} --mtp-num-layers 1 {EP2} {ZERO1} --bf16",
}
# The first of two stages has dense layers only.
PP2 = f"{EXPERTS} --moe-layer-freq [0,0,1,1] {EP2} --pipeline-model-parallel-size 2"
FOUR = {"pp2_ep2_zero1_bf16": f"{PP2} {ZERO1} --bf16"}
FOUR_MORE = {"pp2_ep2": PP2}


Runs = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What the layout of a name recorded; layouts of a size run in the same processes, once."""

    @cache
    def found(size: int, more: bool) -> dict[str, Any]:
        layouts = {(2, False): TWO, (2, True): TWO_MORE, (4, False): FOUR, (4, True): FOUR_MORE}[size, more]
        folder = str(tmp_path_factory.mktemp(f"experts{size}"))
        return dict(run_ranks(size, f"{CASES}:continued_and_not", folder, layouts, timeout=300)[0])

    def run_of(name: str) -> dict[str, Any]:
        size = 4 if name in {**FOUR, **FOUR_MORE} else 2
        return dict(found(size, name in {**TWO_MORE, **FOUR_MORE})[name])

    return run_of


NAMES = [
    *TWO,
    *(pytest.param(name, marks=pytest.mark.daily) for name in FOUR),
    *(pytest.param(name, marks=pytest.mark.soak) for name in (*TWO_MORE, *FOUR_MORE)),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_continues_to_the_bit(continued: Runs, name: str) -> None:
    found = continued(name)
    whole, first, second = (found[part] for part in ("whole", "first", "second"))
    assert "error" not in whole and "error" not in second, found
    assert {**first["steps"], **second["steps"]} == whole["steps"] and len(whole["steps"]) == STEPS
    assert found["differing"] == [] and found["tensors"] > 20


@pytest.mark.parametrize("name", NAMES)
def test_the_bias_is_in_the_checkpoint_in_fp32_and_has_moved(continued: Runs, name: str) -> None:
    biases = continued(name)["biases"]
    assert biases
    for largest, dtype in biases.values():
        assert dtype == "torch.float32" and largest > 0.049


def test_sizes_on_either_side_of_one_are_named(tmp_path: Path) -> None:
    resume = f"--resume {tmp_path}/source"
    others = [f"{MIXED} {resume}", f"{MIXED} --load {tmp_path}/source"]
    refused, weights = run_ranks(
        2, f"{CASES}:other_sizes", str(tmp_path), f"{MIXED} {EP2}", others, timeout=200
    )[0]
    assert "expert_model_parallel_size 2 and this run has 1" in refused["error"]
    assert "error" not in weights and weights["finished"]


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["", f" {ZERO1}"])
def test_a_run_continues_with_experts_spread_wider(tmp_path: Path, optimizer: str) -> None:
    flags = f"{MIXED}{optimizer} --resume {tmp_path}/source"
    others = [f"{flags} --expert-model-parallel-size {size}" for size in (2, 4)]
    alike, wider = run_ranks(
        4, f"{CASES}:other_sizes", str(tmp_path), f"{MIXED}{optimizer} {EP2}", others, timeout=300
    )[0]
    assert "error" not in alike and "error" not in wider, (alike, wider)
    for step, values in alike["steps"].items():
        assert wider["steps"][step] == pytest.approx(values, rel=1e-6)
