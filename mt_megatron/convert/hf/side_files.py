"""The files of a published folder that are not weights: tokenizer, generation settings, chat template.

A Megatron checkpoint made from such a folder carries them in ``huggingface/``, so that the way back needs
nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_megatron.convert.folders import CONFIG
from mt_megatron.data.loader.tokenizer import TOKENIZER_FILES, open_tokenizer
from mt_megatron.errors import CheckpointError, DataError

CARRIED = "huggingface"
"""Folder in a Megatron checkpoint."""

GENERATION = "generation_config.json"

_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LARGEST = 1 << 28


@dataclass(frozen=True, kw_only=True)
class End:
    """The token that ended documents when the model was trained, and ends what it generates."""

    id: int
    token: str | None = None
    """Its text; None where the tokenizer has no text for it."""

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint's manifest."""
        return {"eod": self.id, "eod_token": self.token}


def end_of_run(document: Mapping[str, Any]) -> End | None:
    """The end of document of the run that wrote a checkpoint, by its manifest: what it says itself, or the
    tokenizer that it names, where that can still be read."""
    config = document.get("config", {})
    data, model = config.get("data", {}), config.get("model", {})
    if data.get("mock_data"):
        return None
    recorded = document.get("tokenizer")
    if isinstance(recorded, Mapping) and isinstance(recorded.get("eod"), int):
        return End(id=recorded["eod"], token=recorded.get("eod_token"))
    if not data.get("tokenizer_type"):
        return None
    try:
        tokenizer = open_tokenizer(
            data["tokenizer_type"], data.get("tokenizer_model"), vocab_size=model.get("vocab_size")
        )
    except DataError:
        return None
    return End(id=tokenizer.eod, token=getattr(tokenizer, "eod_token", None))


def with_end(files: Mapping[str, bytes], end: End | None) -> dict[str, bytes]:
    """``files`` of a published folder whose tokenizer and settings name ``end`` where they name none."""
    found = dict(files)
    if end is None:
        return found
    if end.token is not None and "tokenizer.json" in found:
        settings = _object(_TOKENIZER_CONFIG, found.get(_TOKENIZER_CONFIG, b"{}"))
        if not settings.get("eos_token"):
            found[_TOKENIZER_CONFIG] = _json({**settings, "eos_token": end.token})
    for name in (CONFIG, GENERATION):
        if name not in found:
            continue
        settings = _object(name, found[name])
        if settings.get("eos_token_id") is None:
            found[name] = _json({**settings, "eos_token_id": end.id})
    return found


def _object(name: str, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{name} of the tokenizer cannot be read: {error}. Mend that file") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{name} of the tokenizer holds {type(document).__name__}, expected an object")
    return document


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()


def side_files(folder: Path) -> dict[str, bytes]:
    """The contents of ``config.json``, the generation settings and the tokenizer's files in ``folder``, by
    name. Raises ``CheckpointError`` for one that cannot be read or is no such file by its size."""
    found = {}
    for name in (CONFIG, GENERATION, *TOKENIZER_FILES):
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
        return {name: each for name, each in side_files(path).items() if name in TOKENIZER_FILES}
    if path.suffix == ".json":
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        return {
            "tokenizer.json": path.read_bytes(),
            _TOKENIZER_CONFIG: _json(settings),
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
    return _json({"_from_model_config": True, **settings})
