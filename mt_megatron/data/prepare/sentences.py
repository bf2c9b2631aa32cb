"""Sentences of a text by one rule, for samples of masked words. No tables, no language model, no download."""

from __future__ import annotations

import itertools
import re

_END = re.compile(
    r"""
    (?: [!?\u2026]
      | (?<! \b [A-Za-z]) (?<! \b (?i:mr|ms|dr|st|vs|no|cf|eq|pp)) (?<! \b (?i:mrs|fig|vol|e\.g|i\.e))
        (?<! \b (?i:prof)) [.]
    )
    ["'\u201d\u2019)\]]* \s+ (?=["'\u201c\u2018(\[]* [A-Z0-9\u00c0-\u00de\u0391-\u03a9\u0410-\u042f])
    | [\u3002\uff01\uff1f]+
    | \n \s* \n
    """,
    re.VERBOSE,
)
"""End of a sentence: its mark, with blanks and a capital letter or a digit behind it, but no full stop of a
single letter or a common abbreviation; a mark that needs no blank; an empty line."""

_PART = re.compile(r"\S(?:.{0,498}\S)?(?=\s|\Z)|\S.{499}", re.DOTALL)
"""At most 500 characters of a sentence, up to a blank where there is one: Megatron-Core leaves documents out
that hold a sentence of more than 512 tokens."""


def split_sentences(text: str) -> list[str]:
    """The sentences of ``text`` in order, long ones in parts; without the blanks around them, none empty."""
    ends = [0, *(end.end() for end in _END.finditer(text)), len(text)]
    return [part for first, last in itertools.pairwise(ends) for part in _PART.findall(text[first:last])]
