"""What a side leaves behind: pieces of tensors with their place in the whole, and wholes made of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

PHASES = ("batch", "initial weight", "forward", "backward", "parameter gradient", "updated weight")
"""In the order in which a step makes them."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of one tensor of the whole model and global batch, as one rank holds it."""

    phase: str
    """One of ``PHASES``."""

    name: str
    """The module, numbered over the whole model (``decoder.layers.3.mlp``), or the parameter."""

    order: tuple[int, int]
    """Stage of the pipeline and position within it, in execution order."""

    shape: tuple[int, ...]
    """Shape of the whole."""

    index: tuple[Tensor | None, ...]
    """For every dimension the whole's indices that this piece covers, int64; None for all of them."""

    tensor: Tensor
    """The values, on the host, in the dtype they were computed in."""

    mask: Tensor | None = None
    """Which elements this rank answers for; None for all of them."""


def save(pieces: Iterable[Piece], path: Path) -> None:
    """Write one rank's pieces."""
    # asdict would copy every tensor.
    torch.save([{**each.__dict__, "order": list(each.order)} for each in pieces], path)


def load(path: Path) -> list[Piece]:
    """Read what ``save`` wrote. Nothing in the file is executed."""
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return [Piece(**{**each, "order": tuple(each["order"])}) for each in found]


@dataclass(frozen=True, kw_only=True)
class Whole:
    """One tensor of the whole model and global batch."""

    tensor: Tensor
    covered: Tensor
    """bool, same shape: whether any rank answered for the element."""

    order: tuple[int, int]
    copies: float
    """Largest error between what two ranks hold of the same elements; 0 when nothing is held twice."""

    def digest(self) -> str | None:
        """sha256 of the values in their own dtype; None unless every element is covered."""
        if not bool(self.covered.all()):
            return None
        return hashlib.sha256(self.tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def assemble(pieces: Sequence[Piece]) -> Whole:
    """The whole tensor of ``pieces``, which all have one phase and name. The first to cover an element
    says what it is; whoever covers it again is compared with that."""
    first = pieces[0]
    whole = torch.zeros(first.shape, dtype=first.tensor.dtype)
    covered = torch.zeros(first.shape, dtype=torch.bool)
    copies = 0.0
    for piece in pieces:
        region = _region(piece)
        mask = torch.ones_like(piece.tensor, dtype=torch.bool) if piece.mask is None else piece.mask
        there, value = covered[region], whole[region]
        both = there & mask
        if bool(both.any()):
            zero = torch.zeros((), dtype=piece.tensor.dtype)
            mine, theirs = torch.where(both, piece.tensor, zero), torch.where(both, value, zero)
            copies = max(copies, row_error(theirs, mine, by_element=piece.name == "loss")[0])
        new = mask & ~there
        whole[region] = torch.where(new, piece.tensor, value)
        covered[region] = there | mask
    return Whole(tensor=whole, covered=covered, order=min(each.order for each in pieces), copies=copies)


def _region(piece: Piece) -> tuple[Tensor, ...]:
    parts = []
    for dim, (size, index) in enumerate(zip(piece.shape, piece.index, strict=True)):
        index = torch.arange(size) if index is None else index
        parts.append(index.view([-1 if d == dim else 1 for d in range(len(piece.shape))]))
    return tuple(parts)


def row_error(a: Tensor, b: Tensor, *, by_element: bool = False, smallest: float = 0.0) -> tuple[float, int]:
    """Largest error of a row, and which row: ``|a - b| / max(|a|, root mean square of all |a|)``, where
    ``smallest`` is the least size of an element, by root mean square, that an error is measured against.

    A row is the last dimension: one token's features, one output's weights; with ``by_element``, or in a
    vector, a single element. Infinite where one side is finite and the other is not.
    """
    width = 1 if by_element or a.dim() < 2 else a.shape[-1]
    x, y = (each.detach().to(torch.float64).reshape(-1, max(width, 1)) for each in (a, b))
    if x.numel() == 0:
        return 0.0, 0
    finite = torch.isfinite(x) & torch.isfinite(y)
    same_kind = finite | (torch.isnan(x) & torch.isnan(y)) | (x == y)
    broken = ~same_kind.all(dim=1)
    if bool(broken.any()):
        return float("inf"), int(broken.to(torch.int8).argmax())
    zero = torch.zeros((), dtype=torch.float64)
    x, y = torch.where(finite, x, zero), torch.where(finite, y, zero)
    norms, differences = x.norm(dim=1), (x - y).norm(dim=1)
    typical = max(float(norms.square().mean().sqrt()), smallest * max(width, 1) ** 0.5)
    scale = norms.clamp(min=typical)
    errors = torch.where(differences == 0, zero, differences / scale)
    worst = int(errors.argmax())
    return float(errors[worst]), worst


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a rank says about its run, beside the tensors."""

    loss: float | None
    """Mean over the counted tokens of the global batch; None when none counts."""

    learning_rate: float
    dtype: str
    device: str
    layout: dict[str, int | None]
    not_placed: list[str]
    """Modules whose outputs have a shape that this package cannot place in the whole."""

    outside_model: dict[str, list[str]] = field(default_factory=dict)
    """``module:Class (attributes)`` that an import changed and no module of the rank is an instance of ->
    classes of the same name that the rank's modules have."""


def write_facts(facts: RankFacts, path: Path) -> None:
    """Beside the pieces, as JSON."""
    path.write_text(json.dumps(asdict(facts)) + "\n", encoding="utf-8")


def read_facts(path: Path) -> RankFacts:
    """Read what ``write_facts`` wrote."""
    return RankFacts(**json.loads(path.read_text(encoding="utf-8")))
