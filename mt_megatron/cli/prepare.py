"""``mt-megatron prepare``: text becomes a tokenizer and Megatron's indexed data files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

from mt_megatron.cli.progress import ConsoleProgress
from mt_megatron.convert.folders import CONFIG
from mt_megatron.data.prepare.corpus import (
    DEFAULT_MAX_TRAIN_TOKENS,
    DEFAULT_VALIDATION_FRACTION,
    DEFAULT_VOCAB_SIZE,
)
from mt_megatron.errors import CheckpointError, ConfigError

_SMALLEST_VOCABULARY = 257


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "prepare",
        description="Write tokenizer.json, train.bin/.idx, valid.bin/.idx and corpus.json to a folder.\n"
        "A folder that already holds this corpus is left as it is; an interrupted one is made anew.\n"
        "Nothing is downloaded: without --corpus the text is the source of Python's standard library.",
        epilog="examples:\n"
        "  mt-megatron prepare --output data/stdlib\n"
        "  mt-megatron prepare --output data/mine --corpus texts/ --vocab-size 8192 --max-tokens 50000000\n"
        "  mt-megatron prepare --output data/mine --corpus docs.jsonl --tokenizer tokenizer.json\n\n"
        "exit codes: 0 prepared (or it was already), 1 the data cannot be made, 2 wrong use",
    )
    add = parser.add_argument
    add("--output", required=True, type=Path, metavar="DIR", help="folder to write to")
    add(
        "--corpus",
        type=Path,
        metavar="PATH",
        help="a folder or a file, in UTF-8: text (one document a file), JSON lines (.jsonl, .json, .ndjson) "
        "and Parquet (a document a line or row under the key 'text'; for other keys use mt-megatron "
        "preprocess --json-keys), also .gz and .zst; default: Python's standard library",
    )
    add(
        "--vocab-size",
        type=_positive,
        default=DEFAULT_VOCAB_SIZE,
        metavar="N",
        help="tokens of the byte-level BPE that is trained on the training documents (%(default)s)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="use this tokenizer.json, or that of a folder with its further files, instead of training one; "
        "--vocab-size is then not used",
    )
    add(
        "--max-tokens",
        type=_limit,
        default=DEFAULT_MAX_TRAIN_TOKENS,
        metavar="N",
        help="stop after the document that reaches N training tokens; 0: no limit (%(default)s)",
    )
    add(
        "--validation-fraction",
        type=_fraction,
        default=DEFAULT_VALIDATION_FRACTION,
        metavar="X",
        help="share of the documents that is held out, by the hash of their names (%(default)s)",
    )
    add(
        "--split-sentences",
        action="store_true",
        help="make data for BERT: a sequence of each sentence, and a WordPiece instead of the BPE",
    )
    add("--force", action="store_true", help="replace what the folder holds")
    add("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Prepare the corpus. Raises ``DataError`` when it cannot be made."""
    _check(args)
    # Deprecations of torch's that megatron-core's import sets off; nothing the reader can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.core\.")
    from mt_megatron.data.prepare.prepare import prepare_corpus

    if args.tokenizer is not None:
        check_published_tokenizer(args.tokenizer, "--tokenizer")
    # A bar and lines on one terminal go through the bar; elsewhere each has its own stream.
    with _Progress(plain=not (sys.stderr.isatty() and (args.json or sys.stdout.isatty()))) as progress:
        corpus = prepare_corpus(
            args.output,
            corpus=args.corpus,
            vocab_size=args.vocab_size,
            max_train_tokens=args.max_tokens or None,
            validation_fraction=args.validation_fraction,
            tokenizer=args.tokenizer,
            split_sentences=args.split_sentences,
            force=args.force,
            log=lambda line: progress.log(line, sys.stderr if args.json else sys.stdout),
            advance=progress.advance,
        )
    if args.json:
        print(json.dumps(dataclasses.asdict(corpus) | {"directory": str(corpus.directory)}, indent=2))
    return 0


def check_published_tokenizer(folder: Path, option: str) -> None:
    """Raise ``CheckpointError`` where ``folder``, which ``option`` names, is of a published model that
    ``convert`` and ``--init-from-hf`` refuse; it may be without weights. Anything else passes."""
    if not (folder / CONFIG).is_file():
        return
    from mt_megatron.convert.hf.weights import INDEX
    from mt_megatron.convert.inputs import open_published

    try:
        open_published(
            folder,
            prediction=True,
            weights=any(
                each.suffix in (".bin", ".safetensors") or each.name == INDEX for each in folder.iterdir()
            ),
        )
    except CheckpointError as error:
        raise CheckpointError(
            f"the model of {option} {folder} cannot be trained here: {error}\nFor its tokenizer alone give "
            f"{option} {folder / 'tokenizer.json'}"
        ) from error


class _Progress(ConsoleProgress):
    """Documents and tokens of each pass over the text."""

    command = "prepare"

    def log(self, line: str, stream: TextIO) -> None:
        """A line about a step, where the command's lines go."""
        if self.has_bar:
            self.say(line.removeprefix("data: "))
        else:
            print(line, file=stream, flush=True)

    def advance(self, done: int, total: int, documents: int, tokens: int) -> None:
        """How far a pass is."""
        figures = (
            f"{documents:,} documents encoded, {tokens:,} tokens" if tokens else f"{documents:,} documents"
        )
        self.show(time.monotonic(), done, total, figures)


def _check(args: argparse.Namespace) -> None:
    """What can be wrong with the words themselves: said before anything is imported for the work."""
    for option, path in (("--corpus", args.corpus), ("--tokenizer", args.tokenizer)):
        if path is not None and not path.exists():
            raise ConfigError(f"{option} {path}: there is nothing; check the path")
    if args.tokenizer is None and args.vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(
            f"--vocab-size {args.vocab_size}: expected at least {_SMALLEST_VOCABULARY} (256 bytes and the "
            "end-of-document token)"
        )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}; expected at least 1")
    return value


def _limit(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"found {value}; expected a positive number, or 0 for no limit")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"found {value}; expected a number between 0 and 1")
    return value
