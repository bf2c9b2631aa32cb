"""A small set of rows that contains every pair of values which a legal row can contain."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Factors = Mapping[str, Sequence[Any]]
Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
Legal = Callable[[Row], bool]
"""Of a row that may be incomplete: whether nothing in it contradicts a rule."""

_CANDIDATES = 12


def pairs_of(row: Row) -> set[Pair]:
    """Every pair of values in ``row``, the factors of a pair in the row's order."""
    return set(itertools.combinations(row.items(), 2))


def all_pairs(factors: Factors) -> Iterator[Pair]:
    """Every pair of values of two different factors, legal or not."""
    for first, second in itertools.combinations(factors, 2):
        for a, b in itertools.product(factors[first], factors[second]):
            yield (first, a), (second, b)


def covering_rows(factors: Factors, legal: Legal, seed: int = 0) -> list[Row]:
    """Greedy: each row starts from a pair nobody has yet, and is the best of a dozen completions."""
    choose = random.Random(seed)
    left = dict.fromkeys(all_pairs(factors))
    rows: list[Row] = []
    while left:
        start = dict(next(iter(left)))
        found = [_complete(start, factors, legal, choose) for _ in range(_CANDIDATES)]
        candidates = [row for row in found if row is not None]
        if not candidates:
            del left[next(iter(left))]
            continue
        best = max(candidates, key=lambda row: len(pairs_of(row) & left.keys()))
        rows.append(best)
        for pair in pairs_of(best):
            left.pop(pair, None)
    return rows


def _complete(start: Row, factors: Factors, legal: Legal, choose: random.Random) -> Row | None:
    """A legal row that contains ``start``, by backtracking over values in random order."""

    def fill(row: Row, missing: list[str]) -> Row | None:
        if not legal(row):
            return None
        if not missing:
            return {name: row[name] for name in factors}
        for value in choose.sample(list(factors[missing[0]]), len(factors[missing[0]])):
            filled = fill({**row, missing[0]: value}, missing[1:])
            if filled is not None:
                return filled
        return None

    missing = [name for name in factors if name not in start]
    return fill(start, choose.sample(missing, len(missing)))
