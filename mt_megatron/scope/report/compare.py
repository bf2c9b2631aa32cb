"""Comparison of two recorded runs: the first step and module, in execution order, at which they part.

Within a step values come in this order: what the forward pass makes of each module, as the modules run; the
loss; gradients, backwards; what the update makes of weights. A value that lacks parts in one of the runs says
nothing and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mt_megatron.errors import ScopeError
from mt_megatron.scope.format.statistics import STATISTICS
from mt_megatron.scope.recording.data import Value
from mt_megatron.scope.recording.reader import Recording

BACKWARD = ("gradient_norm",)
UPDATE = ("update_ratio", "weight_norm", "embedding_norm")
"""Statistics by when they are made; all others are of the forward pass."""

_ORDERED = ("outlier_channels",)
"""Statistics whose vectors are in the order of their values, which a small difference changes."""

MOST_SHOWN = 12
"""Values of the first step that differ, in execution order."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One value that differs."""

    step: int
    path: str
    """Empty for the whole run's loss and gradient norm."""

    statistic: str
    a: float
    b: float

    relative: float
    """|a - b| over the larger absolute value; infinite where one of them is not finite. Of a statistic with a
    vector the largest of its elements."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs side by side."""

    steps: int
    """Training steps that both recorded."""

    samples: int
    """Of them steps with statistics in both."""

    has_statistics: bool
    """True where one of the runs has statistics, of whatever steps."""

    values: int
    """Statistics that were compared."""

    left_out: int
    """Statistics that lack parts in one of the runs."""

    only_a: int
    only_b: int
    """Statistics (module and name) that one run alone has."""

    first_loss: Difference | None
    """First step whose loss, or gradient norm, differs."""

    first: tuple[Difference, ...]
    """Of the first step whose statistics differ: the values that do, in execution order."""

    differing: int
    """How many values of that step differ."""

    largest: float
    """Largest relative difference of any value that was compared, below the tolerance or above."""

    tolerance: float

    @property
    def equal(self) -> bool:
        """True where nothing that was compared differs by more than the tolerance; False where a run has
        statistics and none could be compared."""
        return self.first_loss is None and not self.first and self.has_compared

    @property
    def has_compared(self) -> bool:
        """True where a statistic was compared, or neither run has any."""
        return self.values > 0 or not self.has_statistics


def compare(a: Recording, b: Recording, *, tolerance: float = 0.0) -> Comparison:
    """Compare what two runs recorded, up to the first step whose statistics differ by more than ``tolerance``
    (relative). Raises ``ScopeError`` where they have no step in common."""
    losses, first_loss, largest = _losses(a, b, tolerance)
    sampled = (set(a.sampled()), set(b.sampled()))
    samples = sorted(sampled[0] & sampled[1])
    if not losses and not samples:
        raise ScopeError(
            f"the runs have no step in common ({_span(a)} and {_span(b)}); expected recordings of the same "
            "steps"
        )
    order = _order(a, b)
    names = ({(each.path, each.statistic) for each in run.names()} for run in (a, b))
    only = [left - right for left, right in _both_ways(*names)]
    values = left_out = differing = 0
    first: tuple[Difference, ...] = ()
    for step in samples:
        found, compared, partial, worst = _step(a, b, step, tolerance)
        values, left_out, largest = values + compared, left_out + partial, max(largest, worst)
        if found:
            last = len(order)
            found.sort(key=lambda each: _place(each, order, last))
            first, differing = tuple(found[:MOST_SHOWN]), len(found)
            break
    return Comparison(
        steps=losses,
        samples=len(samples),
        has_statistics=any(sampled),
        values=values,
        left_out=left_out,
        only_a=len(only[0]),
        only_b=len(only[1]),
        first_loss=first_loss,
        first=first,
        differing=differing,
        largest=largest,
        tolerance=tolerance,
    )


def _both_ways(
    a: set[tuple[str, str]], b: set[tuple[str, str]]
) -> tuple[tuple[set[tuple[str, str]], set[tuple[str, str]]], ...]:
    return (a, b), (b, a)


def _span(run: Recording) -> str:
    steps = run.steps().step
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) else "no steps"


def _losses(a: Recording, b: Recording, tolerance: float) -> tuple[int, Difference | None, float]:
    """Common steps, the first that differs in loss or gradient norm, the largest relative difference."""
    one, other = a.steps(), b.steps()
    common, left, right = np.intersect1d(one.step, other.step, return_indices=True)
    first: Difference | None = None
    largest = 0.0
    for index, step in enumerate(common):
        for name in ("loss", "grad_norm"):
            pair = (float(getattr(one, name)[left[index]]), float(getattr(other, name)[right[index]]))
            relative = difference(*pair)
            largest = max(largest, relative)
            if relative > tolerance:
                first = Difference(
                    step=int(step), path="", statistic=name, a=pair[0], b=pair[1], relative=relative
                )
                return len(common), first, largest
    return len(common), first, largest


def _order(a: Recording, b: Recording) -> Mapping[str, int]:
    paths = [each.path for each in a.modules()]
    known = set(paths)
    paths += [each.path for each in b.modules() if each.path not in known]
    return {path: index for index, path in enumerate(paths)}


def _place(each: Difference, order: Mapping[str, int], last: int) -> tuple[int, int, int]:
    """When the value is made within a step."""
    at = order.get(each.path, last)
    number = list(STATISTICS).index(each.statistic)
    if each.statistic in BACKWARD:
        return 1, -at, number
    return (2 if each.statistic in UPDATE else 0), at, number


def _step(
    a: Recording, b: Recording, step: int, tolerance: float
) -> tuple[list[Difference], int, int, float]:
    """Values that differ, how many were compared, how many left out, largest relative difference."""
    right = {(each.path, each.statistic): each for each in b.values(step, vectors=True)}
    found = []
    compared = partial = 0
    largest = 0.0
    for one in a.values(step, vectors=True):
        other = right.get((one.path, one.statistic))
        if other is None:
            continue
        if one.partial or other.partial:
            partial += 1
            continue
        compared += 1
        relative = max(difference(one.value, other.value), _vectors(one, other, tolerance))
        largest = max(largest, relative)
        if relative > tolerance:
            found.append(
                Difference(
                    step=step,
                    path=one.path,
                    statistic=one.statistic,
                    a=one.value,
                    b=other.value,
                    relative=relative,
                )
            )
    return found, compared, partial, largest


def _vectors(one: Value, other: Value, tolerance: float) -> float:
    if one.vector is None or other.vector is None or (tolerance and one.statistic in _ORDERED):
        return 0.0
    if one.vector.shape != other.vector.shape:
        return math.inf
    return max(map(difference, one.vector.tolist(), other.vector.tolist()), default=0.0)


def difference(a: float, b: float) -> float:
    """Relative difference of two numbers; NaN equals NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not math.isfinite(a) or not math.isfinite(b):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def text(found: Comparison) -> str:
    """For people."""
    about = f"{found.steps} common steps, {found.samples} of them with statistics"
    more = [f"{found.left_out} values lack parts and were left out"] if found.left_out else []
    more += [f"{found.only_a} statistics are only in the first run"] if found.only_a else []
    more += [f"{found.only_b} statistics are only in the second run"] if found.only_b else []
    allowed = f" within {found.tolerance:g}" if found.tolerance else ""
    if found.equal:
        largest = f"; largest relative difference {found.largest:.3g}" if found.largest else ""
        lines = [f"equal{allowed}: {about}, {found.values} values compared{largest}"]
    elif found.first_loss is None and not found.first:
        lines = [f"losses are equal{allowed}, but no statistic could be compared: {about}"]
    else:
        lines = [f"the runs part ({about})"]
    if found.first_loss is not None:
        each = found.first_loss
        lines.append(f"  step {each.step}: {each.statistic} {_numbers(each)}")
    if found.first:
        lines.append(f"  step {found.first[0].step}: {found.differing} values differ, in execution order:")
        lines += [
            f"    {each.statistic} of {each.path or 'the model'}: {_numbers(each)}" for each in found.first
        ]
        if found.differing > len(found.first):
            lines.append(f"    and {found.differing - len(found.first)} more")
        where = next((each for each in found.first if each.path), None)
        if where is not None:
            lines.append(f"  first module: {where.path} at step {where.step}")
    elif found.first_loss is not None:
        why = "that was recorded differs" if found.has_compared else "could be compared"
        lines.append(f"  no statistic {why}")
    if not found.equal and 0 < found.largest < 1e-4:
        lines.append(
            "  differences as small as rounding of other layouts makes: --tolerance 1e-3 allows them"
        )
    return "\n".join([*lines, *(f"  {line}" for line in more)])


def _numbers(each: Difference) -> str:
    # The elements of a vector may differ by more than the number that stands for them.
    of = " of its elements" if each.relative > difference(each.a, each.b) else ""
    return f"{each.a!r} and {each.b!r} (relative {each.relative:.3g}{of})"


def as_map(found: Comparison) -> Mapping[str, object]:
    """For JSON."""

    def plain(each: Difference) -> Mapping[str, object]:
        numbers = {name: getattr(each, name) for name in ("a", "b", "relative")}
        texts: dict[str, object] = {
            name: value if math.isfinite(value) else str(value) for name, value in numbers.items()
        }
        return {"step": each.step, "path": each.path, "statistic": each.statistic, **texts}

    def listed(each: Sequence[Difference]) -> list[Mapping[str, object]]:
        return [plain(one) for one in each]

    return {
        "equal": found.equal,
        "tolerance": found.tolerance,
        "steps": found.steps,
        "samples": found.samples,
        "values": found.values,
        "left_out": found.left_out,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "largest": found.largest if math.isfinite(found.largest) else str(found.largest),
        "first_loss": None if found.first_loss is None else plain(found.first_loss),
        "first": listed(found.first),
        "differing": found.differing,
    }
