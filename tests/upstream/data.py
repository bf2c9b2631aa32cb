"""A small pair of .bin and .idx files in Megatron's format."""

from __future__ import annotations

from pathlib import Path


def write_dataset(prefix: Path, *, vocabulary: int, documents: int = 64, length: int = 200) -> Path:
    """Write ``documents`` random documents of ``length`` tokens; returns ``prefix``."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = numpy.random.default_rng(7)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for _ in range(documents):
        builder.add_document(torch.from_numpy(rng.integers(0, vocabulary, length)), [length])
    builder.finalize(f"{prefix}.idx")
    return prefix
