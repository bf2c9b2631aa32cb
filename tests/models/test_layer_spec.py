"""Which layers a model gets. ``transformer_engine`` is a stand-in here: names that can be imported and
built by nobody, and the stand-in of ``torch.cuda`` of tests/fake_cuda."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import run_ranks

STAND_IN = '''
"""A stand-in for Transformer Engine: the classes that Megatron-Core derives from, and nothing in them."""
import sys
import types

__version__ = "1.9.0"


def _namespace(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


def _class(name):
    return type(name, (), {})


recipe = types.SimpleNamespace(DelayedScaling=_class("DelayedScaling"))
common = _namespace("transformer_engine.common", recipe=recipe)
pytorch = _namespace(
    "transformer_engine.pytorch",
    distributed=types.SimpleNamespace(CudaRNGStatesTracker=_class("CudaRNGStatesTracker")),
    **{name: _class(name) for name in ("Linear", "LayerNormLinear", "DotProductAttention", "GroupedLinear")},
)
'''


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    return str(tmp_path)


def found(backend: str, implementation: str, *flags: str, path: str = "") -> dict[str, str]:
    arguments = ["--transformer-impl", implementation, *flags]
    return run_ranks(1, "tests.models.layer_spec_ranks:chosen", backend, arguments, path)[0]


def test_transformer_engine_is_used_where_it_is_installed(stand_in: str) -> None:
    for implementation in ("auto", "transformer_engine"):
        result = found("cuda", implementation, path=stand_in)
        assert result["linear_qkv"] == "TELayerNormColumnParallelLinear"
        assert result["core_attention"] == "TEDotProductAttention"
        assert "Transformer Engine's layers, by Megatron-Core's own spec" in result["log"]
        assert result["norm_row"] == "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight"


def test_local_means_local(stand_in: str) -> None:
    result = found("cuda", "local", path=stand_in)
    assert result["linear_qkv"] == "ColumnParallelLinear" and result["log"] == ""
    assert result["norm_row"] == "decoder.layers.{layer}.input_layernorm.weight"


@pytest.mark.daily
def test_queries_and_keys_are_normalised_beside_transformer_engine(stand_in: str) -> None:
    """The spec takes Apex's class for them, which in 0.9.0 knows LayerNorm alone."""
    (Path(stand_in) / "apex").mkdir()
    (Path(stand_in) / "apex" / "__init__.py").touch()
    flags = ("--qk-layernorm", "--normalization", "RMSNorm")
    result = found("cuda", "transformer_engine", *flags, path=stand_in)
    assert result["linear_qkv"] == "TELayerNormColumnParallelLinear"
    assert result["norm_of_queries"] == "mt_megatron.layers.norm.RMSNorm"


@pytest.mark.parametrize(
    ("backend", "installed", "flags", "why"),
    [
        ("cuda", False, (), "transformer_engine is not installed"),
        pytest.param("cpu", True, (), "needs CUDA and the backend's device is cpu", marks=pytest.mark.daily),
        pytest.param("cuda", True, ("--qk-layernorm",), "needs Apex", marks=pytest.mark.daily),
        pytest.param(
            "cuda",
            True,
            ("--reset-attention-mask",),
            "its causal attention looks at no mask",
            marks=pytest.mark.daily,
        ),
    ],
)
def test_an_obstacle_is_named_in_the_log_or_is_an_error(
    stand_in: str, backend: str, installed: bool, flags: tuple[str, ...], why: str
) -> None:
    path = stand_in if installed else ""
    result = found(backend, "auto", *flags, path=path)
    assert result["linear_qkv"] == "ColumnParallelLinear"
    assert "local layers, since" in result["log"] and why in result["log"]
    refused = found(backend, "transformer_engine", *flags, path=path)
    assert refused["error"].startswith("transformer_impl is transformer_engine") and why in refused["error"]
