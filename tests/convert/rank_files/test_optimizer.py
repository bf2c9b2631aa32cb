"""A run that is stopped, converted with its optimizer and continued goes on as if it had not been."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.second_lane import of_lane

EXPERTS = (
    "--family mixtral --num-moe-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none"
)
LATENT = (
    "--family deepseek --multi-latent-attention --qk-layernorm --num-query-groups 4 --q-lora-rank 16 "
    "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --num-moe-experts 4 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-layer-freq [0,1,1,1] "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --mtp-num-layers 1 "
    "--moe-shared-expert-intermediate-size 16"
)
ODD = "--vocab-size 4333"
TP2, PP2, EP2 = (f"--{name}-model-parallel-size 2" for name in ("tensor", "pipeline", "expert"))
ZERO1 = "--use-distributed-optimizer"

CASES: dict[str, dict[str, Any]] = of_lane(
    {
        "llama": {
            "model": ODD,
            "before": TP2,
            "chain": [["torch", *TP2.split()], ["torch_dist", *TP2.split()]],
            "after": TP2,
            "by_rank": True,
            "control": True,
        },
        "mixtral": {
            "model": f"{EXPERTS} --bf16",
            "before": f"{EP2} {ZERO1}",
            "chain": [["torch", *PP2.split()], ["torch_dist", *EP2.split(), ZERO1]],
            "after": f"{EP2} {ZERO1}",
        },
    },
    "llama",
)
IN_SOAK: dict[str, dict[str, Any]] = {
    "mixtral_by_rank": {
        "model": f"{EXPERTS} --no-moe-grouped-gemm --bf16",
        "before": EP2,
        "chain": [["torch", *TP2.split(), *EP2.split()], ["torch_dist", *EP2.split()]],
        "after": EP2,
        "by_rank": True,
    },
    "mixtral_grouped": {
        "model": f"{EXPERTS} --moe-grouped-gemm --bf16",
        "before": EP2,
        "chain": [["torch", *EP2.split(), "--moe-grouped-gemm"], ["torch_dist", *EP2.split()]],
        "after": EP2,
        "by_rank": True,
        # Rank files hold such experts as upstream does, which only weights are understood in.
        "taken": False,
    },
    "deepseek_by_rank": {
        "model": f"{LATENT} --no-moe-grouped-gemm",
        "before": PP2,
        "chain": [["torch", *PP2.split()], ["torch_dist", *PP2.split()]],
        "after": PP2,
        "by_rank": True,
    },
    "deepseek_distributed": {
        "model": f"{LATENT} --bf16",
        "before": f"{EP2} {ZERO1}",
        "chain": [["torch_dist", *TP2.split(), ZERO1], ["torch"], ["torch_dist", *EP2.split(), ZERO1]],
        "after": f"{EP2} {ZERO1}",
    },
    "llama_to_distributed": {
        "model": ODD,
        "before": TP2,
        "chain": [["torch_dist", ZERO1]],
        "after": ZERO1,
    },
    "llama_to_plain": {
        "model": "",
        "before": ZERO1,
        "chain": [["torch_dist", *PP2.split()]],
        "after": PP2,
    },
    "mixtral_to_other_side_of_one": {
        "model": EXPERTS,
        "before": EP2,
        "chain": [["torch_dist", *TP2.split()]],
        "after": f"{TP2} --sequence-parallel",
    },
}
MARKED = [*CASES, *(pytest.param(name, marks=pytest.mark.soak) for name in IN_SOAK)]


def _losses(found: dict[str, Any]) -> list[float]:
    assert "error" not in found, found
    return [found["steps"][str(step)][0] for step in (4, 5, 6)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in done:
            # Starting ranks takes longer than a case.
            names = CASES if name in CASES else IN_SOAK
            folder = str(tmp_path_factory.mktemp("optimizer"))
            done.update(
                run_ranks(
                    2, "tests.convert.rank_files.optimizer_ranks:continued", folder, names, timeout=550
                )[0]
            )
        return done[name]

    return get


@pytest.mark.parametrize("name", MARKED)
def test_a_run_goes_on_as_before(results: Any, name: str) -> None:
    found, case = results(name), (CASES | IN_SOAK)[name]
    assert "error" not in found, found
    assert found["tensors"] == []
    own, converted = _losses(found["own"]), _losses(found["converted"])
    assert found["converted"]["consumed_samples"] == found["own"]["consumed_samples"] == 48
    assert converted == (own if case["before"] == case["after"] else pytest.approx(own, rel=1e-6))


def test_moments_that_are_lost_are_noticed(results: Any) -> None:
    found = results("llama")
    own, control = _losses(found["own"]), _losses(found["control"])
    # The first step follows from the weights alone.
    assert control[0] == own[0] and abs(control[2] / own[2] - 1) > 1e-4


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in CASES else pytest.mark.soak)
        for name, case in (CASES | IN_SOAK).items()
        if case.get("by_rank")
    ],
)
def test_files_by_rank_are_megatrons_own(results: Any, name: str) -> None:
    found = results(name)
    assert found["order"], "parameters are counted in another order than the model's"
    assert found["read"] == []
    assert found["taken"] is (CASES | IN_SOAK)[name].get("taken", True)
