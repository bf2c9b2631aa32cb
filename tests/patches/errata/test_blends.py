"""Weighted blends of drawn weights and lengths: every one starts, and those that started stay as they are."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from tests.launch import run_ranks

HERE = "tests.patches.errata.test_blends"
DRAWN = 300


class Samples:
    """A dataset of which only the length matters."""

    index_split = SimpleNamespace(name="train")
    unique_identifiers = "samples"
    built_anew_on_cache_miss = True

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


def blends(without: list[str]) -> list[Any]:
    """Of each drawn blend: the samples asked for, those beyond an end, the order's checksum, the refusal."""
    import zlib

    import numpy as np

    import mt_megatron
    from tests.patches.errata.dropout_ranks import features_without

    mt_megatron.patch("cpu", features=features_without(without))
    from megatron.core.datasets import blended_megatron_dataset_builder as builder
    from megatron.core.datasets.blended_dataset import BlendedDataset

    found = []
    for seed in range(DRAWN):
        draw = random.Random(seed)
        weights = [draw.choice((1, 10, 100, 1000)) * draw.random() for _ in range(draw.randint(2, 8))]
        weights = builder.normalize(weights)
        wanted = draw.choice((20, 100, 1000, 5000))
        sizes = [each[0] for each in builder._get_size_per_split_per_dataset(weights, [wanted])]
        # Datasets are of whole epochs, so that they may hold more than what was asked for.
        parts = [Samples(size + draw.choice((0, draw.randint(0, 50)))) for size in sizes]
        config = SimpleNamespace(path_to_cache=None, renormalize_blend_weights=False)
        made = BlendedDataset(parts, weights, sum(sizes), config)
        lengths = np.array([len(part) for part in parts])
        missing = int((made.dataset_sample_index >= lengths[made.dataset_index]).sum())
        order = np.stack([made.dataset_index, made.dataset_sample_index])[:, :wanted]
        build = object.__new__(builder.BlendedMegatronDatasetBuilder)
        build._build_blended_dataset_splits = lambda made=made: [made]
        try:
            build.build()
            refused = ""
        except IndexError as error:
            refused = str(error)
        assert made.size == len(made)
        found.append([len(made) >= wanted, missing, len(made), zlib.crc32(order.tobytes()), refused])
    return found


def test_every_blend_starts_and_takes_what_datasets_have() -> None:
    [ours] = run_ranks(1, f"{HERE}:blends", [])
    [upstream] = run_ranks(1, f"{HERE}:blends", ["errata"])
    oversampled = [each for each in upstream if each[1]]
    spurious = [each for each in upstream if each[4] and not each[1]]
    assert len(oversampled) > 30 and len(spurious) > 15
    for one, other in zip(ours, upstream, strict=True):
        enough, missing, length, order, refused = one
        assert enough and missing == 0 and not refused
        # The samples that were asked for are the same ones in the same order.
        assert order == other[3] and (other[1] or length == other[2])
