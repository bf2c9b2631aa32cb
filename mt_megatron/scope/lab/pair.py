"""One step made twice from the same state: where its activations part with a perturbation and without."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.scope.lab.snapshot import MIB, default_limit_mib
from mt_megatron.scope.lab.specification import Perturbation
from mt_megatron.scope.recording.order import execution_order
from mt_megatron.scope.trainer import StepOutcome, Trainer
from mt_megatron.seams import taps

_LAYER = re.compile(r"(^|\.)layers\.\d+$")
_EXPERTS = re.compile(r"(^|\.)(local_)?experts(\.|$)")
_MOST_MICROBATCHES = 64


@dataclass(kw_only=True)
class Difference:
    """Sums over a module's outputs, those of one step against those of the other."""

    elements: int = 0
    """Elements that were compared."""

    differ: int = 0
    """Elements that differ."""

    square: float = 0.0
    """Sum of squares of the unperturbed values."""

    difference: float = 0.0
    """Sum of squares of the differences."""

    largest: float = 0.0
    """Largest difference."""

    not_comparable: int = 0
    """Outputs whose rows are in the order of routing, or that have another shape in the second step."""

    def add(self, other: Difference) -> None:
        """Count ``other`` too."""
        self.elements += other.elements
        self.differ += other.differ
        self.square += other.square
        self.difference += other.difference
        self.largest = max(self.largest, other.largest)
        self.not_comparable += other.not_comparable

    def figures(self) -> dict[str, float | None]:
        """The answer's figures: None where the outputs are not comparable."""
        if self.not_comparable or not self.elements:
            return {"changed_share": None, "relative_difference": None, "largest_difference": None}
        return {
            "changed_share": self.differ / self.elements,
            "relative_difference": math.sqrt(self.difference / self.square) if self.square > 0 else math.nan,
            "largest_difference": self.largest,
        }


Row = tuple[str, Difference]
"""Path and difference of a module."""


class Comparison:
    """Outputs of modules in both steps of a pair. Those of the first are kept on the host."""

    def __init__(self, trainer: Trainer, one: Perturbation, arguments: Mapping[str, Any]) -> None:
        """``arguments``: ``modules``, a pattern of paths (all layers and what is perturbed), and
        ``microbatches`` (the first). Raises ``ConfigError``."""
        pattern, chosen = arguments.get("modules"), arguments.get("microbatches", [0])
        if pattern is not None and not isinstance(pattern, str):
            raise ConfigError(f"found modules: {pattern!r}; expected a pattern of module paths")
        if not isinstance(chosen, list) or len(chosen) > _MOST_MICROBATCHES:
            raise ConfigError(f"found microbatches: {chosen!r}; expected a list of numbers from 0")
        self._microbatches = frozenset(chosen)
        self._mode: Literal["baseline", "perturbed"] | None = None
        self._kept: dict[tuple[str, int, int], Tensor] = {}
        self._room = 0.0
        self._left_out = self._left_out_of_all = 0
        self._found: dict[str, Difference] = {}
        """By path, in the order in which outputs were complete in the first step."""

        self._taps = [
            taps.watch(module, after=self._after(path))
            for path, module in taps.named_modules(list(trainer.bare_chunks()))
            if path and _wanted(path, pattern, one)
        ]

    def close(self) -> None:
        """Leave every callable as it was."""
        for each in self._taps:
            each.close()
        self._kept.clear()

    @contextmanager
    def baseline(self) -> Iterator[None]:
        """Around the step without the perturbation."""
        # With the snapshot taken, which needs room as well.
        self._room = default_limit_mib() * MIB
        self._mode = "baseline"
        yield
        self._mode = None

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Around the step with it."""
        self._mode = "perturbed"
        yield
        self._mode = None

    def rows(self, gathered: Callable[[Any], list[Any]]) -> list[Row]:
        """Every module's row, of all ranks together; collective. Modules are in the order in which their
        outputs are complete."""
        every = gathered((list(self._found.items()), self._left_out))
        ranks: list[list[Row]] = [rows for rows, _ in every]
        self._left_out_of_all = sum(left_out for _, left_out in every)
        total: dict[str, Difference] = {}
        for rows in ranks:
            for path, found in rows:
                total.setdefault(path, Difference()).add(found)
        ordered = execution_order([path for path, _ in rows] for rows in ranks)
        return [(path, total[path]) for path in ordered]

    def result(self, without: StepOutcome, changed: StepOutcome, rows: Sequence[Row]) -> dict[str, Any]:
        """What a pair comes to: both steps' figures, and each module's difference."""
        return {
            "baseline": _figures(without),
            "perturbed": _figures(changed),
            "modules": [{"path": path, **found.figures()} for path, found in rows],
            "first_difference": next((path for path, found in rows if found.differ), None),
            "outputs_left_out": self._left_out_of_all,
            "outputs_not_comparable": sum(found.not_comparable for _, found in rows),
        }

    def _after(self, path: str) -> Callable[[taps.Call, Any], None]:
        def look(call: taps.Call, output: Any) -> None:
            if self._mode is None or call.microbatch not in self._microbatches:
                return
            tensor = _first(output)
            if tensor is None:
                return
            key = path, call.microbatch, call.ordinal
            if self._mode == "baseline":
                self._keep(key, tensor)
            elif key in self._kept:
                self._compare(path, self._kept.pop(key), tensor.detach().to("cpu"))

        return look

    def _keep(self, key: tuple[str, int, int], tensor: Tensor) -> None:
        if tensor.dim() < 3 and _EXPERTS.search(key[0]):
            # Rows of experts are in the order of routing, which the perturbation changes, so the same row of
            # both steps may be of two tokens.
            self._of(key[0]).not_comparable += 1
            return
        size = tensor.numel() * tensor.element_size()
        if size > self._room:
            self._left_out += 1
            return
        self._room -= size
        self._kept[key] = tensor.detach().to("cpu", copy=True)
        self._of(key[0])

    def _compare(self, path: str, before: Tensor, after: Tensor) -> None:
        found = self._of(path)
        if before.shape != after.shape:
            found.not_comparable += 1
            return
        first, second = before.double(), after.double()
        # NaN differs from itself; equal bits are no difference.
        same = (first == second) | (first.isnan() & second.isnan())
        difference = torch.where(same, 0.0, second - first)
        found.elements += first.numel()
        found.differ += int((~same).sum())
        found.square += float(first.square().sum())
        found.difference += float(difference.square().sum())
        if first.numel():
            found.largest = max(found.largest, float(difference.abs().max()))

    def _of(self, path: str) -> Difference:
        return self._found.setdefault(path, Difference())


def _wanted(path: str, pattern: str | None, one: Perturbation) -> bool:
    if path == "output_layer":
        return False
    if pattern is not None:
        return fnmatchcase(path, pattern)
    owner = one.module.rpartition(".")[0] if one.on in ("weight", "weight_gradient") else one.module
    return bool(_LAYER.search(path)) or (bool(owner) and fnmatchcase(path, owner))


def _first(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values if values.is_floating_point() else None
    listed = (
        values.values() if isinstance(values, Mapping) else values if isinstance(values, list | tuple) else ()
    )
    return next((found for value in listed if (found := _first(value)) is not None), None)


def _figures(figures: StepOutcome) -> dict[str, Any]:
    return {
        "loss": figures.loss,
        "grad_norm": figures.grad_norm,
        "skipped": figures.skipped,
        "reason": figures.reason,
    }
