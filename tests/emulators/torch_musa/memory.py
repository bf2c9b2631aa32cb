"""``torch.musa``'s memory functions: what ``storage`` counts, under the names of a caching allocator."""

from __future__ import annotations

from typing import Any

import psutil

from .device_index import device_index
from .storage import counters


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    counters.limit = int(fraction * psutil.virtual_memory().total)


def empty_cache() -> None:
    counters.empty_cache()


def memory_stats(device: Any = None) -> dict[str, int]:
    device_index(device)
    found = {"num_alloc_retries": 0, "num_ooms": 0}
    for kind in ("all", "large_pool", "small_pool"):
        whole = kind == "all"
        for name, now, peak, total, freed in (
            (
                "allocated_bytes",
                counters.allocated,
                counters.peak_allocated,
                counters.total_bytes,
                counters.freed_bytes,
            ),
            (
                "active_bytes",
                counters.allocated,
                counters.peak_allocated,
                counters.total_bytes,
                counters.freed_bytes,
            ),
            ("reserved_bytes", counters.reserved, counters.peak_reserved, counters.peak_reserved, 0),
            (
                "allocation",
                counters.blocks,
                counters.peak_blocks,
                counters.total_blocks,
                counters.total_blocks - counters.blocks,
            ),
        ):
            values = {"current": now, "peak": peak, "allocated": total, "freed": freed}
            for which, value in values.items():
                found[f"{name}.{kind}.{which}"] = value if whole else 0
    return dict(sorted(found.items()))


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *path, last = name.split(".")
        at = nested
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return nested


def reset_accumulated_memory_stats(device: Any = None) -> None:
    counters.total_bytes, counters.freed_bytes, counters.total_blocks = counters.allocated, 0, counters.blocks


def reset_peak_memory_stats(device: Any = None) -> None:
    counters.reset_peaks()


def reset_max_memory_allocated(device: Any = None) -> None:
    counters.reset_peaks()


def reset_max_memory_cached(device: Any = None) -> None:
    counters.reset_peaks()


def memory_stats_all() -> list[dict[str, int]]:
    return [memory_stats()]


def memory_snapshot() -> list[dict[str, Any]]:
    return [{"device": 0, "total_size": counters.reserved, "allocated_size": counters.allocated}]


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return "\n".join(f"{name}: {value}" for name, value in memory_stats(device).items() if ".all." in name)


def memory_allocated(device: Any = None) -> int:
    return counters.allocated


def max_memory_allocated(device: Any = None) -> int:
    return counters.peak_allocated


def memory_reserved(device: Any = None) -> int:
    return counters.reserved


def max_memory_reserved(device: Any = None) -> int:
    return counters.peak_reserved


def mem_get_info(device: Any = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total
