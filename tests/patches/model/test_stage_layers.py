"""Upstream builds, numbers and recomputes the layers that the layout gives each stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from mt_megatron.errors import ConfigError
from tests.launch import run_ranks
from tests.patches import small_gpt

HERE = "tests.patches.model.test_stage_layers"


@pytest.fixture(scope="module")
def alone() -> Any:
    return run_ranks(1, f"{HERE}:both")[0]


def test_upstream_builds_what_the_layout_says(alone: dict[str, Any]) -> None:
    found = alone["built"]
    assert found["even"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found["chunks"] == [[0], [1, 2, 3], [4, 5], [6]]
    assert found["ends"] == [[0, 1], [2], [3], [4, 5, 6]]
    assert [len(stage) for stage in found["61"]] == [4] * 15 + [1]
    assert sum(found["61"], []) == list(range(61))
    assert found["empty end"] == [[0, 1, 2, 3], []]
    assert "num_layers is 5; expected a multiple" in found["five"]
    assert "2 in the TransformerConfig and 1 in the process groups" in found["differs"]
    assert "expected a multiple and no number of layers per stage" in found["mamba"]
    # Upstream alone drops a layer without a word: that is what is guarded against.
    assert found["five, upstream"] == [[0, 1], [2, 3]]


def test_recomputation_of_runs_that_do_not_come_out_even_is_exact(alone: dict[str, Any]) -> None:
    found = alone["recomputed"]
    assert found["off"] == found["runs of 2"] == found["runs of 5"]
    assert "IndexError" in found["upstream"]


@contextmanager
def _as_rank(pp: int, stage: int, chunks: int | None, chunk: int) -> Iterator[None]:
    from megatron.core import parallel_state

    answers = {
        "get_pipeline_model_parallel_world_size": pp,
        "get_pipeline_model_parallel_rank": stage,
        "get_virtual_pipeline_model_parallel_world_size": chunks,
        "get_virtual_pipeline_model_parallel_rank": chunk if chunks else None,
    }
    with mock.patch.multiple(
        parallel_state, **{name: mock.Mock(return_value=value) for name, value in answers.items()}
    ):
        yield


def _layers(pp: int, chunks: int | None = None, **options: Any) -> list[list[int]]:
    """The layers that upstream's own functions give every stage, chunk after chunk."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import TransformerLayer

    config = TransformerConfig(
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        **options,
    )
    found = []
    for chunk in range(chunks or 1):
        for stage in range(pp):
            with _as_rank(pp, stage, chunks, chunk):
                first = TransformerLayer._get_layer_offset(SimpleNamespace(config=config))
                found.append(list(range(first, first + get_num_layers_to_build(config))))
    return found


def _error(make: Any) -> str:
    try:
        make()
    except (ConfigError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def both() -> dict[str, Any]:
    return {"recomputed": recomputed(), "built": built()}


def built() -> dict[str, Any]:
    import mt_megatron

    small_gpt.start()
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    differs = SimpleNamespace(
        num_layers=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=None,
        pipeline_model_parallel_layout=[3, 1],
    )
    found: dict[str, Any] = {
        "even": _layers(2, 2, num_layers=8),
        "chunks": _layers(2, 2, num_layers=7, pipeline_model_parallel_layout="Et|t*3|tt|tL"),
        "ends": _layers(4, num_layers=7, num_layers_in_first_pipeline_stage=2, last_pipeline_num_layers=3),
        "61": _layers(16, num_layers=61, first_pipeline_num_layers=4, num_layers_in_last_pipeline_stage=1),
        "empty end": _layers(2, num_layers=4, pipeline_model_parallel_layout=[4, 0]),
        "five": _error(lambda: _layers(2, num_layers=5)),
        "differs": _error(lambda: get_num_layers_to_build(differs)),
        "mamba": _error(_mamba),
    }
    mt_megatron.unpatch()
    mt_megatron.patch("cpu", features=["device", "collectives", "compat"])
    found["five, upstream"] = _plain_layers(2, 5)
    return found


def _plain_layers(pp: int, num_layers: int) -> list[list[int]]:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import TransformerLayer

    config = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=pp,
        first_pipeline_num_layers=None,
        last_pipeline_num_layers=None,
    )
    found = []
    for stage in range(pp):
        with _as_rank(pp, stage, None, 0):
            first = TransformerLayer._get_layer_offset(SimpleNamespace(config=config))
            found.append(list(range(first, first + get_num_layers_to_build(config))))
    return found


def _mamba() -> None:
    # The module itself wants Transformer Engine: the body that is patched in is asked directly.
    from mt_megatron.patches.model.stage_layers import _mamba_layers

    config = SimpleNamespace(num_layers=5)
    with _as_rank(2, 0, None, 0):
        _mamba_layers(lambda *ignored: None, SimpleNamespace(config=config), ["M"] * 5)


def recomputed() -> dict[str, Any]:
    small_gpt.start()
    data = small_gpt.batch()

    def gradients(**options: Any) -> str:
        model = small_gpt.build(small_gpt.transformer_config(num_layers=3, **options))
        model(data["tokens"], data["positions"], None, labels=data["labels"]).mean().backward()
        return str([float(p.grad.double().norm()) for p in model.parameters()])

    def runs(length: int) -> dict[str, Any]:
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": length,
        }

    found = {
        "off": gradients(),
        "runs of 2": gradients(**runs(2)),
        "runs of 5": gradients(**runs(5)),
    }
    from mt_megatron.layers import stage_layers as this_stage

    with mock.patch.object(
        this_stage, "layer_or_nothing", lambda original, block, index: original(block, index)
    ):
        found["upstream"] = _error(lambda: gradients(**runs(2)))
    return found
