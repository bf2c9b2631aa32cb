"""The JSON file beside indexed data: which tokenizer made it, from what, with what left out.

``mt-megatron preprocess`` writes ``PREFIX.json`` beside ``PREFIX.bin`` and ``PREFIX.idx``; ``prepare``
writes one ``corpus.json`` for its folder. ``data_problems`` is what a run checks before it starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.data.loader.tokenizer import TokenizerLike, load_tokenizer
from mt_megatron.data.prepare.indexed_files import largest_token, last_token, pair_problem
from mt_megatron.errors import DataError

FORMAT = 1
"""Version of the sidecar's layout."""

_CORPUS = "corpus.json"


class _Made(NamedTuple):
    """The tokenizer that data were made with."""

    identity: str
    vocab_size: int
    name: str

    source: Path
    """The file that says so."""

    eod: int | None
    """Id that ends a document; None where it is not known."""

    end_known: str
    """How the id is known, for errors."""

    model: str | None
    """The ``--tokenizer-model`` with that end; None where it is not known."""

    has_ends: bool
    """False where no document holds it."""


def sidecar_path(prefix: str) -> Path:
    """Where the sidecar of ``prefix`` lies."""
    return Path(prefix + ".json")


def read_sidecar(prefix: str) -> dict[str, Any] | None:
    """What ``preprocess`` wrote about ``prefix``; None when there is no such file.

    Raises ``DataError`` when the file is there and is no sidecar.
    """
    path = sidecar_path(prefix)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}, which describes {prefix}.bin: {error}. Make the data again, or move that "
            "file away to train without the check of the tokenizer"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(
            f"{path} is not a description of this version (format {FORMAT}) of {prefix}.bin. Make the data "
            "again, or move that file away to train without the check of the tokenizer"
        )
    return found


def tokenizer_problem(prefix: str, config: TrainingConfig) -> str | None:
    """Whether ``prefix`` was made with another tokenizer than ``config`` names, on one line.

    None when they agree, or when nothing beside the data says what it was made with. The tokenizer
    must be readable; NullTokenizer, which stands for any, is compared by size alone. The end of documents
    is compared where the run looks for it.
    """
    return _mismatch(prefix, load_tokenizer(config.data, vocab_size=config.model.vocab_size), config)


def data_problems(prefix: str, config: TrainingConfig) -> list[str]:
    """Everything that can be said about ``prefix`` before a run: whether both files are there and
    fit, whether their tokens fit the vocabulary, and ``tokenizer_problem``.

    One line per problem: found, expected, what to change. A tokenizer that cannot be read is one
    of them. Takes no longer than reading the first million tokens.
    """
    problem = pair_problem(prefix)
    if problem is not None:
        return [problem]
    try:
        tokenizer = load_tokenizer(config.data, vocab_size=config.model.vocab_size)
        mismatch = _mismatch(prefix, tokenizer, config)
    except DataError as error:
        return [str(error)]
    if mismatch is not None:
        return [mismatch]
    largest = largest_token(prefix)
    if largest is not None and largest >= tokenizer.vocab_size:
        return [
            f"{prefix}.bin holds token {largest}, and the tokenizer has only {tokenizer.vocab_size} tokens: "
            "the data was made with another one. Name that one with --tokenizer-model"
        ]
    return []


def _mismatch(prefix: str, tokenizer: TokenizerLike, config: TrainingConfig) -> str | None:
    made = _made_with(prefix)
    if made is None:
        return None
    if tokenizer.identity.startswith("null-"):
        if made.vocab_size <= tokenizer.vocab_size:
            return _other_end(prefix, made, tokenizer, config)
        return (
            f"{prefix}.bin was made with {made.vocab_size} tokens ({made.name}), and NullTokenizer has "
            f"{tokenizer.vocab_size}; expected at least as many: raise --vocab-size"
        )
    if made.identity == tokenizer.identity:
        return _other_end(prefix, made, tokenizer, config)
    return (
        f"{prefix}.bin was made with another tokenizer: {made.source} says {made.name} with "
        f"{made.vocab_size} tokens, digest {made.identity[:12]}; this run's has {tokenizer.vocab_size} "
        f"tokens, digest {tokenizer.identity[:12]}. Name the data's tokenizer with --tokenizer-type and "
        "--tokenizer-model, or make the data again"
    )


def _other_end(prefix: str, made: _Made, tokenizer: TokenizerLike, config: TrainingConfig) -> str | None:
    """No end of documents, or another one, in data of the same vocabulary, which the run would look for in
    vain or find within documents: ``tokenizer_config.json`` chooses it, and the digest is of
    ``tokenizer.json``."""
    looking = looking_for_ends(config)
    if not looking:
        return None
    if not made.has_ends:
        return (
            f"{prefix}.bin was made without --append-eod, as {made.source} says: its documents have no "
            f"end-of-document token; expected one for {' and '.join(looking)}. Make the data again with "
            f"--append-eod, or leave {' and '.join(looking)} out"
        )
    if made.eod is None or made.eod == tokenizer.eod:
        return None
    named = f" ({made.model})" if made.model is not None else ""
    return (
        f"{prefix}.bin was made with the end-of-document token {made.eod}, {made.end_known}, and "
        f"this run's tokenizer ends documents with {tokenizer.eod}; expected the same for "
        f"{' and '.join(looking)}. Name the data's tokenizer with --tokenizer-type and --tokenizer-model"
        f"{named}, or make the data again"
    )


def recorded_ends(config: TrainingConfig) -> list[int]:
    """The ids that end documents of the training data, as the files beside these say, sorted. Raises
    ``DataError``."""
    made = [
        each
        for prefix in (*config.data.train_data_path, *config.data.data_path)
        if (each := _made_with(prefix)) is not None and each.has_ends
    ]
    return sorted({each.eod for each in made if each.eod is not None})


def looking_for_ends(config: TrainingConfig) -> list[str]:
    """Options of ``config`` that look for ends of documents in the tokens; packed sequences are a way of the
    first."""
    data = config.data
    options = {
        "--reset-attention-mask": data.reset_attention_mask,
        "--reset-position-ids": data.reset_position_ids,
        "--eod-mask-loss": data.eod_mask_loss,
    }
    return [flag for flag, is_on in options.items() if is_on]


def _made_with(prefix: str) -> _Made | None:
    sidecar = read_sidecar(prefix)
    if sidecar is not None:
        try:
            made = sidecar["tokenizer"]
            return _Made(
                identity=str(made["digest"]),
                vocab_size=int(made["vocab_size"]),
                name=str(made["type"]),
                source=sidecar_path(prefix),
                eod=_id(made.get("eod")),
                end_known=f"as {sidecar_path(prefix)} says",
                model=made.get("model"),
                # NullTokenizer reads the end from the text, where documents may hold it themselves.
                has_ends=sidecar.get("append_eod") is not False or made["type"] == "NullTokenizer",
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{sidecar_path(prefix)} names no tokenizer ({error}); make the data again"
            ) from error
    corpus = Path(prefix).parent / _CORPUS
    if Path(prefix).name not in ("train", "valid"):
        return None
    try:
        manifest = json.loads(corpus.read_text(encoding="utf-8"))
        # A corpus.json of an earlier version does not name the token, with which every document ends.
        has_end = "eod" in manifest
        return _Made(
            identity=str(manifest["tokenizer_sha256"]),
            vocab_size=int(manifest["vocab_size"]),
            name="HuggingFaceTokenizer",
            source=corpus,
            eod=_id(manifest["eod"]) if has_end else last_token(prefix),
            end_known=f"as {corpus} says" if has_end else "with which its last document ends",
            # A tokenizer.json that is opened alone does not read tokenizer_config.json beside it.
            model=str(corpus.parent) if "tokenizer_config.json" in manifest.get("files", ()) else None,
            has_ends=True,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _id(found: Any) -> int | None:
    return found if isinstance(found, int) else None
