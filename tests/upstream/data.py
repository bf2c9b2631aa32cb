"""Small .bin and .idx files in Megatron's format, and a text of sentences."""

from __future__ import annotations

import json
from pathlib import Path


def write_dataset(prefix: Path, *, vocabulary: int, documents: int = 64, length: int = 200) -> Path:
    """Write ``documents`` random documents of ``length`` tokens; returns ``prefix``."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = numpy.random.default_rng(7)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for _ in range(documents):
        builder.add_document(torch.from_numpy(rng.integers(0, vocabulary, length)), [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


def write_sentences(prefix: Path, *, vocabulary: int) -> tuple[Path, Path]:
    """Write the docstrings of some modules of the standard library: PREFIX.jsonl with texts,
    PREFIX.lists.jsonl with lists of their sentences in the place of each text, a WordPiece of ``vocabulary``
    words as PREFIX.json, and as a vocabulary file. Returns ``prefix`` and that file."""
    import argparse
    import collections
    import inspect
    import logging
    import subprocess

    from mt_megatron.data.loader.tokenizer import train_tokenizer
    from mt_megatron.data.prepare.sentences import split_sentences

    sources = [inspect.getsource(module) for module in (argparse, collections, inspect, logging, subprocess)]
    texts = [part for source in sources for part in source.split('"""')[1::2] if len(part) > 200]
    for suffix, content in (("jsonl", texts), ("lists.jsonl", list(map(split_sentences, texts)))):
        Path(f"{prefix}.{suffix}").write_text("".join(json.dumps({"text": each}) + "\n" for each in content))
    tokenizer = train_tokenizer(texts, vocab_size=vocabulary, output=Path(f"{prefix}.json"), wordpiece=True)
    words = sorted(tokenizer.vocabulary().items(), key=lambda each: each[1])
    file = Path(f"{prefix}.txt")
    file.write_text("".join(f"{word}\n" for word, _ in words))
    return prefix, file


def preprocess_sentences(prefix: Path, output: Path) -> None:
    """``mt-megatron preprocess --split-sentences`` of what ``write_sentences`` wrote under ``prefix``."""
    from mt_megatron.cli.main import main

    command = [
        "preprocess",
        "--input",
        f"{prefix}.jsonl",
        "--output-prefix",
        str(output),
        "--split-sentences",
    ]
    assert main([*command, "--tokenizer-model", f"{prefix}.json", "--workers", "1"]) == 0
