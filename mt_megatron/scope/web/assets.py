"""Files of the page, held in memory: a request never names a file on disk.

Large ones are compressed when the page is built, and sent as they are: every browser decodes gzip.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mt_megatron.errors import ConfigError

PAGE = Path(__file__).parent / "page"
"""The build (``tools/scope_page``)."""

DIGEST = "source.json"
"""Beside the build: ``{"sha256": …}`` of the source that it was made of."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

_MOST_BYTES = 5 * 2**20


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One file."""

    body: bytes
    content_type: str
    etag: str
    encoding: str | None = None
    """``gzip``, or None: as it is."""


@functools.cache
def assets(folder: Path = PAGE) -> Mapping[str, Asset]:
    """URL path -> file. Raises ``ConfigError`` where the build is missing."""
    found: dict[str, Asset] = {}
    size = 0
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        packed = path.suffix == ".gz"
        shown = path.with_suffix("") if packed else path
        kind = _TYPES.get(shown.suffix)
        if kind is None or not path.is_file():
            continue
        body = path.read_bytes()
        size += len(body)
        name = "/" if path.name == "index.html" else f"/{shown.relative_to(folder).as_posix()}"
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        encoding = "gzip" if packed else None
        found[name] = Asset(body=body, content_type=kind, etag=etag, encoding=encoding)
    if "/" not in found or size > _MOST_BYTES:
        raise ConfigError(
            f"found no page in {folder} (or one of more than {_MOST_BYTES:,} bytes); expected the build that "
            "the wheel carries. Install mt_megatron again, or build it: python -m tools.scope_page.build"
        )
    return found


def built_from(folder: Path = PAGE) -> str:
    """Digest of the source that the build was made of; empty where it is not said."""
    try:
        return str(json.loads((folder / DIGEST).read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
