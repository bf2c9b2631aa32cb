"""Questions to a recording in SQL: read-only views over the files of all nodes.

============ ==========================================================================================
sessions     session, name, attempt, started_ns, world_size, first_step, last_current
ranks        session, rank, tp, pp, dp, cp, ep, host, pid, node
modules      position, path, class, layer, parameters (of the last session, in execution order)
steps        session, step, time_ns, seconds, loss, grad_norm, lr, tokens, tokens_per_second,
             memory_bytes, skipped, current, perturbed
rank_steps   session, step, rank, time_ns, seconds, memory_bytes
stats        session, step, path, layer, statistic, value, parts, of, partial, current, perturbed
vectors      session, step, path, layer, statistic, vector (JSON list), current
tensors      session, step, path, what, microbatch, indices (JSON), shape (JSON), bytes, current
tokens       session, step, path, sample, position, id, loss, entropy
alerts       session, step, time_ns, kind, path, statistic, value, low, high, text
dropped      session, source, rank, step, frames, bytes
perturbed    session, step, text
validation   session, step, loss, current
bookmarks    step, text, time_unix
thinned      node, kind, steps, first_step, last_step, time_ns
requests     time_ns, texts (JSON)
============ ==========================================================================================

``layer`` counts decoder layers from 0; it is NULL outside of them, also in depths of multi-token prediction
(``mtp.layers.*``). ``current`` is 1 where the run went on from a row, 0 where a later session recorded the
step anew or the run went back to before it. Values of statistics combine all nodes' parts. SQL is SQLite's.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

import numpy as np

from mt_megatron.errors import ConfigError, ScopeError
from mt_megatron.scope.format.statistics import DERIVED, STATISTICS, combined

from .combining import number
from .data import Session
from .node import NodeFile
from .order import layer_of
from .reader import Recording
from .schema import busy, is_busy

VIEWS = (
    *("sessions", "ranks", "modules", "steps", "rank_steps", "stats", "vectors", "tensors", "tokens"),
    *("alerts", "dropped", "perturbed", "validation", "bookmarks", "thinned", "requests"),
)
"""In the order of the documentation."""

MOST_ATTACHED = 9
"""Nodes whose files are attached and read in place; rows of more are copied into memory first."""

_TABLES = ("step", "rank_step", "value", "vector", "entry", "path", "perturbed")
"""Of a node's file: what the views read from SQLite itself."""

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}

_SMALL = """
CREATE TABLE sessions(session INTEGER PRIMARY KEY, name, attempt, started_ns, world_size, first_step,
  last_current);
CREATE TABLE ranks(session, rank, tp, pp, dp, cp, ep, host, pid, node);
CREATE TABLE modules(position INTEGER PRIMARY KEY, path, class, layer, parameters);
CREATE TABLE tensors(session, step, path, what, microbatch, indices, shape, bytes, current);
CREATE TABLE alerts(session, step, time_ns, kind, path, statistic, value, low, high, text);
CREATE TABLE dropped(session, source, rank, step, frames, bytes);
CREATE TABLE bookmarks(step, text, time_unix);
CREATE TABLE thinned(node, kind, steps, first_step, last_step, time_ns);
CREATE TABLE requests(time_ns, texts);
-- Sessions by node; those whose ranks send the same parts are of one kind.
CREATE TABLE known(node, own, session, kind, PRIMARY KEY(node, own)) WITHOUT ROWID;
CREATE TABLE parts_of(node, kind, entry, ranks, PRIMARY KEY(node, kind, entry)) WITHOUT ROWID;
CREATE TABLE tokens(session, step, path, sample, position, id, loss, entropy);
"""

_CURRENT = (
    "ifnull({0}.step >= sessions.first_step AND ({0}.step <= sessions.last_current OR "
    "sessions.last_current IS NULL), 0)"
)

_EXPECTED = """
CREATE TEMP TABLE expected(session, path, statistic, ranks, PRIMARY KEY(session, path, statistic))
  WITHOUT ROWID;
INSERT INTO expected SELECT known.session, p.text, e.statistic, sum(d.ranks) FROM known
  JOIN parts_of AS d ON d.node = known.node AND d.kind = known.kind
  JOIN all_entry AS e ON e.node = d.node AND e.id = d.entry
  JOIN all_path AS p ON p.node = d.node AND p.id = e.path GROUP BY 1, 2, 3;
"""

_VIEWS = f"""
CREATE TEMP VIEW perturbed AS SELECT DISTINCT known.session, step, text FROM all_perturbed AS p
  JOIN known ON known.node = p.node AND known.own = p.session;
CREATE TEMP VIEW steps AS SELECT known.session AS session, s.step AS step, min(s.t) AS time_ns,
  max(s.seconds) AS seconds, max(s.loss) AS loss, max(s.grad_norm) AS grad_norm, max(s.lr) AS lr,
  max(s.tokens) AS tokens, max(s.tokens_per_second) AS tokens_per_second, max(s.memory_bytes) AS memory_bytes,
  max(s.skipped) AS skipped, max({_CURRENT.format("s")}) AS current,
  EXISTS(SELECT 1 FROM perturbed AS q WHERE q.session = known.session AND q.step = s.step) AS perturbed
  FROM all_step AS s JOIN known ON known.node = s.node AND known.own = s.session
  JOIN sessions ON sessions.session = known.session GROUP BY known.session, s.step;
CREATE TEMP VIEW rank_steps AS SELECT known.session AS session, r.step AS step, r.rank AS rank,
  r.t AS time_ns, r.seconds AS seconds, r.memory_bytes AS memory_bytes
  FROM all_rank_step AS r JOIN known ON known.node = r.node AND known.own = r.session;
CREATE TEMP VIEW node_stats AS SELECT known.session AS session, v.step AS step, p.text AS path,
  e.statistic AS statistic, v.parts AS parts, v.number AS number, v.node AS node,
  ifnull(v.part, (SELECT w.part FROM all_vector AS w WHERE w.node = v.node AND w.session = v.session
    AND w.step = v.step AND w.entry = ifnull((SELECT f.id FROM all_entry AS f WHERE f.node = v.node
      AND f.path = e.path AND f.statistic = source_of(e.statistic)), v.entry))) AS part,
  ifnull((SELECT ranks FROM parts_of AS d WHERE d.node = v.node AND d.kind = known.kind
    AND d.entry = v.entry), 0) AS of,
  {_CURRENT.format("v")} AS current,
  sessions.world_size > (SELECT count(*) FROM ranks WHERE ranks.session = known.session) AS lacking
  FROM all_value AS v JOIN all_entry AS e ON e.node = v.node AND e.id = v.entry
  JOIN all_path AS p ON p.node = v.node AND p.id = e.path
  JOIN known ON known.node = v.node AND known.own = v.session
  JOIN sessions ON sessions.session = known.session;
"""

_ONE_NODE = """
CREATE TEMP VIEW stats AS SELECT session, step, path, layer_of(path) AS layer, statistic,
  number AS value, parts, of, parts < of OR lacking AS partial, current,
  EXISTS(SELECT 1 FROM perturbed AS q WHERE q.session = n.session AND q.step = n.step) AS perturbed
  FROM node_stats AS n;
"""

_MORE_NODES = """
CREATE TEMP VIEW merged_stats AS SELECT session, step, path, statistic,
  merged(statistic, number, part) AS value, sum(parts) AS parts,
  ifnull((SELECT ranks FROM expected AS x WHERE x.session = n.session AND x.path = n.path
    AND x.statistic = n.statistic), 0) AS of, max(lacking) AS lacking, max(current) AS current
  FROM node_stats AS n GROUP BY session, step, path, statistic;
CREATE TEMP VIEW stats AS SELECT session, step, path, layer_of(path) AS layer, statistic,
  value, parts, of, parts < of OR lacking AS partial, current,
  EXISTS(SELECT 1 FROM perturbed AS q WHERE q.session = n.session AND q.step = n.step) AS perturbed
  FROM merged_stats AS n;
"""

_VECTORS = """
CREATE TEMP VIEW validation AS SELECT session, step, value AS loss, current FROM stats
  WHERE statistic = 'validation_loss';
CREATE TEMP VIEW vectors AS SELECT session, step, path, layer_of(path) AS layer, statistic,
  vector(statistic, part) AS vector, max(current) AS current FROM node_stats
  AS n WHERE has_vector(statistic) GROUP BY session, step, path, statistic
  HAVING count(*) = count(part) AND sum(parts) >= ifnull((SELECT ranks FROM expected AS x
    WHERE x.session = n.session AND x.path = n.path AND x.statistic = n.statistic), 0);
"""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Columns and rows of the answer to a statement."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def query(recording: Recording, statement: str) -> Answer:
    """The answer to ``statement``, one SELECT over ``VIEWS``; nothing is written and no other file is read.

    Raises ``ConfigError`` for a wrong statement and ``ScopeError`` for damaged files.
    """
    words = statement.lower()
    large = tuple(name for name in ("tensors", "tokens") if name in words)
    connection = connected(recording, large)
    try:
        connection.set_authorizer(_authorised)
        result = connection.execute(statement)
        columns = tuple(column[0] for column in result.description or ())
        return Answer(columns=columns, rows=result.fetchall())
    except sqlite3.Error as error:
        if is_busy(error):
            raise busy(recording.files.root) from error
        text = "only SELECT over the views is allowed" if "authorized" in str(error) else str(error)
        raise ConfigError(
            f"the statement cannot be run: {text}\nViews: {', '.join(VIEWS)}; "
            "'select * from VIEW limit 1' shows the columns of one."
        ) from None
    except sqlite3.Warning as error:  # several statements, before Python 3.12
        raise ConfigError(f"the statement cannot be run: {error}") from None
    finally:
        connection.close()


def connected(recording: Recording, large: Sequence[str] = ("tensors", "tokens")) -> sqlite3.Connection:
    """A connection in memory with the views; it reads the nodes' files in place. Of the views ``tensors`` and
    ``tokens`` those named in ``large`` have rows. Raises ``ScopeError``."""
    nodes = recording.nodes()
    connection = sqlite3.connect("file::memory:", uri=True, isolation_level=None)
    try:
        connection.execute("PRAGMA trusted_schema=ON")  # of this connection's own views
        _functions(connection)
        connection.executescript(_SMALL)
        _fill(connection, recording, large)
        _node_tables(connection, nodes)
        connection.executescript(
            _EXPECTED + _VIEWS + (_ONE_NODE if len(nodes) == 1 else _MORE_NODES) + _VECTORS
        )
        connection.execute("PRAGMA query_only=ON")
    except sqlite3.Error as error:
        connection.close()
        if is_busy(error):
            raise busy(recording.files.root) from error
        raise ScopeError(f"the recording in {recording.files.root} cannot be read: {error}") from error
    return connection


def _authorised(action: int, *_: object) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _node_tables(connection: sqlite3.Connection, nodes: list[NodeFile]) -> None:
    """Views ``all_TABLE`` of the nodes' tables, with a column ``node``."""
    if len(nodes) <= MOST_ATTACHED and _attached(connection, nodes):
        for table in _TABLES:
            parts = (f"SELECT {index} AS node, * FROM node{index}.{table}" for index in range(len(nodes)))
            connection.execute(f"CREATE TEMP VIEW all_{table} AS {' UNION ALL '.join(parts)}")
        return
    for table in _TABLES:
        columns = [row[1] for row in nodes[0].rows(f"PRAGMA table_info({table})")]
        connection.execute(f"CREATE TABLE all_{table}(node, {', '.join(columns)})")
        marks = ", ".join("?" * (len(columns) + 1))
        for index, node in enumerate(nodes):
            rows = ((index, *row) for row in node.rows(f"SELECT * FROM {table}"))
            connection.executemany(f"INSERT INTO all_{table} VALUES ({marks})", rows)
    for table, columns_of in (
        ("vector", "node, entry, session, step"),
        ("entry", "node, id"),
        ("path", "node, id"),
    ):
        connection.execute(f"CREATE INDEX index_{table} ON all_{table}({columns_of})")


def _attached(connection: sqlite3.Connection, nodes: list[NodeFile]) -> bool:
    """Attach all files; False where one can only be read from a copy, as in a folder without permission."""
    for index, node in enumerate(nodes):
        uri = f"file:{quote(str(node.path.resolve()))}?mode=ro"
        try:
            connection.execute(f"ATTACH DATABASE ? AS node{index}", (uri,))
            connection.execute(f"SELECT count(*) FROM node{index}.about")
        except sqlite3.OperationalError:
            return False
    return True


def _fill(connection: sqlite3.Connection, recording: Recording, large: Sequence[str]) -> None:
    """Small tables, which the reader has merged."""
    sessions = recording.sessions()
    insert = connection.executemany
    insert("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)", _session_rows(sessions))
    for index, node in enumerate(recording.nodes()):
        kinds: dict[object, int] = {}
        for each in sessions:
            if node.session(each) is None:
                continue
            same = (node.declared_in(each), node.ranks(each))
            if same not in kinds:
                kinds[same] = len(kinds)
                rows = ((index, kinds[same], entry, ranks) for entry, ranks in node.expected(each))
                insert("INSERT INTO parts_of VALUES (?, ?, ?, ?)", rows)
            row = (index, node.session(each), each.number, kinds[same])
            connection.execute("INSERT INTO known VALUES (?, ?, ?, ?)", row)
    for session in sessions:
        insert(
            "INSERT INTO ranks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    session.number,
                    each.rank,
                    *(each.at.get(name) for name in ("tp", "pp", "dp", "cp", "ep")),
                    *(each.host, each.pid, each.node),
                )
                for each in recording.facts(session.number).ranks
            ),
        )
    if sessions:
        insert(
            "INSERT INTO modules VALUES (?, ?, ?, ?, ?)",
            (
                (position, each.path, each.class_name, each.layer, each.parameters)
                for position, each in enumerate(recording.modules())
            ),
        )
    for session in sessions:
        insert(
            "INSERT INTO tensors VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    *(key.session, key.step, key.path, key.what, key.microbatch),
                    *(json.dumps(dict(key.index)), json.dumps(key.shape), key.bytes),
                    session.is_current(key.step),
                )
                for key in recording.tensors(session=session.number)
                if "tensors" in large
            ),
        )
        if "tokens" in large:
            insert("INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _token_rows(recording, session))
    insert(
        "INSERT INTO alerts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (
                *(each.session, each.step, each.time_ns, each.kind, each.path, each.statistic),
                *(each.value, each.low, each.high, each.text),
            )
            for each in recording.alerts()
        ),
    )
    insert(
        "INSERT INTO dropped VALUES (?, ?, ?, ?, ?, ?)",
        (
            (each.session, each.source, each.rank, each.step, each.frames, each.bytes)
            for each in recording.dropped()
        ),
    )
    insert(
        "INSERT INTO bookmarks VALUES (?, ?, ?)",
        ((each.step, each.text, each.time_unix) for each in recording.bookmarks()),
    )
    insert(
        "INSERT INTO thinned VALUES (?, ?, ?, ?, ?, ?)",
        (
            (each.node, each.kind, each.steps, each.first_step, each.last_step, each.time_ns)
            for each in recording.thinned()
        ),
    )
    insert("INSERT INTO requests VALUES (?, ?)", recording.requests())


def _session_rows(sessions: Iterable[Session]) -> Iterator[tuple[Any, ...]]:
    for each in sessions:
        yield (
            *(each.number, each.name, each.attempt, each.started_ns, each.world_size),
            *(each.first_step, each.last_current),
        )


def _token_rows(recording: Recording, session: Session) -> Iterator[tuple[Any, ...]]:
    for step in recording.token_steps(session.number):
        for each in recording.tokens(step, session=session.number):
            columns = (each.position.tolist(), each.ids.tolist(), each.loss.tolist(), each.entropy.tolist())
            for row in zip(*columns, strict=True):
                yield (session.number, step, each.path, each.sample, *row)


class _Merged:
    """Aggregate ``merged(statistic, number, part)``: the value of all nodes' parts."""

    def __init__(self) -> None:
        self._statistic = ""
        self._numbers: list[float | None] = []
        self._parts: list[bytes | None] = []

    def step(self, statistic: str, value: float | None, part: bytes | None) -> None:
        self._statistic = statistic
        self._numbers.append(value)
        self._parts.append(part)

    def finalize(self) -> float | None:
        if len(self._numbers) == 1:
            return self._numbers[0]
        part = _part(self._statistic, self._parts)
        value = math.nan if part is None else number(self._statistic, part)
        return None if math.isnan(value) else value


class _Vector:
    """Aggregate ``vector(statistic, part)``: JSON of the vector of all nodes' parts."""

    def __init__(self) -> None:
        self._statistic = ""
        self._parts: list[bytes | None] = []

    def step(self, statistic: str, part: bytes | None) -> None:
        self._statistic = statistic
        self._parts.append(part)

    def finalize(self) -> str | None:
        part = _part(self._statistic, self._parts)
        of = STATISTICS[self._statistic].vector if self._statistic in STATISTICS else None
        if part is None or of is None:
            return None
        with np.errstate(all="ignore"):
            values = of(part).tolist()
        return json.dumps([value if math.isfinite(value) else None for value in values])


def _part(statistic: str, parts: list[bytes | None]) -> Any:
    kept = [np.frombuffer(part, "<f8") for part in parts if part is not None]
    if not kept or len(kept) < len(parts):
        return None
    return combined(DERIVED.get(statistic, statistic), kept)


def _functions(connection: sqlite3.Connection) -> None:
    plain: dict[str, Callable[[Any], Any]] = {
        "layer_of": layer_of,
        "source_of": lambda name: DERIVED.get(name, name),
        "has_vector": lambda name: name in STATISTICS and STATISTICS[name].vector is not None,
    }
    for name, function in plain.items():
        connection.create_function(name, 1, function, deterministic=True)
    connection.create_aggregate("merged", 3, cast(Any, _Merged))
    connection.create_aggregate("vector", 2, cast(Any, _Vector))
