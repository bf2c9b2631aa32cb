"""The files of a published folder that are not weights: tokenizer, generation settings, chat template.

A Megatron checkpoint made from such a folder carries them in ``huggingface/``, so that the way back needs
nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_megatron.convert.places import CONFIG
from mt_megatron.errors import CheckpointError

CARRIED = "huggingface"
"""Folder in a Megatron checkpoint."""

GENERATION = "generation_config.json"

_TOKENIZER = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LARGEST = 1 << 28


def side_files(folder: Path) -> dict[str, bytes]:
    """The contents of ``config.json``, the generation settings and the tokenizer's files in ``folder``, by
    name. Raises ``CheckpointError`` for one that cannot be read or is no such file by its size."""
    found = {}
    for name in (CONFIG, GENERATION, *_TOKENIZER):
        path = folder / name
        if not path.is_file():
            continue
        try:
            if path.stat().st_size > _LARGEST:
                raise CheckpointError(f"{path} has {path.stat().st_size} bytes: that is no {name}")
            found[name] = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return found


def carried_files(checkpoint: Path) -> dict[str, bytes]:
    """The side files that a Megatron checkpoint carries; none when it has no such folder."""
    folder = checkpoint / CARRIED
    return side_files(folder) if folder.is_dir() else {}


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """The tokenizer's files for a published folder from a ``tokenizer.json``, a SentencePiece model, or a
    folder of such, that a run was configured with."""
    if path.is_dir():
        return {name: each for name, each in side_files(path).items() if name in _TOKENIZER}
    if path.suffix == ".json":
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        return {
            "tokenizer.json": path.read_bytes(),
            "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
        }
    return {"tokenizer.model": path.read_bytes()} if path.suffix == ".model" else {}


def has_tokenizer(files: Mapping[str, bytes]) -> bool:
    """Whether ``files`` hold a tokenizer."""
    return any(name in files for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def generation_config(config: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    """The generation settings of ``files``, or those that ``config`` (a ``config.json``) implies."""
    if GENERATION in files:
        return files[GENERATION]
    settings = {name: config[name] for name in _TOKENS if config.get(name) is not None}
    return (json.dumps({"_from_model_config": True, **settings}, indent=2) + "\n").encode()
