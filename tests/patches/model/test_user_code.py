"""Code of users around the patched layers computes what it computes around upstream's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.launch import run_ranks
from tests.patches.model.user_code_ranks import LOSSES, TOKENS

RANKS = "tests.patches.model.user_code_ranks"
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> Found:
    all_of_it: Found = run_ranks(1, f"{RANKS}:everything")[0]
    return all_of_it


@pytest.mark.parametrize("way", ["torch", "torch reentrant", "megatron"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_applied_and_counted_once_by_every_recomputation(
    found: Found, loss: str, way: str
) -> None:
    once, again = (found["checkpointing"][f"{loss} {each}"] for each in ("once", way))
    assert again == once
    assert once["tokens"] == 2 * TOKENS
    assert any(map(any, once["gradient"])), "the loss has a gradient"


@pytest.mark.parametrize("case", ["1 alltoall", "1 allgather", "2 alltoall", "2 allgather"])
def test_code_between_dispatcher_and_experts_gets_every_experts_rows(found: Found, case: str) -> None:
    seen = found["subclasses"][case]
    topk = int(case[0])
    assert seen["scaled"]["seen"] == seen["expected"]["seen"]
    expected = torch.tensor(seen["expected"]["output"])
    # Rows are scaled before the products or after: small elements are sums of terms as large as the largest.
    close = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(torch.tensor(seen["scaled"]["output"]), expected, rtol=0, atol=close)
    for name in ("other", "exchanged"):
        rows, counts = seen[name]["seen"]
        assert rows == sum(counts) == topk * TOKENS, name
        assert seen[name]["output"] == seen["other"]["output"], name


@pytest.mark.parametrize("kind", ["Loop", "Calling", "Plain", "replaced"])
def test_grouped_experts_of_users_are_what_upstreams_weights_say(found: Found, kind: str) -> None:
    """A forward of their own reads the weights in upstream's order, in which a checkpoint has them."""
    expected, seen = found["grouped"]["GroupedMLP"], found["grouped"][kind]
    assert (expected["dimensions"], seen["dimensions"]) == (3, 3 if kind == "Plain" else 2)
    assert torch.allclose(torch.tensor(seen["output"]), torch.tensor(expected["output"]), atol=1e-6)
    for mine, ours in zip(seen["gradients"], expected["gradients"], strict=True):
        assert torch.allclose(torch.tensor(mine), torch.tensor(ours), atol=1e-5)
    assert seen["kept"] == expected["kept"]
    assert seen["diverge"] == expected["diverge"]


def test_products_of_users_are_not_said_to_be_quantised(found: Found) -> None:
    assert found["grouped"]["fp8"].startswith("ConfigError: found a Loop with a forward of its own")


def test_the_type_of_a_routers_logits_is_not_autocasts(found: Found) -> None:
    assert found["autocast"]["on"] == found["autocast"]["off"]
    assert found["autocast"]["on"][0] == "torch.float32"
    assert found["autocast"]["layer"] is True


def test_recomputation_is_under_the_autocast_of_the_forward_pass(found: Found) -> None:
    assert found["autocast"]["twice"] == found["autocast"]["once"]
    assert isinstance(found["autocast"]["once"], list)


def test_recomputation_has_the_types_of_the_forward_pass_whatever_is_on_then(found: Found) -> None:
    assert found["autocast"]["types"] == 2 * ["torch.bfloat16"]
    assert found["autocast"]["types off"] == 2 * ["torch.float32"]


def test_a_loss_of_the_users_gets_logits(found: Found) -> None:
    seen = found["losses"]
    for name in ("fused", "own", "replaced after", "replaced before", "head", "all heads"):
        assert seen[name][0] == pytest.approx(seen["apart"][0], rel=1e-6), name
    assert seen["plain"][0] != pytest.approx(seen["apart"][0], rel=1e-3), "the loss is another one"


def test_a_function_that_was_replaced_before_is_reported(found: Found) -> None:
    (said,) = (text for text in found["losses"]["warned"] if " holds " in text)
    assert "LanguageModule.compute_language_model_loss holds tempered of tests.patches.model" in said
    assert "cross_entropy.language_model_loss (wrap)" in said
