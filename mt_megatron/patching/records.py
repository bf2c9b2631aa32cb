"""Records that ship with the package: files of JSON, compressed with gzip where the name ends in ``.gz``."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

from mt_megatron.errors import PatchError


def read_record(path: Path) -> Any:
    """The content of ``path``. Raises PatchError when it is missing, damaged or something else."""
    try:
        return json.loads(_text(path))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        expected = "JSON that is compressed with gzip" if _packed(path) else "JSON"
        raise PatchError(
            f"{path} cannot be read ({type(error).__name__}: {error}); expected {expected}. Reinstall "
            "mt_megatron, or run 'mt-megatron patches record', which writes its files anew"
        ) from error


def write_record(path: Path, content: object) -> None:
    """JSON of ``content``, the same bytes for the same content: no time and no name is in them.

    Releases of zlib compress differently; a file that has the content already stays as it is.
    """
    text = (json.dumps(content, indent=1) + "\n").encode()
    try:
        if _text(path) == text:
            return
    except (OSError, EOFError, zlib.error):
        pass  # Missing or damaged: written anew.
    if not _packed(path):
        path.write_bytes(text)
        return
    raw = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(text)
    path.write_bytes(raw.getvalue())


def _text(path: Path) -> bytes:
    found = path.read_bytes()
    return gzip.decompress(found) if _packed(path) else found


def _packed(path: Path) -> bool:
    return path.suffix == ".gz"
