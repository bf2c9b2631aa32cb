"""What was found wrong with documents: the kinds, one record each, and their counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

LEFT_OUT: Mapping[str, str] = {
    "not_utf8": "not UTF-8",
    "nul": "holds NUL bytes, so it is no text",
    "broken_json": "not JSON",
    "not_an_object": "JSON, and no object",
    "missing_key": "an object without the key, or without a string under it",
    "too_long": "longer than --max-document-bytes",
    "truncated": "the file ends too early: what follows is lost",
    "damaged": "the file is damaged: what follows is lost",
    "unreadable": "the file cannot be read",
    "no_tokens": "the tokenizer makes nothing of it",
    "empty": "holds nothing but white space",
}
"""Kinds of what is left out of the data. All but ``empty`` count as bad."""

KEPT: Mapping[str, str] = {
    "byte_order_mark": "began with a byte order mark, which was taken off",
    "crlf": "has lines that end with CRLF, which were kept",
    "blank_line": "a blank line between JSON lines",
}
"""Kinds of what was noticed and cost nothing."""

BROKEN_OFF = frozenset(("truncated", "damaged", "unreadable"))
"""Kinds of a file whose other documents are lost, however many they are."""

BAD = frozenset(LEFT_OUT) - BROKEN_OFF - {"empty"}
"""Kinds of one bad document each."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was found."""

    kind: str
    """Key of ``LEFT_OUT`` or ``KEPT``."""

    file: str
    """The file it is in."""

    at: int | None = None
    """Number of the line or row, from 1; None: the file as a whole."""

    unit: str = "line"
    """What ``at`` counts: ``line``, or ``row`` in Parquet files."""

    detail: str = ""
    """What exactly was found there."""

    lost_bytes: int = 0
    """About how many bytes of the file were not read because of it."""

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return asdict(self)

    def line(self) -> str:
        """One line for a person."""
        place = self.file if self.at is None else f"{self.file}, {self.unit} {self.at}"
        meaning = LEFT_OUT.get(self.kind) or KEPT[self.kind]
        lost = f"; {self.lost_bytes:,} bytes were not read" if self.lost_bytes else ""
        return f"{place}: {meaning}{f' ({self.detail})' if self.detail else ''}{lost}"


def summary_of(counts: Mapping[str, int]) -> str:
    """The counts by kind in one line; empty when there are none."""
    order = [*LEFT_OUT, *KEPT]
    return ", ".join(f"{counts[kind]:,} {kind}" for kind in order if counts.get(kind))


def bad_share(counts: Mapping[str, int], documents: int, *, lost_bytes: int, total_bytes: int) -> float:
    """Share of the input that is bad or lost, from 0 to 1.

    ``lost_bytes`` of the ``total_bytes`` of all files were not read, for files that break off; of what was
    read, bad documents count among all, ``documents`` being those that were kept. The loss of a truncated
    file is not known, so that it counts as 1.
    """
    if counts.get("truncated"):
        return 1.0
    lost = lost_bytes / max(1, total_bytes)
    bad = sum(counts.get(kind, 0) for kind in BAD)
    return lost + (1 - lost) * bad / max(1, bad + documents)


def added(counts: Counter[str], more: Mapping[str, int]) -> Counter[str]:
    """``counts`` with ``more`` added."""
    counts.update(more)
    return counts
