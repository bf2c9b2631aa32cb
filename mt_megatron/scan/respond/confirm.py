"""The paired measurement that tells whether a suspect is really slower: about one second, between two steps.

Suspects and others do the same at the same time, block by block, and only the ratios within a block count:
what holds up all of them at once cancels. Each verdict needs more than its median: with twelve blocks the
third smallest and third largest ratio are the ends of a 96 % interval of the median.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mt_megatron.errors import ConfigError

from .measures import LARGE_BYTES, SMALL_BYTES, Measures

BLOCKS = 12
_COMPUTE_SECONDS = 0.4
_SLOWER = 1.05
_LINK_SLOWER = 1.3
_LINK_SECONDS = 2e-4
_CONTROLS = 3
_DISTANCES = (1, 2, 3)
"""Between the two ranks of a host, or the two hosts, of a control pair, in their order."""
_INNER = 2
_VERDICTS = ("confirmed", "inconclusive", "refuted")
"""Of two measures of a link the one that comes first here counts."""

MEASURABLE = {
    "slow_compute": "compute",
    "host_contention": "compute",
    "slow_link": "link",
    "slow_node_link": "link",
}
"""Causes that a measurement can confirm, and which one; others leave no trace between two steps."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured."""

    identity: str
    what: Literal["compute", "link"]
    ranks: tuple[int, ...]
    """The suspects; for a link its two ends."""

    def to_json(self) -> str:
        """As text that ``request_from`` reads."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """What came out."""

    identity: str
    what: str
    ranks: tuple[int, ...]
    verdict: Literal["confirmed", "refuted", "inconclusive"]
    ratio: float
    """Suspects' time over the others', the median of the blocks; 0 without others."""

    low: float
    high: float
    """A 96 % interval of it."""

    seconds: float
    """How long the measurement took."""

    text: str
    """In words, with the figures."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def request_from(text: str, world_size: int) -> Request:
    """What ``Request.to_json`` gave. Raises ``ConfigError`` for what cannot be measured."""
    try:
        given = json.loads(text)
        ranks = tuple(int(rank) for rank in given["ranks"])
        request = Request(identity=str(given["identity"]), what=given["what"], ranks=ranks)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"found {text[:200]!r}; expected identity, what and ranks as JSON") from error
    check_request(request, world_size)
    return request


def check_request(request: Request, world_size: int) -> None:
    """Raises ``ConfigError`` for what cannot be measured among ``world_size`` ranks."""
    ranks = set(request.ranks)
    if request.what not in ("compute", "link"):
        raise ConfigError(f"found a measurement of {request.what!r}; expected compute or link")
    if len(ranks) != len(request.ranks) or not ranks or not ranks <= set(range(world_size)):
        raise ConfigError(
            f"found ranks {list(request.ranks)}; expected different ones of 0 to {world_size - 1}"
        )
    if request.what == "link" and len(ranks) != 2:
        raise ConfigError(f"found {len(ranks)} ranks for a link; expected its two ends")
    if request.what == "link" and world_size < 3:
        raise ConfigError("found 2 ranks; expected a third one, or there is no other pair to compare with")
    if request.what == "compute" and len(ranks) >= world_size:
        raise ConfigError("found every rank suspected; expected one that is not, to compare with")


def measure(request: Request, measures: Measures, rank: int, hosts: Sequence[str]) -> Confirmation:
    """Measure as ``request``, the same on all ranks, says; collective. The same result on every rank.
    ``hosts``: of every rank of the run."""
    began = time.monotonic()
    if request.what == "compute":
        ratios, extra = _compute(request, measures)
        return judged(request, ratios, _SLOWER, 0.0, extra, time.monotonic() - began)
    controls = control_pairs(request.ranks, hosts)
    if not controls:
        return _without_controls(request, hosts)
    found = _link(request, measures, rank, controls)
    seconds = time.monotonic() - began
    each = [judged(request, ratios, _LINK_SLOWER, least, extra, seconds) for ratios, extra, least in found]
    # Either measure may show that the link is slow; both have to show that it is not.
    return min(each, key=lambda one: (_VERDICTS.index(one.verdict), -one.low))


def judged(
    request: Request, ratios: Sequence[float], limit: float, least: float, extra: str, seconds: float
) -> Confirmation:
    """The verdict on ``ratios``, one per block. ``least``: by how many seconds less than
    what would matter the suspects' time differs; above 0 nothing is confirmed."""
    ordered = sorted(ratios)
    low, high = ordered[_INNER], ordered[-1 - _INNER]
    median = statistics.median(ordered)
    verdict: Literal["confirmed", "refuted", "inconclusive"] = "inconclusive"
    if low > limit and least <= 0:
        verdict = "confirmed"
    elif high < limit or least > 0:
        verdict = "refuted"
    who = "ranks " if len(request.ranks) > 1 else "rank "
    text = (
        f"{request.what} of {who}{', '.join(map(str, request.ranks))}: {median:.2f} times the others' time "
        f"({low:.2f} to {high:.2f}, 96 % interval, {len(ordered)} blocks; from {limit:g} on it counts): "
        f"{verdict}; {extra}"
    )
    return Confirmation(
        identity=request.identity,
        what=request.what,
        ranks=request.ranks,
        verdict=verdict,
        ratio=median,
        low=low,
        high=high,
        seconds=seconds,
        text=text,
    )


def _without_controls(request: Request, hosts: Sequence[str]) -> Confirmation:
    """The verdict on a link that is the only one of its kind."""
    kind = "within a host" if len({hosts[rank] for rank in request.ranks}) == 1 else "between hosts"
    text = (
        f"link of ranks {', '.join(map(str, request.ranks))}: the run has no other pair {kind} to compare it "
        "with: inconclusive"
    )
    return Confirmation(
        identity=request.identity,
        what=request.what,
        ranks=request.ranks,
        verdict="inconclusive",
        ratio=0.0,
        low=0.0,
        high=0.0,
        seconds=0.0,
        text=text,
    )


def _compute(request: Request, measures: Measures) -> tuple[list[float], str]:
    measures.products(1)
    slowest = max(row[0] for row in measures.gather([measures.products(1)]))
    count = max(1, round(_COMPUTE_SECONDS / BLOCKS / max(slowest, 1e-6)))
    times = []
    for _ in range(BLOCKS):
        measures.barrier()
        times.append(measures.products(count))
    every = measures.gather(times)
    suspects = [every[each] for each in request.ranks]
    others = [row for each, row in enumerate(every) if each not in request.ranks]
    # Each suspect against the median of the others; the least slow one decides.
    ratios = [
        min(row[block] for row in suspects) / statistics.median(row[block] for row in others)
        for block in range(BLOCKS)
    ]
    rate = measures.flops_per_product * count / 1e9
    slow = rate / statistics.median(suspects[0])
    usual = rate / statistics.median(value for row in others for value in row)
    return ratios, f"{slow:,.1f} against {usual:,.1f} GFLOP/s"


def control_pairs(suspects: tuple[int, ...], hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of the same kind as the pair ``suspects`` (within a host, or between two), to compare it with.

    ``hosts``: of every rank. Pairs that share less with the suspects come first. Between hosts no pair has an
    end at the first suspect's host, whose network card may be what is slow, while there are others; of these
    each two hosts give one pair before any give a second.
    """
    first, second = (hosts[rank] for rank in suspects)
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    groups = list(members.values())
    if first == second:
        near = [
            (ranks[at], ranks[at + distance])
            for distance in _DISTANCES
            for ranks in groups
            for at in range(len(ranks) - distance)
        ]
    else:
        near = [
            (ranks[at], others[(at + shift) % len(others)])
            for distance in _DISTANCES
            for ranks, others in zip(groups, groups[distance:], strict=False)
            for shift in range(len(others))
            for at in range(len(ranks))
        ]

    def shared(pair: tuple[int, int]) -> tuple[bool, bool, bool]:
        touched = {hosts[rank] for rank in pair} if first != second else set()
        return first in touched, second in touched, bool(set(pair) & set(suspects))

    controls = sorted((pair for pair in near if set(pair) != set(suspects)), key=shared)
    if first != second:
        # The way between two hosts may be shorter than others, or slow: one way alone is no measure.
        ways: dict[frozenset[str], list[tuple[int, int]]] = {}
        for pair in controls:
            ways.setdefault(frozenset(hosts[rank] for rank in pair), []).append(pair)
        turns = itertools.zip_longest(*ways.values())
        controls = sorted((pair for turn in turns for pair in turn if pair), key=lambda pair: shared(pair)[0])
    return controls[:_CONTROLS]


def _link(
    request: Request, measures: Measures, rank: int, controls: Sequence[tuple[int, int]]
) -> list[tuple[list[float], str, float]]:
    """Per measure the ratios of the blocks, the figures in words, and ``least`` as ``judged`` takes it."""
    pairs = [(min(request.ranks), max(request.ranks)), *controls]
    small = [[0.0] * BLOCKS for _ in pairs]
    large = [[0.0] * BLOCKS for _ in pairs]
    for block in range(-1, BLOCKS):  # the first round makes the connections
        for number, (first, second) in enumerate(pairs):
            measures.barrier()
            if rank not in (first, second):
                continue
            peer, leads = (second, True) if rank == first else (first, False)
            quick = measures.exchange(peer, first=leads, nbytes=SMALL_BYTES, repeats=2)
            bulk = measures.exchange(peer, first=leads, nbytes=LARGE_BYTES, repeats=1)
            if block >= 0 and rank == first:
                small[number][block], large[number][block] = min(quick), bulk[0]
    gathered = measures.gather([value for row in (*small, *large) for value in row])
    length = len(pairs) * BLOCKS
    quick_of, bulk_of = [], []
    for number, (first, _) in enumerate(pairs):
        row = gathered[first]
        quick_of.append(row[number * BLOCKS : (number + 1) * BLOCKS])
        bulk_of.append(row[length + number * BLOCKS : length + (number + 1) * BLOCKS])
    found = []
    for name, times in (("round trip", quick_of), ("1 MiB there and back", bulk_of)):
        usual = [statistics.median(row[block] for row in times[1:]) for block in range(BLOCKS)]
        ratios = [own / max(other, 1e-9) for own, other in zip(times[0], usual, strict=True)]
        own, other = statistics.median(times[0]), statistics.median(usual)
        extra = f"{name} {own * 1e3:.2f} against {other * 1e3:.2f} ms"
        found.append((ratios, extra, _LINK_SECONDS - (own - other)))
    return found
