"""Tensors and token sequences out of the files of all nodes: keys, assembly from shards, overviews."""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ScopeError
from mt_megatron.scope.format.tokens import combined

from .data import Sequence, Tensor, TensorKey
from .node import NodeFile, loaded
from .statistic_reading import Range
from .tensors import FACTOR, LEVELS, Chunk, Floats, chunk_values, matrix_shape, reduced, unhalved

Window = tuple[int, int, int, int]
"""First row, rows, first column, columns."""

Reduce = Literal["peak", "mean"]

_FEWEST_PIXELS = 1.0
"""Overview pixels for each one asked for, from which on an overview is fine enough."""


@dataclass(frozen=True, kw_only=True)
class _Shard:
    node: NodeFile
    number: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    encoding: str
    tile_rows: int
    error: float


def tensor_keys(ranges: Iterable[Range], path: str | None, what: str | None) -> tuple[TensorKey, ...]:
    """Keys of the tensors in ``ranges``; those of several nodes are one."""
    found: dict[tuple[Any, ...], TensorKey] = {}
    for node, own, session, low, high in ranges:
        rows = node.rows(
            "SELECT tensor.step, text, what, microbatch, indices, tensor.shape, perturbed, bytes, "
            "(SELECT min(rank) FROM shard WHERE shard.tensor = tensor.id) AS first "
            "FROM tensor JOIN path ON path.id = tensor.path WHERE session=? AND tensor.step BETWEEN ? AND ? "
            "AND (? IS NULL OR text=?) AND (? IS NULL OR what=?)",
            (own, low, high, path, path, what, what),
        )
        for step, text, kind, microbatch, indices, shape, perturbed, size, rank in rows:
            if rank is None:
                continue
            key = (step, session.number, text, kind, microbatch, indices)
            before = found.get(key)
            found[key] = TensorKey(
                step=step,
                session=session.number,
                path=text,
                what=kind,
                microbatch=microbatch,
                index=loaded(indices),
                shape=tuple(json.loads(shape)),
                perturbed=perturbed,
                bytes=size + (before.bytes if before is not None else 0),
                rank=rank if before is None else before.rank,
            )
    return tuple(found[key] for key in sorted(found))


def assembled(files: list[tuple[NodeFile, int]], key: TensorKey, window: Window | None) -> Tensor:
    """All shards of ``key`` in one array, or a window of it."""
    shards = _shards(files, key)
    rows, columns = matrix_shape(key.shape)
    view = (0, rows, 0, columns) if window is None else _checked(window, key)
    values = np.full((view[1], view[3]), np.nan, np.float32)
    covered = np.zeros((view[1], view[3]), np.bool_)
    for shard in shards:
        _fill(values, covered, shard, key.shape, view)
    return Tensor(
        key=key,
        values=values.reshape(key.shape) if window is None else values,
        missing=float(1 - covered.mean()) if covered.size else 0.0,
        error=max(shard.error for shard in shards),
        encodings=tuple(sorted({shard.encoding for shard in shards})),
    )


def overview(
    files: list[tuple[NodeFile, int]],
    key: TensorKey,
    rows: int,
    columns: int,
    window: Window | None,
    reduce: Reduce,
) -> Tensor:
    """At most ``rows`` x ``columns`` values of ``key`` or a window of it, each of a block."""
    if rows < 1 or columns < 1:
        raise ScopeError(f"found an overview of {rows} x {columns} values; expected 1 x 1 or more")
    all_rows, all_columns = matrix_shape(key.shape)
    view = (0, all_rows, 0, all_columns) if window is None else _checked(window, key)
    shards = _shards(files, key)
    block = max(-(-view[1] // rows), -(-view[3] // columns), 1)
    for level in range(LEVELS, 0, -1):
        if FACTOR**level <= block * _FEWEST_PIXELS:
            stored = _from_level(shards, key, level, view, reduce)
            if stored is not None:
                found, error = stored
                left = max(-(-found.shape[0] // rows), -(-found.shape[1] // columns), 1)
                if reduce == "mean" and left > 1:
                    found = _means_of_blocks(found, left, FACTOR**level, view)
                else:
                    found = _again(found, left, reduce)
                return _as_tensor(key, shards, found, FACTOR**level * left, error)
    values = np.full((view[1], view[3]), np.nan, np.float32)
    covered = np.zeros(values.shape, np.bool_)
    for shard in shards:
        _fill(values, covered, shard, key.shape, view)
    return _as_tensor(key, shards, _again(values, block, reduce), block)


def _as_tensor(
    key: TensorKey, shards: list[_Shard], values: Floats, block: int, error: float = 0.0
) -> Tensor:
    """``error``: of the values besides that of the shards' encodings."""
    return Tensor(
        key=key,
        values=values,
        missing=float(np.isnan(values).mean()) if values.size else 0.0,
        error=max(shard.error for shard in shards) + error,
        encodings=tuple(sorted({shard.encoding for shard in shards})),
        block=block,
    )


def _again(values: Floats, block: int, reduce: Reduce) -> Floats:
    if block == 1:
        return values
    found: Floats = reduced(values, block)[0 if reduce == "peak" else 1]
    return found


def _means_of_blocks(values: Floats, left: int, block: int, view: Window) -> Floats:
    """Means over ``left`` x ``left`` means of blocks, of which those at the ends are smaller."""
    total = values.astype(np.float64)
    for axis, elements in ((0, view[1]), (1, view[3])):
        starts = np.arange(0, elements, block)
        sizes = np.minimum(block, elements - starts).astype(np.float64)
        at = np.arange(0, len(starts), left)
        weights = sizes.reshape((-1, 1) if axis == 0 else (1, -1))
        sums = np.add.reduceat(sizes, at).reshape((-1, 1) if axis == 0 else (1, -1))
        total = np.add.reduceat(total * weights, at, axis=axis) / sums
    return total.astype(np.float32)


def _checked(window: Window, key: TensorKey) -> Window:
    rows, columns = matrix_shape(key.shape)
    first, high, left, wide = window
    if min(window) < 0 or not high or not wide or first + high > rows or left + wide > columns:
        raise ScopeError(f"found the window {window}; expected one within {rows} rows and {columns} columns")
    return first, high, left, wide


def _shards(files: list[tuple[NodeFile, int]], key: TensorKey) -> list[_Shard]:
    indices = json.dumps(dict(sorted(key.index.items())), separators=(",", ":"))
    found = []
    for node, own in files:
        path = node.path_id(key.path)
        if path is None:
            continue
        for number, offset, shape, encoding, tile_rows, error in node.rows(
            "SELECT shard.id, offset, shard.shape, encoding, tile_rows, error FROM shard JOIN tensor "
            "ON tensor.id = shard.tensor WHERE session=? AND step=? AND path=? AND what=? AND microbatch=? "
            "AND indices=?",
            (own, key.step, path, key.what, key.microbatch, indices),
        ):
            found.append(
                _Shard(
                    node=node,
                    number=number,
                    offset=tuple(json.loads(offset)),
                    shape=tuple(json.loads(shape)),
                    encoding=encoding,
                    tile_rows=tile_rows,
                    error=0.0 if error is None else error,
                )
            )
    if not found:
        raise ScopeError(
            f"{key.what} of {key.path} at step {key.step} is no longer kept; the run's bound has room for "
            "the newest (--scope-retain-mib)"
        )
    return found


def _fill(
    values: Floats, covered: NDArray[np.bool_], shard: _Shard, whole: Ordered[int], view: Window
) -> None:
    """Write the part of ``shard`` that lies in the ``view`` of the whole matrix."""
    if not all(shard.shape):
        return
    rows, columns = matrix_shape(shard.shape)
    # Row of the whole matrix of each row of the shard.
    index = np.zeros(1, np.int64)
    for size, at, full in zip(shard.shape[:-1], shard.offset[:-1], whole[:-1], strict=True):
        index = (index[:, None] * full + at + np.arange(size)).reshape(-1)
    left = shard.offset[-1] if shard.offset else 0
    wanted = (index >= view[0]) & (index < view[0] + view[1])
    first, last = max(left, view[2]), min(left + columns, view[2] + view[3])
    if not wanted.any() or first >= last:
        return
    own = np.flatnonzero(wanted)
    for chunk in _chunks(shard, int(own[0]), int(own[-1])):
        within = own[(own >= chunk.first) & (own < chunk.first + chunk.rows)]
        if not len(within):
            continue
        part = chunk_values(shard.encoding, chunk, shard.tile_rows)
        target = (index[within] - view[0], slice(first - view[2], last - view[2]))
        values[target] = part[within - chunk.first, first - left : last - left]
        covered[target] = True


def _chunks(shard: _Shard, first: int, last: int) -> Iterable[Chunk]:
    start = shard.node.rows(
        "SELECT max(first) FROM chunk WHERE shard=? AND level=0 AND first<=?", (shard.number, first)
    )[0][0]
    for at, rows, columns, data, scale, low in shard.node.rows(
        "SELECT first, rows, columns, data, scale, low FROM chunk WHERE shard=? AND level=0 "
        "AND first BETWEEN ? AND ? ORDER BY first",
        (shard.number, start or 0, last),
    ):
        yield Chunk(level=0, first=at, rows=rows, columns=columns, data=data, scale=scale, low=low)


def _from_level(
    shards: list[_Shard], key: TensorKey, level: int, view: Window, reduce: Reduce
) -> tuple[Floats, float] | None:
    """The stored overview of ``level`` and its rounding where all shards have it, it has room for their
    values, and the window lies on its blocks."""
    block = FACTOR**level
    rows, columns = matrix_shape(key.shape)
    ends = (view[0] + view[1], view[2] + view[3])
    on_blocks = view[0] % block == view[2] % block == 0 and all(
        end % block == 0 or end == full for end, full in zip(ends, (rows, columns), strict=True)
    )
    if not on_blocks:
        return None
    found = np.full((-(-rows // block), -(-columns // block)), np.nan, np.float32)
    which, error = 0 if reduce == "peak" else 1, 0.0
    for shard in shards:
        row = shard.node.rows(
            "SELECT rows, columns, data, scale FROM chunk WHERE shard=? AND level=? AND first=0",
            (shard.number, level),
        )
        if not row:
            return None
        high, wide, data, scale = row[0]
        half = np.frombuffer(data, "<f2").reshape(2, high, wide)[which]
        part = unhalved(half, None if scale is None else float(np.frombuffer(scale, "<f4")[which]))
        if part is None:
            return None
        error = max(error, part[1])
        top, left = (each // block for each in shard.offset[-2:])
        found[top : top + high, left : left + wide] = part[0]
    window: Floats = found[view[0] // block : -(-ends[0] // block), view[2] // block : -(-ends[1] // block)]
    return window, error


def sequences(
    ranges: Iterable[Range], step: int, path: str | None, sample: int | None
) -> tuple[Sequence, ...]:
    """Token sequences of ``step``, of ``path`` and ``sample`` alone if given: pieces of one sample, by
    position, ranks' words put together."""
    found: dict[tuple[Any, ...], dict[int, list[dict[str, Any]]]] = {}
    for node, own, session, *_ in ranges:
        columns = "position, parts, count, best, ids, loss, entropy, lse, top_ids, top_logprobs"
        for text, microbatch, number, *row in node.rows(
            f"SELECT text, microbatch, sample, {columns} FROM tokens JOIN path ON path.id = tokens.path "
            "WHERE session=? AND step=? AND (? IS NULL OR text=?) AND (? IS NULL OR sample=?) ORDER BY rank",
            (own, step, path, path, sample, sample),
        ):
            piece = _piece(*row)
            pieces = found.setdefault((session.number, text, number, microbatch), {})
            pieces.setdefault(piece["position"], []).append(piece)
    return tuple(
        _sequence(step, key, [_whole_piece(each) for each in found[key].values()]) for key in sorted(found)
    )


def _piece(position: int, parts: int, count: int, best: int, *raw: Any) -> dict[str, Any]:
    """One rank's tokens; keys as in the frame."""
    ids, loss, entropy, lse, top_ids, top_logprobs = raw

    def floats(array: bytes | None) -> NDArray[np.float64]:
        return np.full(count, np.nan) if array is None else np.frombuffer(array, "<f4").astype(np.float64)

    found: dict[str, Any] = {
        "position": position,
        "parts": parts,
        "ids": np.frombuffer(ids, "<i8"),
        "loss": floats(loss),
        "entropy": floats(entropy),
        "lse": floats(lse),
        "top_ids": np.zeros((count, 0), np.int64),
        "top_logprobs": np.zeros((count, 0)),
    }
    if top_ids is not None and top_logprobs is not None:
        found["top_ids"] = np.frombuffer(top_ids, "<i8").reshape(count, best)
        found["top_logprobs"] = np.frombuffer(top_logprobs, "<f4").astype(np.float64).reshape(count, best)
    return found


def _whole_piece(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of one position: the last of replicas, or tensor-parallel ranks' words combined."""
    last = pieces[-1]
    if last["parts"] == 1:
        return last | {"missing": 0}
    same = [piece for piece in pieces if len(piece["ids"]) == len(last["ids"])]
    found = combined(same) | {"missing": max(0, last["parts"] - len(same))}
    if found["missing"]:
        # Of a part of the vocabulary alone each of these would be a wrong number.
        found |= {name: np.full_like(found[name], np.nan) for name in ("loss", "entropy", "top_logprobs")}
    return found


def _sequence(step: int, key: tuple[Any, ...], pieces: list[dict[str, Any]]) -> Sequence:
    most = max(piece["top_ids"].shape[1] for piece in pieces)
    arrays: dict[str, list[NDArray[Any]]] = {}
    for piece in pieces:
        more = ((0, 0), (0, most - piece["top_ids"].shape[1]))
        whole = {
            "position": piece["position"] + np.arange(len(piece["ids"])),
            "ids": piece["ids"],
            "loss": np.asarray(piece["loss"], np.float64),
            "entropy": np.asarray(piece["entropy"], np.float64),
            "top_ids": np.pad(piece["top_ids"], more, constant_values=-1),
            "top_logprobs": np.pad(np.asarray(piece["top_logprobs"]), more, constant_values=np.nan),
        }
        for name, array in whole.items():
            arrays.setdefault(name, []).append(array)
    joined = {name: np.concatenate(each) for name, each in arrays.items()}
    # Pieces that overlap: the later one wins.
    _, last = np.unique(joined["position"][::-1], return_index=True)
    order = len(joined["position"]) - 1 - last
    return Sequence(
        step=step,
        session=key[0],
        path=key[1],
        sample=key[2],
        microbatch=key[3],
        missing_parts=max(piece["missing"] for piece in pieces),
        **{name: array[order] for name, array in joined.items()},
    )
