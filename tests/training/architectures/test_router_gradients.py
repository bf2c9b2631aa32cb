"""Routers' losses weigh the same beside the loss of tokens, wherever the tokens of a sequence are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.launch import run_ranks

CASES = "tests.training.architectures.router_gradient_cases:everything"
Found = dict[str, Any]


@pytest.fixture(scope="module")
def one() -> Found:
    found: Found = run_ranks(1, CASES, 1)[0]
    return found


@pytest.fixture(scope="module")
def two() -> list[Found]:
    return run_ranks(2, CASES, 2)


def deviation(found: list[list[float]], expected: list[list[float]]) -> float:
    a, b = torch.tensor(found), torch.tensor(expected)
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("kind", ["mean", "per token", "per token, masked"])
def test_context_parallel_ranks_get_the_gradient_of_one_process(
    one: Found, two: list[Found], kind: str
) -> None:
    for found in two:
        assert deviation(found[kind], one[kind]) < 1e-5


def test_a_loss_per_token_gives_the_same_gradient(one: Found) -> None:
    """Every token counts here, so the mean over tokens is the mean over micro-batches."""
    assert deviation(one["per token"], one["mean"]) < 1e-5


@pytest.mark.parametrize(("kind", "alone"), [("summed", "mean"), ("summed, masked", "per token, masked")])
def test_a_loss_function_may_return_what_all_context_parallel_ranks_have(
    one: Found, two: list[Found], kind: str, alone: str
) -> None:
    """As Megatron-LM 0.9's does, and the trainer's does not."""
    for found in two:
        assert deviation(found[kind], one[alone]) < 1e-5


def test_upstreams_scale_gives_another(one: Found, two: list[Found]) -> None:
    """Negative control: what 0.9.0 does halves these losses with two context parallel ranks."""
    assert deviation(one["upstream's scale"], one["mean"]) < 1e-7
    assert deviation(two[0]["upstream's scale"], one["mean"]) > 0.1
