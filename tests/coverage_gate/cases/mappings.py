"""Gathers, scatters and exchanges between tensor- and expert-parallel ranks, forward and backward."""

from __future__ import annotations

from tests.coverage_gate.case import case
from tests.coverage_gate.target import DEVICE, torch


def _rank() -> int:
    return torch.distributed.get_rank()


def _mine(rows: int, columns: int, rank: int | None = None) -> torch.Tensor:
    """A tensor whose values name the rank, the row and the column."""
    base = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    return base + 1000 * (_rank() if rank is None else rank)


@case(world=2, tp=2)
def gather_along_last_dim() -> None:
    from megatron.core.tensor_parallel import mappings

    x = _mine(3, 2).requires_grad_()
    y = mappings.gather_from_tensor_model_parallel_region(x)
    assert torch.equal(y, torch.cat([_mine(3, 2, 0), _mine(3, 2, 1)], dim=-1))
    weight = torch.arange(12.0).reshape(3, 4)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight[:, 2 * _rank() : 2 * _rank() + 2])


@case(world=2, tp=2)
def gather_and_reduce_scatter_along_first_dim() -> None:
    from megatron.core.tensor_parallel import mappings

    x = _mine(2, 3).requires_grad_()
    y = mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True)
    assert torch.equal(y, torch.cat([_mine(2, 3, 0), _mine(2, 3, 1)]))
    (y * (_rank() + 1)).sum().backward()
    # The other rank's gradient of my rows is added: 1 + 2.
    assert torch.equal(x.grad, torch.full((2, 3), 3.0))


@case(world=2, tp=2)
def gather_along_first_dim_of_given_sizes() -> None:
    from megatron.core.tensor_parallel import mappings

    sizes = [1, 3]
    x = _mine(sizes[_rank()], 2).requires_grad_()
    y = mappings.gather_from_sequence_parallel_region(x, output_split_sizes=sizes)
    assert torch.equal(y, torch.cat([_mine(1, 2, 0), _mine(3, 2, 1)]))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


@case(world=2, ep=2)
def gather_and_reduce_scatter_between_experts() -> None:
    from megatron.core.tensor_parallel import mappings

    x = _mine(2, 3).requires_grad_()
    y = mappings.gather_from_sequence_parallel_region_to_moe(x)
    assert torch.equal(y, torch.cat([_mine(2, 3, 0), _mine(2, 3, 1)]))
    z = mappings.reduce_scatter_to_sequence_parallel_region_from_moe(y)
    assert torch.equal(z, 2 * _mine(2, 3))
    z.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))


@case(world=2, ep=2)
def gather_along_first_dim_of_the_expert_group() -> None:
    from megatron.core.tensor_parallel import mappings

    y = mappings._gather_along_first_dim_expert_parallel(_mine(2, 2))
    assert torch.equal(y, torch.cat([_mine(2, 2, 0), _mine(2, 2, 1)])) and y.device.type == DEVICE


@case(world=2, ep=2)
def all_to_all_of_unequal_parts() -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    # Rank 0 keeps 1 row and sends 2; rank 1 sends 3 rows and keeps 1.
    sent = [[1, 2], [3, 1]]
    me, other = _rank(), 1 - _rank()
    x = _mine(sum(sent[me]), 2).requires_grad_()
    received = [sent[0][me], sent[1][me]]
    y = mappings.all_to_all(parallel_state.get_expert_model_parallel_group(), x, received, sent[me])
    parts = [_mine(sum(sent[r]), 2, r).split(sent[r])[me] for r in (0, 1)]
    assert torch.equal(y, torch.cat(parts))
    (y * (me + 1)).sum().backward()
    expected = torch.cat([torch.full((sent[me][r], 2), r + 1.0) for r in (0, 1)])
    assert torch.equal(x.grad, expected), (me, other, x.grad)
