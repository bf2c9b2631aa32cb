"""Tensor-parallel linears compute their GEMMs through ``seams.gemm``, and need no Apex to fuse."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch
from mt_megatron.seams import late_wgrad
from mt_megatron.seams.gemm import require_no_pending_wgrad, wgrad_pending

_LAYERS = "megatron.core.tensor_parallel.layers"
_advised = False


def linear_with_grad_accumulation_and_async_allreduce(
    input: Any,
    weight: Any,
    bias: Any,
    gradient_accumulation_fusion: bool,
    sequence_parallel: bool,
    allreduce_dgrad: bool,
    async_grad_allreduce: bool | None = None,
    grad_output_buffer: list[Any] | None = None,
    wgrad_deferral_limit: int | None = 0,
) -> Any:
    """Upstream's function of this name; ``layers.linear.TensorParallelLinear`` says what it does.

    ``async_grad_allreduce`` means nothing, as upstream; its warning is dropped, since its own layers
    pass the argument every time.
    """
    if input.is_cuda and (sequence_parallel or allreduce_dgrad):
        _advise_on_connections()
    return _applied()(
        input,
        weight,
        bias,
        gradient_accumulation_fusion,
        allreduce_dgrad,
        sequence_parallel,
        grad_output_buffer,
        wgrad_deferral_limit,
    )


@cache
def _applied() -> Callable[..., Any]:
    """Imported late, once: a statement in the function itself would cost each call some microseconds."""
    from mt_megatron.layers.linear import TensorParallelLinear

    apply: Callable[..., Any] = TensorParallelLinear.apply
    return apply


def _advise_on_connections() -> None:
    global _advised
    if not _advised and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        warnings.warn(
            "set CUDA_DEVICE_MAX_CONNECTIONS=1: without it a CUDA device may start a GEMM before the "
            "collective that should run beside it",
            stacklevel=3,
        )
    _advised = True


def _drain_embedding_wgrad_compute(
    config: Any, embedding_activation_buffer: Any, grad_output_buffer: Any, weight: Any
) -> None:
    from mt_megatron.layers.linear import drain_embedding_wgrad

    drain_embedding_wgrad(config, embedding_activation_buffer, grad_output_buffer, weight)


class _Nowhere(list[Any]):
    """An activation buffer that keeps nothing."""

    def append(self, item: Any) -> None:
        pass


def _column_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if not self.config.defer_embedding_wgrad_compute:
        return
    if self.embedding_activation_buffer is None:
        self.embedding_activation_buffer = _Nowhere()
    elif self.grad_output_buffer is not None:
        self.activations_put_off = self.embedding_activation_buffer
        self.register_forward_pre_hook(_before_output_layer, with_kwargs=True)


def _before_output_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.is_grad_enabled():
        # No backward and no gradient will come: what is appended would stay for ever.
        layer.embedding_activation_buffer = _Nowhere()
        return
    layer.embedding_activation_buffer = layer.activations_put_off
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    late_wgrad.note_layer(layer.weight if weight is None else weight, layer)


def _clear(original: Callable[..., Any], config: Any, model: Any) -> Any:
    module = original(config, model)
    if module is not None:
        # Of a step that nobody finished: their activations are gone.
        module.grad_output_buffer.clear()
    return module


def _trainable(original: Any) -> Any:
    from mt_megatron.layers.linear import TensorParallelLinear

    return TensorParallelLinear


def _frozen(original: Any) -> Any:
    from mt_megatron.layers.linear import FrozenLinear

    return FrozenLinear


def _make_backward_post_hook(
    original: Callable[..., Callable[..., None]], self: Any, param: Any
) -> Callable[..., None]:
    """While a gradient of ``param`` waits in a queue, or for the step's end, add what has come and do not
    call it ready. One that went to ``main_grad`` and was not handed to autograd is there all the same."""
    ready = original(self, param)

    def hook(*unused: Any) -> None:
        late = late_wgrad.is_late(param)
        if late:
            late_wgrad.when_there(param, hook)
        if not (late or wgrad_pending(param)):
            if param.grad is None and getattr(param, "grad_added_to_main_grad", False):
                # Upstream asks for some gradient; this one is a single zero.
                param.grad = param.new_zeros(()).expand(param.shape)
            ready(*unused)
        elif param in self.param_to_bucket_group:
            added = param.grad_added_to_main_grad and not getattr(param, "zero_out_wgrad", False)
            if param.grad is not None and not added:
                param.main_grad.add_(param.grad.data)
            param.grad = None

    return hook


def _start_grad_sync(original: Callable[..., None], self: Any) -> None:
    late_wgrad.before_reduction(self.params)
    require_no_pending_wgrad(self.params)
    original(self)


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="linear.apply",
            target=f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce",
            kind="replace",
            feature="linear",
            reason="its three GEMMs go through one seam, and accumulation fusion works without Apex",
            body=linear_with_grad_accumulation_and_async_allreduce,
            digest="aba4f48d2050f19ae2b3a6599b0eb9283b5ffa53fd4e4cb5f1492a073d88fe77",
        ),
        Patch(
            id="linear.autograd",
            target=f"{_LAYERS}:LinearWithGradAccumulationAndAsyncCommunication",
            kind="value",
            feature="linear",
            reason="for whoever applies the autograd function itself; its source is what ours follows",
            body=_trainable,
            digest="73cc7c7df188ed13a3a8e30cf77fbe3a118fa639e89c19e41307c10884a06290",
        ),
        Patch(
            id="linear.autograd_frozen",
            target=f"{_LAYERS}:LinearWithFrozenWeight",
            kind="value",
            feature="linear",
            reason="a frozen weight's two GEMMs go through the seam; a trainable bias gets its gradient",
            body=_frozen,
            digest="2a86b7157d7b046b655664012a06236d19e81efa7e65bd497b0c21c5b11262ec",
        ),
        Patch(
            id="linear.fusion_available",
            target=f"{_LAYERS}:_grad_accum_fusion_available",
            kind="value",
            feature="linear",
            reason="ColumnParallelLinear refuses gradient_accumulation_fusion without Apex's extension",
            body=lambda original: True,
        ),
        Patch(
            id="linear.drain_embedding_wgrad",
            target="megatron.core.utils:drain_embedding_wgrad_compute",
            kind="replace",
            feature="linear",
            reason="it imports Apex's extension",
            body=_drain_embedding_wgrad_compute,
            digest="e999b2d2512e37b4dfa235680bdb37d06b06855bc6936266289e257bbd178ca3",
        ),
        Patch(
            id="linear.column_without_buffer",
            target=f"{_LAYERS}:ColumnParallelLinear.__init__",
            kind="wrap",
            feature="linear",
            reason="deferring the output layer's weight gradient, every column linear appends to a buffer, "
            "but only the output layer has one; and a reduction has to know what was put off",
            body=_column_init,
            digest="687a4019533af8e7e224ae513e0f0e3526985f556d39e4d8cbc7d329287c0d1c",
        ),
        Patch(
            id="linear.clear_both_buffers",
            target="megatron.core.pipeline_parallel.schedules:clear_embedding_activation_buffer",
            kind="wrap",
            feature="linear",
            reason="output gradients that a step without finalize_model_grads_func, or one that failed, left "
            "behind would be added to the next step's",
            body=_clear,
            digest="9416d0ed9720118ff996fd7f854acd66caceaa6feb2c134259376e0cd1ae7430",
        ),
        Patch(
            id="linear.wait_for_deferred_wgrad",
            target="megatron.core.distributed.distributed_data_parallel:"
            "DistributedDataParallel._make_backward_post_hook",
            kind="wrap",
            feature="linear",
            reason="a parameter whose weight gradient is deferred is not ready to be reduced",
            body=_make_backward_post_hook,
            digest="fa1cd150de61d5cd2a1926f486b104193c1bec1de882b5f3b25286e532ecf8f9",
        ),
        Patch(
            id="linear.refuse_lost_wgrad",
            target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
            kind="wrap",
            feature="linear",
            reason="reducing gradients while some are still deferred would lose them silently, so that what "
            "waits for the step's end is computed first",
            body=_start_grad_sync,
            digest="40d7290a3aecd61e6f0d9afb1f3c87c640423e794a8a5602ddc815fc0af03fa6",
        ),
    ]
