"""Megatron-LM's arguments that count samples: the same in steps of a global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_megatron.config.types import options


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A number of samples where the option itself is a number of steps."""

    count: int
    where: str
    """How it was written, for messages."""


def divide_samples(values: dict[str, Any], problems: list[str]) -> list[str]:
    """Put steps in the place of every ``Samples`` in ``values``, rounded down as Megatron-LM does.

    Returns a line about each for the log; what cannot be divided goes to ``problems``.
    """
    notes = []
    for name, given in values.items():
        if not isinstance(given, Samples):
            continue
        option = options()[name]
        values[name] = option.default
        batch = values.get("global_batch_size", options()["global_batch_size"].default)
        if values.get("rampup_batch_size") is not None:
            problems.append(
                f"{given.where} counts samples, which --rampup-batch-size takes in steps of changing size; "
                f"expected {option.flag}."
            )
        elif not isinstance(batch, int) or batch < 1 or (name != "lr_warmup_iters" and given.count < batch):
            problems.append(
                f"{given.where} is {given.count}; expected at least one global batch of {batch} samples. "
                "Change it or --global-batch-size."
            )
        else:
            values[name] = given.count // batch
            notes.append(
                f"{given.where} {given.count}: {option.flag} {values[name]}, as a step takes {batch} samples"
            )
    return notes
