"""Every layout perturbs the same elements of whole tensors, by the same amounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"
WEIGHTS = {"decoder.layers.1.*": "weight", "embedding.*": "weight"}
# One module each: what follows a perturbed one has other values everywhere.
ACTIVATIONS = {
    "embedding": "activation",
    "embedding.word_embeddings": "activation",
    "decoder.layers.1": "activation",
    "decoder.layers.0.self_attention.linear_qkv": "activation",
    "decoder.layers.1.self_attention.core_attention": "activation",
    "decoder.layers.1.mlp.linear_fc1": "activation",
    "decoder.layers.0.mlp.linear_fc2": "activation",
    "decoder.layers.0.pre_mlp_layernorm": "activation",
    "decoder.layers.0": "gradient",
    "decoder.layers.0.mlp.linear_fc1": "gradient",
}

CHOSEN = {
    "decoder.layers.0.self_attention.linear_qkv.weight": "weight heads",
    "decoder.layers.0.self_attention.linear_proj.weight": "weight heads",
    "decoder.layers.0.mlp.linear_fc1.weight": "weight index",
    "*.layers.0.self_attention.core_attention": "activation heads",
    "*.layers.0.mlp.linear_fc1": "activation token",
}
GRADIENTS = {"decoder.layers.0.*": "weight_gradient"}


def _same(tmp_path: Path, model: str, layouts: dict[str, str], patterns: dict[str, str]) -> None:
    case = "tests.scope.lab.layout_cases:same_elements"
    found: list[dict[str, Any]] = run_ranks(
        2, case, str(tmp_path), model, {"data": "", **layouts}, patterns, timeout=600
    )
    for rank in found:
        for name, each in rank.items():
            assert each["paths"] and not each["missing"], (name, each)
            assert not each["wrong"], (name, each["wrong"])
            assert each["changed"] > 0, name


def test_tensor_parallel_with_sequences(tmp_path: Path) -> None:
    chosen = {name: on for name, on in ACTIVATIONS.items() if "fc1" in name or name == "decoder.layers.1"}
    chosen |= {**CHOSEN, **GRADIENTS}
    _same(tmp_path, "small", {"tp": f"{TP} --sequence-parallel"}, {**WEIGHTS, **chosen})


@pytest.mark.daily
@pytest.mark.parametrize(
    "layout",
    [TP, f"{TP} --sequence-parallel", PP, "--context-parallel-size 2", "--use-distributed-optimizer"],
    ids=["tp", "sequences", "pp", "cp", "zero 1"],
)
def test_every_layout(tmp_path: Path, layout: str) -> None:
    # With the distributed optimizer a rank has the reduced gradients of its shard alone.
    gradients = {} if "distributed-optimizer" in layout else GRADIENTS
    _same(tmp_path, "small", {"other": layout}, {**WEIGHTS, **ACTIVATIONS, **CHOSEN, **gradients})


@pytest.mark.daily
def test_experts(tmp_path: Path) -> None:
    patterns = {
        "decoder.layers.2.mlp.*": "weight",
        "decoder.layers.1.self_attention.*": "weight",
        "decoder.layers.2.mlp.experts.weight1": "weight expert",
        "mtp.*": "weight",
        "decoder.layers.1.mlp.*": "weight_gradient",
        "decoder.layers.1.self_attention.linear_q_up_proj": "activation",
        "decoder.layers.2.mlp": "activation",
    }
    layouts = {
        "experts": "--expert-model-parallel-size 2",
        "tp": f"{TP} --sequence-parallel",
        "grouped": "--expert-model-parallel-size 2 --moe-grouped-gemm",
        "pp": PP,
    }
    _same(tmp_path, "mixture", layouts, patterns)


@pytest.mark.daily
def test_experts_that_are_modules(tmp_path: Path) -> None:
    sequential = "--no-moe-grouped-gemm"
    patterns = {
        "decoder.layers.2.mlp.experts.*": "weight",
        "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight": "weight expert",
        "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight": "weight index",
        "mtp.*": "weight",
    }
    layouts = {"data": sequential, "experts": f"{sequential} --expert-model-parallel-size 2"}
    _same(tmp_path, "mixture", layouts, patterns)
