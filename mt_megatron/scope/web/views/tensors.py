"""Recorded tensors: which there are, tiles, thumbnails, summaries, projections on a basis that stays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..source import TensorFacts
from ..tiles import TILE, Tile, level_for, matrix_shape, padded, quantised
from .context import Answer, Context

HISTOGRAM_BINS = 96
OUTLIERS = 16
MOST_THUMBS = 1_024
MOST_ELEMENTS = 2**22
STRETCHES = 16
_MOST_POINTS = 4_096
_BASIS_ROWS = 256
_MOST_BASES = 16


def tensors(context: Context, query: dict[str, Any]) -> Answer:
    """Names, shapes and steps."""
    rows = []
    for each in context.source.tensors():
        rows.append(
            {
                "id": each.name.text,
                "path": each.name.path,
                "what": each.name.what,
                "microbatch": each.name.microbatch,
                "index": dict(each.name.index),
                "shape": list(each.shape),
                "shapes": _changes(each),
                "steps": list(each.steps[-2_000:]),
                "stamps": list(each.stamps[-2_000:]),
            }
        )
    return Answer(facts={"tensors": rows})


def _changes(facts: TensorFacts) -> list[tuple[int, list[int]]]:
    """Shapes as (step, shape): each holds from its step up to the next one's."""
    found: list[tuple[int, list[int]]] = []
    for step, shape in zip(facts.steps, facts.shapes, strict=True):
        if not found or found[-1][1] != list(shape):
            found.append((step, list(shape)))
    return found


def named(context: Context, text: str) -> TensorFacts:
    """The tensor whose ``TensorName.text`` this is: it is looked up, not parsed. Raises ``KeyError``."""
    for each in context.source.tensors():
        if each.name.text == text:
            return each
    raise KeyError(f"found no tensor {text}")


def tile(context: Context, query: dict[str, Any]) -> Answer:
    """One tile (``tiles``)."""
    facts = named(context, query["tensor"])
    found: Tile = context.tiles.tile(
        facts,
        query["step"],
        level=query["level"],
        row=query["row"],
        column=query["column"],
        by=query["by"],
    )
    return Answer(
        facts={
            "low": found.low,
            "scale": found.scale,
            "rows": found.rows,
            "columns": found.columns,
            "tile": TILE,
            "error": found.error,
            "perturbed": found.perturbed,
            "missing": found.missing,
        },
        arrays={"codes": found.codes},
    )


def thumbs(context: Context, query: dict[str, Any]) -> Answer:
    """Small pictures of all tensors of one kind at a step: ``side`` x ``side`` codes each."""
    side, step = query["side"], query["step"]
    rows: list[dict[str, Any]] = []
    pictures: list[NDArray[np.uint8]] = []
    left_out = 0
    for each in context.source.tensors():
        wanted = each.name.what == query["what"] and step in each.steps
        if not wanted or (query["path"] and each.name.path != query["path"]):
            continue
        if len(rows) >= MOST_THUMBS:
            left_out += 1
            continue
        shape = each.shape_at(step)
        cells = context.tiles.overview(each, step, level_for(shape, side), "max").values
        codes, low, scale = quantised(cells)
        pictures.append(padded(codes, side))
        rows.append(
            {
                "id": each.name.text,
                "path": each.name.path,
                "index": dict(each.name.index),
                "rows": codes.shape[0],
                "columns": codes.shape[1],
                "low": low,
                "scale": scale,
                "shape": list(shape),
            }
        )
    table = np.stack(pictures) if pictures else np.zeros((0, side, side), np.uint8)
    return Answer(facts={"rows": rows, "side": side, "left_out": left_out}, arrays={"codes": table})


def summary(context: Context, query: dict[str, Any]) -> Answer:
    """Count, moments, extremes, histogram of equal bins between the extremes, and the outstanding columns
    (channels) with their largest absolute value over the root mean square. Of more than ``MOST_ELEMENTS``
    elements evenly spaced stretches of rows are looked at, and ``looked_at`` says how many elements."""
    facts = named(context, query["tensor"])
    step = query["step"]
    shape = facts.shape_at(step)
    rows, columns = matrix_shape(shape)
    parts = [
        context.source.window(facts.name, step, stretch, (0, columns))
        for stretch in _stretches(rows, columns)
    ]
    values = np.concatenate([part.values for part in parts])
    finite = np.isfinite(values)
    known = values[finite].astype(np.float64)
    count = known.size
    low, high = (float(known.min()), float(known.max())) if count else (math.nan, math.nan)
    edges = np.linspace(low, high, HISTOGRAM_BINS + 1) if count else np.zeros(HISTOGRAM_BINS + 1)
    bins = np.zeros(HISTOGRAM_BINS, np.int64)
    if count and high > low:
        bins = np.histogram(known, bins=edges)[0]
    elif count:
        bins[0] = count
    rms = math.sqrt(float((known**2).mean())) if count else math.nan
    largest = np.where(finite, np.abs(values), 0).max(axis=0)
    best = np.argsort(-largest, kind="stable")[:OUTLIERS]
    return Answer(
        facts={
            "shape": list(shape),
            "looked_at": int(values.size),
            "nan": int(np.isnan(values).sum()),
            "infinite": int(np.isinf(values).sum()),
            "mean": float(known.mean()) if count else math.nan,
            "deviation": float(known.std()) if count else math.nan,
            "rms": rms,
            "low": low,
            "high": high,
            "error": max(part.error for part in parts),
            "missing": max(part.missing for part in parts),
            "perturbed": parts[0].perturbed,
            "outliers": [
                {"channel": int(each), "largest": float(largest[each]), "ratio": float(largest[each]) / rms}
                for each in best
                if rms > 0
            ],
        },
        arrays={"edges": edges, "bins": bins},
    )


def _stretches(rows: int, columns: int) -> list[tuple[int, int]]:
    """Rows to look at, as (first, end)."""
    most = max(1, MOST_ELEMENTS // max(1, columns))
    if rows <= most:
        return [(0, rows)]
    length = max(1, most // STRETCHES)
    starts = np.linspace(0, rows - length, STRETCHES).astype(int)
    return [(int(start), int(start) + length) for start in starts]


def projection(context: Context, query: dict[str, Any]) -> Answer:
    """Rows (tokens) of a tensor on the two principal directions of the *first* step that recorded it in the
    same shape. The basis and the centre stay, so that a step can be compared with another."""
    facts = named(context, query["tensor"])
    name, step = facts.name, query["step"]
    shape = facts.shape_at(step)
    rows, columns = matrix_shape(shape)
    shown = min(rows, _MOST_POINTS)
    values = context.source.window(name, step, (0, shown), (0, columns)).values
    begin = facts.first_like(step)
    stamp = facts.stamp(begin)
    basis = context.bases.get((name, shape))
    if basis is None or (basis[0], basis[3]) != (begin, stamp):
        first = (
            values if begin == step else context.source.window(name, begin, (0, shown), (0, columns)).values
        )
        basis = (begin, *_basis(first), stamp)
        if len(context.bases) >= _MOST_BASES:
            context.bases.clear()
        context.bases[name, shape] = basis
    at, directions, centre, _ = basis
    centred = _finite(values - centre)
    points = centred @ directions.T
    total = float((centred**2).sum())
    return Answer(
        facts={
            "basis_step": at,
            "rows": rows,
            "explained": [float((points[:, axis] ** 2).sum()) / total if total else None for axis in (0, 1)],
        },
        arrays={"points": np.asarray(points, np.float32)},
    )


def _finite(values: NDArray[Any]) -> NDArray[np.float64]:
    """``values`` with 0 for what is not finite: products of the largest finite number would overflow."""
    found: NDArray[np.float64] = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    return found


def _basis(values: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two directions [2, channels] and the centre; the sign is the one that makes the largest component
    positive."""
    known = _finite(values.astype(np.float64))
    centre = known.mean(axis=0)
    rows = known[np.unique(np.linspace(0, len(known) - 1, _BASIS_ROWS).astype(int))] - centre
    # By the rows' products with each other: there are fewer rows than channels.
    strengths, vectors = np.linalg.eigh(rows @ rows.T)
    directions = []
    for strength, vector in list(zip(strengths, vectors.T, strict=True))[::-1][:2]:
        directions.append(vector @ rows / np.sqrt(strength) if strength > 1e-20 else np.zeros(rows.shape[1]))
    found = np.zeros((2, values.shape[1]))
    for index, each in enumerate(directions):
        found[index] = each * (np.sign(each[np.abs(each).argmax()]) or 1.0)
    return found, centre
