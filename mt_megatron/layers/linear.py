"""Autograd of the tensor-parallel linears, with every GEMM through ``seams.gemm``.

Takes the place of the two autograd functions of ``megatron.core.tensor_parallel.layers`` and keeps
their meaning: what is gathered, reduced and overlapped, and where the weight gradient goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ConfigError
from ..seams import collectives, events, late_wgrad
from ..seams.gemm import (
    GemmRole,
    Operand,
    WeightRef,
    gemm,
    is_deferrable,
    note_use,
    prepared,
    restored,
    saved,
    wgrad_queue,
)

# torch renamed these twice; the newest name is the one that does not warn.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class TensorParallelLinear(torch.autograd.Function):
    """``input @ weight.T + bias`` over the tensor parallel group, weight trainable.

    * ``sequence_parallel``: ``input`` is this rank's share of the first dimension. It is gathered
      in forward, gathered again in backward while dgrad runs, and the gradient is reduce-scattered
      while wgrad runs.
    * ``allreduce_dgrad``: the input gradient is summed over the group while wgrad runs.
    * ``gradient_accumulation_fusion``: wgrad is added to ``weight.main_grad`` (fp32, bf16 or fp16)
      by the GEMM itself. DDP's hook is told by ``grad_added_to_main_grad`` and gets a gradient of
      the right shape that it ignores, zero where ``zero_out_wgrad`` says that it is added.
    * ``grad_output_buffer``: output gradients of the first ``wgrad_deferral_limit`` micro-batches
      (0: all) are put there for ``drain_embedding_wgrad_compute``.
    * Within ``seams.gemm.deferred_wgrad`` a parameter's gradient waits in the queue and arrives,
      with the hooks that watch for it, when the queue is flushed.

    Under autocast the GEMMs run in autocast's dtype, chosen in forward, as ``torch.matmul`` would;
    backward does the same wherever it is called. What is kept for it is the input as computed with.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None,
        wgrad_deferral_limit: int | None,
    ) -> Tensor:
        if allreduce_dgrad and sequence_parallel:
            raise ConfigError(
                "a linear was called with both allreduce_dgrad and sequence_parallel; under sequence "
                "parallelism the gradient is reduce-scattered, so pass allreduce_dgrad=False"
            )
        ctx.dtype = _autocast_dtype(input)
        with _autocast_off(input):
            input = _cast(input, ctx.dtype).contiguous()
            note_use(weight)
            reference, group = WeightRef(weight), _group() if sequence_parallel else None
            keep = ctx.needs_input_grad[1]
            operand = prepared("input", _flat(input), reference, group=group, keep=keep)
            if isinstance(operand, Tensor):
                operand = input
            ctx.shape = input.shape
            ctx.save_for_backward(*saved(operand))
            _keep_weight(ctx, weight)
            ctx.use_bias = bias is not None
            ctx.gradient_accumulation_fusion = gradient_accumulation_fusion
            ctx.allreduce_dgrad = allreduce_dgrad
            ctx.sequence_parallel = sequence_parallel
            ctx.grad_output_buffer = grad_output_buffer
            ctx.wgrad_deferral_limit = wgrad_deferral_limit
            total_input = _gathered("fprop", operand)() if sequence_parallel else operand
            shape = (input.shape[0] * (group.size() if group else 1), *input.shape[1:])
            return _fprop(total_input, shape, weight, bias, ctx.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        weight = _kept_weight(ctx)
        reference, group = WeightRef(weight), _group() if ctx.sequence_parallel else None
        with _autocast_off(grad_output):
            input = restored(ctx.saved_tensors, reference, group=group)
            grad_output = _cast(grad_output, ctx.dtype)
            later = _keep_for_drain(ctx, grad_output) or not ctx.needs_input_grad[1]
            queue = None if later or not is_deferrable(weight) else wgrad_queue()

            total_input: Any = input
            gather = None
            if ctx.sequence_parallel and not later and queue is None:
                gather = _gathered("wgrad", input, asynchronous=True)

            flat = _flat(grad_output)
            grad: Tensor | Operand = flat
            if not later or ctx.needs_input_grad[0] or ctx.allreduce_dgrad or ctx.sequence_parallel:
                grad = prepared("grad", flat, reference, keep=not later)
            grad_input = reduction = None
            # The group's ranks must agree on the collectives, whatever each of them needs.
            if ctx.needs_input_grad[0] or ctx.allreduce_dgrad or ctx.sequence_parallel:
                grad_input = _dgrad(grad, grad_output, weight, ctx.dtype)
                if gather is not None:
                    total_input = gather()
                # Started before wgrad so that it overlaps with it.
                if ctx.allreduce_dgrad:
                    reduction = _Collective("all_reduce", grad_input, dist.all_reduce, asynchronous=True)
                elif ctx.sequence_parallel:
                    total_grad_input, grad_input = grad_input, grad_input.new_empty(ctx.shape)
                    reduction = _Collective(
                        "reduce_scatter", grad_input, _reduce_scatter, total_grad_input, asynchronous=True
                    )

            grad_weight = None
            if later:
                if ctx.gradient_accumulation_fusion and ctx.needs_input_grad[1]:
                    grad_weight = _already_added(weight)
            elif queue is not None:
                queue.put(weight, _wgrad_later(ctx, weight, input, grad))
            else:
                grad_weight = _wgrad(weight, grad, total_input, ctx.gradient_accumulation_fusion)
            grad_bias = flat.sum(dim=0) if ctx.use_bias and ctx.needs_input_grad[2] else None
            if reduction is not None:
                reduction.wait()
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


class FrozenLinear(torch.autograd.Function):
    """``input @ weight.T + bias`` with a weight that gets no gradient: keeps no input.

    Upstream's counterpart returns no gradient for the bias either; here a trainable bias gets one.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, allreduce_dgrad: bool
    ) -> Tensor:
        ctx.dtype = _autocast_dtype(input)
        ctx.allreduce_dgrad = allreduce_dgrad
        _keep_weight(ctx, weight)
        with _autocast_off(input):
            input = _cast(input, ctx.dtype)
            return _fprop(
                prepared("input", _flat(input), WeightRef(weight)), input.shape, weight, bias, ctx.dtype
            )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        weight = _kept_weight(ctx)
        with _autocast_off(grad_output):
            grad_output = _cast(grad_output, ctx.dtype)
            grad = prepared("grad", _flat(grad_output), WeightRef(weight))
            grad_input = _dgrad(grad, grad_output, weight, ctx.dtype)
            reduction = None
            if ctx.allreduce_dgrad:
                reduction = _Collective("all_reduce", grad_input, dist.all_reduce, asynchronous=True)
            grad_bias = _flat(grad_output).sum(dim=0) if ctx.needs_input_grad[2] else None
            if reduction is not None:
                reduction.wait()
        return grad_input, None, grad_bias, None


@torch.no_grad()
def drain_embedding_wgrad(
    config: Any, embedding_activation_buffer: list[Tensor], grad_output_buffer: list[Tensor], weight: Tensor
) -> None:
    """Compute the weight gradients of the output layer that ``grad_output_buffer`` put off.

    Empties both lists, oldest micro-batch first; under sequence parallelism the next activation is
    gathered while the current GEMM runs. Whoever waits for the gradients is told. Raises ConfigError when
    the lists do not match.
    """
    if len(embedding_activation_buffer) != len(grad_output_buffer):
        raise ConfigError(
            f"{len(embedding_activation_buffer)} activations and {len(grad_output_buffer)} output gradients "
            "were put off for the output layer; both must come from the same micro-batches"
        )

    def fetch(slot: int) -> tuple[Tensor, _Collective | None]:
        activation = embedding_activation_buffer.pop(0).to(grad_output_buffer[0].dtype).contiguous()
        if not config.sequence_parallel:
            return activation, None
        return _gather(activation, asynchronous=True, buffer=f"mpu_{slot % 2}")

    slot = 0
    following = fetch(slot) if grad_output_buffer else None
    while following is not None:
        total_input, gather = following
        if gather is not None:
            gather.wait()
        slot += 1
        following = fetch(slot) if embedding_activation_buffer else None
        _add_to_main_grad(weight, _flat(grad_output_buffer.pop(0)), total_input)
    late_wgrad.is_there(weight)


def _keep_weight(ctx: Any, weight: Tensor) -> None:
    # Not as a saved tensor: recomputation and offloading hand back a copy of those, and the
    # gradient has to reach the parameter itself, by its attributes.
    ctx.weight = weight
    ctx.weight_version = None if weight.is_inference() else weight._version


def _kept_weight(ctx: Any) -> Tensor:
    weight: Tensor = ctx.weight
    if ctx.weight_version is not None and weight._version != ctx.weight_version:
        raise RuntimeError(
            f"a linear's weight {tuple(weight.shape)} was changed in place between forward and backward "
            f"(version {ctx.weight_version} -> {weight._version}); its gradients would belong to neither"
        )
    return weight


def _autocast_dtype(input: Tensor) -> torch.dtype | None:
    """What autocast would compute with; None when it is off or leaves ``input`` alone."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return torch.get_autocast_dtype(kind)
    return None


def _autocast_off(tensor: Tensor) -> AbstractContextManager[Any]:
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _shaped(flat: Tensor, like: Sequence[int]) -> Tensor:
    # A view made inside an autograd function may not be changed in place by those who get it.
    shaped: Tensor = torch.ops.aten._unsafe_view(flat, [*like[:-1], flat.shape[-1]])
    return shaped


def _recipe(weight: Tensor) -> Any:
    return getattr(weight, "gemm_recipe", None)


def _fprop(
    input: Any, shape: Sequence[int], weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    """``input`` has the rows of a tensor of ``shape``."""
    flat = _flat(input) if isinstance(input, Tensor) else input
    output = gemm("fprop", flat, _cast(weight, dtype), recipe=_recipe(weight), weight=WeightRef(weight))
    if bias is not None:
        output = output.add_(bias) if bias.dtype == output.dtype else output + bias
    return _shaped(output, shape)


def _dgrad(grad: Tensor | Operand, grad_output: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``grad`` is what ``grad_output`` is computed with."""
    grad_input = gemm("dgrad", grad, _cast(weight, dtype), recipe=_recipe(weight), weight=WeightRef(weight))
    return _shaped(grad_input, grad_output.shape)


def _wgrad(weight: Tensor, grad: Tensor | Operand, total_input: Any, fused: bool) -> Tensor | None:
    """The gradient to hand to autograd; None when it is in ``main_grad`` and no hook waits for it."""
    if not fused:
        flat = _flat(total_input) if isinstance(total_input, Tensor) else total_input
        return gemm("wgrad", grad, flat, recipe=_recipe(weight), weight=WeightRef(weight))
    _add_to_main_grad(weight, grad, total_input)
    return _already_added(weight)


def _add_to_main_grad(weight: Tensor, grad: Tensor | Operand, total_input: Any) -> None:
    main_grad = _main_grad(weight)
    flat = _flat(total_input) if isinstance(total_input, Tensor) else total_input
    gemm(
        "wgrad",
        grad,
        flat,
        out=main_grad,
        accumulate=True,
        recipe=_recipe(weight),
        weight=WeightRef(weight),
    )


def _main_grad(weight: Tensor) -> Tensor:
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None or main_grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            "gradient_accumulation_fusion adds to weight.main_grad in float32, bfloat16 or float16, found "
            f"{'no main_grad' if main_grad is None else main_grad.dtype}; wrap the model in Megatron's "
            "DistributedDataParallel or set gradient_accumulation_fusion=False"
        )
    return main_grad


def _already_added(weight: Tensor) -> Tensor | None:
    """A stand-in gradient for DDP's hook, which must run although the gradient went elsewhere."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # A weight that is shared with the embedding gets the embedding's gradient added to this one.
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)


def _wgrad_later(
    ctx: Any, weight: Tensor, input: Tensor | Operand, grad: Tensor | Operand
) -> Callable[[], None]:
    sequence_parallel, fused = ctx.sequence_parallel, ctx.gradient_accumulation_fusion

    def compute() -> None:
        with torch.no_grad(), _autocast_off(weight):
            # The shard waits, not the gathered input: all layers share the buffer it would be in.
            total_input = _gathered("wgrad", input)() if sequence_parallel else input
            gradient = _wgrad(weight, grad, total_input, fused)
        if gradient is not None:
            # Through autograd, so that whatever watches this weight's gradient sees it arrive.
            torch.autograd.backward([weight], [gradient])

    return compute


def _keep_for_drain(ctx: Any, grad_output: Tensor) -> bool:
    buffer, limit = ctx.grad_output_buffer, ctx.wgrad_deferral_limit
    if buffer is None or (limit != 0 and len(buffer) >= limit):
        return False
    late_wgrad.put_off(ctx.weight, buffer, grad_output)
    return True


class _Collective:
    """One collective of the tensor parallel group, with its events: one from here to ``wait``, or where
    work goes on meanwhile (``asynchronous``) one for its start and one for the wait."""

    def __init__(
        self, op: str, output: Tensor, run: Callable[..., Any], *inputs: Tensor, asynchronous: bool = False
    ) -> None:
        group = parallel_state.get_tensor_model_parallel_group()
        self._attrs: dict[str, Any] | None = None
        self._asynchronous = asynchronous
        if events.listening():
            size = collectives.size_of(*(inputs or (output,)))
            self._attrs = collectives.described(op, "tp", group, size)
        if asynchronous:
            with collectives.part(self._attrs, "start"):
                self._work = run(output, *inputs, group=group, async_op=True)
            return
        if self._attrs is not None:
            events.begin("collective", **self._attrs)
        self._work = run(output, *inputs, group=group, async_op=True)

    def wait(self) -> None:
        if self._asynchronous:
            with collectives.part(self._attrs, "wait"):
                self._work.wait()
            return
        self._work.wait()
        if self._attrs is not None:
            events.end("collective")


def _group() -> Any:
    return parallel_state.get_tensor_model_parallel_group()


def _gathered(role: GemmRole, input: Any, *, asynchronous: bool = False) -> Callable[[], Any]:
    """Starts the gathering of every rank's ``input``, as what ``role`` needs of it; what is returned waits
    for it and has the whole, in buffers that the next gathering writes over."""
    parts = (input,) if isinstance(input, Tensor) else input.parts(role)
    whole = isinstance(input, Tensor) or parts is None
    if parts is None:
        parts = (input.source,)
    started = [
        _gather(part, asynchronous=asynchronous, buffer=f"mpu{index or ''}")
        for index, part in enumerate(parts)
    ]

    def wait() -> Any:
        for _, work in started:
            if work is not None:
                work.wait()
        found = tuple(part for part, _ in started)
        if isinstance(input, Tensor):
            return found[0]
        return input.gathered(role, found) if not whole else input.whole(role, found[0])

    return wait


def _gather(
    input: Tensor, *, asynchronous: bool = False, buffer: str = "mpu"
) -> tuple[Tensor, _Collective | None]:
    """Every rank's ``input`` in a shared buffer; complete once the returned collective was waited for."""
    size = (input.shape[0] * parallel_state.get_tensor_model_parallel_world_size(), *input.shape[1:])
    gathered = parallel_state.get_global_memory_buffer().get_tensor(size, input.dtype, buffer)
    work = _Collective("all_gather", gathered, _all_gather, input, asynchronous=asynchronous)
    if asynchronous:
        return gathered, work
    work.wait()
    return gathered, None
