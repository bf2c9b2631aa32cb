"""The trainer announces the gradient of its loss to the bit, and trains alike with and without fusion."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks


@pytest.fixture(scope="module")
def trained():
    (found,) = run_ranks(1, "tests.training.architectures.loss_fusion_ranks:trained")
    return found


@pytest.mark.parametrize(
    ("way", "bound"),
    [*((way, 1e-5) for way in ("plain", "tied", "per token", "one by one")), ("fp16", 2e-2), ("bf16", 2e-2)],
)
def test_same_losses_and_norms_and_no_logits_a_second_time(trained, way, bound):
    fused, plain = trained[f"{way}, fused"], trained[way]
    assert fused["losses"] == pytest.approx(plain["losses"], rel=bound)
    assert fused["norms"] == pytest.approx(plain["norms"], rel=bound)
    # Three steps of three micro-batches: what backward brought was what had been announced, to the bit.
    assert (fused["fused"], fused["again"]) == (9, 0)
    assert (plain["fused"], plain["again"]) == (0, 0)


def test_another_loss_than_announced_is_noticed_and_made_up_for(trained):
    fused, plain = trained["doubled, fused"], trained["doubled"]
    assert (fused["fused"], fused["again"]) == (9, 9)
    assert fused["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert fused["norms"][0] == pytest.approx(2 * trained["tied"]["norms"][0], rel=1e-5)


def test_logits_that_a_hook_wants_to_see_do_not_lead_to_upstreams_loss(trained):
    hooked, plain = trained["hooked, fused"], trained["tied"]
    assert hooked["fused"] == 0
    assert hooked["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    # Upstream's fused loss rounds the gradient to bf16, whatever the model's dtype.
    assert hooked["norms"] == pytest.approx(plain["norms"], rel=1e-5)
