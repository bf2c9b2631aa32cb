"""Megatron's own GPT datasets and blends, built from file prefixes with an index cache that cannot go stale."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from mt_megatron.errors import DataError
from mt_megatron.training.data.tokenizer import Tokenizer


class SampleDataset(Protocol):
    """What the loop needs of Megatron's GPTDataset and BlendedDataset."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), each
        [sequence_length]; with document resets also ``attention_mask`` (bool, True = masked)."""


def build_datasets(
    *,
    train_data_path: Sequence[str],
    valid_data_path: Sequence[str] = (),
    split: str | None = None,
    tokenizer: Tokenizer,
    sequence_length: int,
    train_samples: int,
    valid_samples: int | None = None,
    seed: int = 1234,
    cache_dir: Path,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    mmap_bin_files: bool = True,
) -> tuple[SampleDataset, SampleDataset | None]:
    """Build the train and validation datasets; collective: every rank must call it.

    ``train_data_path`` and ``valid_data_path`` are Megatron's blend lists: one prefix
    (``["data/train"]``), several (``["a", "b"]`` is read as two prefixes), or weights and
    prefixes (``["30", "a", "70", "b"]``). Either name both, or name ``train_data_path`` and
    ``split`` ("95,5") to cut both out of the same documents by position.

    ``train_samples`` is ``train_iters * global_batch_size``: Megatron draws as many epochs as
    that takes. The order of samples is the same for every ``train_samples`` that needs one epoch;
    beyond that it depends on the number of epochs, as in Megatron-LM. ``valid_samples=None``
    means one pass over everything held out (less the last, incomplete sample).

    Rank 0 writes the index cache under ``cache_dir``, the others then read it, so the folder must
    be one that all nodes see. The cache's folder is named after size and time of every data file:
    data prepared anew under the same path gets a new index.

    A mask [1, s, s] per sample is only made with ``reset_attention_mask``; otherwise the batch has
    none and attention is causal.

    Raises ``DataError`` when files are missing, damaged, do not fit the tokenizer, or hold too
    little for one sample.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    if split is not None and valid_data_path:
        raise DataError(
            f"found both split={split!r} and validation data {list(valid_data_path)}; expected one of the "
            "two: drop the split, or drop the validation paths"
        )
    train_blend = get_blend_from_list(list(train_data_path) or None)
    if train_blend is None:
        raise DataError("found no training data path; give --train-data-path PREFIX or --data-path PREFIX")
    valid_blend = get_blend_from_list(list(valid_data_path) or None)
    if valid_blend is not None and valid_blend[1] is not None and valid_samples is None:
        raise DataError(
            "found weights in the validation blend and no number of validation samples; a pass over "
            "everything cannot be weighted: drop the weights or set eval_iters"
        )
    prefixes = [*train_blend[0], *(valid_blend[0] if valid_blend else [])]
    for prefix in prefixes:
        _check_indexed(prefix, tokenizer)

    common: dict[str, Any] = {
        "random_seed": seed,
        "sequence_length": sequence_length,
        "tokenizer": _as_megatron_tokenizer(tokenizer),
        "path_to_cache": str(cache_dir / _files_fingerprint(prefixes)),
        "mmap_bin_files": mmap_bin_files,
        "reset_position_ids": reset_position_ids,
        "reset_attention_mask": reset_attention_mask,
        "eod_mask_loss": eod_mask_loss,
        "create_attention_mask": reset_attention_mask,
    }
    if split is not None:
        config = GPTDatasetConfig(blend=train_blend, split=split, **common)
    else:
        config = GPTDatasetConfig(blend_per_split=[train_blend, valid_blend, None], **common)
    # Upstream asks for a size per split; 0 for the test split, which nobody builds here.
    sizes: list[int | None] = [train_samples, valid_samples, None if train_blend[1] is None else 0]
    try:
        train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    except (AssertionError, ValueError, IndexError, OSError, EOFError) as error:
        raise DataError(
            f"Megatron could not build its datasets from {prefixes} with the index cache "
            f"{common['path_to_cache']}: {type(error).__name__}: {error}. The cache must be on storage "
            "that all nodes share; if an earlier run was killed while writing it, delete that folder"
        ) from error
    _check_not_empty(train, "training", sequence_length)
    if valid is not None:
        _check_not_empty(valid, "validation", sequence_length)
    return train, valid


def order_fingerprint(dataset: SampleDataset) -> str:
    """A digest of which tokens every sample index stands for (documents, offsets, shuffle, blend).

    Store it in a checkpoint and compare on resume: equal fingerprints mean that
    ``consumed_samples`` continues exactly where the earlier run stopped.
    """
    digest = hashlib.sha256()
    for part in [dataset, *getattr(dataset, "datasets", [])]:
        for name in ("document_index", "sample_index", "shuffle_index", "dataset_index", "dataset_sample_index"):
            array = getattr(part, name, None)
            if array is not None:
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _check_indexed(prefix: str, tokenizer: Tokenizer) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if not IndexedDataset.exists(prefix):
        raise DataError(
            f"expected Megatron data files {prefix}.bin and {prefix}.idx, found none or only one; give the "
            "path without its extension, or make the files with: mt-megatron prepare --output DIR"
        )
    try:
        data = IndexedDataset(prefix)
    except (AssertionError, ValueError, KeyError, OSError) as error:
        raise DataError(f"{prefix}.idx is not a Megatron index file or is damaged: {error}") from error
    tokens = int(data.sequence_lengths.sum(dtype=np.int64))
    found = Path(prefix + ".bin").stat().st_size
    expected = tokens * np.dtype(data.index.dtype).itemsize
    if found != expected:
        raise DataError(
            f"{prefix}.bin has {found} bytes; its index expects {expected} ({tokens} tokens): the two files "
            "do not belong together or one was cut off. Prepare the data again"
        )
    # The first megabytes are enough to notice another tokenizer's data; every token would be a full read.
    head = np.fromfile(prefix + ".bin", dtype=data.index.dtype, count=1 << 20)
    if head.size and int(head.max()) >= tokenizer.vocab_size:
        raise DataError(
            f"{prefix}.bin holds token {int(head.max())}, and {tokenizer.path} has only "
            f"{tokenizer.vocab_size} tokens: the data was prepared with another tokenizer"
        )


def _check_not_empty(dataset: SampleDataset, role: str, sequence_length: int) -> None:
    if len(dataset) < 1:
        raise DataError(
            f"the {role} data holds fewer than {sequence_length + 1} tokens, too few for one sample of "
            f"sequence_length={sequence_length}; use more data or a shorter sequence"
        )


def _files_fingerprint(prefixes: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            status = Path(prefix + suffix).stat()
            digest.update(f"{prefix}{suffix}:{status.st_size}:{status.st_mtime_ns};".encode())
    return digest.hexdigest()[:16]


def _as_megatron_tokenizer(tokenizer: Tokenizer) -> Any:
    """GPTDataset wants a MegatronTokenizer, and takes only its ``eod`` and identity from it."""
    from megatron.core.datasets.megatron_tokenizer import MegatronTokenizer

    class _View(MegatronTokenizer):  # type: ignore[misc]
        def tokenize(self, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
            return np.asarray(tokenizer.encode(text), dtype=np.int32)

        @property
        def vocab(self) -> dict[str, int]:
            return tokenizer.vocabulary()

        @property
        def inv_vocab(self) -> dict[int, str]:
            return {index: token for token, index in tokenizer.vocabulary().items()}

        @property
        def vocab_size(self) -> int:
            return tokenizer.vocab_size

        @property
        def eod(self) -> int:
            return tokenizer.eod

    return _View(sha256=tokenizer.sha256)
