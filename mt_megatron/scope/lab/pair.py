"""One step made twice from the same state: where its activations part with a perturbation and without."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.scope.lab.snapshot import MIB, default_limit_mib
from mt_megatron.scope.lab.specification import Perturbation
from mt_megatron.scope.trainer import StepOutcome, Trainer
from mt_megatron.seams import taps

_LAYER = re.compile(r"(^|\.)layers\.\d+$")
_MOST_MICROBATCHES = 64

Row = tuple[str, float, float, float, float, float]
"""Path; elements, elements that differ, sums of squares of the unperturbed values and of the difference,
and the largest difference."""


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
        self._room = default_limit_mib() * MIB
        self._left_out = 0
        self._sums: dict[str, list[float]] = {}
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
        """Every module's row, of all ranks together; collective. Modules are in the order in which they
        are called."""
        total: dict[str, list[float]] = {}
        rows: list[tuple[str, list[float]]]
        for rows in gathered(list(self._sums.items())):
            for path, sums in rows:
                known = total.setdefault(path, [0.0] * len(sums))
                for index in range(4):
                    known[index] += sums[index]
                known[4] = max(known[4], sums[4])
        return [
            (path, sums[0], sums[1], sums[2], sums[3], sums[4])
            for path, sums in sorted(total.items(), key=_first_is_first)
        ]

    def result(self, without: StepOutcome, changed: StepOutcome, rows: Sequence[Row]) -> dict[str, Any]:
        """What a pair comes to: both steps' figures, and each module's difference."""
        modules = [
            {
                "path": path,
                "changed_share": differ / elements if elements else 0.0,
                "relative_difference": math.sqrt(difference / square) if square > 0 else math.nan,
                "largest_difference": largest,
            }
            for path, elements, differ, square, difference, largest in rows
        ]
        first = next((path for path, _, differ, *_ in rows if differ > 0), None)
        return {
            "baseline": _figures(without),
            "perturbed": _figures(changed),
            "modules": modules,
            "first_difference": first,
            "outputs_left_out": self._left_out,
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
                size = tensor.numel() * tensor.element_size()
                if size > self._room:
                    self._left_out += 1
                    return
                self._room -= size
                self._kept[key] = tensor.detach().to("cpu", copy=True)
                self._sums.setdefault(path, [0.0] * 5)
            elif key in self._kept:
                self._compare(path, self._kept.pop(key), tensor.detach().to("cpu"))

        return look

    def _compare(self, path: str, before: Tensor, after: Tensor) -> None:
        sums = self._sums[path]
        first, second = before.double(), after.double()
        # NaN differs from itself; equal bits are no difference.
        same = (first == second) | (first.isnan() & second.isnan())
        difference = torch.where(same, 0.0, second - first)
        sums[0] += first.numel()
        sums[1] += float((~same).sum())
        sums[2] += float(first.square().sum())
        sums[3] += float(difference.square().sum())
        sums[4] = max(sums[4], float(difference.abs().max())) if first.numel() else sums[4]


def _wanted(path: str, pattern: str | None, one: Perturbation) -> bool:
    if path == "output_layer":
        return False
    if pattern is not None:
        return fnmatchcase(path, pattern)
    owner = one.module.rpartition(".")[0] if one.on in ("weight", "weight_gradient") else one.module
    return bool(_LAYER.search(path)) or (bool(owner) and fnmatchcase(path, owner))


def _first_is_first(item: tuple[str, Any]) -> tuple[float, int, str]:
    return _order(item[0])


def _order(path: str) -> tuple[float, int, str]:
    """Order of calls, by what is known without the model: embedding, layers, what comes after them."""
    layer = taps.layer_of(path)
    if layer is None:
        return (-1 if path.startswith("embedding") else 1 << 30, 0, path)
    # A layer is over after its parts.
    return layer, 1 if _LAYER.search(path) else 0, path


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
