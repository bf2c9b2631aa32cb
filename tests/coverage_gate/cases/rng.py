"""The RNG tracker really forks, restores and replays random states on the cpu device."""

from __future__ import annotations

import mt_megatron
from tests.coverage_gate.case import case
from tests.coverage_gate.target import torch


def _mask() -> torch.Tensor:
    return torch.nn.functional.dropout(torch.ones(64), 0.5)


@case(world=1)
def tracker_forks_and_restores_dropout_masks() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tracker.add("a", 11)
    tracker.add("b", 12)
    assert torch.equal(torch.get_rng_state(), before), "adding a state must not disturb the current one"
    with tracker.fork("a"):
        first = _mask()
    assert torch.equal(torch.get_rng_state(), before), "leaving the fork must restore the outer state"
    with tracker.fork("a"):
        second = _mask()
    with tracker.fork("b"):
        other = _mask()
    assert not torch.equal(first, second), "a fork goes on where the last one ended"
    assert not torch.equal(first, other)
    torch.manual_seed(11)
    assert torch.equal(_mask(), first) and torch.equal(_mask(), second)


@case(world=2, tp=2)
def model_parallel_seed_differs_by_rank_only_where_it_should() -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(321)
    outside = torch.rand(8)
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(8)
    everywhere = [torch.empty(8) for _ in range(2)]
    torch.distributed.all_gather(everywhere, outside)
    assert torch.equal(everywhere[0], everywhere[1])
    torch.distributed.all_gather(everywhere, inside)
    assert not torch.equal(everywhere[0], everywhere[1])


@case(world=1)
def state_is_set_for_every_way_to_name_the_device() -> None:
    from megatron.core.tensor_parallel.random import _set_cuda_rng_state

    backend = mt_megatron.backend()
    backend.manual_seed(99)
    state = backend.get_rng_state()
    for device in (-1, 0, "cuda", "cuda:0"):
        backend.manual_seed(1)
        assert not torch.equal(backend.get_rng_state(), state)
        _set_cuda_rng_state(state, device)
        assert torch.equal(backend.get_rng_state(), state), device


@case(world=1)
def recomputation_replays_the_dropout_of_the_forward_pass() -> None:
    from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker

    masks: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            y = torch.nn.functional.dropout(x, 0.5)
        y = torch.nn.functional.dropout(y, 0.5)
        masks.append((y != 0).detach())
        return y

    x = torch.ones(64, requires_grad=True)
    y = checkpoint(block, False, x)
    torch.rand(17)
    state = torch.get_rng_state()
    y.sum().backward()
    assert len(masks) == 2 and torch.equal(masks[0], masks[1])
    assert torch.equal(x.grad, y.detach()), "the gradient of dropout is its own scaled mask"
    assert torch.equal(torch.get_rng_state(), state), "the backward pass must leave the state as it was"


@case(world=2, tp=2)
def recomputation_with_activations_spread_over_ranks() -> None:
    from megatron.core.tensor_parallel import checkpoint

    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    y = checkpoint(lambda value: value.square(), True, x * 1.0)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * torch.arange(8.0).reshape(4, 2))
