"""Padding of one sample is not counted against the samples after it, in any order of reading."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

HERE = "tests.patches.errata.test_cached_loss_mask"
SAMPLES, LENGTH, END = 1000, 32, 0


def counted(folder: str, order: list[int], without: list[str]) -> dict[str, Any]:
    """Of each read: the tokens that its loss mask counts, and those whose label is no padding."""
    from types import SimpleNamespace

    import numpy
    import torch

    import mt_megatron
    from tests.patches.errata.dropout_ranks import features_without

    mt_megatron.patch("cpu", features=features_without(without))
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = f"{folder}/documents"
    generator = numpy.random.default_rng(7)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for length in generator.integers(1, 30, 4000):
        builder.add_item(torch.from_numpy(numpy.append(generator.integers(1, 99, length), END)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=f"{folder}/cache",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=SimpleNamespace(eod=END, pad=END, unique_identifiers={"class": "test"}),
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [SAMPLES, 0, 0], lambda: True, config).build()
    masks, expected = [], []
    for index in order:
        sample = train[index]
        text, _ = train._query_document_sample_shuffle_indices(index)
        masks.append(sample["loss_mask"])
        expected.append(int((text[1:] != END).sum()))
    # Summed after the last read, so that a mask which a later read overwrites is noticed.
    return {"counted": [int(mask.sum()) for mask in masks], "expected": expected}


def _order() -> list[int]:
    return random.Random(0).sample(range(SAMPLES), SAMPLES)


def test_a_thousand_samples_count_what_is_no_padding(tmp_path: Path) -> None:
    [found] = run_ranks(1, f"{HERE}:counted", str(tmp_path), _order(), [])
    assert found["counted"] == found["expected"]
    assert min(found["expected"]) < LENGTH and len(set(found["expected"])) > 3


def test_upstreams_mask_decays(tmp_path: Path) -> None:
    """Negative control: without the mend the counts fall to nothing."""
    [found] = run_ranks(1, f"{HERE}:counted", str(tmp_path), _order(), ["errata"])
    assert sum(found["counted"]) == pytest.approx(0, abs=SAMPLES)
    assert sum(found["counted"]) < 0.1 * sum(found["expected"])
