"""A number that is none is named by step, rank and first module, on every rank, under every layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mt_megatron.pipeline.execute import source
from mt_megatron.training import steps
from mt_megatron.training.nan_watch import _Search
from tests.launch import run_ranks
from tests.second_lane import DAILY

CASES = "tests.training.health.divergence_cases"
FEW = "" if DAILY else "--global-batch-size 2"
"""Two micro-batches a step for ranks that share their samples, in the first lane."""

TP2 = f"--tensor-model-parallel-size 2 {FEW}"
PP2 = f"--pipeline-model-parallel-size 2 {FEW}"


def fault(module: str, kind: str, rank: int, value: str = "nan", **more: Any) -> dict[str, Any]:
    return {"module": module, "kind": kind, "rank": rank, "value": value, "steps": [2], **more}


QKV = "decoder.layers.0.self_attention.linear_qkv"

ON_TWO = {
    "tp2_forward": {
        "flags": TP2,
        "fault": fault("decoder.layers.1.mlp.linear_fc1", "forward", 1, "inf"),
        "says": "rank 1, forward pass of micro-batch 0: the output of decoder.layers.1.mlp.linear_fc1 "
        "(layer 2 of the model) has 0 NaN and 1 infinite of",
    },
    "tp2_backward": {
        "flags": f"{TP2} --sequence-parallel",
        "fault": fault("decoder.layers.2.mlp.linear_fc2", "backward", 1),
        "says": "rank 1, backward pass of micro-batch 0: the gradient that decoder.layers.2.mlp.linear_fc2 "
        "(layer 3 of the model) passes back to its input",
    },
    "pp2_first_stage": {
        "flags": PP2,
        "fault": fault("decoder.layers.1.mlp", "forward", 0),
        "says": "rank 0 (pipeline stage 0), forward pass of micro-batch 0: the output of "
        "decoder.layers.1.mlp (layer 2 of the model)",
    },
    "pp2_last_stage": {
        "flags": PP2,
        "fault": fault("decoder.layers.0.mlp", "backward", 1),
        "says": "rank 1 (pipeline stage 1), backward pass of micro-batch 0: the gradient that "
        "decoder.layers.0.mlp (layer 3 of the model) passes back to its input",
    },
    "pp2_deferred": {
        "flags": f"{PP2} --pipeline-schedule zb_h1 --no-untie-embeddings-and-output-weights",
        "fault": fault("decoder.layers.0.mlp", "backward", 1),
        "says": "rank 1 (pipeline stage 1), backward pass of micro-batch 0: the gradient that "
        "decoder.layers.0.mlp (layer 3 of the model) passes back to its input",
    },
    "dp2_overlapped": {
        "flags": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "fault": fault("decoder.layers.0.mlp", "backward", 1),
        "says": "rank 1, backward pass of micro-batch 0: the gradient that decoder.layers.0.mlp (layer 1",
    },
    "dp2_weight": {
        "flags": "",
        "fault": fault(QKV, "weight", 0),
        "says": f"rank 0: the weight {QKV}.weight (layer 1 of the model) itself has 1 NaN",
    },
    "dp2_once": {
        "flags": "",
        "fault": fault("decoder.layers.0.mlp", "forward", 1, once=True),
        "says": "the same step repeated is finite, so neither data nor weights are at fault",
    },
}
ON_ONE = {
    "forward": {
        "flags": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "fault": fault("decoder.layers.3.self_attention", "forward", 0),
        "says": "rank 0, forward pass of micro-batch 0: the output of decoder.layers.3.self_attention (layer",
    },
    "backward": {
        "flags": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "fault": fault("decoder.layers.3.mlp", "backward", 0),
        "says": "rank 0, backward pass of micro-batch 0: the gradient that decoder.layers.3.mlp (layer 4",
    },
    "unclipped": {
        "flags": "--clip-grad 0",
        "fault": fault("decoder.layers.3.mlp", "backward", 0, "inf"),
        "says": "rank 0, backward pass of micro-batch 0: the gradient that decoder.layers.3.mlp (layer 4",
    },
}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, f"{CASES}:runs", str(tmp_path_factory.mktemp("two")), ON_TWO, timeout=400)


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("one"))
    return run_ranks(1, f"{CASES}:runs_and_repetitions", folder, ON_ONE, timeout=300)


@pytest.mark.parametrize("name", ON_TWO)
def test_every_rank_ends_with_the_same_cause(on_two: list[dict[str, Any]], name: str) -> None:
    errors = [rank[name]["error"] for rank in on_two]
    assert errors[0] == errors[1]
    assert errors[0].startswith("DivergenceError: iteration 2: the ")
    assert str(ON_TWO[name]["says"]) in errors[0], errors[0]


@pytest.mark.parametrize("name", ON_ONE)
def test_one_process_names_the_module(on_one: list[dict[str, Any]], name: str) -> None:
    error = on_one[0][name]["error"]
    assert error.startswith("DivergenceError: iteration 2: the ")
    assert str(ON_ONE[name]["says"]) in error, error


@pytest.mark.parametrize("name", ["restored", "not_restored"])
def test_the_repeated_step_drops_what_the_step_dropped(on_one: list[dict[str, Any]], name: str) -> None:
    first, second, repeated = on_one[0][name]
    assert first != second
    # Other dropout moves these losses by more than a thousandth.
    assert (repeated == pytest.approx(second, rel=1e-6)) == (name == "restored")


def test_the_search_leaves_the_schedule_s_count_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that is chosen by the step is the diverged one's in the search, and the next one's after."""
    asked: list[int] = []
    states = SimpleNamespace(now=lambda job: SimpleNamespace(restore=lambda job: None))
    monkeypatch.setattr(steps, "RandomStates", states)
    monkeypatch.setattr(steps, "first_finding", lambda *args: source._chosen(4, False))
    made: Any = object.__new__(steps.Steps)
    made._trainable, made._fp8_before, made._job, made._forward_step = (
        SimpleNamespace(chunks=[]),
        [],
        None,
        None,
    )
    made._batches_after = lambda *args, **kwargs: []
    source.set_pipeline_schedule(lambda step, microbatches, forward_only: asked.append(step))
    try:
        source._chosen(4, False)
        made._again = source.remember_step()
        source._chosen(4, False)
        made._explain(None, None, None)
        source._chosen(4, False)
    finally:
        source.set_pipeline_schedule(None)
    assert asked == [0, 1, 1, 2]


class _Fused(torch.autograd.Function):
    """A product whose weight gradient goes to ``main_grad``, with a place holder for autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        [weight] = ctx.saved_tensors
        return gradient @ weight, torch.full_like(weight, torch.nan)


class _Head(torch.nn.Module):
    """Two outputs of one operation, from a weight that the caller gives, as tied embeddings are."""

    def forward(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return _Fused.apply(hidden, weight).chunk(2, dim=-1)  # type: ignore[no-untyped-call, no-any-return]


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Linear(4, 4), _Head()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.embedding(hidden), weight=self.embedding.weight)[0].sum()  # type: ignore[no-any-return]


def test_place_holders_and_outputs_that_nothing_reads_are_no_findings() -> None:
    model = _Tied()
    weight: Any = model.embedding.weight
    weight.grad_added_to_main_grad, weight.main_grad = True, torch.zeros(4, 4)
    job: Any = SimpleNamespace(
        at=SimpleNamespace(pp=0), layout=SimpleNamespace(pp=1), rank=0, reports_loss=True
    )
    trainable: Any = SimpleNamespace(bare_chunks=lambda: [model])
    search = _Search(trainable, job, 1)
    with search.hooks():
        model(torch.ones(2, 4, requires_grad=True)).backward()
    assert search.findings() == []
