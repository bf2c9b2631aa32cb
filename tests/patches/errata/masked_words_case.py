"""The ranks' side of ``tests/data/test_sentences.py``: samples with an erratum and without."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tests.patches.errata.dropout_ranks import features_without


def samples(folder: str, paddings: list[int], without: list[str]) -> list[dict[str, Any]]:
    """Figures of the samples of masked words with each of the padding tokens."""
    import mt_megatron

    mt_megatron.patch("cpu", features=features_without(without))
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [_figures(Path(f"{folder}{padding}"), padding) for padding in paddings]


def _figures(place: Path, padding: int) -> dict[str, Any]:
    import numpy as np

    from mt_megatron.config.schema import DataConfig
    from mt_megatron.data.loader import datasets
    from mt_megatron.errors import DataError

    place.mkdir()
    _write(
        place / "some",
        [[5, 9, 30], [4, 600, 9], [8, 8], [20] * 9, [513, 2], [12, 3, 4], [9] * 30, [7, 7], [40, 8]],
    )
    _write(place / "none", [[600, 4], [5], [700, 700]])
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mt_megatron").addHandler(handler)

    def built(*prefixes: str, order: bool = True) -> Any:
        return datasets.build_datasets(
            DataConfig(train_data_path=tuple(str(place / each) for each in prefixes)),
            tokenizer=_Words(padding),
            sequence_length=64,
            train_samples=300,
            valid_samples=0,
            test_samples=0,
            seed=3,
            cache_dir=place / "cache",
            masked_words=True,
            sentence_order=order,
        ).train

    def refused(*prefixes: str) -> str:
        try:
            built(*prefixes)
        except DataError as error:
            return str(error)
        return ""

    train = built("some")
    outside = masked = tokens = swapped = 0
    text = []
    for index in range(300):
        sample = train[index]
        length = 64 - len(sample["text"]) + len(np.trim_zeros(sample["text"] - padding, "b"))
        outside += int(sample["padding_mask"][length:].any()) + int(sample["types"][length:].any())
        assert sample["padding_mask"][:length].all() and set(sample["types"][:length]) == {0, 1}
        masked += int(sample["loss_mask"].sum())
        tokens += length
        swapped += sample["is_random"]
        text.append(int(sample["text"].sum()))
    return {
        "outside": outside,
        "masked": masked / tokens,
        "swapped": swapped / 300,
        "text": text,
        "log": " ".join(said),
        "none": refused("none"),
        "unweighted": refused("some", "some"),
    }


def _write(prefix: Path, documents: list[list[int]]) -> None:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(5)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for lengths in documents:
        builder.add_document(random.integers(10, 200, sum(lengths)).astype(np.uint16), lengths)
    builder.finalize(f"{prefix}.idx")


class _Words:
    """200 words, the special ones among the first ten."""

    vocab_size = 200
    eod = 3
    identity = "words"

    def __init__(self, padding: int) -> None:
        names = {padding: "[PAD]", 2: "[CLS]", 3: "[SEP]", 4: "[MASK]"}
        self._words = {names.get(index, f"word{index}"): index for index in range(200)}

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    encode_batch = encode

    def vocabulary(self) -> dict[str, int]:
        # In another order each time, as the tokenizers library gives it.
        return dict(sorted(self._words.items(), key=lambda each: hash(each[0])))
