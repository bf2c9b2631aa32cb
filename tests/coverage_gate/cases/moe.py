"""Routers, experts and the three token dispatchers, against a loop over tokens."""

from __future__ import annotations

from typing import Any

from tests.coverage_gate import models
from tests.coverage_gate.case import case
from tests.coverage_gate.target import DEVICE, torch

_EXPERTS = 4


def _config(**changes: Any) -> Any:
    defaults = {"num_moe_experts": _EXPERTS, "moe_router_topk": 2, "add_bias_linear": False}
    return models.config(**{**defaults, **changes})


def _routed(topk: int, experts: int, tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [6, 1, 16], probabilities [6, topk] and distinct expert ids [6, topk], different per rank."""
    generator = torch.Generator().manual_seed(31 + torch.distributed.get_rank())
    hidden = torch.randn(tokens, 1, 16, generator=generator)
    scores = torch.randn(tokens, experts, generator=generator)
    values, indices = scores.topk(topk, dim=1)
    return hidden, values.softmax(dim=1), indices


def _through(
    dispatcher: Any, topk: int, experts: int = _EXPERTS, local: list[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dispatch, let expert ``e`` multiply by ``e + 1``, combine; also what a loop over tokens gives."""
    hidden, probs, indices = _routed(topk, experts)
    hidden.requires_grad_()
    mine = list(range(experts)) if local is None else local
    permuted, counts = dispatcher.token_permutation(hidden, probs, indices)
    assert permuted.device.type == DEVICE and int(counts.sum()) == permuted.shape[0]
    parts = permuted.split([int(count) for count in counts])
    worked = torch.cat([part * (expert + 1) for part, expert in zip(parts, mine, strict=True)])
    output, _ = dispatcher.token_unpermutation(worked)
    factor = (probs * (indices + 1)).sum(dim=1)
    expected = hidden.detach() * factor[:, None, None]
    output.sum().backward()
    assert torch.allclose(hidden.grad, factor[:, None, None].expand_as(hidden), atol=1e-5)
    return output, expected, indices


def _compare(dispatcher: Any, topk: int, **options: Any) -> None:
    output, expected, _ = _through(dispatcher, topk, **options)
    assert torch.allclose(output, expected, atol=1e-5)


def _local_experts() -> list[int]:
    first = torch.distributed.get_rank() * 2
    return [first, first + 1]


@case(world=1)
def allgather_dispatcher_alone() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    _compare(MoEAllGatherTokenDispatcher(_EXPERTS, list(range(_EXPERTS)), _config()), 2)


@case(world=2, ep=2)
def allgather_dispatcher_between_ranks() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    config = _config(expert_model_parallel_size=2)
    _compare(MoEAllGatherTokenDispatcher(2, _local_experts(), config), 2, local=_local_experts())


@case(world=1)
def alltoall_dispatcher_alone() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    config = _config(moe_token_dispatcher_type="alltoall")
    _compare(MoEAlltoAllTokenDispatcher(_EXPERTS, list(range(_EXPERTS)), config), 2)
    single = _config(num_moe_experts=1, moe_router_topk=1, moe_token_dispatcher_type="alltoall")
    _compare(MoEAlltoAllTokenDispatcher(1, [0], single), 1, experts=1)


@case(world=1)
def alltoall_dispatcher_with_a_capacity() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    config = _config(moe_token_dispatcher_type="alltoall", moe_expert_capacity_factor=4.0)
    _compare(MoEAlltoAllTokenDispatcher(_EXPERTS, list(range(_EXPERTS)), config), 2)


@case(world=2, ep=2)
def alltoall_dispatcher_between_ranks() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    config = _config(expert_model_parallel_size=2, moe_token_dispatcher_type="alltoall")
    _compare(MoEAlltoAllTokenDispatcher(2, _local_experts(), config), 2, local=_local_experts())


@case(world=2, tp=2)
def alltoall_dispatcher_of_one_expert_between_ranks() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    config = _config(
        num_moe_experts=1,
        moe_router_topk=1,
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    dispatcher = MoEAlltoAllTokenDispatcher(1, [0], config)
    hidden, probs, indices = _routed(1, 1)
    permuted, counts = dispatcher.token_permutation(hidden, probs, indices)
    assert int(counts.sum()) == permuted.shape[0] == 2 * len(hidden)
    # Each rank has a part of the expert; the parts' outputs are added.
    output, _ = dispatcher.token_unpermutation(permuted * 0.5)
    assert torch.allclose(output, hidden, atol=1e-5)


def _legacy(local: list[int], **changes: Any) -> Any:
    from megatron.core.transformer.moe.legacy_a2a_token_dispatcher import MoEAlltoAllSEQTokenDispatcher

    config = _config(moe_token_dispatcher_type="alltoall_seq", **changes)
    return MoEAlltoAllSEQTokenDispatcher(len(local), local, config)


@case(world=1)
def legacy_dispatcher_alone() -> None:
    dispatcher = _legacy(list(range(_EXPERTS)))
    assert dispatcher.expert_ids_per_ep_rank.device.type == DEVICE
    assert dispatcher.expert_ids_per_ep_rank.tolist() == [0, 1, 2, 3]
    _compare(dispatcher, 2)
    _compare(_legacy([0], num_moe_experts=1, moe_router_topk=1), 1, experts=1)
    capacity = _legacy([0], num_moe_experts=1, moe_router_topk=1, moe_expert_capacity_factor=2.0)
    _compare(capacity, 1, experts=1)


@case(world=2, ep=2)
def legacy_dispatcher_between_ranks() -> None:
    rank = torch.distributed.get_rank()
    changes = {"num_moe_experts": 2, "expert_model_parallel_size": 2}
    _compare(_legacy([rank], **changes), 2, experts=2, local=[rank])
    _compare(_legacy(_local_experts(), expert_model_parallel_size=2), 2, local=_local_experts())


@case(world=1)
def gather_by_a_map_scatters_its_gradient() -> None:
    from megatron.core.transformer.moe.moe_utils import moe_gather

    x = torch.arange(6.0).reshape(3, 2).requires_grad_()
    index = torch.tensor([[2, 2], [0, 0], [2, 2]])
    y = moe_gather.apply(x, index)
    assert torch.equal(y, torch.tensor([[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]))
    y.sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]))


@case(world=1)
def router_moves_its_weight_and_balances() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    router = TopKRouter(_config(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01))
    hidden, _, _ = _routed(2, _EXPERTS)
    logits = router.gating(hidden)
    assert router.weight.device.type == DEVICE and torch.allclose(
        logits, hidden @ router.weight.t(), rtol=0, atol=1e-6 * logits.abs().max().item()
    )
    probs, indices = router(hidden)
    top, chosen = logits.view(-1, _EXPERTS).topk(2, dim=1)
    assert torch.equal(indices, chosen) and torch.allclose(probs, top.softmax(dim=1), atol=1e-6)
    probs.sum().backward()
    assert torch.isfinite(router.weight.grad).all() and router.weight.grad.abs().sum() > 0


@case(world=1)
def moe_layer_equals_a_loop_over_experts() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.moe_layer import MoELayer

    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    hidden, _, _ = _routed(2, _EXPERTS)
    for dispatcher in ("allgather", "alltoall", "alltoall_seq"):
        layer = MoELayer(_config(moe_token_dispatcher_type=dispatcher), submodules)
        output, _ = layer(hidden)
        probs, indices = layer.router(hidden)
        expected = torch.zeros(6, 16)
        for token in range(6):
            for slot in range(2):
                expert = layer.experts.local_experts[int(indices[token, slot])]
                expected[token] += probs[token, slot] * expert(hidden[token])[0].view(16)
        assert torch.allclose(output.view(6, 16), expected, atol=1e-5), dispatcher


@case(world=1)
def grouped_experts_made_on_the_device() -> None:
    """Experts need no package: their matrices lie as a linear's do, on whichever device they were made."""
    from megatron.core.transformer.moe.experts import GroupedMLP

    for on_cpu in (False, True):
        config = _config(
            num_moe_experts=2,
            use_cpu_initialization=on_cpu,
            gated_linear_unit=True,
            activation_func=_silu,
        )
        experts = GroupedMLP(2, config)
        assert experts.weight1.shape == (2, 2 * 32, 16) and experts.weight2.shape == (2, 16, 32)
        place = "cpu" if on_cpu else DEVICE
        assert experts.weight1.device.type == experts.weight2.device.type == place
        experts.to(DEVICE)
        x = torch.randn(5, 16)
        output, _ = experts(x, torch.tensor([2, 3]))
        expected = []
        for part, first, second in zip(x.split([2, 3]), experts.weight1, experts.weight2, strict=True):
            gate, up = (part @ first.t()).chunk(2, dim=-1)
            expected.append((_silu(gate) * up) @ second.t())
        assert torch.allclose(output, torch.cat(expected), atol=1e-6)


_silu = torch.nn.functional.silu
