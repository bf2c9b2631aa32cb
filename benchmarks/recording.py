"""Tables on the screen and dated records (JSON and Markdown) for the benchmarks beside this file."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def spread(values: Sequence[float]) -> dict[str, float]:
    """Smallest, median and largest of some paired ratios or times."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and a 95 % interval of it from order statistics, which assumes nothing of the distribution."""
    found, count = sorted(values), len(values)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, int(count / 2 - reach)), min(count - 1, int(count / 2 + reach))
    return statistics.median(found), found[low], found[high]


def machine() -> dict[str, Any]:
    """What the figures depend on and a reader cannot see from them."""
    import torch

    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            flags = next(line for line in lines if line.startswith("flags"))
    except (OSError, StopIteration):
        flags = ""
    matrix = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in flags.split()]
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "instructions": matrix,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    return "\n".join([line(cells[0]), line(["-" * width for width in widths]), *map(line, cells[1:])])


def record(folder: Path, name: str, title: str, figures: dict[str, Any], tables: str) -> list[Path]:
    """Write ``name-DATE.json`` and ``.md`` into ``folder``; returns both paths."""
    day = datetime.date.today().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{name}-{day}.json", folder / f"{name}-{day}.md"
    written[0].write_text(json.dumps({"date": day, **figures}, indent=1) + "\n", encoding="utf-8")
    about = ", ".join(f"{key} {value}" for key, value in figures.get("machine", {}).items())
    written[1].write_text(f"# {title}\n\n{day}; {about}\n\n{tables}\n", encoding="utf-8")
    return list(written)
