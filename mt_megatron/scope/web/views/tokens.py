"""Tokens of a sample: text, loss, entropy and the most probable tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..source import TokenKey
from .context import Answer, Context

MOST_ROWS = 5_000


def rows(context: Context, query: dict[str, Any]) -> Answer:
    """Step, sample, micro-batch and number of the path of all samples that are kept, the newest ones."""
    found = context.source.token_rows()
    kept = found[-MOST_ROWS:]
    paths = list(dict.fromkeys(key.path for key in kept))
    numbers = {path: index for index, path in enumerate(paths)}
    table = [(key.step, key.sample, key.microbatch, numbers[key.path]) for key in kept]
    return Answer(
        facts={"count": len(found), "paths": paths},
        arrays={"rows": np.asarray(table, np.float64).reshape(-1, 4)},
    )


def tokens(context: Context, query: dict[str, Any]) -> Answer:
    """One sample at one place. ``text`` and ``top_text`` are None where the run's tokenizer is not known."""
    key = TokenKey(
        step=query["step"],
        sample=query["sample"],
        microbatch=query["microbatch"],
        path=query["path"] if query["path"] is not None else "output_layer",
    )
    row = context.source.tokens(key)
    return Answer(
        facts={
            "text": _text(context, row.ids),
            "top_text": _text(context, row.top_ids.ravel()),
        },
        arrays={
            "position": row.position,
            "ids": row.ids,
            "loss": np.asarray(row.loss, np.float32),
            "entropy": np.asarray(row.entropy, np.float32),
            "top_ids": row.top_ids,
            "top_logprobs": np.asarray(row.top_logprobs, np.float32),
        },
    )


def _text(context: Context, ids: NDArray[np.int64]) -> list[str] | None:
    found = context.source.text_of([int(each) for each in ids])
    return None if found is None else list(found)
