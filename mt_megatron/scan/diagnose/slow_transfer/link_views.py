"""One slow group or edge, and what its members' exits say of where it is slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from mt_megatron.scan.analysis.matched_ops import Label
from mt_megatron.scan.analysis.step_table import StepTable
from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.analysis.units import LEAST_LOSS, SlowUnit, Unit
from mt_megatron.scan.diagnose.hops.hidden_links import said
from mt_megatron.scan.diagnose.hops.ring_patterns import Hops, fit_pairs, fit_ring
from mt_megatron.scan.diagnose.hops.slow_rings import crossing_hops, node_borders, node_of
from mt_megatron.scan.diagnose.hops.where_slow import WhereSlow

NODE_SHARE = 0.7
"""Of the units that cross a node's border, so many must be slow to blame its border."""

LEAST_SPREAD = 0.12
"""Of what a ring loses by one slow hop, its members' exits differ by this at least."""

Pair = tuple[int, int]


class View:
    """A slow unit, and what the pattern of its exits says of where it is slow."""

    def __init__(self, slow: SlowUnit, places: Mapping[int, Place]) -> None:
        self.slow = slow
        self.pair: Pair | None = None
        self.border: str | None = None
        self.sentence = slow.said
        self.trust = slow.trust
        self._places = places
        self._inner: tuple[Pair, ...] = ()
        self.unclear = False
        """Whether its members' exits were compared, and neither a place in it nor all of it explains them."""

        ranks = slow.unit.ranks
        if slow.pair is not None:
            self.pair = pair_of(*slow.pair)
        elif len(ranks) == 2:
            self.pair = pair_of(*ranks)

    @property
    def nodes(self) -> set[str]:
        """Nodes whose border may be the slow place."""
        if self.border is not None:
            return {self.border}
        concerned = self._inner or (self.slow.unit.ranks if self.pair is None else self.pair,)
        crossed = [{node_of(self._places, rank) for rank in ranks} for ranks in concerned]
        return {node for nodes in crossed if len(nodes) > 1 for node in nodes}

    def inherits(self, pairs: Iterable[Pair]) -> None:
        """Slow ``pairs`` within this group explain it: no other border need be slow."""
        if self.pair is None and self.border is None:
            ranks = set(self.slow.unit.ranks)
            self._inner = tuple(pair for pair in pairs if set(pair) < ranks)

    def fit(
        self,
        labels: Sequence[Label],
        where: WhereSlow,
        unsound: Collection[int],
        borders: Mapping[Hops, str],
    ) -> None:
        """Look for the place: beside other operations, or where there are none by the exits alone."""
        slow, unit = self.slow, self.slow.unit
        if unit.samples is None or unit.clock_error > 0.3 * slow.extra_ns:
            return
        located = where.find(unit, slow.first_step, slow.last_step, unsound=unsound, borders=tuple(borders))
        self.unclear = located is None and where.comparable(unit, slow.first_step, slow.last_step, unsound)
        if located is not None:
            if located.pair is not None:
                self.pair, self.trust = pair_of(*located.pair), 0.97
                self.sentence = said(unit, located)
            else:
                self.border = borders.get(located.hops)
            return
        self._fit_alone(labels, borders)

    def _fit_alone(self, labels: Sequence[Label], borders: Mapping[Hops, str]) -> None:
        unit = self.slow.unit
        assert unit.samples is not None
        inside = unit.samples.iteration >= self.slow.first_step
        samples = unit.samples.take(inside & (unit.samples.iteration <= self.slow.last_step))
        if not len(samples.iteration):
            return
        ranks = unit.ranks
        op = labels[int(samples.label[0])][0]
        if "all_to_all" in op:
            found = fit_pairs(samples, self.slow.healthy_ns)
            if found is not None:
                self.pair, self.trust = pair_of(ranks[found[0]], ranks[found[1]]), 0.9
                self.sentence = f"only these two leave the {op} of {unit.name} late"
            return
        share = self.slow.extra_ns / (self.slow.extra_ns + self.slow.healthy_ns)
        fit = fit_ring(
            samples,
            labels,
            self.slow.healthy_ns,
            list(borders),
            least_amplitude=LEAST_SPREAD * share,
            crossing=crossing_hops(ranks, self._places),
        )
        if fit is None or not fit.accepted:
            return
        if fit.hops in borders:
            self.border = borders[fit.hops]
            return
        sender = ranks[fit.hops[0]]
        receiver = ranks[(fit.hops[0] + 1) % len(ranks)]
        self.pair, self.trust = pair_of(sender, receiver), 0.97
        self.sentence = (
            f"the times at which the members leave the {op} of {unit.name} fit a slow hop from rank {sender} "
            f"to rank {receiver} ({100 * fit.explained:.0f} % of the pattern; the error of the next best hop "
            f"is {1.0 / max(fit.against_second, 1e-3):.0f} times as large)"
        )


def borders_of(
    unit: Unit, judged: Sequence[Unit], slow: Collection[int], table: StepTable
) -> dict[Hops, str]:
    """Of the ring of ``unit``, the sets of hops across one node's border that may be slow together: not where
    others that cross the same border are as quick as ever."""
    found = {}
    for hops, node in node_borders(unit.ranks, table.places).items():
        across = [
            each
            for each in judged
            if crosses(each, node, table.places) and cost_of(each, table) > 2 * LEAST_LOSS * table.step_ns
        ]
        if sum(id(each) in slow for each in across) >= NODE_SHARE * len(across):
            found[hops] = node
    return found


def cost_of(unit: Unit, table: StepTable) -> float:
    """ns per step that its operations take."""
    inside = (unit.rows.iteration >= table.iteration[0]) & (unit.rows.iteration <= table.iteration[-1])
    return float((unit.rows.time[inside] * unit.rows.count[inside]).sum()) / len(table.iteration)


def crosses(unit: Unit, node: str, places: Mapping[int, Place]) -> bool:
    """Whether it has members on ``node`` and elsewhere."""
    inside = [node_of(places, rank) == node for rank in unit.ranks]
    return any(inside) and not all(inside)


def pair_of(one: int, other: int) -> Pair:
    """The two in order."""
    return (one, other) if one < other else (other, one)
