"""Search for the module that first made a number that is none: the step again, with a tap on every module.

Nothing of this runs while all is well. When the ranks have agreed that a step is not finite, all of
them repeat its forward and backward passes on the same micro-batches and from the same random states,
without reducing gradients, so that what a rank sees is its own. The first finding wins: weights before
anything else, then the forward pass (micro-batch, pipeline stage, order of execution), the loss, and
the backward pass (micro-batch, stages from the last to the first).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mt_megatron.parallel import stage_order
from mt_megatron.seams import taps
from mt_megatron.seams.schedule import ForwardStep
from mt_megatron.training.distributed import Job
from mt_megatron.training.model import Trainable
from mt_megatron.training.step import Batches, Shape, forward_backward

_WEIGHT, _FORWARD, _LOSS, _BACKWARD, _GRADIENT = range(5)


class Finding(NamedTuple):
    """Something that is not finite. Findings of all ranks sort by where a fault shows first."""

    kind: int
    microbatch: int
    stage: int
    """Virtual pipeline stage; counted from the last one where gradients are meant."""

    order: int
    rank: int
    where: str
    amount: str

    def text(self, stages: int) -> str:
        """The finding in words; ``stages`` is how many virtual pipeline stages there are."""
        stage = stages - 1 - self.stage if self.kind in (_BACKWARD, _GRADIENT) else self.stage
        at = f"rank {self.rank}" + (f" (pipeline stage {stage})" if stages > 1 else "")
        if self.kind == _WEIGHT:
            return f"{at}: {self.where} itself has {self.amount}"
        if self.kind == _GRADIENT:
            return f"{at}, backward pass: {self.where} has {self.amount}"
        direction = {_FORWARD: "forward pass", _LOSS: "loss"}.get(self.kind, "backward pass")
        return f"{at}, {direction} of micro-batch {self.microbatch}: {self.where} has {self.amount}"


def first_finding(
    trainable: Trainable, forward_step: ForwardStep, batches: Batches, shape: Shape, job: Job
) -> str | None:
    """Where numbers stop being finite, in words, the same on every rank; collective.

    ``batches`` must yield the micro-batches of the step in question. None: weights are finite and
    the repeated step is too. Random states are left as the repeated step left them; gradients are
    left unreduced, to be zeroed by the next step.
    """
    stages = job.layout.pp * (job.layout.vpp or 1)
    search = _Search(trainable, job, stages)
    search.look_at_weights()
    with search.hooks(), _unreduced(trainable):
        reports = forward_backward(trainable, forward_step, batches, shape)
    if job.reports_loss:
        search.look_at_losses(reports)
    search.look_at_gradients()
    everyone: list[Finding | None] = [None] * job.layout.world_size
    dist.all_gather_object(everyone, min(search.findings(), default=None))
    findings = sorted(each for each in everyone if each is not None)
    if not findings:
        return None
    first = findings[0]
    same = [str(each.rank) for each in findings[1:] if each[:4] == first[:4]]
    return first.text(stages) + (f"; at the same point on rank {', '.join(same)}" if same else "")


class _Search:
    """Taps on all modules of this rank, and what they saw that is not finite."""

    def __init__(self, trainable: Trainable, job: Job, stages: int) -> None:
        self._found: list[Finding] = []
        self._chunks = trainable.bare_chunks()
        self._job = job
        self._stages = stages
        self._forward_at = [-1] * len(self._chunks)
        self._backward_at = [0] * len(self._chunks)
        # Counts every look, so that ranks with the same modules can tell whose fault came first.
        self._looks = 0
        self._numbers: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        self._next_number = itertools.count()
        self._spoilt: dict[tuple[int, int], tuple[int | None, Finding]] = {}

    def findings(self) -> list[Finding]:
        """Everything seen so far."""
        return [*self._found, *(found for _, found in self._spoilt.values())]

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Look at everything that runs within."""
        with ExitStack() as hooked:
            for index, chunk in enumerate(self._chunks):
                for path, module in chunk.named_modules():
                    where = _name(path, chunk)
                    hooked.enter_context(
                        taps.watch(
                            module,
                            before=self._before(index, where, is_chunk=module is chunk),
                            after=self._after(index, where),
                            # Tensors are known again by identity, gradients of recomputed calls count, and
                            # a fault may be in the logits.
                            live=True,
                            recomputed=True,
                            whole_output=True,
                            errors="raise",
                        )
                    )
                for path, parameter in chunk.named_parameters():
                    if parameter.requires_grad:
                        hook = self._on_parameter(index, parameter, _name(path, chunk))
                        hooked.callback(parameter.register_hook(hook).remove)
            yield

    def look_at_weights(self) -> None:
        """Whether they are finite before anything is computed from them."""
        for index, chunk in enumerate(self._chunks):
            for path, parameter in chunk.named_parameters():
                self._looks += 1
                if not _finite(parameter):
                    where = f"the weight {_name(path, chunk)}"
                    self._add(_WEIGHT, 0, self._stage(index), where, parameter)

    def look_at_losses(self, reports: list[dict[str, Any]]) -> None:
        """What the loss function reported, by micro-batch."""
        for microbatch, report in enumerate(reports):
            if not _finite(report["loss"]):
                self._add(_LOSS, microbatch, self._stages - 1, "the sum of the losses", report["loss"])

    def look_at_gradients(self) -> None:
        """Gradient buffers, for gradients that were added to them without passing by a hook."""
        for index, chunk in enumerate(self._chunks):
            for path, parameter in chunk.named_parameters():
                gradient = getattr(parameter, "main_grad", None)
                self._looks += 1
                if gradient is not None and not _finite(gradient):
                    where = f"the gradient of {_name(path, chunk)}"
                    self._add(_GRADIENT, 0, self._from_the_end(index), where, gradient)

    def _before(self, index: int, where: str, *, is_chunk: bool) -> Callable[..., None]:
        where = f"the gradient that {where} passes back to its input"

        def before(call: taps.Call, args: Any, kwargs: Any) -> None:
            if is_chunk:
                self._forward_at[index] += 1
            for tensor in _tensors((args, kwargs)):
                if _passes_gradient(tensor):
                    tensor.register_hook(self._on_gradient(index, self._number(tensor), where, enters=True))

        return before

    def _after(self, index: int, where: str) -> Callable[..., None]:
        arriving = f"the gradient that arrives at the output of {where}"

        def after(call: taps.Call, output: Any) -> None:
            for tensor in _tensors(output):
                self._looks += 1
                # Recomputation repeats forward passes within the backward pass, which was looked at before.
                if not call.recomputing and not _finite(tensor):
                    stage = self._stage(index)
                    self._add(_FORWARD, self._forward_at[index], stage, f"the output of {where}", tensor)
                if _passes_gradient(tensor):
                    tensor.register_hook(self._on_gradient(index, self._number(tensor), arriving))

        return after

    def _on_parameter(self, index: int, parameter: Tensor, name: str) -> Callable[[Tensor | None], None]:
        look = self._on_gradient(index, None, f"the gradient of {name}")

        def hook(gradient: Tensor | None) -> None:
            # What the fused weight gradient hands on is a place holder.
            fused = getattr(parameter, "grad_added_to_main_grad", False)
            look(getattr(parameter, "main_grad", gradient) if fused else gradient)

        return hook

    def _on_gradient(
        self, index: int, tensor: int | None, where: str, *, enters: bool = False
    ) -> Callable[[Tensor | None], None]:
        """``tensor`` is None for a parameter's gradient, which is of the micro-batch under way."""
        begun = None if tensor is None or taps.is_recomputing() else self._forward_at[index]

        def hook(gradient: Tensor | None) -> None:
            # None: a schedule defers a parameter's gradient, and torch calls again when it is there; or the
            # output has none, as of several outputs of an operation those that nothing reads.
            if gradient is None:
                return
            self._looks += 1
            if begun is not None:
                self._backward_at[index] = begun
            if _finite(gradient):
                return
            microbatch = self._backward_at[index]
            known = self._spoilt.get((index, microbatch))
            # A tensor enters an outer module and then the inner one whose gradient this is.
            if known is None or (enters and known[0] == tensor):
                order = self._looks if known is None else known[1].order
                stage, rank = self._from_the_end(index), self._job.rank
                found = Finding(_BACKWARD, microbatch, stage, order, rank, where, _amount(gradient))
                self._spoilt[index, microbatch] = (tensor, found)

        return hook

    def _add(self, kind: int, microbatch: int, stage: int, where: str, values: Tensor) -> None:
        found = Finding(kind, microbatch, stage, self._looks, self._job.rank, where, _amount(values))
        self._found.append(found)

    def _number(self, tensor: Tensor) -> int:
        return self._numbers.setdefault(tensor, next(self._next_number))

    def _stage(self, index: int) -> int:
        return stage_order.virtual_stage(self._job.at.pp, index, self._job.layout.pp)

    def _from_the_end(self, index: int) -> int:
        return self._stages - 1 - self._stage(index)


@dataclass(frozen=True, kw_only=True)
class RandomStates:
    """What dropout draws from, at one moment."""

    torch: Tensor
    device: Tensor
    tracker: dict[str, Any]

    @classmethod
    def now(cls, job: Job) -> RandomStates:
        """The states of this rank."""
        from megatron.core import tensor_parallel

        return cls(
            torch=torch.get_rng_state(),
            device=job.backend.get_rng_state(),
            tracker=dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
        )

    def restore(self, job: Job) -> None:
        """Make them this rank's again."""
        from megatron.core import tensor_parallel

        torch.set_rng_state(self.torch)
        job.backend.set_rng_state(self.device)
        tensor_parallel.get_cuda_rng_tracker().set_states(dict(self.tracker))


@contextmanager
def _unreduced(trainable: Trainable) -> Iterator[None]:
    """Gradients stay this rank's own."""
    core, ddp = trainable.core, [chunk.ddp_config for chunk in trainable.chunks]
    before = core.finalize_model_grads_func, core.no_sync_func, core.grad_sync_func
    overlap = [each.overlap_grad_reduce for each in ddp]
    core.finalize_model_grads_func = core.no_sync_func = core.grad_sync_func = None
    for each in ddp:
        each.overlap_grad_reduce = False
    try:
        yield
    finally:
        core.finalize_model_grads_func, core.no_sync_func, core.grad_sync_func = before
        for each, value in zip(ddp, overlap, strict=True):
            each.overlap_grad_reduce = value


def _name(path: str, chunk: torch.nn.Module) -> str:
    """``path`` within ``chunk``, with the number that its layer has in the whole model."""
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        try:
            number = getattr(chunk.get_submodule(".".join(parts[:length])), "layer_number", None)
        except AttributeError:
            break
        if number is not None:
            return f"{path} (layer {number} of the model)"
    return path or type(chunk).__name__


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _passes_gradient(tensor: Tensor) -> bool:
    """False for a parameter, such as an embedding that an output layer is given: it has a hook of its own,
    which knows place holders of its gradient."""
    return tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter)


def _finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values.detach()).all())


def _amount(values: Tensor) -> str:
    values = values.detach()
    nan, infinite = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    return f"{nan:,} NaN and {infinite:,} infinite of {values.numel():,} values"
