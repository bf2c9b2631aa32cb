"""Models with experts and latent attention: the same model has no finding, however it is spread."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_megatron.diverge.compare import compare, read_record
from tests.launch import run_ranks
from tests.second_lane import of_lane

MIXTURE = (
    "--family deepseek --num-query-groups 4 --num-moe-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
    "--moe-shared-expert-intermediate-size 16 --moe-layer-freq [0,1] --num-layers 2 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --multi-latent-attention "
    "--qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EP2 = "--expert-model-parallel-size 2"
EXPERTS = {"one by one": "--no-moe-grouped-gemm", "grouped": "--moe-grouped-gemm"}
SPREAD = of_lane({"ep2": EP2, "tp2": TP2}, "ep2")


@pytest.fixture(scope="module", params=EXPERTS)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A record of one process, and records of two that start from its weights."""
    path = tmp_path_factory.mktemp("mixture")
    flags = f"{MIXTURE} {EXPERTS[request.param]}"
    target = "tests.diverge.recordings:record"
    run_ranks(1, target, str(path), [("alone", flags, None)], timeout=300)
    spread = [(name, f"{flags} {more}", None) for name, more in SPREAD.items()]
    run_ranks(2, target, str(path), spread, timeout=300)
    return path


@pytest.mark.parametrize("name", SPREAD)
def test_the_same_model_has_no_finding_however_it_is_spread(folder: Path, name: str) -> None:
    found = compare(read_record(folder / "alone", 1), read_record(folder / name, 2))
    assert found.first is None, found.first
    names = {entry.name for entry in found.entries if entry.phase == "forward"}
    assert "decoder.layers.1.self_attention.q_layernorm" in names
    gradients = {entry.name for entry in found.entries if entry.phase == "parameter gradient"}
    assert {"decoder.layers.1.mlp.router.weight"} <= gradients
    assert sum("experts" in each for each in gradients) >= 3
