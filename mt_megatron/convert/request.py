"""Request and outcome of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

Form = Literal["huggingface", "torch_dist", "torch"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAX_SHARD = {"huggingface": 5 * 10**9, "torch_dist": 512 * 10**6, "torch": 0}
"""Bytes of tensors in one file, where nothing else is asked for."""


class Progress(Protocol):
    """Receiver of messages and progress."""

    def say(self, line: str) -> None:
        """One line for a person."""

    def expect(self, total: int) -> None:
        """So many bytes will be written."""

    def advance(self, count: int) -> None:
        """So many more are; from any thread."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to convert, into what."""

    source: Path
    published: bool
    """Whether the source is a folder in Hugging Face's form; else a Megatron checkpoint."""

    destination: Path
    form: Form
    arguments: tuple[str, ...] = ()
    """Options of a training configuration: the layout, and what the source does not say of its model."""

    dtype: str | None = None
    """One of ``DTYPES``; None: every tensor as it is stored."""

    max_shard_size: int | None = None
    fp8: bool = False
    """Whether published linears are written block-scaled."""

    fp8_recipe: str | None = None
    """``blockwise``: only the linears that the recipe trains in FP8, with its power-of-two scales; None: all
    that published files may hold in FP8, each block's largest magnitude becoming 448."""

    prediction: bool = True
    """Whether layers of multi-token prediction are converted as well."""

    weights_only: bool = True
    """Whether an optimizer's state in the source is left behind; else it is converted as well."""

    side_files: Path | None = None
    """A folder with tokenizer, generation settings and ``config.json`` for a published result."""

    verify: bool = True
    """Whether a Megatron checkpoint is compared with its checksums first."""

    workers: int = 2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a conversion."""

    folder: Path
    tensors: int
    bytes: int
    seconds: float
