"""Megatron's own datasets and blends, from file prefixes, with an index cache that cannot go stale.

One job at a time fills an index cache; what a killed job left half written is made anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import torch

from mt_megatron.checkpoint.file_locks import BUSY
from mt_megatron.config.schema import DataConfig
from mt_megatron.data.loader.content_digest import content_digest
from mt_megatron.data.loader.tokenizer import TokenizerLike
from mt_megatron.errors import DataError

logger = logging.getLogger("mt_megatron")

_LOCK = ".building"
_POLL_SECONDS = 0.2
_TELL_SECONDS = 60.0


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Around the building of an index in ``folder``, on the one rank that may write it.

    Waits as long as another process is at it, and removes first what one that was killed had begun to
    write. A folder that cannot be written, or storage without locks, is used as it is: the second is said.
    """
    with contextlib.ExitStack() as stack:
        lock = _opened(folder)
        if lock is not None:
            stack.enter_context(lock)
            if _locked(lock, folder):
                _remove_what_was_begun(lock, folder)
                _write(lock, json.dumps(sorted(_files(folder))))
                # Only after a build that went well: one that failed may have left a part as well.
                yield
                _write(lock, "")
                return
        yield


def _opened(folder: Path) -> IO[str] | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / _LOCK, "a+", encoding="utf-8")
    except OSError:
        # This user writes nothing here; one who may is not waited for. What is missing, Megatron says.
        return None


def _locked(lock: IO[str], folder: Path) -> bool:
    told = -math.inf
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in BUSY:
                logger.warning(
                    "the storage of the index cache %s has no file locks (%s): let no two jobs with the same "
                    "data start at once",
                    folder,
                    error,
                )
                return False
            reason = error.strerror
        if time.monotonic() - told > _TELL_SECONDS:
            # Storage that denies every lock says the same.
            logger.warning(
                "another job writes the index cache %s (%s); waiting until it has ended. If there is none, "
                "give another folder with --data-cache-path",
                folder,
                reason,
            )
            told = time.monotonic()
        # A lock that blocks fails at once where the storage says EACCES of a busy one.
        time.sleep(_POLL_SECONDS)


def _remove_what_was_begun(lock: IO[str], folder: Path) -> None:
    """Whoever held the lock last and left a list was killed: what is not on it, that process wrote.

    Other jobs may still open what is on the list, and have never seen the rest as a whole.
    """
    lock.seek(0)
    text = lock.read()
    if not text:
        return
    try:
        before = set(json.loads(text))
    except (ValueError, TypeError):
        before = set()
    begun = _files(folder) - before
    for name in begun:
        (folder / name).unlink(missing_ok=True)
    if begun:
        logger.warning(
            "an earlier job ended while it wrote the index cache %s; its %d files are made anew",
            folder,
            len(begun),
        )


def _files(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir() if each.name != _LOCK}


def _write(lock: IO[str], text: str) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()


_ROLES = ("training", "validation", "test")
_ORDER = ("document_index", "sample_index", "shuffle_index", "dataset_index", "dataset_sample_index")


class SampleDataset(Protocol):
    """What the loop needs of Megatron's datasets and BlendedDataset."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), each
        [sequence_length]; with masks also ``attention_mask`` [1, s, s] (bool, True = masked). Of masked words
        numpy's arrays (``batches.Batch``)."""


class Datasets(NamedTuple):
    """One dataset per split; None where the configuration names no data for it."""

    train: SampleDataset
    valid: SampleDataset | None
    test: SampleDataset | None


def unused_test_data(data: DataConfig) -> str | None:
    """A line about test data that ``data`` asks for and no run evaluates on; None where there are none."""
    shares = (data.split or "").split(",") if data.data_path else []
    if data.test_data_path:
        return "--test-data-path: no evaluation on it; for a loss on this data name it as --valid-data-path"
    if len(shares) == 3 and float(shares[2]) > 0:
        return f"--split {data.split}: no evaluation on the third share, whose documents are not used at all"
    return None


def build_datasets(
    data: DataConfig,
    *,
    tokenizer: TokenizerLike,
    sequence_length: int,
    train_samples: int,
    valid_samples: int | None = None,
    test_samples: int | None = None,
    seed: int,
    cache_dir: Path,
    masked_words: bool = False,
    sentence_order: bool = False,
) -> Datasets:
    """Build Megatron's datasets. Collective when torch.distributed is up: every rank must call it.

    ``train_samples`` is ``train_iters * global_batch_size``: Megatron draws as many epochs as
    that takes. The order of samples is the same for every ``train_samples`` that one epoch
    satisfies; beyond that it depends on the number of epochs, as in Megatron-LM.
    ``valid_samples=None`` (``test_samples`` alike) means one pass over everything held out, less
    the last, incomplete sample: every evaluation then sees the same tokens. 0 means no dataset.

    Rank 0 writes the index cache, the others then read it, so the folder (``data.data_cache_path``,
    else ``cache_dir``) must be one that all nodes see. Its subfolder is named after the size and
    time of every data file on rank 0: data prepared anew under the same path gets a new index, and copies on
    disks of the nodes may have other times.

    A mask is only made for ``reset_attention_mask`` with ``packed_sequences=False``. Otherwise
    attention is causal, and ``batches`` says where documents begin if they are to be kept apart.

    With ``masked_words`` samples are whole sentences of a document with some words masked; with
    ``sentence_order`` two halves of at least a sentence each, swapped in half of the samples. They need
    sizes for every role. Megatron leaves documents out that hold a sentence of more than 512 tokens: if
    there are any, the log says so.

    Raises ``DataError`` on every rank when files are missing, damaged, do not fit the tokenizer, or hold
    too little for one sample, and when rank 0 cannot write the index.
    """
    from megatron.core.datasets.bert_dataset import (
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

    sources, prefixes = _sources(data, (train_samples, valid_samples, test_samples))
    for prefix in prefixes:
        _check_indexed(prefix, tokenizer)
    cache = Path(data.data_cache_path or cache_dir) / _agreed_fingerprint(prefixes)
    common = {
        "random_seed": seed,
        "sequence_length": sequence_length,
        "tokenizer": _as_megatron_tokenizer(tokenizer, _bert_tokens(tokenizer) if masked_words else {}),
        "path_to_cache": str(cache),
        "mmap_bin_files": data.mmap_bin_files,
        **sources,
    }
    causal = MockGPTDataset if data.mock_data else GPTDataset
    sizes = [train_samples, valid_samples, test_samples]
    if masked_words:
        config = BERTMaskedWordPieceDatasetConfig(
            **common,
            masking_probability=data.mask_prob,
            short_sequence_probability=data.short_seq_prob,
            masking_max_ngram=3,
            masking_do_full_word=True,
            masking_do_permutation=False,
            masking_use_longer_ngrams=False,
            masking_use_geometric_distribution=False,
            classification_head=sentence_order,
        )
    else:
        config = GPTDatasetConfig(
            **common,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
            create_attention_mask=data.reset_attention_mask and data.packed_sequences is False,
        )
    if not data.mock_data:
        _require_shares(config, sizes, sentences=1 + sentence_order if masked_words else 0)
    built = _built(BERTMaskedWordPieceDataset if masked_words else causal, sizes, config, cache, prefixes)
    for role, dataset in zip(_ROLES, built, strict=True):
        if dataset is not None and len(dataset) < 1:
            raise DataError(
                f"the {role} data holds fewer than {sequence_length + 1} tokens, too few for one sample of "
                f"sequence length {sequence_length}; use more data or a shorter sequence"
            )
    return Datasets(*built)


def _built(kind: type, sizes: list[int | None], config: Any, cache: Path, prefixes: list[str]) -> list[Any]:
    """Datasets of Megatron's builder: made on rank 0 first, which writes the index, then on the others.

    Megatron waits for rank 0 at each dataset, so that an error there would leave the others waiting: here
    they hear of it and raise it too.
    """
    distributed = torch.distributed.is_initialized()
    writes = not distributed or torch.distributed.get_rank() == 0
    problem: list[str | None] = [None]

    def build() -> list[Any]:
        try:
            with filling(cache) if writes else contextlib.nullcontext():
                built: list[Any] = _builder(kind, sizes, config).build()
                return built
        except Exception as error:  # Megatron raises a bare one for generated samples
            problem[0] = _not_built(error, cache, prefixes)
            if writes and distributed:
                torch.distributed.broadcast_object_list(problem, src=0)
            raise DataError(problem[0]) from error

    if not distributed:
        return build()
    built = build() if writes else []
    torch.distributed.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise DataError(problem[0])
    return built if writes else build()


_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT)


def _not_built(error: Exception, cache: Path, prefixes: list[str]) -> str:
    found = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(found, OSError) and found.errno in _NOT_WRITABLE:
        return (
            f"the index cache {cache} of Megatron's datasets cannot be written: {found}. Give a folder that "
            "can, on storage that all nodes share, with --data-cache-path"
        )
    return (
        f"Megatron could not build its datasets from {prefixes} with the index cache {cache}: "
        f"{type(found).__name__}: {found}. The cache must be on storage that all nodes share; if its "
        "files are damaged, delete that folder"
    )


def _builder(kind: type, sizes: list[int | None], config: Any) -> Any:
    """Megatron's builder without its barriers, for ranks that take turns at all datasets together. A role of
    no samples is None: Megatron makes an empty dataset of it, or looks for its first token for ever."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    class _Builder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]
        @staticmethod
        def build_generic_dataset(
            cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *arguments: Any
        ) -> Any:
            parts = arguments[0]
            if isinstance(parts, (list, tuple)) and all(part is None for part in parts):
                return None  # A blend of a role of no samples.
            return cls(*arguments)

        def _build_megatron_dataset_splits(self, prefix: Any, split: Any, *arguments: Any) -> Any:
            # The configuration's own matrix stays: it is part of the names of all cached indices.
            wanted = [None if size == 0 else share for share, size in zip(split, self.sizes, strict=True)]
            return super()._build_megatron_dataset_splits(prefix, wanted, *arguments)

        def _build_megatron_datasets_parallel(self, prefixes: Any, split: Any, sizes_per_dataset: Any) -> Any:
            by_prefix = [
                self._build_megatron_dataset_splits(prefix, split, sizes, False)
                for prefix, sizes in zip(prefixes, sizes_per_dataset, strict=True)
            ]
            return [list(by_role) for by_role in zip(*by_prefix, strict=True)]

    return _Builder(kind, sizes, lambda: True, config)


def _require_shares(config: Any, sizes: list[int | None], *, sentences: int = 0) -> None:
    """Raise ``DataError`` where a prefix has nothing in a split that it takes part in: Megatron would
    repeat nothing for ever to get the number of samples, or fail on one rank alone. Not 0 for masked words:
    a sample has so many ``sentences`` at least."""
    for index, (role, size) in enumerate(zip(_ROLES, sizes, strict=True)):
        blend = config.blend if config.blend_per_split is None else config.blend_per_split[index]
        share = (0.0, 1.0) if config.split_matrix is None else config.split_matrix[index]
        if blend is None or share is None or size == 0:
            continue
        prefixes, weights = blend
        # Prefixes without weights weigh what they hold, which has to be a sample at least.
        wanted = config.sequence_length + 1 if len(prefixes) > 1 and weights is None else 1
        if len(prefixes) == 1 and size is None:
            continue
        if sentences and len(prefixes) > 1 and weights is None:
            raise DataError(
                f"the {role} data is {' '.join(prefixes)}; expected a weight before each prefix, since "
                f"samples of masked words are drawn to a number: {' '.join(f'1 {each}' for each in prefixes)}"
            )
        for prefix in prefixes:
            documents, tokens, total = _share(prefix, share, sentences)
            if tokens < wanted:
                split = "" if config.split is None else f" of the split {config.split}"
                raise DataError(
                    f"the {role} share{split} of {prefix} holds {tokens} tokens in {documents} of its "
                    f"{total} documents; expected at least {wanted}. Change --split, leave {prefix} out, "
                    "or give it more documents"
                    + f" of {sentences} sentences of at most {_LONG_SENTENCE} tokens"
                    * bool(sentences)
                )


_LONG_SENTENCE = 512
"""Most tokens of a sentence that Megatron-Core makes samples of (LONG_SENTENCE_LEN of ``helpers.cpp``)."""


def _share(prefix: str, share: tuple[float, float], sentences: int) -> tuple[int, int, int]:
    """Documents and tokens of a share of ``prefix``, and all its documents; rounded as Megatron does. With
    ``sentences`` only documents that masked words are taken from: so many sentences, all short enough."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    # Its end takes the memory of the lengths away.
    data = IndexedDataset(prefix)
    count = len(data.document_indices) - 1 if sentences else len(data.sequence_lengths)
    begin, end = (round(each * float(count)) for each in share)
    if not sentences:
        return end - begin, int(data.sequence_lengths[begin:end].sum(dtype=np.int64)), count
    lengths, borders = data.sequence_lengths, data.document_indices[begin : end + 1]
    held = np.diff(borders)
    tokens, long = (
        np.diff(np.insert(np.cumsum(each, dtype=np.int64), 0, 0)[borders])
        for each in (lengths, lengths > _LONG_SENTENCE)
    )
    too_long = (long > 0) & (held > 1)
    if left_out := int(too_long.sum()):
        logger.warning(
            "%d of %d documents of %s hold a sentence of more than %d tokens, and Megatron-Core makes no "
            "samples of them; the option --split-sentences of prepare and preprocess makes shorter ones",
            left_out,
            end - begin,
            prefix,
            _LONG_SENTENCE,
        )
    used = ~too_long & (held >= sentences)
    return int(used.sum()), int(tokens[used].sum()), count


def order_fingerprint(dataset: SampleDataset) -> str:
    """A digest of which tokens every sample index stands for (documents, offsets, shuffle, blend).

    Store it in a checkpoint and compare on resume: equal fingerprints mean that
    ``consumed_samples`` continues exactly where the earlier run stopped.
    """
    parts = getattr(dataset, "datasets", None)
    if parts is None:
        return _digest([dataset])
    # Which prefix each sample comes from follows from the weights; how many such samples there are, from
    # the number that was asked for.
    return _digest(parts, repr([float(weight) for weight in getattr(dataset, "weights", ())]))


def has_order(dataset: SampleDataset, fingerprint: object) -> bool:
    """True where a checkpoint's ``fingerprint`` is of the order of ``dataset``. Fingerprints of blends that
    earlier versions wrote cover the number of samples as well."""
    parts = [dataset, *getattr(dataset, "datasets", [])]
    return fingerprint == order_fingerprint(dataset) or fingerprint == _digest(parts)


def _digest(parts: Sequence[Any], blend: str = "") -> str:
    digest = hashlib.sha256(blend.encode())
    for part in parts:
        for name in _ORDER:
            array = getattr(part, name, None)
            if array is not None:
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _sources(data: DataConfig, samples: tuple[int | None, ...]) -> tuple[dict[str, Any], list[str]]:
    """The blend arguments of GPTDatasetConfig, and every prefix they name."""
    from megatron.core.datasets.utils import get_blend_from_list

    if data.mock_data:
        return {}, []
    if data.data_path:
        if data.train_data_path or data.valid_data_path or data.test_data_path:
            raise DataError(
                "found data_path together with train/valid/test_data_path; expected one of the two: "
                "data_path and split, or a path for each split"
            )
        if data.split is None:
            raise DataError("found data_path without split; say how to divide it, for example --split 98,2,0")
        blend = get_blend_from_list(list(data.data_path))
        return {"blend": blend, "split": data.split}, list(blend[0])
    if not data.train_data_path:
        raise DataError(
            "found no training data; give --train-data-path PREFIX, or --data-path PREFIX and --split"
        )
    if data.split is not None:
        raise DataError(
            "found split together with train_data_path; split divides data_path only: drop one of them"
        )
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    blends = [
        None if count == 0 else get_blend_from_list(list(path) or None)
        for path, count in zip(paths, samples, strict=True)
    ]
    for role, blend, count in zip(("train", "valid", "test"), blends, samples, strict=True):
        if blend is not None and blend[1] is not None and count is None:
            raise DataError(
                f"found weights in {role}_data_path and no number of samples to draw; one pass over "
                "everything cannot be weighted: drop the weights"
            )
    prefixes = [prefix for blend in blends if blend is not None for prefix in blend[0]]
    return {"blend_per_split": blends}, prefixes


def _check_indexed(prefix: str, tokenizer: TokenizerLike) -> None:
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
    # The first million tokens are enough to notice another tokenizer's data; all would be a full read.
    head = np.fromfile(prefix + ".bin", dtype=data.index.dtype, count=1 << 20)
    if head.size and int(head.max()) >= tokenizer.vocab_size:
        raise DataError(
            f"{prefix}.bin holds token {int(head.max())}, and the tokenizer has only {tokenizer.vocab_size} "
            "tokens: the data was prepared with another one. Name that one with --tokenizer-model"
        )


def _agreed_fingerprint(prefixes: Sequence[str]) -> str:
    """Rank 0's fingerprint, on all ranks. Raises ``DataError`` on a rank whose files are others."""
    own = [_files_fingerprint(prefixes), content_digest(prefixes)]
    if not torch.distributed.is_initialized():
        return own[0]
    first: list[Any] = list(own)
    torch.distributed.broadcast_object_list(first, src=0)
    if first[1] != own[1]:
        raise DataError(
            f"the data files {', '.join(prefixes)} of {socket.gethostname()} are not those of rank 0: their "
            "sizes or contents differ. Copy them anew to every node, or name ones that all nodes see"
        )
    return str(first[0])


def _files_fingerprint(prefixes: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            status = Path(prefix + suffix).stat()
            digest.update(f"{prefix}{suffix}:{status.st_size}:{status.st_mtime_ns};".encode())
    return digest.hexdigest()[:16]


_BERT_TOKENS = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
"""Attribute of a MegatronTokenizer -> the token."""


def _bert_tokens(tokenizer: TokenizerLike) -> dict[str, int]:
    """Attributes of a MegatronTokenizer that masked words need."""
    vocabulary = tokenizer.vocabulary()
    missing = [token for token in _BERT_TOKENS.values() if token not in vocabulary]
    if missing:
        raise DataError(
            f"the tokenizer has no {' '.join(missing)}; expected BERT's special tokens, as in a WordPiece "
            "tokenizer.json. Make one with: mt-megatron prepare --split-sentences --output DIR"
        )
    return {name: vocabulary[token] for name, token in _BERT_TOKENS.items()}


def _as_megatron_tokenizer(tokenizer: TokenizerLike, special: Mapping[str, int]) -> Any:
    """Megatron's datasets want a MegatronTokenizer. GPTDataset takes its ``eod`` and identity alone from it,
    that of masked words the vocabulary and the ``special`` tokens."""
    from megatron.core.datasets.megatron_tokenizer import MegatronTokenizer

    class _View(MegatronTokenizer):  # type: ignore[misc]
        def tokenize(self, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
            return np.asarray(tokenizer.encode(text), dtype=np.int32)

        @property
        def vocab(self) -> dict[str, int]:
            return tokenizer.vocabulary()

        @cached_property
        def inv_vocab(self) -> dict[int, str]:
            # In the order of ids, from which random words are drawn; asked for each token of a sample.
            return {index: token for token, index in sorted(self.vocab.items(), key=itemgetter(1))}

        @property
        def vocab_size(self) -> int:
            return tokenizer.vocab_size

        @property
        def eod(self) -> int:
            return tokenizer.eod

    for name, index in special.items():
        setattr(_View, name, index)
    return _View(identity=tokenizer.identity)
