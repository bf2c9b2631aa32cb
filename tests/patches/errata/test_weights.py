"""Weights that are not drawn have the marks of drawn ones; routers' follow perform_initialization."""

from __future__ import annotations

from typing import Any

from tests.launch import run_ranks

HERE = "tests.patches.errata.test_weights"
SENTINEL = 7.0


def layers(without: list[str]) -> dict[str, Any]:
    """Marks of weights with and without drawing, and what routers hold, with and without a tracker."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import layers as parallel
    from megatron.core.transformer.moe.experts import GroupedMLP
    from megatron.core.transformer.moe.router import TopKRouter

    from tests.patches import small_gpt
    from tests.patches.errata.dropout_ranks import features_without

    small_gpt.start(features=features_without(without))

    drawn_shapes: list[Any] = []

    def init(weight: Any) -> Any:
        drawn_shapes.append(weight.shape)
        return weight.data.fill_(SENTINEL)

    def marks(drawn: bool) -> dict[str, Any]:
        config = small_gpt.transformer_config(
            perform_initialization=drawn,
            num_moe_experts=2,
            add_bias_linear=False,
            moe_grouped_gemm=True,
            moe_ffn_hidden_size=32,
            init_method=init,
            output_layer_init_method=init,
        )
        row = {"input_is_parallel": True, "skip_bias_add": False, "bias": False}
        made = {
            "embedding": parallel.VocabParallelEmbedding(8, 4, init_method=init, config=config).weight,
            "column": parallel.ColumnParallelLinear(4, 8, config=config, init_method=init, stride=2).weight,
            "row": parallel.RowParallelLinear(4, 8, config=config, init_method=init, **row).weight,
        }
        experts = GroupedMLP(2, config)
        made |= {"weight1": experts.weight1, "weight2": experts.weight2}
        names = ("tensor_model_parallel", "partition_dim", "partition_stride")
        return {name: [getattr(weight, key, None) for key in names] for name, weight in made.items()}

    def router(drawn: bool, tracked: bool) -> bool:
        tracker = tensor_parallel.get_cuda_rng_tracker()
        if not tracked:
            tracker.reset()
        config = small_gpt.transformer_config(
            perform_initialization=drawn, num_moe_experts=2, init_method=init, params_dtype=torch.bfloat16
        )
        drawn_shapes.clear()
        found = TopKRouter(config)
        assert found.config is config and found.weight.dtype == torch.bfloat16
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        assert not drawn_shapes or (found.weight == SENTINEL).all()
        return drawn_shapes == [found.weight.shape]

    return {
        "drawn": marks(True),
        "undrawn": marks(False),
        "routers": {
            f"{drawn} {tracked}": router(drawn, tracked)
            for drawn in (True, False)
            for tracked in (True, False)
        },
    }


def test_weights_that_are_not_drawn_are_marked_and_routers_follow_perform_initialization() -> None:
    [found] = run_ranks(1, f"{HERE}:layers", [])
    assert found["undrawn"] == found["drawn"]
    assert all(marks[0] is True for marks in found["drawn"].values())
    assert found["routers"] == {
        "True True": True,
        "True False": True,
        "False True": False,
        "False False": False,
    }


def test_upstream_has_these_faults() -> None:
    [found] = run_ranks(1, f"{HERE}:layers", ["errata"])
    assert all(marks == [None] * 3 for name, marks in found["undrawn"].items() if "weight" not in name)
    assert not found["routers"]["True False"] and found["routers"]["False True"]
