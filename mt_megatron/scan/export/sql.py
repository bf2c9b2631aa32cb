"""A trace as columns on disk (Parquet), and SQL over them: DuckDB, offline, shut off from everything else.

Tables: ``spans``, ``counters``, ``ranks``, ``steps`` and ``findings``; times are ns of the reference clock.
Made rank after rank in a stream. Needs pyarrow and DuckDB (the extra ``scan``).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ConfigError
from mt_megatron.scan.analysis.step_features import rank_steps
from mt_megatron.scan.analysis.trace import Trace, open_trace
from mt_megatron.scan.export.rank_stream import Piece, pieces
from mt_megatron.scan.findings.recorded import findings_on_record
from mt_megatron.scan.format.permissions import grant_below, make_private_folder
from mt_megatron.scan.format.records import ASYNC, KINDS, WAIT
from mt_megatron.scan.format.run_files import RunFiles, segment_paths, write_private

TABLES = ("spans", "counters", "ranks", "steps", "findings")
_VERSION = 2
_STAMP = "store.json"
_OPTIONS = {"compression": "zstd", "compression_level": 1}
_STEP_COLUMNS = (
    "step",
    "compute",
    "forward",
    "backward",
    "optimizer",
    "communication",
    "data",
    "checkpoint",
    "pause",
)


def ensure_store(trace: Trace) -> Path:
    """The folder with the tables of ``trace``, made anew unless it fits the trace's files.

    Tables that lack a file which could not be read (``trace.unreadable``) get no stamp, so that the next call
    makes them anew. Raises ``ConfigError`` when pyarrow is missing, ``OSError`` when it cannot be written.
    """
    folder = trace.files.root / "store"
    stamp = _stamp(trace.files, trace.session)
    with contextlib.suppress(OSError, ValueError):
        if json.loads((folder / _STAMP).read_text(encoding="utf-8")) == stamp:
            return folder
    arrow, parquet = load("pyarrow"), load("pyarrow.parquet")
    make_private_folder(trace.files.root)
    # Beside the old one, which others may be reading, and in its place when it is whole.
    fresh = Path(tempfile.mkdtemp(dir=trace.files.root, prefix=".store."))
    try:
        _write(trace, fresh, arrow, parquet)
        # A file that can be read again has the size that it had before: the stamp would fit it.
        if not trace.unreadable:
            write_private(fresh / _STAMP, json.dumps(stamp))
        grant_below(fresh)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return folder


def load(module: str) -> ModuleType:
    """Import one of the store's libraries. Raises ``ConfigError`` that says how to get it."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"scan sql needs {module.split('.')[0]}, which cannot be imported here ({error}). "
            "Install it with: pip install 'mt_megatron[scan]'"
        ) from None


def _stamp(files: RunFiles, session: int) -> dict[str, Any]:
    sizes = {
        str(rank): [[path.name, path.stat().st_size] for path in segment_paths(files.rank_folder(rank))]
        for rank in files.ranks()
    }
    found = files.findings.stat().st_size if files.findings.exists() else 0
    return {"version": _VERSION, "session": session, "findings": found, "ranks": sizes}


def _write(trace: Trace, folder: Path, arrow: ModuleType, parquet: ModuleType) -> None:
    for name in ("spans", "counters", "steps"):
        (folder / name).mkdir(mode=0o700)
    for rank in trace.ranks:
        with _tables(folder, rank, arrow, parquet) as (spans, counters):
            for piece in pieces(trace, rank):
                if len(piece.spans):
                    spans.write_table(_spans(piece, arrow))
                if len(piece.counters):
                    counters.write_table(_counters(piece, arrow))
        parquet.write_table(_steps(trace, rank, arrow), folder / "steps" / f"{rank:05d}.parquet", **_OPTIONS)
    parquet.write_table(_ranks(trace, arrow), folder / "ranks.parquet", **_OPTIONS)
    parquet.write_table(_findings(trace, arrow), folder / "findings.parquet", **_OPTIONS)


@contextlib.contextmanager
def _tables(folder: Path, rank: int, arrow: ModuleType, parquet: ModuleType) -> Iterator[tuple[Any, Any]]:
    name = f"{rank:05d}.parquet"
    spans = parquet.ParquetWriter(folder / "spans" / name, _span_schema(arrow), **_OPTIONS)
    counters = parquet.ParquetWriter(folder / "counters" / name, _counter_schema(arrow), **_OPTIONS)
    with spans, counters:
        yield spans, counters


def _span_schema(arrow: ModuleType) -> Any:
    word = arrow.dictionary(arrow.int32(), arrow.string())
    fields = [("rank", arrow.int32()), ("kind", word), ("name", word), ("process_group", word)]
    fields += [(name, arrow.int64()) for name in ("begin_ns", "end_ns", "device_begin_ns", "device_end_ns")]
    fields += [("bytes", arrow.int64()), ("work", arrow.int64())]
    fields += [(name, arrow.int32()) for name in ("step", "seq", "peer", "microbatch", "chunk", "thread")]
    fields += [(name, arrow.bool_()) for name in ("starts_background", "waits_for_background", "unfinished")]
    return arrow.schema(fields)


def _spans(piece: Piece, arrow: ModuleType) -> Any:
    spans = piece.spans
    groups = [""] * (max(piece.groups, default=0) + 1)
    for number, group in piece.groups.items():
        groups[number] = group.name
    timed = spans["device_begin"] != 0
    columns = [
        np.full(len(spans), piece.rank, dtype=np.int32),
        _words(arrow, spans["kind"], list(KINDS)),
        _words(arrow, spans["name"], piece.strings or [""]),
        _words(arrow, spans["group"], groups),
        spans["begin"],
        spans["end"],
        arrow.array(spans["device_begin"], mask=~timed),
        arrow.array(spans["device_end"], mask=~timed),
        arrow.array(spans["bytes"], mask=spans["bytes"] < 0),
        arrow.array(spans["work"], mask=spans["work"] == 0),
        spans["iteration"],
        *(
            arrow.array(spans[name].astype(np.int32), mask=spans[name] < 0)
            for name in ("seq", "peer", "microbatch", "chunk")
        ),
        spans["thread"].astype(np.int32),
        (spans["flags"] & ASYNC) != 0,
        (spans["flags"] & WAIT) != 0,
        piece.unfinished,
    ]
    schema = _span_schema(arrow)
    return arrow.table([arrow.array(each) for each in map(_contiguous, columns)], schema=schema)


def _counter_schema(arrow: ModuleType) -> Any:
    word = arrow.dictionary(arrow.int32(), arrow.string())
    return arrow.schema(
        [
            ("rank", arrow.int32()),
            ("time_ns", arrow.int64()),
            ("name", word),
            ("device", arrow.int32()),
            ("value", arrow.float64()),
        ]
    )


def _counters(piece: Piece, arrow: ModuleType) -> Any:
    rows = piece.counters
    columns = [
        np.full(len(rows), piece.rank, dtype=np.int32),
        rows["time"],
        _words(arrow, rows["name"], piece.strings or [""]),
        rows["device"].astype(np.int32),
        rows["value"],
    ]
    schema = _counter_schema(arrow)
    return arrow.table([arrow.array(each) for each in map(_contiguous, columns)], schema=schema)


def _steps(trace: Trace, rank: int, arrow: ModuleType) -> Any:
    steps = rank_steps(rank, trace.rank(rank))
    columns: dict[str, Any] = {
        "rank": np.full(len(steps.iteration), rank, dtype=np.int32),
        "step": steps.iteration.astype(np.int32),
        "begin_ns": trace.clocks.to_reference(rank, steps.begin),
        "end_ns": trace.clocks.to_reference(rank, steps.end),
    }
    for name in _STEP_COLUMNS:
        # What nobody said is null in SQL: NaN would spoil every sum and mean.
        values = steps.columns[name]
        label = "seconds" if name == "step" else f"{name}_seconds"
        columns[label] = arrow.array(values / 1e9, mask=np.isnan(values))
    for name in ("work", "expert_work"):
        columns[name] = arrow.array(steps.columns[name], mask=np.isnan(steps.columns[name]))
    return arrow.table({name: arrow.array(each) for name, each in columns.items()})


def _ranks(trace: Trace, arrow: ModuleType) -> Any:
    rows = [
        {
            **asdict(trace.places[rank]),
            "recorded": rank not in trace.missing,
            "simulated": trace.simulated,
            "clock_source": str(getattr(trace.clocks.residuals.get(rank), "source", "none")),
            "clock_residual_p99_ns": _number(getattr(trace.clocks.residuals.get(rank), "residual_p99", None)),
        }
        for rank in sorted(trace.places)
    ]
    integers = ("rank", "node", "dp", "pp", "tp", "cp", "ep")
    fields = [(name, arrow.int32()) for name in integers]
    fields.insert(1, ("host", arrow.string()))
    fields += [("recorded", arrow.bool_()), ("simulated", arrow.bool_()), ("clock_source", arrow.string())]
    fields += [("clock_residual_p99_ns", arrow.float64())]
    return arrow.Table.from_pylist(rows, schema=arrow.schema(fields))


def _findings(trace: Trace, arrow: ModuleType) -> Any:
    fields = [(name, arrow.string()) for name in ("cause", "lateness", "group", "host", "advice")]
    fields += [("ranks", arrow.list_(arrow.int32())), ("evidence", arrow.list_(arrow.string()))]
    fields += [("first_step", arrow.int32()), ("last_step", arrow.int32())]
    fields += [("lost_fraction", arrow.float64()), ("confidence", arrow.float64())]
    names = [name for name, _ in fields]
    rows = [asdict(finding) for finding in findings_on_record(trace.files)]
    rows = [{name: row[name] for name in names} for row in rows]
    renamed = [("process_group" if name == "group" else name, kind) for name, kind in fields]
    table = arrow.Table.from_pylist(rows, schema=arrow.schema(fields))
    return table.rename_columns([name for name, _ in renamed])


def _words(arrow: ModuleType, numbers: NDArray[Any], table: list[str]) -> Any:
    # A number beyond the table gets number 0, no name: its writer was killed before it wrote the table.
    known = np.where(numbers < len(table), numbers, 0).astype(np.int32)
    return arrow.DictionaryArray.from_arrays(arrow.array(known), arrow.array(table, type=arrow.string()))


def _contiguous(column: Any) -> Any:
    return np.ascontiguousarray(column) if isinstance(column, np.ndarray) else column


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, float) and value == value else None


_FILES = {"spans": "spans/*.parquet", "counters": "counters/*.parquet", "steps": "steps/*.parquet"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a query returned."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    unreadable: tuple[str, ...] = ()
    """Sentences on files that could not be read: the tables lack what they hold."""


def query(run: Path | str, statement: str, *, start: int | None = None) -> Answer:
    """The answer to ``statement``, which sees the tables of ``parquet.TABLES`` and no other file.
    ``start`` as ``open_trace``.

    Raises ``ConfigError`` for a wrong statement or a missing library, ``ScanError`` without a trace.
    """
    duckdb = load("duckdb")
    trace = open_trace(run, start=start)
    folder = ensure_store(trace).resolve()
    # Tables with a stamp lack nothing, even if a file was damaged after they were made.
    unreadable = () if (folder / _STAMP).exists() else tuple(trace.unreadable)
    connection = duckdb.connect(":memory:")
    try:
        # Nothing is fetched or loaded, and no other file can be named in the statement.
        connection.execute("SET autoinstall_known_extensions=false; SET autoload_known_extensions=false")
        connection.execute(f"SET allowed_directories=[{_quoted(str(folder) + '/')}]")
        connection.execute("SET enable_external_access=false")
        connection.execute("SET lock_configuration=true")
        for table in TABLES:
            source = _quoted(str(folder / _FILES.get(table, f"{table}.parquet")))
            connection.execute(f'CREATE VIEW "{table}" AS SELECT * FROM read_parquet({source})')
        result = connection.execute(statement)
        columns = tuple(column[0] for column in result.description or ())
        return Answer(columns=columns, rows=result.fetchall(), unreadable=unreadable)
    except duckdb.Error as error:
        raise ConfigError(
            f"the statement cannot be run: {str(error).strip()}\nTables: {', '.join(TABLES)}; "
            "'describe spans' lists the columns of one."
        ) from None
    finally:
        connection.close()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
