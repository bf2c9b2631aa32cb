"""What differs between two records, by how much and where, in the order in which a step computes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mt_megatron.errors import MtMegatronError

from .pieces import PHASES, Piece, RankFacts, Whole, assemble, load, read_facts, row_error

_LOW_PRECISION = ("bfloat16", "float16")

TOLERANCE = {
    "float32": {"weight": 1e-6, "forward": 1e-4, "backward": 1e-3, "update": 2e-2, "smallest": 1e-2},
    "float16": {"weight": 2e-3, "forward": 3e-2, "backward": 1e-1, "update": 2e-2, "smallest": 1e-1},
    "bfloat16": {"weight": 8e-3, "forward": 1e-1, "backward": 3e-1, "update": 5e-2, "smallest": 3e-1},
}
"""Largest error of a row that is still rounding, by the coarser of the two sides' dtypes. An update is
judged against the size of the update in fp32, against the size of the weights otherwise. Gradients below
``smallest`` times the phase's median are measured against that: some are 0 but for rounding, such as a
bias that is added to every key."""


class RecordsMissingError(MtMegatronError):
    """A side's records are not there, or the two sides have nothing in common."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor on both sides."""

    phase: str
    name: str
    error: float
    """Largest error of a row (see ``row_error``), copies within a side included."""

    tolerance: float
    relative: float
    """|a - b| / |a| over the whole tensor."""

    largest: float
    """Largest absolute difference of an element."""

    norm_a: float
    norm_b: float
    digest_a: str | None
    digest_b: str | None
    where: str
    """The row with the largest error, in words."""

    shape: tuple[int, ...]
    note: str = ""

    @property
    def differs(self) -> bool:
        """Whether the error is more than rounding."""
        return not self.error <= self.tolerance

    @property
    def equal(self) -> bool:
        """Whether both sides have the same bits."""
        return self.digest_a is not None and self.digest_a == self.digest_b


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a side left behind."""

    wholes: dict[tuple[str, str], Whole]
    facts: RankFacts
    """Of its rank 0."""

    not_placed: list[str]
    outside_model: dict[str, list[str]]
    """Those of ``RankFacts`` that are outside every rank's part of the model."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The verdict."""

    entries: list[Entry]
    """In the order in which a step computes them, which for gradients is backwards."""

    only_a: list[str]
    only_b: list[str]
    not_placed: list[str]
    """Modules that could not be compared because the place of their output is not known."""

    facts_a: RankFacts
    facts_b: RankFacts
    notes: list[str]

    @property
    def first(self) -> Entry | None:
        """The first that differs; None when nothing does."""
        return next((entry for entry in self.entries if entry.differs), None)

    def suspect(self) -> str | None:
        """The module to look at: the first that differs, or, for a gradient that arrives wrong at a
        module's output, the module after it, which computed that gradient."""
        first = self.first
        if first is None or first.phase != "backward":
            return None if first is None else first.name
        forward = [entry.name for entry in self.entries if entry.phase == "forward"]
        after = forward[forward.index(first.name) + 1 :] if first.name in forward else []
        # A module that contains the first one ends with the same tensor and computed nothing.
        return next((name for name in after if not first.name.startswith(f"{name}.")), first.name)


def read_record(folder: Path, processes: int) -> Record:
    """Join the pieces of all ranks of a side. Raises ``RecordsMissingError`` when a rank's are missing."""
    pieces: defaultdict[tuple[str, str], list[Piece]] = defaultdict(list)
    facts: list[RankFacts] = []
    for rank in range(processes):
        path = folder / f"rank_{rank}.pt"
        if not path.exists():
            raise RecordsMissingError(f"{path} is missing; run this side again")
        for piece in load(path):
            pieces[piece.phase, piece.name].append(piece)
        facts.append(read_facts(folder / f"rank_{rank}.json"))
    return Record(
        wholes={key: assemble(found) for key, found in pieces.items()},
        facts=facts[0],
        not_placed=sorted({name for each in facts for name in each.not_placed}),
        outside_model={
            name: sorted({place for each in facts for place in each.outside_model[name]})
            for name in facts[0].outside_model
            if all(name in each.outside_model for each in facts)
        },
    )


def compare(
    a: Record,
    b: Record,
    *,
    tolerance: float | None = None,
    gradient_tolerance: float | None = None,
    notes: Sequence[str] = (),
) -> Comparison:
    """Compare everything that both sides have. ``tolerance`` and ``gradient_tolerance`` replace the
    dtype's for outputs and for gradients. Raises ``RecordsMissingError`` without common modules."""
    allowed = dict(TOLERANCE[_coarser(a.facts.dtype, b.facts.dtype)])
    if tolerance is not None:
        allowed["forward"] = tolerance
    if gradient_tolerance is not None:
        allowed["backward"] = gradient_tolerance
    common = [key for key in a.wholes if key in b.wholes]
    if not any(phase == "forward" for phase, _ in common):
        raise RecordsMissingError(
            "the two sides have no module in common: the comparison goes by the modules' names"
        )
    entries = []
    smallest = {
        phase: allowed["smallest"] * _median_size(a, phase) for phase in ("backward", "parameter gradient")
    }
    for phase in PHASES:
        keys = sorted((key for key in common if key[0] == phase), key=lambda key: a.wholes[key].order)
        if phase in ("backward", "parameter gradient"):
            keys.reverse()
        entries += [_entry(phase, name, a, b, allowed, smallest) for _, name in keys]
    modules_a, modules_b = ({name for phase, name in r.wholes if phase == "forward"} for r in (a, b))
    said = [
        *notes,
        *(
            f"the import on side {side} changed {name}, of which the model has no module"
            + (f"; it has {', '.join(places)} in its place: change that" if places else "")
            for side, record in (("a", a), ("b", b))
            for name, places in record.outside_model.items()
        ),
    ]
    if 0.0 in (a.facts.learning_rate, b.facts.learning_rate):
        said.append(
            "the learning rate of the first step is 0: the updated weights compare nothing but weight decay "
            "(--lr-warmup-iters 0 changes that)"
        )
    return Comparison(
        entries=entries,
        only_a=sorted(modules_a - modules_b),
        only_b=sorted(modules_b - modules_a),
        not_placed=sorted({*a.not_placed, *b.not_placed}),
        facts_a=a.facts,
        facts_b=b.facts,
        notes=said,
    )


def _coarser(*dtypes: str) -> str:
    return next((each for each in ("bfloat16", "float16") if each in dtypes), "float32")


def _median_size(record: Record, phase: str) -> float:
    """Median over the phase's tensors of their elements' root mean square."""
    sizes = sorted(_size(whole.tensor) for (each, _), whole in record.wholes.items() if each == phase)
    return sizes[len(sizes) // 2] if sizes else 0.0


def _size(tensor: Tensor) -> float:
    finite = tensor.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _entry(
    phase: str,
    name: str,
    a: Record,
    b: Record,
    allowed: dict[str, float],
    smallest: dict[str, float],
) -> Entry:
    x, y = a.wholes[phase, name], b.wholes[phase, name]
    if x.tensor.shape != y.tensor.shape:
        return _mismatched(phase, name, x, y)
    covered = x.covered & y.covered
    zero = torch.zeros((), dtype=torch.float64)
    one, other = (torch.where(covered, each.tensor.double(), zero) for each in (x, y))
    difference = (one - other).nan_to_num(nan=float("inf"), posinf=float("inf"))
    relative = _ratio(float(difference.norm()), float(one.norm()))
    by_element = name == "loss" or phase == "batch"
    error, row = row_error(one, other, by_element=by_element, smallest=smallest.get(phase, 0.0))
    where, note = _row_words(row, x.tensor.shape, phase, by_element), ""
    tolerance = _tolerance(phase, allowed)
    if phase == "updated weight":
        error = _update_error(name, a, b, float(difference.norm()), relative)
        where = ""
        gradient = a.wholes.get(("parameter gradient", name))
        if (
            gradient is not None
            and _size(gradient.tensor) < allowed["backward"] * smallest["parameter gradient"]
        ):
            # Adam gives it a full step all the same, in a direction that rounding decides.
            tolerance, note = float("inf"), "its gradient is nothing but rounding: not judged"
    for side, whole in (("a", x), ("b", y)):
        if whole.copies > max(error, tolerance):
            error, note = whole.copies, f"the ranks of side {side} hold different copies"
    if not bool(covered.all()):
        note = (note + "; " if note else "") + f"{float(covered.float().mean()):.0%} of it is on any rank"
    return Entry(
        phase=phase,
        name=name,
        error=error,
        tolerance=tolerance,
        relative=relative,
        largest=float(difference.abs().max()) if difference.numel() else 0.0,
        norm_a=float(one.norm()),
        norm_b=float(other.norm()),
        digest_a=x.digest(),
        digest_b=y.digest(),
        where=where,
        shape=tuple(x.tensor.shape),
        note=note,
    )


def _tolerance(phase: str, allowed: dict[str, float]) -> float:
    kind = {
        "batch": None,
        "initial weight": "weight",
        "forward": "forward",
        "updated weight": "update",
    }.get(phase, "backward")
    return 0.0 if kind is None else allowed[kind]


def _update_error(name: str, a: Record, b: Record, difference: float, relative: float) -> float:
    before = a.wholes.get(("initial weight", name))
    if before is None or {a.facts.dtype, b.facts.dtype} & set(_LOW_PRECISION):
        # A low-precision weight moves by less than its own rounding.
        return relative
    after = a.wholes["updated weight", name]
    return _ratio(difference, float((after.tensor.double() - before.tensor.double()).norm()))


def _ratio(part: float, whole: float) -> float:
    return 0.0 if part == 0 else part / whole if whole > 0 else float("inf")


def _mismatched(phase: str, name: str, x: Whole, y: Whole) -> Entry:
    infinite = float("inf")
    return Entry(
        phase=phase,
        name=name,
        error=infinite,
        tolerance=0.0,
        relative=infinite,
        largest=infinite,
        norm_a=float(x.tensor.double().norm()),
        norm_b=float(y.tensor.double().norm()),
        digest_a=x.digest(),
        digest_b=y.digest(),
        where="",
        shape=tuple(x.tensor.shape),
        note=f"its shape is {list(x.tensor.shape)} on side a and {list(y.tensor.shape)} on side b",
    )


def _row_words(row: int, shape: Sequence[int], phase: str, by_element: bool) -> str:
    lead = list(shape if by_element or len(shape) < 2 else shape[:-1])
    index: list[int] = []
    for size in reversed(lead):
        row, at = divmod(row, max(size, 1))
        index.insert(0, at)
    if phase in ("forward", "backward", "batch") and len(index) >= 2:
        # [b, s] for whatever is one number per token, Megatron's [s, b, ...] for the rest.
        sample, position = (index[0], index[1]) if by_element else (index[1], index[0])
        return f"sample {sample}, position {position}" + (f", {index[2:]}" if index[2:] else "")
    return f"row {index}" if index else ""
