"""The patched router: what 0.9.0 did stays to the bit, the bias keeps its type, nothing waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.patches.model.router_ranks import KEPT

RANKS = "tests.patches.model.router_ranks"
Found = dict[str, Any]


@pytest.fixture(scope="module")
def ours() -> Found:
    found: Found = run_ranks(1, f"{RANKS}:ours")[0]
    return found


@pytest.fixture(scope="module")
def upstream() -> Found:
    found: Found = run_ranks(1, f"{RANKS}:upstream")[0]
    return found


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
@pytest.mark.parametrize("name", KEPT)
def test_options_of_090_stay_to_the_bit(ours: Found, upstream: Found, name: str, dtype: str) -> None:
    assert ours["kept"][f"{name} {dtype}"] == upstream["kept"][f"{name} {dtype}"]
    assert ours["kept"][f"{name} names"] == upstream["kept"][f"{name} names"] == ["weight"]


def test_the_first_tokens_are_kept_by_position(ours: Found) -> None:
    assert ours["position"] == list(range(16))


def test_upstream_drops_tokens_from_anywhere(upstream: Found) -> None:
    """What the patch is for; should this fail, it is not needed any more."""
    assert len(upstream["position"]) == 16 and upstream["position"] != list(range(16))


def test_nothing_waits_for_the_device(ours: Found, upstream: Found) -> None:
    for name in ("waits", "waits deepseek", "waits capacity"):
        assert ours[name] == [], name
    assert upstream["waits"], "the count sees what there is"


def test_the_bias_is_saved_and_the_counts_are_not(ours: Found) -> None:
    assert ours["names"] == ["expert_bias", "weight"]
    assert ours["buffers"] == ["expert_bias", "local_tokens_per_expert"]


def test_only_training_counts(ours: Found) -> None:
    assert ours["counted"] == [0, 0, 64]


@pytest.mark.parametrize(
    ("cast", "weight"),
    [
        ("bfloat16", "torch.bfloat16"),
        ("half", "torch.float16"),
        ("double", "torch.float64"),
        ("float", "torch.float32"),
        ("Float16Module", "torch.bfloat16"),
    ],
)
def test_no_cast_reaches_the_bias(ours: Found, cast: str, weight: str) -> None:
    assert ours["casts"][cast] == ["torch.float32", True, "torch.int64", weight]


def test_the_bias_moves_with_the_model(ours: Found) -> None:
    assert ours["casts"]["meta"] == ["torch.float32", "meta"]


def test_logits_in_fp32_of_a_model_in_bf16(ours: Found) -> None:
    found = ours["in_fp32"]
    assert found["logits"] == ["torch.float32", True]
    assert found["kept"] == ["torch.bfloat16"], "no copy in fp32 waits for backward"
    assert found["hidden"] and found["weight"]
    assert (found["plain"], found["probs"]) == ("torch.bfloat16", "torch.float32")


def test_losses_of_routers_are_scaled_as_the_loss_of_tokens(ours: Found) -> None:
    """Loss scale 8, 4 micro-batches: 8/4; twice with two context parallel ranks, whose gradients are
    averaged; the whole where gradients are divided by tokens later. A dense model is left alone."""
    assert ours["scales"] == {"plain": 2.0, "context": 4.0, "per token": 8.0, "dense": -1.0}


def test_one_expert_of_constant_weight_is_warned_of_once(ours: Found, upstream: Found) -> None:
    found = ours["one expert"]
    assert found["weights"] == [1.0] and found["others"] == []
    (warning,) = found["said"]
    assert "only the load-balancing and z losses train the router" in warning
    assert found["alone"].startswith("ConfigError: found topk 1 without use_pre_softmax; expected")
    assert upstream["alone"].startswith("ValueError: Please use --moe-router-pre-softmax")
