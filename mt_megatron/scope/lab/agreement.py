"""Agreement of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from mt_megatron.errors import ConfigError
from mt_megatron.scope.lab.specification import LabFile, read_lab_file
from mt_megatron.seams import collectives


def read_alike(path: str | Path) -> LabFile:
    """``read_lab_file`` on every rank; collective. Raises ``ConfigError`` on all of them where one cannot
    read its file, or has another than rank 0."""
    given, problem, found = None, None, ""
    try:
        given = read_lab_file(path)
        found = str((given.snapshot_limit_mib, [one.to_dict() for one in given.perturbations]))
    except ConfigError as error:
        problem = str(error)
    said = gathered((problem, found))
    for rank, (wrong, text) in enumerate(said):
        if wrong is None and text != said[0][1]:
            wrong = "found another file than rank 0's; expected the same on every node"
        if wrong is not None:
            raise ConfigError(f"rank {rank}: {wrong}")
    assert given is not None
    return given


def gathered(own: Any) -> list[Any]:
    """``own`` of every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    with collectives.announced("all_gather_object", "world", None):
        dist.all_gather_object(found, own)
    return found
