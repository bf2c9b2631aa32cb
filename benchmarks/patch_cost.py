"""Cost of ``mt_megatron.patch()`` on top of ``import megatron.core``, with a warm digest cache.

Every sample is a fresh interpreter; runs with and without patching alternate. Prints one JSON
object with medians in milliseconds, the ratio to the import, and the machine. The budget is a ratio:
importing mt_megatron and patching take at most this share of the processor time of ``import
megatron.core`` in the same process. The exit code is 1 when the median of the ratios exceeds it.
Processor time, because on a busy machine wall time measures the neighbours.

    python benchmarks/patch_cost.py --samples 9
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 0.06
"""Of the processor time of ``import megatron.core``, which a faster machine shortens as it does ours."""

CHILD = """
import json, sys, time, warnings
warnings.simplefilter("ignore")

def clock():
    return time.perf_counter(), time.process_time()

start = clock()
import megatron.core
imported = clock()
applied = 0
if sys.argv[1] == "patch":
    import mt_megatron
    applied = len(mt_megatron.patch(sys.argv[2]).applied)
end = clock()
print(json.dumps({
    "import": [b - a for a, b in zip(start, imported)],
    "patch": [b - a for a, b in zip(imported, end)],
    "applied": applied,
}))
"""


def sample(mode: str, backend: str, caches: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "XDG_CACHE_HOME": caches,
        # Bytecode as an installed package has it, without writing into the tree.
        "PYTHONPYCACHEPREFIX": str(Path(caches, "bytecode")),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, mode, backend],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(samples: int, backend: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mt_megatron_bench_") as caches:
        cold = sample("patch", backend, caches)
        plain: list[dict[str, Any]] = []
        patched: list[dict[str, Any]] = []
        for _ in range(samples):
            plain.append(sample("plain", backend, caches))
            patched.append(sample("patch", backend, caches))

    def median(rows: list[dict[str, Any]], key: str, clock: int) -> float:
        return round(1000 * statistics.median(row[key][clock] for row in rows), 1)

    ratio = round(statistics.median(row["patch"][1] / row["import"][1] for row in patched), 3)
    return {
        "backend": backend,
        "samples": samples,
        "patches_applied": patched[0]["applied"],
        "import_megatron_core_ms": {"wall": median(plain, "import", 0), "cpu": median(plain, "import", 1)},
        "patch_ms": {"wall": median(patched, "patch", 0), "cpu": median(patched, "patch", 1)},
        "patch_wall_ms_of_the_fastest": round(1000 * min(row["patch"][0] for row in patched), 1),
        "patch_with_cold_caches_ms": {
            "wall": round(1000 * cold["patch"][0], 1),
            "cpu": round(1000 * cold["patch"][1], 1),
        },
        "ratio_to_import": ratio,
        "budget": BUDGET,
        "within_budget": ratio <= BUDGET,
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=7, help="processes of each kind (default: 7)")
    parser.add_argument("--backend", default="cpu")
    options = parser.parse_args()
    found = measure(options.samples, options.backend)
    print(json.dumps(found, indent=2))
    return 0 if found["within_budget"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
