"""What a micro-batch consists of: pieces of computing, and the communication after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .job import Job
from .noise import Floats
from .schedule import Direction


@dataclass(frozen=True)
class Communication:
    """A collective within a micro-batch."""

    op: str
    group: str
    size: int
    """Bytes a rank gives into it where all give the same."""

    combines: bool = False
    """``all_to_all``: rows go back from the experts, so that who had more of them gives more."""

    name: str = ""
    """What the trace calls it where that is not ``op``."""


@dataclass(frozen=True)
class Piece:
    """Computing, then perhaps a communication. Times in ns of an undisturbed rank."""

    plain: float
    expert: float
    """The part that grows with the rows of this rank's experts."""

    layer: int
    after: Communication | None


def pieces(job: Job, direction: Direction) -> tuple[Piece, ...]:
    """One micro-batch through one chunk, without embedding and head."""
    layout = job.layout
    scale = 1e6 if direction == "forward" else 2e6
    attention, mlp = job.attention_ms * scale, job.mlp_ms * scale
    size = job.activation_bytes // layout.cp
    tp = Communication("all_reduce", "tp", size) if layout.tp > 1 else None
    # Keys and values of grouped heads are a part of the activations.
    gather = Communication("all_gather", "cp", size // 2) if layout.cp > 1 else None
    scatter = Communication("reduce_scatter", "cp", size * layout.cp // 2) if layout.cp > 1 else None
    there = Communication("all_to_all", "ep", size) if layout.ep > 1 else None
    back = Communication("all_to_all", "ep", size, combines=True) if layout.ep > 1 else None
    wanted: list[tuple[float, float, Communication | None]]
    if direction == "forward":
        wanted = [(0.25 * attention, 0.0, gather), (0.75 * attention, 0.0, tp)]
        if layout.ep > 1:
            wanted += [(0.1 * mlp, 0.0, there), (0.0, 0.9 * mlp, back)]
        else:
            wanted += [(mlp, 0.0, tp)]
    else:
        if layout.ep > 1:
            # The gradient takes the rows' way backwards: out to the experts, and home.
            wanted = [(0.02 * mlp, 0.0, there), (0.0, 0.9 * mlp, back), (0.08 * mlp, 0.0, None)]
        else:
            wanted = [(mlp, 0.0, tp)]
        wanted += [
            (0.25 * attention, 0.0, gather),
            (0.6 * attention, 0.0, scatter),
            (0.15 * attention, 0.0, tp),
        ]
    made: list[Piece] = []
    plain = expert = 0.0
    for layer in range(job.layers):
        for own, rows, after in wanted:
            plain, expert = plain + own, expert + rows
            if after is not None:
                made.append(Piece(plain, expert, layer, after))
                plain = expert = 0.0
    made.append(Piece(plain, expert, job.layers - 1, None))
    return tuple(made)


def stage_extras(job: Job, direction: Direction) -> Floats:
    """Embedding and head in ns, [chunk, stage, 2]: on top of the first and of the last piece."""
    layout = job.layout
    made = np.zeros((layout.vpp, layout.pp, 2))
    layer = (job.attention_ms + job.mlp_ms) * (1e6 if direction == "forward" else 2e6)
    embedding, head = (0, 1) if direction == "forward" else (1, 0)
    made[0, 0, embedding] += job.embedding_layers * layer
    made[-1, -1, head] += job.head_layers * layer
    return made


def tables(parts: Sequence[Piece]) -> tuple[Floats, Floats]:
    """Plain and expert ns of each piece, [pieces]."""
    return np.array([part.plain for part in parts]), np.array([part.expert for part in parts])
