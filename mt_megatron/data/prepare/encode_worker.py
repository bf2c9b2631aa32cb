"""The process that turns shards into tokens: ``python -m mt_megatron.data.prepare.encode_worker FD``.

It is told what to do, and answers, in JSON over the socket it inherited. It ends when the socket
does, so it never outlives the process that started it, and it imports neither torch nor megatron.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
import traceback
import zlib
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.data.prepare.findings import Finding
from mt_megatron.data.prepare.indexed_files import token_dtype
from mt_megatron.data.prepare.inputs import InputFile, Unit
from mt_megatron.data.prepare.reading import Reading, ShardReader, Texts
from mt_megatron.data.prepare.sentences import split_sentences
from mt_megatron.errors import MtMegatronError

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024
_SET_PARENT_DEATH_SIGNAL = 1


class ShardWriter:
    """Encodes documents into the files of one shard: for each key tokens, lengths of sequences and numbers of
    sequences in a document; and findings.

    ``NAME.json`` is written last and says that the others are whole.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        from mt_megatron.data.loader.tokenizer import open_tokenizer

        kind, model, size = (setup["tokenizer"][key] for key in ("type", "model", "vocab_size"))
        self._tokenizer = open_tokenizer(kind, model, vocab_size=size, **setup["special_tokens"])
        self._special_tokens_in = getattr(self._tokenizer, "special_tokens_in", lambda text: 0)
        self._dtype = token_dtype(self._tokenizer.vocab_size)
        self._split = split_sentences if setup["split_sentences"] else lambda text: [text]
        self._end = self._dtype.type(self._tokenizer.eod).tobytes() if setup["append_eod"] else b""
        self._folder = Path(setup["folder"])
        self._reading = Reading(
            keys=tuple(setup["keys"]),
            max_document_bytes=setup["max_document_bytes"],
            text_documents=setup["text_documents"],
            shard_bytes=setup["shard_bytes"],
        )
        self._counts: Counter[str] = Counter()
        self._lost_bytes = 0
        self._findings: Any = None
        self._reader = ShardReader(self._reading, self._record)

    def write(self, name: str, unit: Unit, shard: int) -> dict[str, Any]:
        """Make the shard's files; returns what ``NAME.json`` says."""
        self._counts, self._lost_bytes = Counter(), 0
        keys = range(len(self._reading.keys))
        kinds = ("bin", "lengths", "documents")
        names = [f"{name}.{key}.{kind}" for key in keys for kind in kinds] + [f"{name}.findings"]
        files = [(self._folder / f"{each}.part").open("wb") for each in names]
        self._findings = files[-1]
        sums, tokens, documents, text_bytes, special = [0] * len(keys), [0] * len(keys), 0, 0, 0
        try:
            for batch in _batches(self._reader.read(unit, shard)):
                text_bytes += sum(len(text) for texts in batch for text in texts)
                special += sum(self._special_tokens_in(text) for texts in batch for text in texts)
                kept = self._encoded(batch, unit)
                documents += len(kept)
                for key in keys:
                    sequences = [sequence for document in kept for sequence in document[key]]
                    block = b"".join(sequences)
                    lengths = [len(sequence) // self._dtype.itemsize for sequence in sequences]
                    counts = [len(document[key]) for document in kept]
                    for file, content in zip(
                        files[3 * key :], (block, *_numbers(lengths, counts)), strict=False
                    ):
                        file.write(content)
                    sums[key] = zlib.crc32(block, sums[key])
                    tokens[key] += sum(lengths)
        finally:
            for file in files:
                file.close()
        for each in names:
            os.replace(self._folder / f"{each}.part", self._folder / each)
        summary = {
            "documents": documents,
            "tokens": tokens,
            "crc32": sums,
            "characters": text_bytes,
            "counts": dict(self._counts),
            "lines": self._reader.lines if unit.kind == "lines" else 0,
            "ended": self._reader.ended,
            "disk_bytes": self._reader.disk_bytes,
            "lost_bytes": self._lost_bytes,
            "special_tokens": special,
        }
        part = self._folder / f"{name}.json.part"
        part.write_text(json.dumps(summary))
        os.replace(part, self._folder / f"{name}.json")
        return summary

    def _record(self, finding: Finding) -> None:
        self._counts[finding.kind] += 1
        self._lost_bytes += finding.lost_bytes
        # Names of files need not be UTF-8.
        self._findings.write(json.dumps(finding.as_dict()).encode() + b"\n")

    def _encoded(self, batch: list[Texts], unit: Unit) -> list[list[list[bytes]]]:
        """The tokens of each document's texts, a text being its sentences or one sequence; a document with a
        text without tokens is recorded instead."""
        parts = [[self._split(text) for text in texts] for texts in batch]
        flat = iter(self._tokenizer.encode_batch([part for each in parts for text in each for part in text]))
        made: list[list[list[bytes]]] = []
        for document in parts:
            ids = [[one for one in itertools.islice(flat, len(text)) if len(one)] for text in document]
            if not all(ids):
                self._record(Finding(kind="no_tokens", file=unit.files[0].path))
                continue
            made.append([[np.asarray(one, dtype=self._dtype).tobytes() for one in text] for text in ids])
            for text in made[-1]:
                text[-1] += self._end
        return made


def _numbers(*columns: list[int]) -> list[bytes]:
    return [np.array(column, dtype="<i4").tobytes() for column in columns]


def _batches(documents: Any) -> Any:
    batch: list[Texts] = []
    size = 0
    for texts in documents:
        batch.append(texts)
        size += sum(map(len, texts))
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def unit_from(plain: dict[str, Any]) -> Unit:
    """A ``Unit`` that came as JSON."""
    files = tuple(InputFile(**each) for each in plain["files"])
    return Unit(kind=plain["kind"], files=files, shards=plain["shards"])


def serve(connection: Connection) -> None:
    """Answer until the other side is gone."""
    setup = json.loads(connection.recv_bytes())
    writer = ShardWriter(setup)
    _answer(connection, ready=True)
    while True:
        task = json.loads(connection.recv_bytes())
        summary = writer.write(task["name"], unit_from(task["unit"]), task["shard"])
        _answer(connection, name=task["name"], summary=summary)


def _answer(connection: Connection, **values: Any) -> None:
    connection.send_bytes(json.dumps(values).encode())


def _end_with_parent(parent: int) -> None:
    # The closed socket ends us only between two shards.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def main() -> int:
    """Serve the inherited descriptor; the exit code is 1 after an error that was told."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _end_with_parent(parent)
    # Ctrl-C goes to the whole group: the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(descriptor) as connection:
        try:
            serve(connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 0
        except MtMegatronError as error:
            _answer(connection, failed=str(error), expected=True)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            _answer(connection, failed=f"{error.strerror or error}{where}", code=error.errno, expected=True)
        except Exception:  # noqa: BLE001 - whatever it was, the parent must be told
            _answer(connection, failed=traceback.format_exc(), expected=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
