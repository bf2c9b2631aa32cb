"""The documents of one shard, and what is wrong with the others: never an exception for bad data."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mt_megatron.data.prepare.findings import Finding
from mt_megatron.data.prepare.inputs import InputFile, Unit, parquet_module
from mt_megatron.data.prepare.streams import Damaged, LineStream, Truncated

Texts = tuple[str, ...]
"""One document: a text for each of the keys."""

_BROKEN = (Truncated, Damaged, OSError)
_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How documents are found in files."""

    keys: tuple[str, ...]
    """Keys of JSON objects, columns of Parquet files."""

    max_document_bytes: int
    """Longer ones are left out."""

    text_documents: Literal["file", "line"]
    """What a document of a text file is."""

    shard_bytes: int
    """Bytes of text in a shard of lines."""


class ShardReader:
    """Reads one shard after another; keeps the file open that the last one was from.

    A line belongs to the shard that its first byte lies in. A compressed file can only be read
    forwards: who reads its shards in rising order decompresses it once.
    """

    def __init__(self, reading: Reading, record: Callable[[Finding], None]) -> None:
        self._reading = reading
        self._record = record
        self._stream: LineStream | None = None
        self._place = ("", -1)
        self.lines = 0
        """Lines of the shard read last, for the numbers of those behind it."""
        self.ended = False
        """Whether the file ends with or before the shard read last."""
        self.disk_bytes = 0
        """About how many bytes of the disk the shard read last took."""

    def read(self, unit: Unit, shard: int) -> Iterator[Texts]:
        """Every document of shard ``shard`` of ``unit``; the rest is recorded."""
        self.lines, self.ended, self.disk_bytes = 0, False, 0
        if unit.kind == "files":
            for file in unit.files:
                yield from self._whole(file)
                self.disk_bytes += file.size
            self.ended = True
        elif unit.kind == "rows":
            yield from self._rows(unit.files[0], shard)
            self.disk_bytes = unit.files[0].size // (unit.shards or 1)
        else:
            yield from self._lines(unit.files[0], shard)

    def close(self) -> None:
        """Close the file that is open, if any."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _found(
        self, kind: str, file: InputFile, at: int | None = None, detail: str = "", *, lost: int = 0
    ) -> None:
        unit = "row" if file.format == "parquet" else "line"
        self._record(Finding(kind=kind, file=file.path, at=at, unit=unit, detail=detail, lost_bytes=lost))

    def _broken(self, file: InputFile, error: Exception, lost: int, detail: str = "") -> None:
        kinds = {Truncated: "truncated", Damaged: "damaged"}
        text = getattr(error, "strerror", None) or str(error)
        self._found(kinds.get(type(error), "unreadable"), file, detail=f"{text}{detail}", lost=lost)

    def _whole(self, file: InputFile) -> Iterator[Texts]:
        limit = self._reading.max_document_bytes
        try:
            stream = LineStream(file.path, file.compression)
            try:
                content = stream.all(limit + 1)
            finally:
                stream.close()
        except _BROKEN as error:
            self._broken(file, error, file.size)
            return
        if file.compression and file.size == 0:
            self._found("truncated", file, detail="the file holds nothing")
            return
        if len(content) > limit:
            self._found("too_long", file, detail=f"more than {limit:,} bytes")
            return
        text = self._text(self._without_mark(content, file, None), file, None)
        if text is None:
            return
        if "\r\n" in text:
            self._found("crlf", file)
        yield (text,) * len(self._reading.keys)

    def _lines(self, file: InputFile, shard: int) -> Iterator[Texts]:
        start = shard * self._reading.shard_bytes
        self.ended = True  # Unless a line is found.
        try:
            stream = self._stream_of(file, shard)
            begun = stream.disk_position()
            stream.to_line_at(start)
        except _BROKEN as error:
            # A compressed file breaks within an earlier shard, which tells; here it has ended.
            if shard == 0 or (not file.compression and self._stream is not None):
                self._broken(file, error, file.size if shard == 0 else self._rest(file, start))
            self.close()
            return
        self.ended = False
        documents = self._until(stream, file, start + self._reading.shard_bytes)
        if file.format == "jsonl":
            yield from self._objects(documents, file)
        else:
            yield from self._text_lines(documents, file)
        self.disk_bytes = max(0, stream.disk_position() - begun)

    def _until(self, stream: LineStream, file: InputFile, end: int) -> Iterator[bytes]:
        """Lines that begin before byte ``end``, each with its end; counts them all."""
        limit, crlf = self._reading.max_document_bytes, False
        try:
            while stream.position < end:
                first = stream.position == 0
                line = stream.line(limit + 2)
                if not line:
                    self.ended = True
                    if first and end == self._reading.shard_bytes:
                        kind = "truncated" if file.compression and file.size == 0 else "empty"
                        self._found(kind, file, detail="the file holds nothing")
                    break
                self.lines += 1
                if len(line) > limit and not line.endswith(b"\n"):
                    length = len(line) + stream.skip_line()
                    self._found("too_long", file, self.lines, f"{length:,} bytes")
                    continue
                if line.endswith(b"\r\n") and not crlf:
                    crlf = True
                    self._found("crlf", file, self.lines)
                # Each of several files that were joined may have had one.
                yield self._without_mark(line, file, self.lines)
        except _BROKEN as error:
            lost = self._rest(file, end - self._reading.shard_bytes, stream.position)
            if file.compression:
                lost = max(0, file.size - stream.disk_position())
            self._broken(file, error, lost, f"; {self.lines:,} lines of this part were read")
            self.ended = True

    def _rest(self, file: InputFile, start: int, position: int = 0) -> int:
        """Bytes of the shard of a plain file that begins at ``start``, without those before ``position``."""
        return max(0, min(file.size, start + self._reading.shard_bytes) - max(start, position))

    def _objects(self, lines: Iterator[bytes], file: InputFile) -> Iterator[Texts]:
        for line in lines:
            texts = self._of_object(line, file, self.lines)
            if texts is not None:
                yield texts

    def _of_object(self, line: bytes, file: InputFile, number: int) -> Texts | None:
        if not line.strip():
            self._found("blank_line", file, number)
            return None
        if b"\0" in line:
            self._found("nul", file, number)
            return None
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            self._found("not_utf8", file, number, f"byte {error.start} of the line")
            return None
        except (ValueError, RecursionError) as error:
            cut = "" if line.endswith(b"\n") else "; the file ends within this line"
            self._found("broken_json", file, number, f"{error}{cut}{_to_lines(line)}")
            return None
        if not isinstance(record, dict):
            self._found("not_an_object", file, number, type(record).__name__ + _to_lines(line))
            return None
        return self._values([record.get(key) for key in self._reading.keys], file, number)

    def _values(self, values: list[Any], file: InputFile, number: int) -> Texts | None:
        texts = []
        for key, value in zip(self._reading.keys, values, strict=True):
            if not isinstance(value, str):
                what = "no " if value is None else f"{type(value).__name__} under "
                self._found("missing_key", file, number, f"{what}{key!r}")
                return None
            checked = self._checked(value, file, number)
            if checked is None:
                return None
            texts.append(checked)
        return tuple(texts)

    def _text_lines(self, lines: Iterator[bytes], file: InputFile) -> Iterator[Texts]:
        for line in lines:
            text = self._text(line.rstrip(b"\r\n"), file, self.lines)
            if text is not None:
                yield (text,) * len(self._reading.keys)

    def _rows(self, file: InputFile, group: int) -> Iterator[Texts]:
        row, rows, total = 0, 1, 1
        try:
            with parquet_module().ParquetFile(file.path) as opened:
                if opened.num_row_groups == 0:
                    return
                before = [opened.metadata.row_group(i).num_rows for i in range(group + 1)]
                rows, total = before.pop(), opened.metadata.num_rows
                missing = [key for key in self._reading.keys if key not in opened.schema_arrow.names]
                if missing:
                    names = ", ".join(opened.schema_arrow.names)
                    said = f"no column {missing[0]!r}; it has {names}"
                    self._found("missing_key", file, detail=said, lost=file.size * rows // max(1, total))
                    return
                batches = opened.iter_batches(
                    batch_size=_ROWS, row_groups=[group], columns=list(self._reading.keys), use_threads=False
                )
                for batch in batches:
                    columns = [batch.column(key) for key in self._reading.keys]
                    for index in range(batch.num_rows):
                        row += 1
                        texts = self._of_row(columns, index, file, sum(before) + row)
                        if texts is not None:
                            yield texts
        except (OSError, ValueError) as error:
            # pyarrow's own errors are ValueErrors or OSErrors: no footer, bad pages, bad checksums.
            cut = "magic" in str(error).lower() or "too small" in str(error).lower()
            lost = file.size * (rows - row) // max(1, total)
            self._found("truncated" if cut else "damaged", file, detail=str(error).splitlines()[0], lost=lost)

    def _of_row(self, columns: list[Any], index: int, file: InputFile, number: int) -> Texts | None:
        try:
            values = [column[index].as_py() for column in columns]
        except UnicodeDecodeError as error:
            self._found("not_utf8", file, number, f"byte {error.start} of the value")
            return None
        return self._values(values, file, number)

    def _text(self, content: bytes, file: InputFile, number: int | None) -> str | None:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            self._found("not_utf8", file, number, f"byte {error.start}")
            return None
        return self._checked(text, file, number)

    def _checked(self, text: str, file: InputFile, number: int | None) -> str | None:
        if not text or text.isspace():
            self._found("empty", file, number)
        elif "\0" in text:
            self._found("nul", file, number)
        elif not text.isascii() and _lone_surrogate(text):
            self._found("not_utf8", file, number, "half of a surrogate pair")
        elif len(text) > self._reading.max_document_bytes:
            self._found("too_long", file, number, f"{len(text):,} characters")
        else:
            return text
        return None

    def _without_mark(self, content: bytes, file: InputFile, number: int | None) -> bytes:
        if content.startswith(codecs.BOM_UTF8):
            self._found("byte_order_mark", file, number)
            return content[len(codecs.BOM_UTF8) :]
        return content

    def _stream_of(self, file: InputFile, shard: int) -> LineStream:
        if self._stream is None or self._place[0] != file.path or self._place[1] >= shard:
            self.close()
            self._stream = LineStream(file.path, file.compression)
        self._place = (file.path, shard)
        return self._stream


def _to_lines(line: bytes) -> str:
    """How a file with such a line becomes JSON lines."""
    start = line.strip()
    if start.startswith(b"["):
        return "; jq -c '.[]' FILE writes the objects of an array, one a line"
    return "; jq -c . FILE writes an object a line" if start == b"{" else ""


def _lone_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
