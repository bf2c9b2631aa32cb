"""SQL over a run's trace: DuckDB on the store's files, offline, and shut off from everything else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.scan.analysis.trace import open_trace

from .parquet import TABLES, ensure_store, load

_FILES = {"spans": "spans/*.parquet", "counters": "counters/*.parquet", "steps": "steps/*.parquet"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a query returned."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def query(run: Path | str, statement: str) -> Answer:
    """The answer to ``statement``, which sees the tables of ``parquet.TABLES`` and no other file.

    Raises ``ConfigError`` for a wrong statement or a missing library, ``ScanError`` without a trace.
    """
    duckdb = load("duckdb")
    folder = ensure_store(open_trace(run)).resolve()
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
        return Answer(columns=columns, rows=result.fetchall())
    except duckdb.Error as error:
        raise ConfigError(
            f"the statement cannot be run: {str(error).strip()}\nTables: {', '.join(TABLES)}; "
            "'describe spans' lists the columns of one."
        ) from None
    finally:
        connection.close()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
