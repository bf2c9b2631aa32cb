"""Unigram and bigram cross-entropy: what counting alone achieves, the line a trained model has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mt_megatron.data.prepare.indexed_files import read_header
from mt_megatron.errors import DataError

if TYPE_CHECKING:
    from mt_megatron.data.loader.datasets import SampleDataset

Tokens = npt.NDArray[np.integer[Any]]

_HELD_OUT_SHARE = 0.05
_COUNTED = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Mean negative log-likelihood per token, in nats, of the very same tokens."""

    unigram: float
    bigram: float
    tokens: int
    """How many tokens were predicted."""


class NgramModel:
    """Counts of a training stream.

    Unigram: ``p(w) = (count(w) + 1) / (N + V)``. Bigram, interpolated with it:
    ``p(w | v) = weight * count(v, w) / count(v) + (1 - weight) * p(w)``; after a ``v`` that was
    never seen, the unigram alone. ``weight`` maximises the likelihood of the last 5 % of the
    training stream under the counts of the first 95 %; validation tokens have no say in it.
    """

    def __init__(self, tokens: Tokens, vocab_size: int) -> None:
        """Count ``tokens`` [n], the training stream with its end-of-document tokens."""
        if tokens.size < 100:
            raise DataError(f"found {tokens.size} training tokens; expected at least 100 to count bigrams")
        if int(tokens.max()) >= vocab_size:
            raise DataError(f"found token {int(tokens.max())}; expected ids below vocab_size={vocab_size}")
        cut = tokens.size - max(1, int(tokens.size * _HELD_OUT_SHARE))
        self.vocab_size = vocab_size
        self._count(tokens[:cut])
        self.weight = self._best_weight(tokens[cut - 1 : -1], tokens[cut:])
        self._count(tokens)

    @classmethod
    def of_prefixes(cls, prefixes: Sequence[str], vocab_size: int) -> NgramModel:
        """Count the indexed datasets ``prefixes``, at most their first 100 million tokens."""
        parts: list[Tokens] = []
        left = _COUNTED
        for prefix in prefixes:
            parts.append(read_tokens(prefix)[:left])
            left -= parts[-1].size
        return cls(np.concatenate(parts), vocab_size)

    def unigram_nats(self, targets: Tokens) -> npt.NDArray[np.float64]:
        """``-log p(w)`` of every target [n]."""
        return -np.log(self._unigram[targets])

    def bigram_nats(self, previous: Tokens, targets: Tokens) -> npt.NDArray[np.float64]:
        """``-log p(w | v)`` of every target [n] after its previous token [n]."""
        return self._mixed_nats(previous, targets, self.weight)

    def evaluate(self, previous: Tokens, targets: Tokens) -> Baselines:
        """Mean over all pairs."""
        return Baselines(
            unigram=float(self.unigram_nats(targets).mean()),
            bigram=float(self.bigram_nats(previous, targets).mean()),
            tokens=int(targets.size),
        )

    def _count(self, tokens: Tokens) -> None:
        counts = np.bincount(tokens, minlength=self.vocab_size)
        self._unigram = (counts + 1.0) / (tokens.size + self.vocab_size)
        self._contexts = np.bincount(tokens[:-1], minlength=self.vocab_size)
        self._pairs, self._pair_counts = np.unique(self._key(tokens[:-1], tokens[1:]), return_counts=True)

    def _key(self, previous: Tokens, targets: Tokens) -> npt.NDArray[np.int64]:
        return previous.astype(np.int64) * self.vocab_size + targets

    def _conditional(self, previous: Tokens, targets: Tokens) -> npt.NDArray[np.float64]:
        keys = self._key(previous, targets)
        at = np.minimum(np.searchsorted(self._pairs, keys), self._pairs.size - 1)
        seen = np.where(self._pairs[at] == keys, self._pair_counts[at], 0)
        shares: npt.NDArray[np.float64] = seen / np.maximum(self._contexts[previous], 1)
        return shares

    def _mixed_nats(self, previous: Tokens, targets: Tokens, weight: float) -> npt.NDArray[np.float64]:
        weights = np.where(self._contexts[previous] > 0, weight, 0.0)
        mixed = weights * self._conditional(previous, targets) + (1.0 - weights) * self._unigram[targets]
        return -np.log(mixed)

    def _best_weight(self, previous: Tokens, targets: Tokens) -> float:
        # Expectation-maximisation of one mixture weight: the likelihood is concave in it.
        known = self._contexts[previous] > 0
        if not known.any():
            return 0.5
        conditional = self._conditional(previous, targets)[known]
        unigram = self._unigram[targets][known]
        weight = 0.5
        for _ in range(100):
            share = weight * conditional / (weight * conditional + (1.0 - weight) * unigram)
            # Never 0 or 1: a pair that was not seen must keep some probability.
            moved = float(np.clip(share.mean(), 1e-6, 1.0 - 1e-6))
            if abs(moved - weight) < 1e-6:
                break
            weight = moved
        return weight


def read_tokens(prefix: str) -> Tokens:
    """All tokens [n] of a Megatron indexed dataset, mapped from its ``.bin`` file."""
    # Not Megatron's own reader: whoever only prepares data would import torch for one dtype.
    dtype = read_header(Path(prefix + ".idx")).dtype
    tokens: Tokens = np.memmap(Path(prefix + ".bin"), dtype=dtype, mode="r")
    return tokens


def dataset_baselines(model: NgramModel, dataset: SampleDataset, max_samples: int | None = None) -> Baselines:
    """The baselines on exactly the positions that a model is scored on when it is evaluated on the
    first ``max_samples`` samples of ``dataset`` (None: all): same inputs, same labels, same mask."""
    count = len(dataset) if max_samples is None else min(max_samples, len(dataset))
    previous, targets = [], []
    for index in range(count):
        sample = dataset[index]
        scored = sample["loss_mask"] > 0
        previous.append(sample["tokens"][scored].numpy())
        targets.append(sample["labels"][scored].numpy())
    return model.evaluate(np.concatenate(previous), np.concatenate(targets))
