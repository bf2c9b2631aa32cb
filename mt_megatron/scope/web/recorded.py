"""The page's view of a recording: ``recording.reader.Recording`` as a ``Source``.

A view asks for the same tables again and again; they are kept until the files change, and not read more
often than their reading costs: a growing recording of a long run must not keep the sidecar busy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ScopeError
from mt_megatron.host.bounds import Recent
from mt_megatron.scope.recording import data as recorded
from mt_megatron.scope.recording.files import add_bookmark, read_requests
from mt_megatron.scope.recording.reader import Recording

from .source import (
    STEP_COLUMNS,
    Alert,
    Bookmark,
    By,
    Dropped,
    Matrix,
    Module,
    TensorFacts,
    TensorName,
    TokenKey,
    TokenRow,
)
from .tiles import TILE, matrix_shape, pooled
from .words import words_of

LOOK_S = 0.25
"""Between two looks whether the files have changed."""

REST = 8.0
"""A table is read again after so many times the time that its reading took, at the earliest."""

KEPT_BYTES = 64 * 2**20
"""Series, vectors and tokens that are kept, of which there are as many as somebody asks for; a larger one is
kept alone. The whole run's tables are kept besides: of each there is one."""

ATTENTION_MEAN = "attention_mean"
"""Kind of tensors that are made here: the mean of a layer's attention over its recorded heads."""

Value = TypeVar("Value")


class RecordedSource:
    """A ``Source`` of the recording of one run, growing or ended."""

    def __init__(self, recording: Recording, name: str, *, is_live: Callable[[], bool] = lambda: False):
        """``name``: the run's, for people. ``is_live``: whether ranks may be connected."""
        self._recording = recording
        self._name = name
        self._is_live = is_live
        self._lock = threading.Lock()
        self._mark: tuple[Any, ...] = ()
        self._revision = 0
        self._looked = -1e9
        self._tables: dict[str, tuple[int, float, Any]] = {}
        self._kept: Recent[Hashable, tuple[int, float, Any]] = Recent(KEPT_BYTES)

    def revision(self) -> int:
        """As ``Source``."""
        with self._lock:
            if time.monotonic() - self._looked >= LOOK_S:
                self._looked = time.monotonic()
                mark = tuple(_state(path) for path in self._paths())
                if mark != self._mark:
                    self._mark, self._revision = mark, self._revision + 1
            return self._revision

    def _paths(self) -> list[str]:
        found = []
        for path in self._recording.files.nodes():
            found += [str(path), f"{path}-wal"]
        return [*found, str(self._recording.files.bookmarks), str(self._recording.files.requests)]

    def _known(self, key: Hashable, read: Callable[[], Value]) -> Value:
        """What ``read`` gave last, if it is still true or too young to be read again. A key that is a text
        names a table of the whole run."""
        revision = self.revision()
        with self._lock:
            kept = self._tables.get(key) if isinstance(key, str) else self._kept.get(key)
            if kept is not None and (kept[0] == revision or time.monotonic() < kept[1]):
                value: Value = kept[2]
                return value
        begin = time.monotonic()
        value = read()
        end = time.monotonic()
        with self._lock:
            entry = (revision, end + REST * (end - begin), value)
            if isinstance(key, str):
                self._tables[key] = entry
            else:
                self._kept.put(key, entry, min(size_of(value), KEPT_BYTES))
        return value

    # The run.

    def facts(self) -> Mapping[str, Any]:
        """As ``Source``."""
        return {**self._known("facts", self._facts), "live": self._is_live()}

    def _facts(self) -> dict[str, Any]:
        folder = str(self._recording.files.root.resolve().parent)
        try:
            found = self._recording.facts()
        except ScopeError as error:  # no rank has come yet
            return {
                "name": self._name,
                "folder": folder,
                "world_size": 0,
                "ranks": [],
                "model": {},
                "note": str(error),
            }
        model = dict(found.model)
        total = model.pop("train_iters", None)
        started = found.sessions[0].started_ns
        return {
            "name": self._name,
            "folder": folder,
            "world_size": found.session.world_size,
            "ranks": [
                {
                    "rank": each.rank,
                    "host": each.host,
                    "node": each.node,
                    "pid": each.pid,
                    "ended": each.ended_ns is not None,
                    **dict(each.at),
                }
                for each in found.ranks
            ],
            "layout": dict(found.layout),
            "model": model,
            "sessions": len(found.sessions),
            "steps_total": int(total) if isinstance(total, int | float) else None,
            "started": started / 1e9 if started else None,
            "requests": self._requests(),
        }

    def _requests(self) -> list[str]:
        try:
            return read_requests(self._recording.files)
        except (ScopeError, OSError):
            return []

    def modules(self) -> Sequence[Module]:
        """As ``Source``."""
        return self._known("modules", self._modules)

    def _modules(self) -> list[Module]:
        try:
            found = self._recording.modules()
        except ScopeError:
            return []
        rows = [
            Module(path=each.path, class_name=each.class_name, parameters=each.parameters) for each in found
        ]
        # The reader gives children before their parents; a tree has a parent above its children.
        rank = {row.path: place for place, row in enumerate(rows)}
        first: dict[str, int] = {}
        for row in rows:
            parts = row.path.split(".")
            for length in range(1, len(parts) + 1):
                above = ".".join(parts[:length])
                first[above] = min(first.get(above, rank[row.path]), rank[row.path])

        def place(row: Module) -> tuple[int, ...]:
            parts = row.path.split(".")
            return tuple(first[".".join(parts[:length])] for length in range(1, len(parts) + 1))

        return sorted(rows, key=place)

    # Steps and statistics.

    def steps(self) -> Mapping[str, NDArray[Any]]:
        """As ``Source``."""
        return self._known("steps", self._steps)

    def _steps(self) -> dict[str, NDArray[Any]]:
        found = self._recording.steps()
        table: dict[str, NDArray[Any]] = {"i": found.step, "perturbed": found.perturbed}
        for name in STEP_COLUMNS:
            column = found.time_ns if name == "t" else getattr(found, name)
            table[name] = np.asarray(column, np.float64)
        return table

    def statistics(self) -> Mapping[str, Sequence[str]]:
        """As ``Source``."""
        return self._known("statistics", self._statistics)

    def _statistics(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for each in self._recording.names():
            found.setdefault(each.path, []).append(each.statistic)
        return found

    def series(self, path: str, statistic: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """As ``Source``."""
        self._has(path, statistic)
        return self._known(("series", path, statistic), lambda: self._series(path, statistic))

    def _series(self, path: str, statistic: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        found = self._recording.series(path, statistic).only_whole()
        return found.step, found.value

    def vectors(self, path: str, statistic: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """As ``Source``."""
        self._has(path, statistic)
        return self._known(("vectors", path, statistic), lambda: self._vectors(path, statistic))

    def _vectors(self, path: str, statistic: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        found = self._recording.series(path, statistic, vectors=True).only_whole()
        if found.vector is None or not found.vector.size:
            return np.zeros(0, np.int64), np.zeros((0, 0))
        kept = ~np.isnan(found.vector).all(axis=1)
        return found.step[kept], found.vector[kept]

    def _has(self, path: str, statistic: str) -> None:
        if statistic not in self.statistics().get(path, ()):
            raise KeyError(f"found no values of {statistic!r} of {path!r}")

    # Tensors.

    def tensors(self) -> Sequence[TensorFacts]:
        """As ``Source``."""
        return self._known("tensors", self._tensors)[0]

    def _tensors(self) -> tuple[list[TensorFacts], dict[tuple[TensorName, int], recorded.TensorKey]]:
        keys: dict[tuple[TensorName, int], recorded.TensorKey] = {}
        steps: dict[TensorName, list[int]] = {}
        names: dict[tuple[Any, ...], TensorName] = {}
        for key in self._recording.tensors():
            index = tuple(sorted((str(name), int(value)) for name, value in key.index.items()))
            parts = (key.path, key.what, key.microbatch, index)
            name = names.get(parts)
            if name is None:
                name = TensorName(path=key.path, what=key.what, microbatch=key.microbatch, index=index)
                names[parts] = name
            if (name, key.step) not in keys:
                steps.setdefault(name, []).append(key.step)
            keys[name, key.step] = key  # keys come by step and session: the later session's stays
        facts = [
            TensorFacts(
                name=name,
                steps=tuple(sorted(at)),
                shapes=tuple(keys[name, step].shape for step in sorted(at)),
                stamps=tuple(_stamp(keys[name, step]) for step in sorted(at)),
            )
            for name, at in steps.items()
        ]
        facts += _means(facts)
        return sorted(facts, key=lambda each: (each.name.what, _natural(each.name))), keys

    def _heads(self, mean: TensorName, step: int) -> list[TensorName]:
        keys = self._known("tensors", self._tensors)[1]
        return [name for name, at in keys if at == step and _mean_name(name) == mean]

    def _key(self, name: TensorName, step: int) -> recorded.TensorKey:
        key = self._known("tensors", self._tensors)[1].get((name, step))
        if key is None:
            raise KeyError(f"found no {name.text} at step {step}")
        return key

    def window(self, name: TensorName, step: int, rows: tuple[int, int], columns: tuple[int, int]) -> Matrix:
        """As ``Source``."""
        if name.what == ATTENTION_MEAN and (heads := self._heads(name, step)):
            return _mean([self.window(head, step, rows, columns) for head in heads])
        key = self._key(name, step)
        all_rows, all_columns = matrix_shape(key.shape)
        if not (0 <= rows[0] < rows[1] <= all_rows and 0 <= columns[0] < columns[1] <= all_columns):
            raise KeyError(f"found rows {rows} and columns {columns} of {all_rows} x {all_columns}")
        view = (rows[0], rows[1] - rows[0], columns[0], columns[1] - columns[0])
        return _matrix(self._taken(lambda: self._recording.tensor(key, view)), view[1], view[3])

    def overview(self, name: TensorName, step: int, block: int, by: By) -> Matrix:
        """As ``Source``."""
        if name.what == ATTENTION_MEAN and (heads := self._heads(name, step)):
            all_rows, all_columns = matrix_shape(self._key(heads[0], step).shape)
            # The largest mean is not the mean of the largest: from whole rows, some at a time.
            parts = [
                self.window(name, step, (first, min(first + TILE * block, all_rows)), (0, all_columns))
                for first in range(0, all_rows, TILE * block)
            ]
            values = np.concatenate([pooled(part.values, block, by) for part in parts])
            return replace(parts[0], values=values, missing=float(np.mean([part.missing for part in parts])))
        key = self._key(name, step)
        all_rows, all_columns = matrix_shape(key.shape)
        rows, columns = -(-all_rows // block), -(-all_columns // block)
        found = self._taken(
            lambda: self._recording.overview(key, rows, columns, reduce="peak" if by == "max" else "mean")
        )
        return _matrix(found, *found.values.shape)

    def _taken(self, read: Callable[[], recorded.Tensor]) -> recorded.Tensor:
        try:
            return read()
        except ScopeError as error:  # retention has removed it meanwhile
            raise KeyError(str(error)) from None

    # Tokens.

    def token_rows(self) -> Sequence[TokenKey]:
        """As ``Source``."""
        return self._known("token rows", self._token_rows)

    def _token_rows(self) -> list[TokenKey]:
        steps = self._recording.token_steps()[-MOST_TOKEN_STEPS:]
        if not steps:
            return []
        return [TokenKey(*each) for each in self._recording.token_keys(steps[0], steps[-1])]

    def _sequences(self, key: TokenKey) -> Sequence[recorded.Sequence]:
        def read() -> Sequence[recorded.Sequence]:
            return self._recording.tokens(key.step, path=key.path, sample=key.sample)

        return self._known(("tokens", key.step, key.path, key.sample), read)

    def tokens(self, key: TokenKey) -> TokenRow:
        """As ``Source``."""
        for each in self._sequences(key):
            if each.microbatch == key.microbatch:
                return TokenRow(
                    position=each.position,
                    ids=each.ids,
                    loss=np.asarray(each.loss, np.float32),
                    entropy=np.asarray(each.entropy, np.float32),
                    top_ids=each.top_ids,
                    top_logprobs=np.asarray(each.top_logprobs, np.float32),
                )
        raise KeyError(f"found no tokens of sample {key.sample} at step {key.step} ({key.path})")

    def text_of(self, ids: Sequence[int]) -> Sequence[str] | None:
        """As ``Source``: by the run's tokenizer, where its file is still there and the same."""
        words = words_of((self.facts().get("model") or {}).get("tokenizer"))
        return None if words is None else [words(each) for each in ids]

    # What went wrong, and what people marked.

    def alerts(self) -> Sequence[Alert]:
        """As ``Source``."""
        return self._known("alerts", self._alerts)

    def _alerts(self) -> list[Alert]:
        return [
            Alert(
                step=each.step,
                text=each.text,
                path=each.path,
                statistic=each.statistic,
                value=each.value,
                low=each.low,
                high=each.high,
            )
            for each in self._recording.alerts(current=True)
        ]

    def bookmarks(self) -> Sequence[Bookmark]:
        """As ``Source``."""
        try:
            return [Bookmark(step=mark.step, text=mark.text) for mark in self._recording.bookmarks()]
        except ScopeError:  # what is missing says so
            return []

    def bookmark(self, mark: Bookmark) -> None:
        """As ``Source``."""
        add_bookmark(self._recording.files, mark.step, mark.text)

    def dropped(self) -> Dropped:
        """As ``Source``."""
        return self._known("dropped", self._dropped)

    def _dropped(self) -> Dropped:
        rows = self._recording.dropped()
        notes = []
        for source in ("rank", "sidecar", "checks", "page"):
            frames = sum(each.frames for each in rows if each.source == source)
            if frames:
                ranks = sorted({each.rank for each in rows if each.source == source})
                notes.append(f"{source}: {frames:,} frames (ranks {', '.join(map(str, ranks[:8]))})")
        notes += [
            f"node {each.node}: {each.steps:,} steps of {each.kind} ({each.first_step} to {each.last_step}) "
            "removed to stay within --scope-retain-mib"
            for each in self._recording.thinned()[-4:]
        ]
        notes += self._missing()
        return Dropped(
            frames=sum(each.frames for each in rows),
            bytes=sum(each.bytes for each in rows),
            notes=tuple(notes),
        )

    def _missing(self) -> list[str]:
        notes = []
        sessions = self._recording.sessions()
        if sessions and sessions[-1].missing_ranks > 0:
            notes.append(f"{sessions[-1].missing_ranks} ranks are in no file: their parts are missing")
        try:
            self._recording.bookmarks()
        except ScopeError as error:
            notes.append(f"no bookmarks: {error}")
        return notes


def _mean_name(name: TensorName) -> TensorName | None:
    """Name of the mean over the heads that ``name`` is one of."""
    if name.what != "attention":
        return None
    return replace(name, what=ATTENTION_MEAN, index=tuple(each for each in name.index if each[0] != "head"))


def _means(facts: Sequence[TensorFacts]) -> list[TensorFacts]:
    """Means over the heads of each attention map, at the steps where several heads have one shape."""
    heads: dict[TensorName, list[TensorFacts]] = {}
    for each in facts:
        if (mean := _mean_name(each.name)) is not None:
            heads.setdefault(mean, []).append(each)
    found = []
    for mean, members in heads.items():
        at: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for each in members:
            for row in zip(each.steps, each.shapes, each.stamps, strict=True):
                at.setdefault(row[0], []).append(row[1:])
        kept = {
            step: rows for step, rows in at.items() if len(rows) > 1 and len({row[0] for row in rows}) == 1
        }
        if kept:
            steps = tuple(sorted(kept))
            shapes = tuple(kept[step][0][0] for step in steps)
            stamps = tuple(sum(stamp for _, stamp in kept[step]) % 2**53 for step in steps)
            found.append(TensorFacts(name=mean, steps=steps, shapes=shapes, stamps=stamps))
    return found


def _mean(parts: Sequence[Matrix]) -> Matrix:
    return Matrix(
        values=np.mean([part.values for part in parts], axis=0, dtype=np.float32),
        error=float(np.mean([part.error for part in parts])),
        missing=max(part.missing for part in parts),
        perturbed=parts[0].perturbed,
    )


MOST_TOKEN_STEPS = 400
"""Newest steps whose token sequences are listed."""


def size_of(value: Any) -> int:
    """Bytes of arrays and of what holds them, about."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes) + 128
    if isinstance(value, list | tuple):
        return 64 + sum(size_of(each) for each in value)
    if is_dataclass(value):
        return 64 + sum(size_of(each) for each in vars(value).values())
    return 64


def _matrix(found: recorded.Tensor, rows: int, columns: int) -> Matrix:
    return Matrix(
        values=found.values.reshape(rows, columns),
        error=found.error,
        missing=found.missing,
        perturbed=found.key.perturbed,
    )


def _natural(name: TensorName) -> tuple[Any, ...]:
    """Layer 2 before layer 10."""
    parts = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.path.split("."))
    return parts, name.microbatch, name.index


def _state(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _stamp(key: recorded.TensorKey) -> int:
    """Bytes grow with each shard; a browser counts exactly up to 2^53."""
    return (key.bytes % 2**42) * 1024 + key.session % 1024
