"""A run's recording, read while it is written or later: the files of all its nodes as one.

``open_recording(RUN)`` is for the page, the report, the command line and whoever writes a notebook. All
methods read what is there now, can be called from any thread, and raise ``ScopeError`` for damaged files.
Where ``session`` is None they give what the run went on from: of a step that was recorded twice, the later
session's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.errors import ScopeError
from mt_megatron.scope.format.statistics import STATISTICS

from .data import (
    AlertRecord,
    Dropped,
    Facts,
    Floats,
    Module,
    Name,
    RankFacts,
    RankStep,
    Sequence,
    Series,
    Session,
    Steps,
    Tensor,
    TensorKey,
    Thinned,
    Value,
)
from .files import Bookmark, ScopeFiles, existing_recording, read_bookmarks
from .node import NodeFile, loaded, merged_sessions
from .order import execution_order, layer_of
from .statistic_reading import are_marked, number_of, series_of, values_of
from .tensor_reading import Reduce, Window, assembled, overview, sequences, tensor_keys

LOOK_SECONDS = 0.5
"""Between two looks for files of further nodes."""

_NO_FILES = (
    "the recording's files are gone; expected node-HOST-NNNNN.sqlite in {}. Give the run's folder again"
)


def open_recording(run: Path | str) -> Recording:
    """The recording of ``run``, a run's folder or its ``scope`` folder.

    Raises ``ScopeError`` where there is none and for a file that is damaged, foreign or of another version.
    """
    return Recording(existing_recording(run))


class Recording:
    """All nodes' files of a run. Use ``open_recording``; close it, or use it in ``with``."""

    def __init__(self, files: ScopeFiles) -> None:
        self.files = files
        self._lock = threading.Lock()
        self._open: dict[Path, NodeFile] = {}
        self._looked = -1e9
        self.nodes()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            for node in self._open.values():
                node.close()
            self._open.clear()

    def nodes(self) -> list[NodeFile]:
        """Files of the nodes, by number; new ones are found within ``LOOK_SECONDS``."""
        with self._lock:
            if time.monotonic() - self._looked > LOOK_SECONDS:
                for path in self.files.nodes():
                    if path not in self._open:
                        self._open[path] = NodeFile(path)
                self._looked = time.monotonic()
            if not self._open:
                raise ScopeError(_NO_FILES.format(self.files.root))
            return sorted(self._open.values(), key=lambda node: (node.node, str(node.path)))

    # Who and what.

    def sessions(self) -> tuple[Session, ...]:
        """Starts of the training processes and rewinds, oldest first."""
        return merged_sessions(self.nodes())

    def facts(self, session: int | None = None) -> Facts:
        """Layout, model and ranks of a session; of the last one by default."""
        sessions = self.sessions()
        if not sessions:
            raise ScopeError(
                f"found no rank in the recording in {self.files.root}; expected the first within seconds of "
                "the run's start. Look again later, or read the sidecar's log beside it"
            )
        chosen = sessions[-1] if session is None else _chosen(sessions, session)
        layout: dict[str, Any] = {}
        model: dict[str, Any] = {}
        ranks = []
        for node, own in self._having(chosen):
            row = node.rows("SELECT layout, model FROM session WHERE id=?", (own,))[0]
            layout, model = layout or loaded(row[0]), model or loaded(row[1])
            columns = "rank, place, host, pid, connected_ns, bye_ns"
            for rank, place, host, pid, since, ended in node.rows(
                f"SELECT {columns} FROM rank WHERE session=?", (own,)
            ):
                ranks.append(
                    RankFacts(
                        rank=rank,
                        at=loaded(place),
                        host=host,
                        pid=pid,
                        node=node.node,
                        connected_ns=since,
                        ended_ns=ended,
                    )
                )
        return Facts(
            session=chosen,
            layout=layout,
            model=model,
            ranks=tuple(sorted(ranks, key=lambda each: each.rank)),
            sessions=sessions,
        )

    def modules(self, session: int | None = None) -> tuple[Module, ...]:
        """Modules of the whole model, in execution order (children before their parent), of the last session
        by default."""
        facts = self.facts(session)
        stage = {each.rank: int(each.at.get("pp", 0) or 0) for each in facts.ranks}
        lists: dict[int, list[str]] = {}
        held: dict[str, tuple[str, int, list[int]]] = {}
        for node, _ in self._having(facts.session):
            for rank, path, name, parameters in node.modules(facts.session):
                lists.setdefault(rank, []).append(path)
                before = held.get(path, (name, 0, []))
                held[path] = (name, max(before[1], parameters), [*before[2], rank])
        order = execution_order(
            lists[rank] for rank in sorted(lists, key=lambda rank: (stage.get(rank, 0), rank))
        )
        return tuple(
            Module(
                path=path,
                class_name=held[path][0],
                layer=layer_of(path),
                parameters=held[path][1],
                ranks=tuple(sorted(set(held[path][2]))),
            )
            for path in order
        )

    def names(self) -> tuple[Name, ...]:
        """Statistics that have values in any session, by path and name."""
        found: set[tuple[str, str]] = set()
        for node in self.nodes():
            found.update(
                (path, statistic)
                for path, statistic in node.rows(
                    "SELECT text, statistic FROM entry JOIN path ON path.id = entry.path"
                )
                if statistic in STATISTICS
            )
        return tuple(
            Name(
                path=path,
                statistic=statistic,
                unit=STATISTICS[statistic].unit,
                meaning=STATISTICS[statistic].meaning,
                layer=layer_of(path),
                is_vector=STATISTICS[statistic].vector is not None,
            )
            for path, statistic in sorted(found)
        )

    # Steps.

    def steps(self, first: int = 0, last: int = 2**62, session: int | None = None) -> Steps:
        """Training steps from ``first`` to ``last``, both included."""
        columns = "seconds, loss, grad_norm, lr, tokens, tokens_per_second, memory_bytes"
        merged: dict[tuple[int, int], list[float | None]] = {}
        for node, own, each, low, high in self._ranges(first, last, session):
            for step, *row in node.rows(
                f"SELECT step, t, {columns}, skipped, ranks FROM step WHERE session=? "
                "AND step BETWEEN ? AND ?",
                (own, low, high),
            ):
                key = (step, each.number)
                merged[key] = row if key not in merged else _one_step(merged[key], row)
        keys = sorted(merged)
        marks = self._marks()
        table = [merged[key] for key in keys]

        def column(index: int) -> Floats:
            return np.asarray([row[index] for row in table], np.float64).reshape(len(table))

        return Steps(
            step=np.asarray([key[0] for key in keys], np.int64),
            session=np.asarray([key[1] for key in keys], np.int64),
            time_ns=np.asarray([row[0] or 0 for row in table], np.int64),
            seconds=column(1),
            loss=column(2),
            grad_norm=column(3),
            lr=column(4),
            tokens=column(5),
            tokens_per_second=column(6),
            memory_bytes=column(7),
            ranks=np.asarray([row[9] for row in table], np.int64),
            skipped=np.asarray([bool(row[8]) for row in table], np.bool_),
            perturbed=are_marked(keys, marks),
        )

    def rank_steps(self, step: int, session: int | None = None) -> tuple[RankStep, ...]:
        """Each rank's part of ``step``, by rank; none where retention has removed them."""
        found = [
            RankStep(rank=rank, seconds=number_of(seconds), memory_bytes=number_of(memory), time_ns=t)
            for node, own, *_ in self._ranges(step, step, session)
            for rank, t, seconds, memory in node.rows(
                "SELECT rank, t, seconds, memory_bytes FROM rank_step WHERE session=? AND step=?", (own, step)
            )
        ]
        return tuple(sorted(found, key=lambda each: each.rank))

    def last_step(self) -> int | None:
        """Largest step that the run went on from; None before the first."""
        found = [
            row[0]
            for node, own, _, low, high in self._ranges(0, 2**62, None)
            for row in node.rows(
                "SELECT max(step) FROM step WHERE session=:s AND step BETWEEN :l AND :h "
                "UNION SELECT max(step) FROM sampled WHERE session=:s AND step BETWEEN :l AND :h",
                {"s": own, "l": low, "h": high},
            )
        ]
        return max((each for each in found if each is not None), default=None)

    def perturbed(self, session: int | None = None) -> tuple[tuple[int, str], ...]:
        """Steps under a perturbation of the lab, with its text."""
        found = {
            (step, text)
            for node, own, _, low, high in self._ranges(0, 2**62, session)
            for step, text in node.rows(
                "SELECT step, text FROM perturbed WHERE session=? AND step BETWEEN ? AND ?", (own, low, high)
            )
        }
        return tuple(sorted(found))

    # Statistics.

    def sampled(self, first: int = 0, last: int = 2**62, session: int | None = None) -> tuple[int, ...]:
        """Steps with statistics, ascending."""
        found = {
            step
            for node, own, _, low, high in self._ranges(first, last, session)
            for (step,) in node.rows(
                "SELECT step FROM sampled WHERE session=? AND step BETWEEN ? AND ?", (own, low, high)
            )
        }
        return tuple(sorted(found))

    def series(
        self,
        path: str,
        statistic: str,
        *,
        first: int = 0,
        last: int = 2**62,
        session: int | None = None,
        vectors: bool = False,
    ) -> Series:
        """Values of ``statistic`` of the module ``path`` from step ``first`` to ``last``, both included, with
        their vectors if ``vectors``: what all ranks' parts combine to, as ``scope.format.statistics`` says.

        Raises ``ScopeError`` for a statistic that does not exist; one without values gives empty arrays.
        """
        return series_of(
            path,
            statistic,
            self._ranges(first, last, session),
            {each.number: each for each in self.sessions()},
            self._marks(),
            vectors=vectors,
        )

    def values(
        self,
        step: int,
        *,
        session: int | None = None,
        statistics: Iterable[str] | None = None,
        vectors: bool = False,
    ) -> tuple[Value, ...]:
        """All statistics of ``step``, by path and name; only those named in ``statistics`` if given."""
        wanted = STATISTICS if statistics is None else statistics
        return values_of(step, self._ranges(step, step, session), wanted, vectors=vectors)

    # Tensors and tokens.

    def tensors(
        self,
        *,
        step: int | None = None,
        path: str | None = None,
        what: str | None = None,
        session: int | None = None,
    ) -> tuple[TensorKey, ...]:
        """Tensors that are kept and match what is given, by step, path, what, micro-batch and index."""
        first, last = (0, 2**62) if step is None else (step, step)
        return tensor_keys(self._ranges(first, last, session), path, what)

    def tensor(self, key: TensorKey, window: Window | None = None) -> Tensor:
        """The tensor of ``key``, assembled from its shards, as float32 of its whole shape; with ``window``
        the rows and columns (first row, rows, first column, columns) of it as a matrix, whose rows are all
        dimensions but the last. Raises ``ScopeError`` where it is no longer kept and for a window outside."""
        return assembled(self._files_of(key), key, window)

    def overview(
        self,
        key: TensorKey,
        rows: int,
        columns: int,
        *,
        window: Window | None = None,
        reduce: Reduce = "peak",
    ) -> Tensor:
        """The tensor of ``key`` as a matrix, or a window of it, in at most ``rows`` x ``columns`` blocks: of
        each the value of the largest absolute value (``peak``) or the ``mean``. Reads stored overviews where
        they are fine enough, so a large map costs no more than the picture."""
        return overview(self._files_of(key), key, rows, columns, window, reduce)

    def tokens(
        self,
        step: int,
        *,
        path: str | None = None,
        sample: int | None = None,
        session: int | None = None,
    ) -> tuple[Sequence, ...]:
        """Sequences of ``step``, assembled from all ranks' pieces, by path and sample; of ``path``
        (``output_layer``, or a layer for its logit lens) and of ``sample`` alone if given."""
        return sequences(self._ranges(step, step, session), step, path, sample)

    def token_keys(
        self, first: int = 0, last: int = 2**62, session: int | None = None
    ) -> tuple[tuple[int, int, int, str], ...]:
        """Step, sample, micro-batch and path of all sequences from step ``first`` to ``last``, both included,
        ascending; their arrays are not read."""
        found = {
            row
            for node, own, _, low, high in self._ranges(first, last, session)
            for row in node.rows(
                "SELECT DISTINCT step, sample, microbatch, text FROM tokens "
                "JOIN path ON path.id = tokens.path WHERE session=? AND step BETWEEN ? AND ?",
                (own, low, high),
            )
        }
        return tuple(sorted(found))

    def token_steps(self, session: int | None = None) -> tuple[int, ...]:
        """Steps with tokens, ascending."""
        found = {
            step
            for node, own, _, low, high in self._ranges(0, 2**62, session)
            for (step,) in node.rows(
                "SELECT DISTINCT step FROM tokens WHERE session=? AND step BETWEEN ? AND ?", (own, low, high)
            )
        }
        return tuple(sorted(found))

    # What went wrong, and what people asked for.

    def alerts(self, *, current: bool = False) -> tuple[AlertRecord, ...]:
        """Alerts of all sessions, by time; ``current``: without those of steps that the run did not go on
        from."""
        found = []
        columns = "step, t, kind, path, statistic, value, low, high, text"
        for node, numbers in self._numbered():
            for session, step, t, kind, path, statistic, value, low, high, text in node.rows(
                f"SELECT session, {columns} FROM alert"
            ):
                found.append(
                    AlertRecord(
                        step=step,
                        session=numbers.get(session, 0),
                        time_ns=t,
                        kind=kind,
                        path=path,
                        statistic=statistic,
                        value=number_of(value),
                        low=number_of(low),
                        high=number_of(high),
                        text=text,
                    )
                )
        if current:
            sessions = {each.number: each for each in self.sessions()}
            found = [
                each
                for each in found
                if each.session in sessions and sessions[each.session].is_current(each.step)
            ]
        return tuple(sorted(found, key=lambda each: (each.time_ns, each.step)))

    def dropped(self) -> tuple[Dropped, ...]:
        """The latest sums of each start, source and rank, of its last session; none where nothing was
        dropped."""
        names = {each.number: each.name for each in self.sessions()}
        found: dict[tuple[str, str, int], Dropped] = {}
        for node, numbers in self._numbered():
            for session, source, rank, step, frames, size in node.rows(
                "SELECT session, source, rank, max(step), max(frames), max(bytes) FROM dropped "
                "GROUP BY session, source, rank HAVING max(frames)"
            ):
                number = numbers.get(session, 0)
                key = (names.get(number, ""), source, rank)
                # They count since the start: attempts, of which each has its own, are not added up.
                if key not in found or found[key].frames <= frames:
                    found[key] = Dropped(
                        source=source, rank=rank, session=number, step=step, frames=frames, bytes=size
                    )
        return tuple(sorted(found.values(), key=lambda each: (each.session, each.source, each.rank)))

    def thinned(self) -> tuple[Thinned, ...]:
        """What retention removed, by time."""
        found = [
            Thinned(node=node.node, kind=kind, steps=steps, first_step=first, last_step=last, time_ns=t)
            for node in self.nodes()
            for t, kind, steps, first, last in node.rows(
                "SELECT t, kind, steps, first_step, last_step FROM thinned"
            )
        ]
        return tuple(sorted(found, key=lambda each: each.time_ns))

    def requests(self) -> tuple[tuple[int, str], ...]:
        """When (ns since the epoch) the ranks were asked for what (JSON lists), by time, as node 0 knows,
        which may have been another host in each start."""
        found = [
            (t, texts)
            for node in self.nodes()
            if node.node == 0
            for t, texts in node.rows("SELECT t, texts FROM request")
        ]
        return tuple(sorted(found))

    def bookmarks(self) -> tuple[Bookmark, ...]:
        """Steps that somebody marked."""
        return tuple(read_bookmarks(self.files))

    # Within.

    def _having(self, session: Session) -> Iterator[tuple[NodeFile, int]]:
        for node in self.nodes():
            own = node.session(session)
            if own is not None:
                yield node, own

    def _ranges(
        self, first: int, last: int, session: int | None
    ) -> Iterator[tuple[NodeFile, int, Session, int, int]]:
        """Node, its number of a session, the session, first and last step to read there."""
        sessions = self.sessions()
        chosen = sessions if session is None else (_chosen(sessions, session),)
        for each in chosen:
            low, high = first, last
            if session is None:
                if each.first_step is None:
                    continue
                low = max(low, each.first_step)
                high = high if each.last_current is None else min(high, each.last_current)
            if low <= high:
                for node, own in self._having(each):
                    yield node, own, each, low, high

    def _files_of(self, key: TensorKey) -> list[tuple[NodeFile, int]]:
        return list(self._having(_chosen(self.sessions(), key.session)))

    def _numbered(self) -> Iterator[tuple[NodeFile, dict[int, int]]]:
        """Each node, with the run's number of each of its sessions."""
        sessions = self.sessions()
        return ((node, self._numbers(node, sessions)) for node in self.nodes())

    def _numbers(self, node: NodeFile, sessions: tuple[Session, ...]) -> dict[int, int]:
        found = {}
        for each in sessions:
            own = node.session(each)
            if own is not None:
                found[own] = each.number
        return found

    def _marks(self) -> set[tuple[int, int]]:
        return {
            (step, numbers[session])
            for node, numbers in self._numbered()
            for session, step in node.rows("SELECT session, step FROM perturbed")
            if session in numbers
        }


def _chosen(sessions: tuple[Session, ...], session: int) -> Session:
    if not 0 <= session < len(sessions):
        raise ScopeError(f"found session {session}; expected one of 0 to {len(sessions) - 1}")
    return sessions[session]


def _one_step(one: list[float | None], other: list[float | None]) -> list[float | None]:
    """Rows t, seconds, loss, grad_norm, lr, tokens, tokens/s, memory, skipped, ranks of two nodes as one."""
    found = [a if a is not None else b for a, b in zip(one, other, strict=True)]
    for index, choose in ((0, min), (1, max), (7, max), (8, max)):
        present = [each[index] for each in (one, other) if each[index] is not None]
        found[index] = choose(present) if present else None  # type: ignore[type-var]
    found[9] = (one[9] or 0) + (other[9] or 0)
    return found
