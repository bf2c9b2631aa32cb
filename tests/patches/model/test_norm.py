"""Wherever upstream builds its torch norm it gets ours, in every layout, checkpoint and order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import run_ranks

HERE = "tests.patches.model.test_norm"


def built(names: list[str]) -> dict[str, Any]:
    from tests.patches import small_gpt

    small_gpt.start()
    found = {}
    for name in names:
        model = small_gpt.build(small_gpt.transformer_config(normalization=name, qk_layernorm=True))
        norms = {
            n: f"{type(m).__module__}.{type(m).__name__}"
            for n, m in model.named_modules()
            if "norm" in n.rpartition(".")[2] and type(m).__name__ != "IdentityOp"
        }
        sharded = model.sharded_state_dict()
        found[name] = {
            "classes": sorted(set(norms.values())),
            "places": sorted({n.rpartition(".")[2] for n in norms}),
            "sharded": sorted(k for k in sharded if "layernorm" in k and "layers.0." in k),
            "final": sorted(k for k in sharded if "final" in k),
        }
    return found


def test_every_norm_of_a_gpt_is_ours():
    (found,) = run_ranks(1, f"{HERE}:built", ["RMSNorm", "LayerNorm"])
    places = ["final_layernorm", "input_layernorm", "k_layernorm", "pre_mlp_layernorm", "q_layernorm"]
    for name, parameters in (("RMSNorm", ["weight"]), ("LayerNorm", ["bias", "weight"])):
        assert found[name]["classes"] == [f"mt_megatron.layers.norm.{name}"]
        assert found[name]["places"] == places
        assert found[name]["final"] == [f"decoder.final_layernorm.{p}" for p in parameters]
        assert found[name]["sharded"] == sorted(
            f"decoder.layers.0.{place}.{p}"
            for place in (
                "input_layernorm",
                "pre_mlp_layernorm",
                "self_attention.q_layernorm",
                "self_attention.k_layernorm",
            )
            for p in parameters
        )


def built_with_apex(folder: str) -> dict[str, Any]:
    """As ``built``, in a process that imports a stand-in for Apex from ``folder``."""
    sys.path.insert(0, folder)
    return built(["RMSNorm", "LayerNorm"])


def test_rms_norm_is_ours_where_apex_is_installed(tmp_path: Path):
    normalization = tmp_path / "apex" / "normalization"
    normalization.mkdir(parents=True)
    for package in (normalization.parent, normalization):
        (package / "__init__.py").touch()
    (normalization / "fused_layer_norm.py").write_text("class FusedLayerNormAffineFunction: pass\n")
    (found,) = run_ranks(1, f"{HERE}:built_with_apex", str(tmp_path))
    assert found["RMSNorm"]["classes"] == ["mt_megatron.layers.norm.RMSNorm"]
    assert found["RMSNorm"]["final"] == ["decoder.final_layernorm.weight"]
    assert len(found["RMSNorm"]["places"]) == 5
    # Its own kernel, which knows LayerNorm, stays.
    assert found["LayerNorm"]["classes"] == ["megatron.core.fusions.fused_layer_norm.FusedLayerNorm"]


def gradients(options: dict[str, Any]) -> Any:
    from tests.patches import small_gpt

    small_gpt.start(tp=options.pop("tp"))
    skip = options.pop("skip_sum", False)
    config = small_gpt.transformer_config(qk_layernorm=True, **options)
    model = small_gpt.distributed(config, small_gpt.build(config))
    if skip:
        for parameter in model.module.parameters():
            if hasattr(parameter, "sequence_parallel"):
                parameter.sequence_parallel = False
    small_gpt.train_step(model, [small_gpt.batch()])
    return {n: g for n, g in small_gpt.whole_gradients(model.module).items() if "norm" in n}


def all_gradients(sets: list[dict[str, Any]]) -> Any:
    return [gradients(dict(options)) for options in sets]


def test_gradients_under_sequence_parallelism_are_summed():
    sets = [
        {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True},
        {"normalization": "LayerNorm"},
    ]
    (alone,) = run_ranks(1, f"{HERE}:all_gradients", [{**options, "tp": 1} for options in sets])
    plain = [{**options, "tp": 2} for options in sets]
    parallel = [{**options, "sequence_parallel": True} for options in plain]
    unsummed = [{**options, "skip_sum": True} for options in parallel]
    for found in run_ranks(2, f"{HERE}:all_gradients", plain + parallel + unsummed):
        for i, expected in enumerate(alone):
            for name, gradient in expected.items():
                for mode in (found[i], found[2 + i]):
                    assert mode[name] == pytest.approx(gradient, rel=1e-4, abs=1e-6), name
            # Negative control: without upstream's sum over the ranks the comparison fails.
            final = "decoder.final_layernorm.weight"
            assert found[4 + i][final] != pytest.approx(expected[final], rel=1e-4, abs=1e-6)


def orders() -> dict[str, Any]:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    import mt_megatron

    def classes() -> list[str]:
        found = []
        for name in ("RMSNorm", "LayerNorm"):
            config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, normalization=name)
            try:
                found.append(type(gpt_layer_specs.LNImpl(config=config, hidden_size=8)).__module__)
            except AssertionError as error:
                found.append(str(error)[:12])
        return found

    early = gpt_layer_specs.LNImpl
    before = classes()
    mt_megatron.patch("cpu")
    during = classes()
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    kept = early(TransformerConfig(**sizes, normalization="RMSNorm"), 8)

    class Subclass(early):  # type: ignore[misc, valid-type]
        pass

    subclass = Subclass(TransformerConfig(**sizes), 8)
    mt_megatron.unpatch()
    x = torch.randn(2, 8)
    return {
        "before": before,
        "during": during,
        "after": classes(),
        "subclass": type(subclass).__name__,
        "kept": float((kept(x) - x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).abs().max()),
    }


def test_names_bound_before_patching_build_ours_until_unpatched():
    (found,) = run_ranks(1, f"{HERE}:orders")
    refused, torch_norm = "(RMSNorm) is", "megatron.core.transformer.torch_layer_norm"
    assert found["before"] == [refused, torch_norm]
    assert found["during"] == ["mt_megatron.layers.norm"] * 2
    assert found["after"] == [refused, torch_norm]
    assert found["subclass"] == "Subclass"
    assert found["kept"] < 1e-6
