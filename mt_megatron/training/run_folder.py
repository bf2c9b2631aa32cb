"""The folder of a run, beside whose metrics its trace and its recording lie."""

from __future__ import annotations

from pathlib import Path


def run_folder(given: str | None, metrics: Path | None) -> Path | None:
    """The ``given`` folder, else that of ``metrics``, the run's JSONL file; None where neither is known."""
    if given is not None:
        return Path(given)
    if metrics is None or (metrics.exists() and not metrics.is_file()):
        # A pipe or a device has neighbours, but none of this run.
        return None
    return metrics.parent


def agreed_folder(folder: Path | None, world_size: int) -> Path | None:
    """Rank 0's ``folder``; collective. What is a pipe on one machine may be a file on another, or nothing,
    and a rank that writes nothing would leave the others waiting for it in a collective of those that do."""
    # Not earlier: the launcher asks for the folder too, and starts seconds later where it imports torch.
    import torch.distributed as dist

    said = [folder]
    if world_size > 1:
        # No event: rank 0 may count collectives already, for its own figures, and the others do not yet.
        dist.broadcast_object_list(said, src=0)
    return said[0]
