"""Which rank or link is slower than its like: robust comparison of one measurement of each.

A value stands out when it is worse than the median both by a share that matters and by four times the usual
spread (median absolute deviation, made comparable with a standard deviation).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SPREAD = 1.4826
_SPREADS = 4.0
_SHARES = {"products": 0.10, "copies": 0.20, "disk_write": 0.5, "disk_read": 0.5}
_LINK_DELAY = 1.0
_LINK_DELAY_SECONDS = 2e-4
_LINK_SPEED = 0.4
_MOST = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """One thing that is slower than its like."""

    what: str
    """``products``, ``copies``, ``disk_write``, ``disk_read``, ``link_delay`` or ``link_speed``."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    text: str


def outlying_ranks(what: str, rates: Sequence[float], hosts: Sequence[str]) -> list[Outlier]:
    """Ranks whose rate (more is better) is lower than the others'. Of two the lower one is named only
    when the share is twice as large: nobody else can say who is usual."""
    share = _SHARES[what] * (2 if len(rates) < 3 else 1)
    median = statistics.median(rates) if len(rates) > 2 else max(rates)
    least = median * (1 - share)
    if len(rates) > 2:
        least = min(least, median - _SPREADS * _spread(rates))
    unit, scale = ("GFLOP/s", 1e9) if what == "products" else ("GB/s", 1e9)
    return [
        Outlier(
            what=what,
            ranks=(rank,),
            hosts=(hosts[rank],),
            text=f"rank {rank} on {hosts[rank]}: {what} {rate / scale:,.2f} {unit}, the others' median is "
            f"{median / scale:,.2f} ({rate / median:.0%})",
        )
        for rank, rate in enumerate(rates)
        if rate < least
    ]


def outlying_links(links: Iterable[tuple[int, int, float, float]], hosts: Sequence[str]) -> list[Outlier]:
    """Links ``(first, second, seconds, bytes per second)`` that are slower than those of their kind: as a
    host's or rank's when most of its links are, else as a pair's."""
    by_kind: dict[bool, list[tuple[int, int, float, float]]] = defaultdict(list)
    for link in links:
        by_kind[hosts[link[0]] == hosts[link[1]]].append(link)
    found = []
    for within, group in by_kind.items():
        kind = "within hosts" if within else "between hosts"
        slow: dict[str, dict[tuple[int, int], str]] = {"link_delay": {}, "link_speed": {}}
        if len(group) < 3:
            continue
        delays, speeds = [one[2] for one in group], [one[3] for one in group]
        # Half of all links may touch one bad host of four: the better half says what is usual.
        quick, fast = _better_half(delays, largest=False), _better_half(speeds, largest=True)
        delay, speed = statistics.median(quick), statistics.median(fast)
        far = 2 * _SPREADS
        most = max(delay * (1 + _LINK_DELAY), delay + _LINK_DELAY_SECONDS, delay + far * _spread(quick))
        least = min(speed * (1 - _LINK_SPEED), speed - far * _spread(fast))
        for first, second, seconds, rate in group:
            if seconds > most:
                text = f"{seconds * 1e6:,.0f} us, {kind} {delay * 1e6:,.0f} us are usual"
                slow["link_delay"][first, second] = text
            if rate < least:
                text = f"{rate / 1e9:,.3f} GB/s, {kind} {speed / 1e9:,.3f} are usual"
                slow["link_speed"][first, second] = text
        for what, pairs in slow.items():
            found += _blamed(what, pairs, [(one[0], one[1]) for one in group], hosts)
    return found


def _better_half(values: Sequence[float], *, largest: bool) -> list[float]:
    ordered = sorted(values, reverse=largest)
    return ordered[: max(2, (len(ordered) + 1) // 2)]


def _spread(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return _SPREAD * statistics.median(abs(value - middle) for value in values)


def _blamed(
    what: str,
    slow: dict[tuple[int, int], str],
    measured: Sequence[tuple[int, int]],
    hosts: Sequence[str],
) -> list[Outlier]:
    found = []
    rest = dict(slow)
    # A host first, then a rank: who has several ranks there is to blame for all of their links.
    sides: list[tuple[str, set[int]]] = [
        (f"host {host}", {rank for rank, other in enumerate(hosts) if other == host})
        for host in dict.fromkeys(hosts)
        if len(set(hosts)) > 2
    ]
    sides += [(f"rank {rank} on {hosts[rank]}", {rank}) for rank in range(len(hosts))]
    for name, ranks in sides:
        touching = [pair for pair in measured if len(set(pair) & ranks) == 1]
        bad = [pair for pair in touching if pair in rest]
        if len(bad) >= 2 and len(bad) >= _MOST * len(touching):
            example = rest[bad[0]]
            found.append(
                Outlier(
                    what=what,
                    ranks=tuple(sorted(ranks)),
                    hosts=tuple(dict.fromkeys(hosts[rank] for rank in sorted(ranks))),
                    text=f"{len(bad)} of {len(touching)} links of {name}, such as ranks {bad[0][0]} and "
                    f"{bad[0][1]}: {example}",
                )
            )
            rest = {pair: text for pair, text in rest.items() if pair not in bad}
    for (first, second), text in rest.items():
        found.append(
            Outlier(
                what=what,
                ranks=(first, second),
                hosts=tuple(dict.fromkeys((hosts[first], hosts[second]))),
                text=f"the link of ranks {first} and {second} ({hosts[first]}, {hosts[second]}): {text}",
            )
        )
    return found
