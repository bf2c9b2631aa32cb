"""Perturbations of tensors at work on this rank: taps on modules, weights before a step, gradients after
it.

Whether a perturbation acts is decided by step, micro-batch and rank; random numbers depend on the step and
on the element's place, so that a recomputed forward pass meets the same change, and every layout too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mt_megatron.errors import ConfigError
from mt_megatron.scope.lab.placement import Geometry, activation_places
from mt_megatron.scope.lab.random_numbers import key_of
from mt_megatron.scope.lab.specification import Perturbation
from mt_megatron.scope.lab.targets import ModuleTarget, ParameterTarget
from mt_megatron.scope.lab.values import Places, Selection, Tally, changed, derivative, require_type
from mt_megatron.seams import taps

Told = Callable[[str], None]


class Acting(Protocol):
    """A perturbation at work."""

    @property
    def acted(self) -> int:
        """Elements that were changed on this rank, or operations that were held up or changed."""

    def before_step(self, step: int) -> None:
        """``step`` begins; the perturbation acts in it."""

    def rest(self) -> None:
        """It acts no more until the next ``before_step``."""

    def close(self) -> None:
        """Leave every callable as it was."""


class ChangedModules:
    """Outputs of modules, or the gradients that arrive at them."""

    def __init__(
        self, one: Perturbation, targets: Sequence[ModuleTarget], geometry: Geometry, rank: int, told: Told
    ) -> None:
        self._one = one
        self._geometry = geometry
        self._rank = rank
        self._step: int | None = None
        self._known: dict[tuple[Any, ...], tuple[Places, Selection]] = {}
        self._tally = Tally()
        gradients = one.on == "gradient"
        self._taps = [
            taps.change(
                target.module,
                output=None if gradients else self._output(target),
                output_gradient=self._gradient(target) if gradients else None,
                told=_telling(told, f"{one.name} no longer acts on {target.path}"),
            )
            for target in targets
        ]

    @property
    def acted(self) -> int:
        return self._tally.count

    def before_step(self, step: int) -> None:
        self._step = step

    def rest(self) -> None:
        self._step = None

    def close(self) -> None:
        self._step = None
        for each in self._taps:
            each.close()

    def _output(self, target: ModuleTarget) -> Callable[[taps.Call, Any], Any]:
        def change(call: taps.Call, output: Any) -> Any:
            if not self._acts(call):
                return None
            return _with_first(output, lambda tensor: self._new(target, call, tensor))

        return change

    def _gradient(self, target: ModuleTarget) -> Callable[[taps.Call, Tensor, int], Tensor | None]:
        def change(call: taps.Call, gradient: Tensor, index: int) -> Tensor | None:
            if index != 0 or not self._acts(call):
                return None
            places, selection, key = self._at(target, call, gradient)
            return changed(gradient, places, selection, self._one, key, self._tally)

        return change

    def _acts(self, call: taps.Call) -> bool:
        chosen = self._one.microbatches
        return self._step is not None and (chosen is None or call.microbatch in chosen)

    def _new(self, target: ModuleTarget, call: taps.Call, tensor: Tensor) -> Tensor:
        one = self._one
        places, selection, key = self._at(target, call, tensor)

        def compute(given: Tensor) -> Tensor:
            return changed(given, places, selection, one, key, self._tally)

        if not tensor.requires_grad:
            return compute(tensor)
        factors = derivative(tensor, places, selection, one, key) if one.differentiate else None
        made: Tensor = _Changed.apply(tensor, compute, factors)  # type: ignore[no-untyped-call]
        return made

    def _at(self, target: ModuleTarget, call: taps.Call, tensor: Tensor) -> tuple[Places, Selection, int]:
        one = self._one
        require_type(one, tensor.dtype, target.path)
        known = (target.path, call.microbatch, tuple(tensor.shape), tensor.device)
        found = self._known.get(known)
        if found is None:
            places = activation_places(target.module, target.path, tensor, call.microbatch, self._geometry)
            found = places, target.selection(one, places)
            if places.whole:
                # Experts have another number of tokens each time: what is kept of them would pile up.
                self._known[known] = found
        places, selection = found
        # Where the whole tensor is not known, ranks and micro-batches must not draw alike.
        own = () if places.whole else (self._rank, call.microbatch, call.chunk)
        key = key_of(one.seed, one.name, target.path, self._step, max(call.ordinal, 0), *own)
        return places, selection, key


def _telling(told: Told, what: str) -> Told:
    return lambda text: told(f"{what}: {text}")


class _Changed(torch.autograd.Function):
    """Other values for a tensor; backward as though they were the tensor's, or times ``factors``."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, compute: Callable[[Tensor], Tensor], factors: Tensor | None
    ) -> Tensor:
        ctx.has_factors = factors is not None
        if factors is not None:
            ctx.save_for_backward(factors)
        return compute(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.has_factors:
            return gradient, None, None
        (factors,) = ctx.saved_tensors
        return (gradient.to(factors.dtype) * factors).to(gradient.dtype), None, None


class ChangedWeights:
    """Parameters, at the beginning of each step in which the perturbation acts."""

    def __init__(self, one: Perturbation, targets: Sequence[ParameterTarget], optimizer: Any) -> None:
        self._one = one
        self._targets = [(target, *target.selection(one)) for target in targets]
        self._masters = MasterWeights(optimizer) if one.master else None
        self._tally = Tally()

    @property
    def acted(self) -> int:
        return self._tally.count

    def before_step(self, step: int) -> None:
        with torch.no_grad():
            for target, places, selection in self._targets:
                weights = target.parameter.data
                key = key_of(self._one.seed, self._one.name, target.path, step)
                values = changed(weights, places.to(weights.device), selection, self._one, key, self._tally)
                if self._masters is not None:
                    self._masters.follow(target.parameter, weights, values)
                weights.copy_(values)

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


class ChangedGradients:
    """Gradients of parameters: those of the whole step, reduced, before clipping and the update."""

    def __init__(self, one: Perturbation, targets: Sequence[ParameterTarget], core: Any) -> None:
        """``core``: the chunks' ``TransformerConfig``, whose ``finalize_model_grads_func`` every schedule
        calls."""
        self._one = one
        self._targets = [(target, *target.selection(one)) for target in targets]
        self._core = core
        self._tally = Tally()
        self._step: int | None = None
        self._closed = False
        self._original = core.finalize_model_grads_func

        def finalize(*args: Any, **kwargs: Any) -> Any:
            result = None if self._original is None else self._original(*args, **kwargs)
            if self._step is not None:
                self._change(self._step)
            return result

        finalize.perturbation = self  # type: ignore[attr-defined]
        core.finalize_model_grads_func = finalize

    @property
    def acted(self) -> int:
        return self._tally.count

    def before_step(self, step: int) -> None:
        self._step = step

    def rest(self) -> None:
        self._step = None

    def close(self) -> None:
        self._step, self._closed = None, True
        # Those that were opened later may be closed earlier, and the other way round.
        while (last := getattr(self._core.finalize_model_grads_func, "perturbation", None)) and last._closed:
            self._core.finalize_model_grads_func = last._original

    def _change(self, step: int) -> None:
        with torch.no_grad():
            for target, places, selection in self._targets:
                gradient = getattr(target.parameter, "main_grad", None)
                gradient = target.parameter.grad if gradient is None else gradient
                if gradient is None:
                    continue
                key = key_of(self._one.seed, self._one.name, target.path, step)
                where = places.to(gradient.device)
                gradient.copy_(changed(gradient, where, selection, self._one, key, self._tally))


class MasterWeights:
    """The optimizer's fp32 copies of weights in half precision; of the distributed optimizer, this rank's
    shards."""

    def __init__(self, optimizer: Any) -> None:
        self._of: dict[int, tuple[Tensor, slice]] = {}
        for part in parts_of(optimizer):
            for parameter, master, where in _masters(part):
                self._of[id(parameter)] = master, where

    def follow(self, parameter: nn.Parameter, before: Tensor, after: Tensor) -> None:
        """Give the fp32 copy of ``parameter`` the elements that differ between ``before`` and ``after``."""
        found = self._of.get(id(parameter))
        if found is None:
            return
        master, where = found
        old, new = before.reshape(-1)[where], after.reshape(-1)[where]
        # As integers: a NaN differs from itself.
        integer = {2: torch.int16, 4: torch.int32}[old.dtype.itemsize]
        differ = old.view(integer) != new.view(integer)
        flat = master.data.view(-1)
        flat.copy_(torch.where(differ, new.to(flat.dtype), flat))


def _masters(part: Any) -> list[tuple[nn.Parameter, Tensor, slice]]:
    if hasattr(part, "shard_fp32_from_float16_groups"):
        return [
            (parameter, master, slice(found.start, found.end))
            for models, masters in zip(
                part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True
            )
            for parameter, master in zip(models, masters, strict=True)
            for found in (part._get_model_param_range_map(parameter)["param"],)
        ]
    return [
        (parameter, master, slice(0, parameter.numel()))
        for models, masters in zip(
            getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True
        )
        for parameter, master in zip(models, masters, strict=True)
    ]


def parts_of(optimizer: Any) -> list[Any]:
    """Megatron's optimizers within ``optimizer``, which may be a chain of them."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [each for part in chained for each in parts_of(part)]


def _with_first(values: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """``values`` with its first floating-point tensor replaced; None where it has none."""
    if isinstance(values, Tensor):
        return new(values) if values.is_floating_point() else None
    if isinstance(values, Mapping):
        for key, value in values.items():
            made = _with_first(value, new)
            if made is not None:
                return {**values, key: made}
        return None
    if isinstance(values, list | tuple):
        for index, value in enumerate(values):
            made = _with_first(value, new)
            if made is not None:
                listed = [*values[:index], made, *values[index + 1 :]]
                return type(values)(*listed) if hasattr(values, "_fields") else type(values)(listed)
    return None


def require_changeable(one: Perturbation, path: str) -> None:
    """Raise ``ConfigError`` for a module whose output is never there as a whole."""
    if path == "output_layer" and one.on in ("activation", "gradient"):
        raise ConfigError(
            "found module output_layer; expected another: its logits are computed in blocks, together with "
            "the loss and are never whole. Choose decoder.final_layernorm, or on: weight"
        )
