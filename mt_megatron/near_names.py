"""What a mistyped name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_FAR = 0.15


def hint(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`` Did you mean A or B?`` with ``prefix`` before each, or nothing when no known name is near."""
    found = near(name, list(known))
    return f" Did you mean {' or '.join(prefix + each for each in found)}?" if found else ""


def near(name: str, known: Sequence[str]) -> list[str]:
    """At most three of ``known``, the nearest first."""
    # Without case and separators first: NumLayers is num-layers.
    same = [each for each in known if _bare(each) == _bare(name)]
    if same:
        return same
    found = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    # A name that is much less like it than the nearest one only distracts.
    return [each for each in found if _likeness(name, each) > _likeness(name, found[0]) - _FAR]


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, name.lower()).ratio()


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
