"""``mt-megatron preprocess``: text, JSONL and Parquet become Megatron's indexed data files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import time
from pathlib import Path
from typing import Any

from mt_megatron.cli import progress
from mt_megatron.cli.prepare import check_published_tokenizer
from mt_megatron.errors import ConfigError
from mt_megatron.host import limits


class ConsoleProgress(progress.ConsoleProgress):
    """Documents, tokens and megabytes of input."""

    command = "preprocess"
    _first: int | None = None

    def advance(self, done_bytes: int, total_bytes: int, documents: int, tokens: int) -> None:
        """Show how much of the input is done, and at which rate since this process began."""
        if self._first is None:
            self._first = done_bytes
        now = time.monotonic()
        rate = self.rate(now, done_bytes - self._first) / progress.MB
        figures = f"{documents:,} documents, {tokens:,} tokens, {rate:.1f} MB/s"
        self.show(now, done_bytes, total_bytes, figures)


_TYPES = (
    "HuggingFaceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
)

_REFUSED = {
    "keep_newlines": "newlines are kept, but around split sentences. Leave --keep-newlines out",
    "lang": "sentences are split by one rule for all languages. Leave --lang out",
    "vocab_file": "a vocabulary and merges are read from one file. Give --tokenizer-model tokenizer.json",
    "merge_file": "a vocabulary and merges are read from one file. Give --tokenizer-model tokenizer.json",
    "partitions": "the input is cut into shards by itself, and their order is kept. Leave --partitions out",
}
"""Megatron-LM's arguments of the same command that have no counterpart, and what to do."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "preprocess",
        description="Write PREFIX_KEY_document.bin, .idx and a description .json, by worker processes.\n"
        "Run again after an interruption, it continues where it stopped; the result is the same to the bit.\n"
        "Nothing is downloaded. Bad documents are counted, named and left out.",
        epilog="examples:\n"
        "  mt-megatron preprocess --input corpus.jsonl.gz --output-prefix data/corpus \\\n"
        "      --tokenizer-model tokenizer.json --append-eod --workers 16\n"
        "  mt-megatron preprocess --input texts/ 'more/*.parquet' --output-prefix data/mine \\\n"
        "      --train-bpe 32000 --append-eod\n\n"
        "exit codes: 0 made (or it was already), 1 the data cannot be made, 2 wrong use, 130 interrupted",
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders and globs: .jsonl, .parquet, anything else is text; also .gz and .zst",
    )
    add("--output-prefix", required=True, metavar="PREFIX", help="beginning of the files' names")
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of JSON objects or columns of Parquet files; a pair of files for each (text)",
    )
    add("--input-format", choices=("jsonl", "text", "parquet"), help="read every file so, whatever its name")
    add(
        "--text-documents",
        choices=("file", "line"),
        default="file",
        help="what a document of a text file is (%(default)s)",
    )
    add("--tokenizer-type", choices=_TYPES, default="HuggingFaceTokenizer", help="(%(default)s)")
    add(
        "--tokenizer-model",
        metavar="PATH",
        help="tokenizer.json, a folder that holds one, or a SentencePiece .model",
    )
    add(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="HuggingFaceTokenizer adds no special tokens of its own, such as the beginning of a sequence",
    )
    add(
        "--split-special-tokens",
        action="store_true",
        help="HuggingFaceTokenizer reads the name of a special token in a text as plain text: no document "
        "can forge its own end",
    )
    add("--vocab-size", type=_positive, metavar="N", help="of NullTokenizer, which reads numbers")
    add(
        "--train-bpe",
        type=_positive,
        metavar="N",
        help="train a byte-level BPE of N tokens on the input; written to PREFIX_tokenizer.json",
    )
    add(
        "--split-sentences",
        action="store_true",
        help="make a sequence of each sentence, as BERT's samples want, in PREFIX_KEY_sentence; no special "
        "tokens are added",
    )
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add(
        "--max-document-bytes",
        type=_positive,
        default=64 << 20,
        metavar="N",
        help="leave longer documents out; bounds a worker's memory (%(default)s)",
    )
    add(
        "--workers",
        type=_positive,
        default=limits.processors(),
        metavar="N",
        help="processes that encode (here %(default)s, the cores)",
    )
    add("--strict", action="store_true", help="anything that is left out is an error")
    add(
        "--max-bad-share",
        type=_share,
        default=0.05,
        metavar="X",
        help="largest share of the input that may be bad or lost; 1 allows truncated files, whose loss is "
        "not known (%(default)s)",
    )
    add("--overwrite", action="store_true", help="remove what an earlier run left under this prefix first")
    add("--json", action="store_true", help="print the result as one JSON object")
    add("--log-interval", type=int, help=argparse.SUPPRESS)
    for name in _REFUSED:
        value: dict[str, Any] = {} if name != "keep_newlines" else {"nargs": 0}
        add(f"--{name.replace('_', '-')}", action=_Refused, help=argparse.SUPPRESS, **value)
    parser.set_defaults(func=run)
    return parser


class _Refused(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None
    ) -> None:
        parser.error(f"{option} is not offered: {_REFUSED[self.dest]}")


def run(args: argparse.Namespace) -> int:
    """Make the data. Raises ``DataError`` when that cannot be done, ``ConfigError`` for options that
    exclude each other."""
    from mt_megatron.data.prepare.preprocess import preprocess
    from mt_megatron.data.prepare.preprocess_options import PreprocessOptions
    from mt_megatron.data.prepare.preprocess_plan import overwrite

    _check(args)
    if args.tokenizer_model is not None:
        check_published_tokenizer(Path(args.tokenizer_model), "--tokenizer-model")
    options = PreprocessOptions(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        json_keys=tuple(args.json_keys),
        input_format=args.input_format,
        text_documents=args.text_documents,
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        include_special_tokens=not args.tokenizer_hf_no_include_special_tokens,
        split_special_tokens=args.split_special_tokens,
        vocab_size=args.vocab_size,
        train_bpe=args.train_bpe,
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        max_document_bytes=args.max_document_bytes,
        workers=args.workers,
        strict=args.strict,
        max_bad_share=args.max_bad_share,
    )
    if args.overwrite:
        overwrite(options)
    # A scheduler that ends the job gets the same orderly end as Ctrl-C.
    before = signal.signal(signal.SIGTERM, _interrupt)
    with ConsoleProgress() as progress:
        try:
            result = preprocess(options, progress)
        except KeyboardInterrupt:
            progress.say("interrupted; run the same command again to continue")
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if args.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
    return 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _check(args: argparse.Namespace) -> None:
    if args.train_bpe is not None and args.tokenizer_model is not None:
        raise ConfigError(
            f"--train-bpe {args.train_bpe} and --tokenizer-model {args.tokenizer_model} are both given; "
            "expected one: train a tokenizer, or use that one"
        )
    if args.train_bpe is not None and args.tokenizer_type != "HuggingFaceTokenizer":
        raise ConfigError(
            f"--train-bpe makes a tokenizer.json, and --tokenizer-type is {args.tokenizer_type}; leave one "
            "of them out"
        )
    chosen = args.tokenizer_hf_no_include_special_tokens or args.split_special_tokens
    if chosen and (args.tokenizer_type != "HuggingFaceTokenizer" or args.train_bpe is not None):
        raise ConfigError(
            "--tokenizer-hf-no-include-special-tokens and --split-special-tokens are about a tokenizer.json "
            "that is given; expected --tokenizer-type HuggingFaceTokenizer, --tokenizer-model. Leave them out"
        )
    if len(set(args.json_keys)) != len(args.json_keys):
        raise ConfigError(f"--json-keys names a key twice: {' '.join(args.json_keys)}; name each once")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}; expected at least 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"found {value}; expected a number from 0 to 1")
    return value
