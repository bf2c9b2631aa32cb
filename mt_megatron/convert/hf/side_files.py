"""The files of a published folder that are not weights: tokenizer, generation settings, chat template.

A Megatron checkpoint made from such a folder carries them in ``huggingface/``, so that the way back needs
nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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

    in_data: tuple[int, ...] = ()
    """Tokens that ended documents in the training data, where records beside these say so."""

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint's manifest."""
        return {"eod": self.id, "eod_token": self.token, "data_ends": list(self.in_data)}


def end_of_run(document: Mapping[str, Any]) -> End | None:
    """The end of document of the run that wrote a checkpoint, by its manifest: what it says itself, or the
    tokenizer that it names, where that can still be read."""
    config = document.get("config", {})
    data, model = config.get("data", {}), config.get("model", {})
    if data.get("mock_data"):
        return None
    recorded = document.get("tokenizer")
    if isinstance(recorded, Mapping) and isinstance(recorded.get("eod"), int):
        return End(
            id=recorded["eod"],
            token=recorded.get("eod_token"),
            in_data=tuple(recorded.get("data_ends", ())),
        )
    if not data.get("tokenizer_type"):
        return None
    try:
        tokenizer = open_tokenizer(
            data["tokenizer_type"], data.get("tokenizer_model"), vocab_size=model.get("vocab_size")
        )
    except DataError:
        return None
    return End(id=tokenizer.eod, token=getattr(tokenizer, "eod_token", None))


def with_end(files: Mapping[str, bytes], end: End | None, say: Callable[[str], None]) -> dict[str, bytes]:
    """``files`` of a published folder whose tokenizer and settings name ``end``: where they name no end, or
    others beside it, which stay and of which ``say`` gets a line.

    Raises ``CheckpointError`` where the tokenizer of ``files`` is another than that of ``end``.
    """
    found = dict(files)
    if end is None:
        return found
    ids = _token_ids(files)
    if end.token is not None and ids and ids.get(end.token) != end.id:
        raise CheckpointError(
            f"the run ended documents with {end.token!r} as token {end.id}, and the tokenizer for the result "
            f"has it as {ids.get(end.token)}; expected the tokenizer that the data were made with. Give "
            "--hf-files a folder with that one"
        )
    if end.token is not None and "tokenizer.json" in found:
        settings = _object(_TOKENIZER_CONFIG, found.get(_TOKENIZER_CONFIG, b"{}"))
        if not settings.get("eos_token"):
            found[_TOKENIZER_CONFIG] = _json({**settings, "eos_token": end.token})
    named = _named("eos_token", found, {})
    for name in [each for each in (CONFIG, GENERATION) if each in found]:
        there = named.get(name, [])
        missing = [each for each in dict.fromkeys((end.id, *end.in_data)) if each not in there]
        if not missing:
            continue
        ends = [*there, *missing] if there or missing[1:] else end.id
        found[name] = _json({**_object(name, found[name]), "eos_token_id": ends})
        if there:
            say(
                f"{name}, of --hf-files or carried along, has eos_token_id {there} without "
                f"{', '.join(map(str, missing))}, with which the run ended documents; the result has all"
            )
    return found


def check_tokens(files: Mapping[str, bytes], vocab_size: int) -> list[str]:
    """Lines about other special tokens that the side files of a folder name differently.

    Raises ``CheckpointError`` where the tokenizer has ids beyond the ``vocab_size`` rows of the embedding, or
    where its files, the generation settings and ``config.json`` disagree about the token that ends a text.
    """
    ids = _token_ids(files)
    if (largest := max(ids.values(), default=-1)) >= vocab_size:
        raise CheckpointError(
            f"tokenizer.json has ids up to {largest}, and config.json has vocab_size = {vocab_size}; "
            "expected a row of the embedding for each id. Give the tokenizer of these weights"
        )
    named = _named("eos_token", files, ids)
    # transformers stops at those of the generation settings, where these name any.
    stops = set(named.get(GENERATION, named.get(CONFIG, [])))
    wanted = {each for name, found in named.items() if name != GENERATION for each in found}
    if (GENERATION in named and wanted - stops) or any(
        each not in range(vocab_size) for each in wanted | stops
    ):
        said = "; ".join(f"{name} has {found}" for name, found in named.items())
        raise CheckpointError(
            f"the files disagree about the token that ends a text: {said}. Expected ids below {vocab_size} "
            "of tokens in tokenizer.json, and its own and those of config.json among the ids that generation "
            "stops at. Correct the wrong file"
        )
    notes = []
    for token in ("bos_token", "pad_token"):
        named = _named(token, files, ids)
        if len({each for found in named.values() for each in found}) > 1:
            said = "; ".join(f"{name} has {found}" for name, found in named.items())
            notes.append(f"the files name different tokens as {token}: {said}; they stay as they are")
    return notes


def check_same_tokens(given: Mapping[str, bytes], asked: Mapping[str, bytes]) -> None:
    """Raise ``CheckpointError`` where the tokenizer of the ``asked`` files lacks tokens of the ``given`` one,
    or has them under other ids."""
    ours, theirs = _token_ids(given), _token_ids(asked)
    wrong = sorted(token for token, index in ours.items() if theirs and theirs.get(token) != index)
    if wrong:
        shown = [f"{token!r} {ours[token]} and {theirs.get(token)}" for token in wrong[:5]]
        raise CheckpointError(
            f"the tokenizer of --hf-files is not that of the weights: {len(wrong)} tokens have other ids "
            f"there, such as {', '.join(shown)}. Give a folder with the tokenizer of the data"
        )


def _named(token: str, files: Mapping[str, bytes], ids: Mapping[str, int]) -> dict[str, list[int | str]]:
    """The ids of a special token by the file that names it; its text where ``ids`` have no such token.
    Without ``ids`` only files that name ids. Raises ``CheckpointError`` for an entry of another type."""
    found: dict[str, list[int | str]] = {}
    for name, entry, kind in (
        (CONFIG, f"{token}_id", int),
        (GENERATION, f"{token}_id", int),
        (_TOKENIZER_CONFIG, token, str),
        ("special_tokens_map.json", token, str),
    ):
        value = _object(name, files.get(name, b"{}")).get(entry)
        value = value.get("content") if isinstance(value, dict) else value
        values = [] if value is None or value is False else value if isinstance(value, list) else [value]
        if any(type(each) is not kind for each in values):
            raise CheckpointError(
                f"{name} has {entry} = {value!r}; expected {kind.__name__}. Correct that entry"
            )
        if values and (ids or kind is int):
            found[name] = [ids.get(each, each) for each in values]
    return found


def _token_ids(files: Mapping[str, bytes]) -> dict[str, int]:
    """Text -> id of the tokens in ``tokenizer.json``; nothing without it. Raises ``CheckpointError``."""
    whole = _object("tokenizer.json", files.get("tokenizer.json", b"{}"))
    try:
        vocabulary = (whole.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, list):
            vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
        added = {each["content"]: int(each["id"]) for each in whole.get("added_tokens") or ()}
        decoder = _object(_TOKENIZER_CONFIG, files.get(_TOKENIZER_CONFIG, b"{}")).get("added_tokens_decoder")
        other = {each["content"]: int(index) for index, each in (decoder or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the tokens of tokenizer.json and {_TOKENIZER_CONFIG} cannot be read ({error!r}). Give complete "
            "copies of them"
        ) from error
    found: dict[str, int] = {**vocabulary, **added}
    wrong = [
        f"{token!r} {other[token]}, not {found[token]}"
        for token in other
        if other[token] != found.get(token, other[token])
    ]
    if wrong:
        raise CheckpointError(
            f"{_TOKENIZER_CONFIG} has other ids than tokenizer.json: {', '.join(wrong[:5])}. Expected "
            "files of one tokenizer"
        )
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
        return {
            "tokenizer.json": path.read_bytes(),
            _TOKENIZER_CONFIG: _json(
                {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            ),
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
