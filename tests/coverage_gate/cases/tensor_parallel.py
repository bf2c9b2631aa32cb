"""Layers, data broadcast and the chunking utilities of tensor parallelism."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

from tests.coverage_gate.case import case
from tests.coverage_gate.target import DEVICE, torch


def _config(**changes: Any) -> Any:
    from megatron.core import ModelParallelConfig

    return ModelParallelConfig(**{"tensor_model_parallel_size": 2, **changes})


def _full(shard: torch.Tensor, dim: int) -> torch.Tensor:
    """Both ranks' shards, joined along ``dim``."""
    parts = [torch.empty_like(shard) for _ in range(2)]
    torch.distributed.all_gather(parts, shard.detach().contiguous())
    return torch.cat(parts, dim=dim)


def _normal(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, std=0.5)


@case(world=2, tp=2)
def vocabulary_embedding_made_on_the_device() -> None:
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    layer = VocabParallelEmbedding(8, 4, init_method=_normal, config=_config())
    assert layer.weight.shape == (4, 4) and layer.weight.device.type == DEVICE
    table = _full(layer.weight, 0)
    # The tracker's model-parallel state differs between ranks, so the halves must.
    assert not torch.equal(table[:4], table[4:])
    ids = torch.tensor([[0, 5], [7, 2]])
    out = layer(ids)
    assert torch.equal(out, table[ids])
    out.sum().backward()
    hits = torch.bincount(ids.flatten(), minlength=8)[4 * torch.distributed.get_rank() :][:4]
    assert torch.equal(layer.weight.grad, hits[:, None].expand(4, 4).float())


@case(world=2, tp=2)
def column_and_row_linear_made_on_the_device() -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    config = _config()
    column = ColumnParallelLinear(4, 6, config=config, init_method=_normal, bias=True)
    row = RowParallelLinear(
        6, 4, config=config, init_method=_normal, bias=True, input_is_parallel=True, skip_bias_add=False
    )
    for tensor in (column.weight, column.bias, row.weight, row.bias):
        assert tensor.device.type == DEVICE and tensor.dtype == torch.float32
    torch.manual_seed(7)
    x = torch.randn(3, 2, 4, requires_grad=True)
    y, _ = row(column(x)[0])
    first, second = _full(column.weight, 0), _full(row.weight, 1)
    reference = x.detach().clone().requires_grad_()
    expected = (reference @ first.t()) @ second.t()
    assert torch.allclose(y, expected, atol=1e-5)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(x.grad, reference.grad, rtol=1e-4, atol=1e-4)


def _sequence_parallel_linear() -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    config = _config(sequence_parallel=True)
    layer = ColumnParallelLinear(4, 6, config=config, init_method=_normal, bias=False)
    torch.manual_seed(8)
    everything = torch.randn(4, 2, 4)
    mine = everything.chunk(2)[torch.distributed.get_rank()].clone().requires_grad_()
    y, _ = layer(mine)
    weight = _full(layer.weight, 0)
    half = weight.chunk(2)[torch.distributed.get_rank()]
    assert torch.allclose(y, everything @ half.t(), atol=1e-5)
    y.sum().backward()
    whole = torch.ones(4, 2, 6) @ weight
    assert torch.allclose(mine.grad, whole.chunk(2)[torch.distributed.get_rank()], atol=1e-5)
    assert torch.allclose(layer.weight.grad, everything.sum(dim=(0, 1)).expand(3, 4), atol=1e-5)
    assert mine.grad.device.type == DEVICE


@case(world=2, tp=2)
def sequence_parallel_linear_reduces_its_input_gradient() -> None:
    _sequence_parallel_linear()


@case(world=2, tp=2, without=("linear",))
def sequence_parallel_linear_of_upstream() -> None:
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    linear_with_grad_accumulation_and_async_allreduce.warned = False
    before = os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _sequence_parallel_linear()
    finally:
        if before is not None:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = before
    assert any("CUDA_DEVICE_MAX_CONNECTIONS" in str(entry.message) for entry in caught)


@case(world=2, tp=2)
def frozen_linear_reduces_its_input_gradient() -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    layer = ColumnParallelLinear(4, 6, config=_config(), init_method=_normal, bias=False)
    layer.weight.requires_grad_(False)
    x = torch.ones(2, 1, 4, requires_grad=True)
    layer(x)[0].sum().backward()
    assert torch.allclose(x.grad, (torch.ones(2, 1, 6) @ _full(layer.weight, 0)), atol=1e-5)
    assert layer.weight.grad is None


@case(world=2, tp=2)
def broadcast_of_a_batch_from_rank_zero() -> None:
    from megatron.core.tensor_parallel import broadcast_data

    full = {"tokens": torch.arange(12).reshape(3, 4), "labels": torch.arange(12, 24).reshape(2, 6)}
    data = full if torch.distributed.get_rank() == 0 else None
    received = broadcast_data(["tokens", "labels"], data, torch.int64)
    for key, value in full.items():
        assert torch.equal(received[key], value) and received[key].device.type == DEVICE
        assert received[key].dtype == torch.int64


@case(world=2, tp=2)
def chunk_of_a_tensor_and_its_gather() -> None:
    from megatron.core.tensor_parallel.utils import (
        gather_split_1d_tensor,
        split_tensor_into_1d_equal_chunks,
    )

    x = torch.arange(12.0).reshape(3, 4)
    chunk = split_tensor_into_1d_equal_chunks(x, new_buffer=True)
    rank = torch.distributed.get_rank()
    assert torch.equal(chunk, torch.arange(6.0) + 6 * rank)
    assert chunk.data_ptr() != x.data_ptr() + 24 * rank
    assert torch.equal(gather_split_1d_tensor(chunk).view(3, 4), x)


def _fused_accumulation(zeroed: bool) -> torch.nn.Parameter:
    from megatron.core.tensor_parallel import layers

    weight = torch.nn.Parameter(torch.randn(3, 4))
    weight.main_grad = torch.full((3, 4), 0.5)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = zeroed
    x = torch.randn(5, 4, requires_grad=True)
    y = layers.linear_with_grad_accumulation_and_async_allreduce(
        x, weight, None, True, sequence_parallel=False, allreduce_dgrad=False
    )
    y.sum().backward()
    assert torch.allclose(weight.main_grad, 0.5 + torch.ones(5, 3).t() @ x.detach(), atol=1e-5)
    assert weight.grad_added_to_main_grad is True
    return weight


@case(world=2, tp=2)
def gradient_accumulation_fusion_adds_to_the_main_gradient() -> None:
    for zeroed in (True, False):
        _fused_accumulation(zeroed)


@case(world=2, tp=2, without=("linear",))
def gradient_accumulation_fusion_of_upstream() -> None:
    """The CUDA extension is not built here: the sum that its kernel computes takes the kernel's place."""
    from megatron.core.tensor_parallel import layers

    def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(grad_output.t() @ total_input)

    assert not hasattr(layers, "fused_weight_gradient_mlp_cuda")
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    try:
        for zeroed in (True, False):
            placeholder = _fused_accumulation(zeroed).grad
            assert placeholder.shape == (3, 4) and placeholder.device.type == DEVICE
            if zeroed:
                assert torch.count_nonzero(placeholder) == 0
    finally:
        del layers.fused_weight_gradient_mlp_cuda
