"""Lines and whole texts of plain, gzip and Zstandard files, with bounded memory and honest ends."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from mt_megatron.errors import DataError

_BLOCK = 1 << 20
_FEED = 1 << 14


class Truncated(Exception):
    """A compressed file ends before its stream does."""


class Damaged(Exception):
    """A compressed file holds something that cannot be decompressed."""


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...

    def readline(self, size: int | None = -1, /) -> bytes: ...

    def close(self) -> None: ...


class LineStream:
    """Reads a file forwards by lines, counting the bytes of the decompressed text.

    Methods raise ``Truncated`` and ``Damaged`` where a compressed file breaks, ``OSError`` where a
    file cannot be read, and ``DataError`` when a package is missing.
    """

    def __init__(self, path: str, compression: str) -> None:
        self.path = path
        self._compression = compression
        self._file: BinaryIO = Path(path).open("rb")  # noqa: SIM115 - close() closes it
        try:
            self._text = self._decompressed()
        except BaseException:
            self._file.close()
            raise
        self.position = 0
        """Bytes of text before the next one to be read."""

    def disk_position(self) -> int:
        """About how many bytes of the file were used so far."""
        return self._file.tell() if self._compression else self.position

    def close(self) -> None:
        """Close the file; nothing can be read any more."""
        self._text.close()
        self._file.close()

    def to_line_at(self, offset: int) -> None:
        """Go to the first line that begins at byte ``offset`` or behind it; never backwards."""
        if self.position >= offset:
            return
        if self._compression:
            while self.position < offset - 1:
                if not self._read(min(_BLOCK, offset - 1 - self.position)):
                    return
        else:
            self._file.seek(offset - 1)
            self.position = offset - 1
        self.skip_line()

    def skip_line(self) -> int:
        """Go to the next line; returns how many bytes were left out."""
        start = self.position
        while (piece := self.line(_BLOCK)) and not piece.endswith(b"\n"):
            pass
        return self.position - start

    def line(self, limit: int) -> bytes:
        """The next line with its end, or its first ``limit`` bytes; empty at the end of the file."""
        piece = self._guarded(self._text.readline, limit)
        self.position += len(piece)
        return piece

    def all(self, limit: int) -> bytes:
        """Everything that is left, or its first ``limit`` bytes."""
        pieces, left = [], limit
        while left and (piece := self._read(min(_BLOCK, left))):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _read(self, size: int) -> bytes:
        piece = self._guarded(self._text.read, size)
        self.position += len(piece)
        return piece

    def _guarded(self, read: Any, size: int) -> bytes:
        try:
            return cast(bytes, read(size))
        except EOFError as error:
            raise Truncated(str(error)) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise Damaged(str(error)) from error

    def _decompressed(self) -> _Readable:
        if self._compression == "gz":
            return cast(_Readable, gzip.GzipFile(fileobj=self._file))
        if self._compression == "zst":
            return io.BufferedReader(_ZstandardFrames(self._file), _BLOCK)
        return cast(_Readable, self._file)


def zstandard_module() -> Any:
    """``zstandard``. Raises ``DataError`` when it is not installed."""
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            "reading .zst files needs the package zstandard, which is not installed; install it with: "
            'pip install "mt_megatron[data]"'
        ) from error
    return zstandard


class _ZstandardFrames(io.RawIOBase):
    """The text of a file of Zstandard frames. Unlike the package's own reader it notices a cut-off."""

    def __init__(self, file: BinaryIO) -> None:
        zstandard = zstandard_module()
        self._error: type[Exception] = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._file = file
        self._frame: Any = None
        self._rest = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer`` with as much text as is at hand; 0 at the end of the last frame."""
        while not self._ready:
            fed = self._rest or self._file.read(_FEED)
            self._rest = b""
            if not fed:
                if self._frame is not None:
                    raise Truncated("the last Zstandard frame is not complete")
                return 0
            if self._frame is None:
                self._frame = self._new()
            try:
                self._ready = memoryview(self._frame.decompress(fed))
            except self._error as error:
                raise Damaged(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
