"""Losses of routers: what is tracked on several ranks, and what later versions of upstream mended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.launch import run_ranks

HERE = "tests.patches.errata.test_router_losses"


def tracked() -> dict[str, list[float]]:
    """Each rank's z-loss of its own tokens, and what the tracker has once ranks were reduced."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    from tests.patches.model import router_ranks

    router_ranks.start()
    rank = torch.distributed.get_rank()
    router = router_ranks.router_of(moe_z_loss_coeff=0.01, moe_router_load_balancing_type="none")
    tokens = (router_ranks.hidden() * (1 + rank)).detach()
    router(tokens)
    own = torch.logsumexp(torch.nn.functional.linear(tokens, router.weight), dim=-1).square().mean()
    moe_utils.reduce_aux_losses_tracker_across_ranks()
    [value, _] = parallel_state.get_moe_layer_wise_logging_tracker()["z_loss"]["values"].tolist()
    return {"own": [own.item()], "tracked": [value]}


def test_the_tracked_z_loss_is_the_mean_over_ranks() -> None:
    found = run_ranks(2, f"{HERE}:tracked")
    own = [each["own"][0] for each in found]
    assert own[0] != pytest.approx(own[1], rel=0.1)
    for each in found:
        assert each["tracked"][0] == pytest.approx(sum(own) / 2, rel=1e-5)


def per_sequence() -> dict[str, Any]:
    """Gradients of a loss per sequence and per token: a batch of two, and its sequences one by one."""
    from tests.patches.model import router_ranks

    router_ranks.start()
    found: dict[str, Any] = {}
    tokens = router_ranks.hidden().detach()
    for function in ("softmax", "sigmoid"):
        router = router_ranks.router_of(
            moe_aux_loss_coeff=0.1,
            moe_z_loss_coeff=0.01,
            moe_router_load_balancing_type="seq_aux_loss",
            moe_router_score_function=function,
            calculate_per_token_loss=True,
        )
        for name, parts in (("batch", [tokens]), ("sequences", [tokens[:, :1], tokens[:, 1:]])):
            router.zero_grad()
            for part in parts:
                (router(part)[0] * 0).sum().backward()
            found[f"{function} {name}"] = router.weight.grad.tolist()
    return found


def test_a_loss_per_sequence_does_not_depend_on_the_batch_size() -> None:
    """Upstream's later seq_aux_loss did, with calculate_per_token_loss (NVIDIA/Megatron-LM #5798)."""
    [found] = run_ranks(1, f"{HERE}:per_sequence")
    for function in ("softmax", "sigmoid"):
        batch, apart = (torch.tensor(found[f"{function} {name}"]) for name in ("batch", "sequences"))
        assert batch.abs().max() > 0
        torch.testing.assert_close(batch, apart, rtol=0, atol=1e-6 * float(batch.abs().max()))


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_balancing_scores_of_bf16_logits_are_of_fp32(function: str) -> None:
    """Upstream's sigmoid was of the logits' type (NVIDIA/Megatron-LM #2765)."""
    from mt_megatron.layers.moe.router_losses import balancing_scores
    from mt_megatron.layers.moe.router_topk import RouterOptions

    logits = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    options = RouterOptions(num_experts=8, topk=2, score_function=function)
    found = balancing_scores(logits, options)
    assert found.dtype == torch.float32
    assert torch.equal(found, balancing_scores(logits.float(), options))
