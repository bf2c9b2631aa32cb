"""The ranks' side: DeepSeek-V3's architecture watched in several layouts; the values that rank 0 was sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.parity.case import MIXTURE, OPTIMIZER
from tests.scope.watch.ranks import begin, train
from tests.scope.watch.reader import values_of, vectors_of

FLAGS = f"{MIXTURE} {OPTIMIZER} --untie-embeddings-and-output-weights"


def values(folder: str, layouts: dict[str, str]) -> dict[str, Any]:
    """Of each layout's first two steps, by ``step|path|statistic``."""
    begin()
    found = {}
    for name, flags in layouts.items():
        reader, _ = train(f"{FLAGS} {flags}", Path(folder) / "weights", seed=7, steps=2)
        if reader is not None:
            found[name] = {
                "values": {"|".join(map(str, key)): each for key, each in values_of(reader.frames).items()},
                "vectors": {"|".join(map(str, key)): each for key, each in vectors_of(reader.frames).items()},
                "lines": reader.lines,
            }
    return found
