"""What the exports share: the file that appears whole or not at all, the title of a rank."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mt_megatron.scan.analysis.trace import Trace
from mt_megatron.scan.findings.text import place_text
from mt_megatron.scan.format.permissions import grant


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    events: int
    ranks: int
    bytes: int


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, with the modes of its trace (``permissions``), that takes ``path``'s place when all
    went well and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        grant(Path(name))
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def rank_title(trace: Trace, rank: int) -> str:
    """``rank 5 (dp 1 pp 0 tp 1) node-3``, and whether it is simulated."""
    place = trace.places.get(rank)
    simulated = " simulated" if trace.simulated else ""
    if place is None:
        return f"rank {rank}{simulated}"
    host = f" {place.host}" if place.host else ""
    return f"rank {rank} ({place_text(place)}){host}{simulated}"
