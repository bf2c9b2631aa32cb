"""Time and memory of a report as ranks grow: simulated traces of 64 to 1,024 ranks.

    python benchmarks/scan/scan_scale.py [--ranks 64 256 1024] [--steps 50] [--events 1000]
                                         [--record results/]

Each trace has 50 steps of 1,000 events per rank and one slow rank. What is timed is
``mt-megatron scan report`` in a process of its own, from start to exit, on this machine's cores; the peak
of its resident memory is the system's own count. On a busy machine only the processor's time says much.
The files have been written just before and are in the system's cache as far as it has room. 1,024 ranks
need 3.7 GB of disk for as long as it runs.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # For the modules that all benchmarks share.

from recording import machine, record, table  # noqa: E402

from tools.scan_simulator import Fault, Job, Layout, simulate, with_events  # noqa: E402

LIMITS = {256: (20.0, 2 << 30), 1024: (120.0, None)}
"""Ranks -> seconds and bytes that are allowed."""

_GIB = 1 << 30


def job_of(ranks: int, steps: int, events: int) -> Job:
    """TP 4 x PP 4 and as many replicas as are left."""
    layout = Layout(dp=ranks // 16, tp=4, pp=4)
    return with_events(replace(Job(layout=layout), steps=steps), events)


def measure(ranks: int, steps: int, events: int, folder: Path) -> dict[str, Any]:
    """Make one trace and report on it."""
    run = folder / f"ranks-{ranks}"
    began = time.perf_counter()
    truth = simulate(
        run,
        job_of(ranks, steps, events),
        [Fault(cause="slow_compute", rank=ranks // 2 + 1, factor=1.2, first=steps // 3 + 1)],
        seed=ranks,
    )
    made = time.perf_counter() - began
    size = sum(path.stat().st_size for path in run.rglob("*.scan"))
    command = [sys.executable, "-m", "mt_megatron.cli", "scan", "report", str(run)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    # The peak of the children that were waited for; a larger trace comes later and can only raise it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        said, _ = process.communicate(timeout=1800)
    taken = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if process.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
    shutil.rmtree(run)
    return {
        "ranks": ranks,
        "events": truth.events,
        "bytes": size,
        "seconds_to_simulate": made,
        "seconds_to_report": taken,
        "processor_seconds": cpu,
        "peak_bytes": after.ru_maxrss * 1024,
        # Without the places of its files, which are gone.
        "said": "\n".join(line for line in said.splitlines() if str(folder) not in line)[-2000:].strip(),
    }


def _verdict(row: dict[str, Any]) -> str:
    limit = LIMITS.get(row["ranks"])
    if limit is None:
        return "-"
    seconds, most = limit
    fits = row["seconds_to_report"] <= seconds and (most is None or row["peak_bytes"] <= most)
    wanted = f"<= {seconds:.0f} s" + (f", <= {most / _GIB:.0f} GiB" if most else "")
    return f"{wanted}: {'yes' if fits else 'NO'}"


def main() -> None:
    """Measure, print, and write down where ``--record`` says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where the traces lie meanwhile (default: the system's)")
    parser.add_argument("--record", type=Path, help="directory for a dated JSON and Markdown file")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mt-scan-scale-", dir=args.folder) as folder:
        for ranks in sorted(args.ranks):
            if ranks % 16:
                parser.error(f"{ranks} ranks; expected a multiple of 16")
            rows.append(measure(ranks, args.steps, args.events, Path(folder)))
            print(f"{ranks} ranks: {rows[-1]['seconds_to_report']:.1f} s", file=sys.stderr)
    shown = []
    for before, row in zip([None, *rows], rows, strict=False):
        growth = "-"
        if before is not None:
            factor = row["seconds_to_report"] / before["seconds_to_report"]
            growth = f"x{factor:.2f} for x{row['ranks'] / before['ranks']:.0f} ranks"
        shown.append(
            [
                str(row["ranks"]),
                f"{row['events'] / 1e6:.1f} M",
                f"{row['bytes'] / _GIB:.2f} GiB",
                f"{row['seconds_to_simulate']:.1f}",
                f"{row['seconds_to_report']:.1f}",
                f"{row['processor_seconds']:.1f}",
                f"{row['peak_bytes'] / _GIB:.2f} GiB",
                growth,
                _verdict(row),
            ]
        )
    text = table(
        [
            "simulated ranks",
            "events",
            "files",
            "s to make",
            "s to report",
            "s of processor",
            "peak memory",
            "growth",
            "wanted",
        ],
        shown,
    )
    print(text)
    if args.record:
        figures = {"simulated": True, "machine": {**machine(), "usable_cores": _cores()}, "rows": rows}
        record(
            args.record, "scan-scale-simulated", "Reports on simulated traces as ranks grow", figures, text
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    main()
