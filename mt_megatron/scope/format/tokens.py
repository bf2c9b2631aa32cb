"""``tokens`` frames of tensor-parallel ranks, each about its own words, as one about the whole vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def combined(frames: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The frame that one rank with all words would have sent.

    ``frames`` are those of one (step, path, microbatch, sample, position). With ``lse_r`` the log of the sum
    of the exponentials of rank r's words and L that of all, rank r's share of the probability is
    exp(lse_r - L); log-probabilities move by lse_r - L, entropies add up weighted with the shares, and the
    loss is that of the rank that has the label's word (it is infinite elsewhere). ``parts`` of the result is
    1, or stays where some are missing. Raises ``ValueError`` for no frames.
    """
    if not frames:
        raise ValueError("found no tokens frame; expected at least one")
    first = dict(frames[0])
    if len(frames) == 1:
        return first
    each = np.stack([np.asarray(frame["lse"], np.float64) for frame in frames])
    whole = np.logaddexp.reduce(each, axis=0)
    # A rank that holds nothing but padding has an lse of minus infinity; its share times its logarithm, 0
    # times infinity, would be NaN.
    without = np.isneginf(each)
    log_shares = np.where(without, 0.0, each - whole)
    shares = np.where(without, 0.0, np.exp(log_shares))
    entropies = np.stack([np.asarray(frame["entropy"], np.float64) for frame in frames])
    losses = np.stack([np.asarray(frame["loss"], np.float64) for frame in frames])
    ids = np.concatenate([np.asarray(frame["top_ids"], np.int64) for frame in frames], axis=1)
    logprobs = np.concatenate(
        [
            np.asarray(frame["top_logprobs"], np.float64) + moved[:, None]
            for frame, moved in zip(frames, log_shares, strict=True)
        ],
        axis=1,
    )
    k = max(np.shape(frame["top_ids"])[1] for frame in frames)
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
    first |= {
        "loss": (losses - log_shares).min(axis=0).astype(np.float32),
        "entropy": (shares * (entropies - log_shares)).sum(axis=0).astype(np.float32),
        "top_ids": np.take_along_axis(ids, order, axis=1),
        "top_logprobs": np.take_along_axis(logprobs, order, axis=1).astype(np.float32),
        "lse": whole.astype(np.float32),
    }
    if len(frames) == int(first.get("parts") or 1):
        first["parts"] = 1
    return first
