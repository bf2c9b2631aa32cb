"""Which parts MLA gets from a layer's spec, and how many parameters the published models' attention has."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks

PUBLISHED = {
    "DeepSeek-V2-Lite": (2048, 16, None, 13_763_072),
    "DeepSeek-V2": (5120, 128, 1536, 149_227_520),
    "DeepSeek-V3": (7168, 128, 1536, 187_107_328),
}
"""Hidden size, heads, rank of queries, and parameters of one layer's attention (latent 512, heads 128 + 64,
values 128), each the sum of the shapes in the published files."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, object]]:
    sizes = {name: row[:3] for name, row in PUBLISHED.items()}
    result: dict[str, dict[str, object]] = run_ranks(1, "tests.layers.mla.spec_ranks:everything", sizes)[0]
    return result


@pytest.mark.parametrize("model", PUBLISHED)
def test_parameters_of_published_attention(found: dict[str, dict[str, int]], model: str) -> None:
    assert found["ours"][model] == found["transformers"][model] == PUBLISHED[model][3]


def test_local_parts(found: dict[str, dict[str, object]]) -> None:
    assert found["local"] == {
        "linear_q_proj": "ColumnParallelLinear",
        "linear_q_down_proj": "ReplicatedLinear",
        "linear_q_up_proj": "ColumnParallelLinear",
        "linear_kv_down_proj": "ReplicatedLinear",
        "linear_kv_up_proj": "ColumnParallelLinear",
        "core_attention": "DotProductAttention",
        "linear_proj": "RowParallelLinear",
        "q_layernorm": "WrappedTorchLayerNorm",
        "kv_layernorm": "WrappedTorchLayerNorm",
    }
    assert found["kept"]["mask"] == "causal"


def test_transformer_engines_parts_from_a_stub(found: dict[str, dict[str, object]]) -> None:
    parts = found["engine"]
    assert parts["linear_q_up_proj"] == parts["linear_kv_up_proj"] == "TEColumnParallelLinear"
    assert parts["linear_proj"] == "TERowParallelLinear"
    assert parts["q_layernorm"] == parts["kv_layernorm"] == "TENorm"
    # It is ours, and the log says why.
    assert parts["core_attention"] == "DotProductAttention"
    assert "in the place of TEDotProductAttention" in str(found["said"]["log"])


def test_the_argument_of_later_versions(found: dict[str, dict[str, object]]) -> None:
    assert found["argument"] == {"module": "MLASelfAttention", "built": "MLASelfAttention", "list": True}
    assert "the norm of the layer's input in it" in str(found["kept"]["engine in a list"])


def test_angles_of_the_model_and_of_the_layer_are_the_same(found: dict[str, dict[str, object]]) -> None:
    assert found["angles"] == {"equal": True, "bit for bit": True}
