"""The n-gram baselines against a naive count, and what may and may not decide their weight."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from mt_megatron.data.prepare.ngram import NgramModel, dataset_baselines
from mt_megatron.errors import DataError

VOCABULARY = 50


def _stream(count: int, seed: int) -> np.ndarray:
    """A Markov chain: each token has a few likely successors."""
    rng = np.random.default_rng(seed)
    tokens = [0]
    for _ in range(count - 1):
        jump = rng.integers(0, 4) if rng.random() < 0.8 else rng.integers(0, VOCABULARY - 10)
        tokens.append(int(tokens[-1] * 3 + 1 + jump) % (VOCABULARY - 10))
    return np.array(tokens, dtype=np.uint16)


TRAIN, VALID = _stream(4000, 0), np.append(_stream(500, 1), [VOCABULARY - 1, 3]).astype(np.uint16)


def _naive(weight: float) -> tuple[float, float]:
    train, valid = TRAIN.tolist(), VALID.tolist()
    single, double = Counter(train), Counter(pairwise(train))
    contexts = Counter(train[:-1])
    unigram = bigram = 0.0
    for v, w in pairwise(valid):
        p = (single[w] + 1) / (len(train) + VOCABULARY)
        unigram -= math.log(p)
        seen = contexts[v] > 0
        bigram -= math.log(weight * double[v, w] / contexts[v] + (1 - weight) * p) if seen else math.log(p)
    return unigram / (len(valid) - 1), bigram / (len(valid) - 1)


def test_equals_a_naive_count() -> None:
    model = NgramModel(TRAIN, VOCABULARY)
    result = model.evaluate(VALID[:-1], VALID[1:])
    unigram, bigram = _naive(model.weight)
    assert result.unigram == pytest.approx(unigram, rel=1e-12)
    assert result.bigram == pytest.approx(bigram, rel=1e-12)
    assert result.tokens == VALID.size - 1
    assert result.bigram < result.unigram - 0.5, "the chain is predictable from one token"


def test_both_are_distributions() -> None:
    model = NgramModel(TRAIN, VOCABULARY)
    everything = np.arange(VOCABULARY)
    assert np.exp(-model.unigram_nats(everything)).sum() == pytest.approx(1.0)
    for previous in (0, 7, VOCABULARY - 1):
        nats = model.bigram_nats(np.full(VOCABULARY, previous), everything)
        assert np.exp(-nats).sum() == pytest.approx(1.0)


def test_the_weight_is_the_best_on_the_held_out_end_of_training() -> None:
    cut = TRAIN.size - TRAIN.size // 20
    model = NgramModel(TRAIN, VOCABULARY)
    shorter = NgramModel(TRAIN, VOCABULARY)
    shorter._count(TRAIN[:cut])
    previous, targets = TRAIN[cut - 1 : -1], TRAIN[cut:]
    losses = {w: shorter._mixed_nats(previous, targets, w).mean() for w in np.linspace(0.01, 0.99, 99)}
    assert model.weight == pytest.approx(min(losses, key=lambda w: losses[w]), abs=0.011)


def test_wrong_streams_are_errors() -> None:
    with pytest.raises(DataError, match="below vocab_size=10"):
        NgramModel(TRAIN, 10)
    with pytest.raises(DataError, match="at least 100"):
        NgramModel(TRAIN[:50], VOCABULARY)


def test_a_stream_of_distinct_contexts_keeps_every_probability_positive() -> None:
    model = NgramModel(np.arange(1000), 1001)
    nats = model.bigram_nats(np.array([5, 5, 1000]), np.array([6, 900, 1000]))
    assert np.isfinite(nats).all()


def test_dataset_baselines_score_the_positions_the_mask_keeps() -> None:
    import torch

    class Two:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            part = torch.from_numpy(VALID[index * 100 : index * 100 + 101].astype(np.int64))
            mask = torch.ones(100)
            mask[90:] = 0
            return {"tokens": part[:-1], "labels": part[1:], "loss_mask": mask}

    model = NgramModel(TRAIN, VOCABULARY)
    first = model.evaluate(VALID[:90], VALID[1:91])
    second = model.evaluate(VALID[100:190], VALID[101:191])
    both = dataset_baselines(model, Two())
    assert both.tokens == 180
    assert both.bigram == pytest.approx((first.bigram + second.bigram) / 2)
    assert dataset_baselines(model, Two(), max_samples=1).bigram == pytest.approx(first.bigram)
