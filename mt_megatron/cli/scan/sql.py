"""``mt-megatron scan sql``: a question to a run's trace in SQL."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from mt_megatron.cli.scan.command import code_without
from mt_megatron.cli.scan.report import add_start

_EXAMPLE = """examples:
  mt-megatron scan sql RUN "describe spans"
  mt-megatron scan sql RUN "select rank, median(seconds) from steps group by rank order by 2 desc limit 5"
  mt-megatron scan sql RUN "select process_group, name, count(*), sum(end_ns - begin_ns) / 1e9 as seconds
    from spans where kind = 'collective' group by all order by seconds desc"

exit codes: 0 fine, 1 a problem was found, or the answer lacks files that cannot be read (stderr names
them), 2 wrong use or no such trace"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    text = "ask a run's trace in SQL, offline"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "sql",
        help=text,
        description="Ask a run's trace in SQL (DuckDB's dialect). Tables: spans, counters, ranks, steps,\n"
        "findings; times are nanoseconds of the reference rank's clock.\nThe first question makes "
        "RUN/scan/store\n(Parquet), which other tools can read too. Needs: pip install 'mt_megatron[scan]'",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument("statement", metavar="SQL", help="one statement, or - to read it from stdin")
    parser.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="of the answer (%(default)s)"
    )
    add_start(parser)
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the answer; returns the exit code."""
    from mt_megatron.scan.export.sql import query

    statement = sys.stdin.read() if args.statement == "-" else args.statement
    answer = query(args.run, statement, start=args.start)
    show(answer.columns, answer.rows, args.format)
    return code_without(answer.unreadable)


def show(columns: tuple[str, ...], rows: list[tuple[Any, ...]], form: str) -> None:
    """Print rows in the form ``table``, ``csv`` or ``json``. In JSON what is not finite is null."""
    if form == "json":
        from mt_megatron.scan.report.data import finite

        named = [finite(dict(zip(columns, row, strict=True))) for row in rows]
        print(json.dumps(named, default=str))
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    else:
        print(table(columns, rows))


def table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """Aligned columns, figures to the right."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [
        max(len(name), *(len(row[index]) for row in cells)) if cells else len(name)
        for index, name in enumerate(columns)
    ]
    numeric = [
        bool(rows) and all(row[index] is None or isinstance(row[index], int | float) for row in rows)
        for index in range(len(columns))
    ]
    lines = ["  ".join(name.ljust(width) for name, width in zip(columns, widths, strict=True)).rstrip()]
    lines.append("  ".join("-" * width for width in widths))
    for row in cells:
        parts = zip(row, widths, numeric, strict=True)
        lines.append("  ".join(t.rjust(w) if n else t.ljust(w) for t, w, n in parts).rstrip())
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
