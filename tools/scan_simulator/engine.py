"""Plays one step after another: when each rank begins and ends everything, and so who waits for whom.

Nothing here knows what a fault is called: some work takes longer, some links are slower, some processes stand
still, and waiting follows from what must have happened before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .collectives import all_to_all, doubling, ring, transfer
from .columns import Template, columns_of
from .draws import Drawing, Draws
from .faults import Fault
from .hosts import Hosts
from .job import Job
from .links import Links
from .noise import Floats, Noise
from .schedule import DIRECTIONS, Direction, Exchange, Level, Plan, plan
from .ways import Tables, Way
from .work import Communication, Piece, pieces

_CALL = 1e3
"""Nanoseconds of a collective at least."""

_COPY = 0.15e6
"""Nanoseconds to hand a batch over."""

_BETWEEN = 0.4e6
"""Nanoseconds of bookkeeping at the end of a step, and after it."""


@dataclass(kw_only=True)
class Step:
    """What happened in one step. Times are true ones in ns; infinite where it never happens."""

    number: int
    begin: Floats
    """[columns, pp, dp, cp, tp]."""

    end: Floats
    draws: Draws
    pauses: list[tuple[int, str, float, float]] = field(default_factory=list)
    """Rank, ``gc`` or ``stopped``, begin, end."""

    checkpoint: tuple[Floats, Floats, Floats] | None = None
    """Begin of the writing, its end, end of the collective after it; [pp, dp, cp, tp] each."""

    over: Floats = field(default_factory=lambda: np.empty(0))
    """When each rank is ready for the next step, [pp, dp, cp, tp]."""

    busy: Floats = field(default_factory=lambda: np.empty(0))
    """Nanoseconds each rank computed, [pp, dp, cp, tp]."""

    throttled: dict[int, float] = field(default_factory=dict)
    """Rank -> nanoseconds that a quota kept from it since the beginning."""


class Engine:
    """A simulated job. ``step`` plays the next one."""

    def __init__(self, job: Job, faults: Sequence[Fault], seed: int) -> None:
        for fault in faults:
            fault.check(job.layout, job.steps)
        layout = job.layout
        self.job, self._faults = job, tuple(faults)
        self.noise = Noise(
            seed, probability=job.tail_probability, scale=job.tail_ms * 1e6, exponent=job.tail_exponent
        )
        self.plan: Plan = plan(layout.pp, job.microbatches, layout.vpp)
        self.pieces = {direction: pieces(job, direction) for direction in DIRECTIONS}
        self.template: Template = columns_of(job, self.plan, self.pieces["forward"], self.pieces["backward"])
        self._drawing = Drawing(job, self.noise, self.plan, self.pieces)
        self._tables = Tables(layout, Links(job, self.noise))
        self._hosts = Hosts(job, self.noise)
        self._across = AcrossStages(job, self.noise, self._tables, self._hosts)
        self._ways = {name: Way(layout, name) for name in ("tp", "cp", "ep")}
        self._ordinals = _ordinals(self.plan)
        self._number = 0
        shape = layout.shape
        self.now: Floats = self.noise.generator("start").uniform(0, 50e6, shape)
        self._ready = self.now.copy()
        self._taken = np.full((layout.pp, job.prefetched, *shape[1:]), -np.inf)
        self._passes_before = 0
        self._last_duration = 2 * job.microbatch_ms * 1e6 * job.microbatches

    def step(self) -> Step:
        """Play the next step."""
        self._number += 1
        faults = [fault for fault in self._faults if fault.on(self._number)]
        self._tables.begin(faults)
        draws = self._drawing.step(faults)
        width = self.template.spans.shape[1]
        nan = np.full((width, *self.job.layout.shape), np.nan)
        step = Step(number=self._number, begin=nan, end=nan.copy(), draws=draws)
        began = self.now.copy()
        step.pauses += self._hosts.begin(faults, self.now, self._last_duration)
        posted: dict[tuple[int, int], Floats] = {}
        for level in self.plan.levels:
            if level.kind == "exchange":
                self._exchange(level, step, posted)
            else:
                self._passes(level, level.kind, step)
        self._passes_before += len(self._ordinals["forward"][0])
        self._end_of_step(step, began)
        step.over, step.busy = self.now.copy(), self._hosts.busy
        step.throttled = self._hosts.throttled()
        finite = self.now[np.isfinite(self.now)]
        self._last_duration = float((finite.max() if finite.size else 0.0) - began.min())
        return step

    def queue_depth(self) -> Floats:
        """Batches that wait for each rank now, [ranks]."""
        need = self.job.microbatch_ms * 1e6 / self.job.layout.vpp * self.job.data_part
        with np.errstate(invalid="ignore"):
            waiting = np.floor((self.now - self._ready) / need) + 1
        depth: Floats = np.clip(np.nan_to_num(waiting), 0, self.job.prefetched).ravel()
        return depth

    # -- the pipeline

    def _passes(self, level: Level, direction: Direction, step: Step) -> None:
        """One micro-batch on each of some stages."""
        stages = np.array([stage for stage, _ in level.places])
        ordinals = np.array([self._ordinals[direction][place[0]][place[1]] for place in level.places])
        column = np.array([self.template.columns.places[place] for place in level.places])
        began = at = self.now[stages]
        if direction == "forward":
            at = self._batch(at, stages, ordinals, step)
            step.begin[column, stages], step.end[column, stages] = began, at
            column = column + 1
        work = step.draws.work[direction]
        factor, delay = step.draws.messages[direction]
        for index, piece in enumerate(self.pieces[direction]):
            before, at = at, self._hosts.worked(at, work[ordinals, index, stages], stages)
            self._note_collections(step, direction, stages, ordinals, index, before)
            if piece.expert and direction == "forward":
                step.begin[column, stages], step.end[column, stages] = before, at
                column = column + 1
            if piece.after is not None:
                noise = factor[ordinals, index, stages], delay[ordinals, index, stages]
                left = self._collective(piece, stages, ordinals, direction, at, noise, step)
                step.begin[column, stages], step.end[column, stages] = at, left
                at, column = left, column + 1
        step.begin[column, stages], step.end[column, stages] = began, at
        step.begin[column + 1, stages], step.end[column + 1, stages] = began, at
        self.now[stages] = at

    def _batch(self, at: Floats, stages: np.ndarray, ordinals: np.ndarray, step: Step) -> Floats:
        """Wait for the next batch of a queue that a worker fills while there is room."""
        ready = self._ready[stages]
        taken = np.maximum(at, ready) + _COPY
        taken = self._hosts.stretched(at, taken, stages)
        slots = (self._passes_before + ordinals) % self.job.prefetched
        self._taken[stages, slots] = taken
        room = self._taken[stages, (slots + 1) % self.job.prefetched]
        self._ready[stages] = np.maximum(ready, room) + step.draws.data[ordinals, stages]
        return taken

    def _note_collections(
        self,
        step: Step,
        direction: Direction,
        stages: np.ndarray,
        ordinals: np.ndarray,
        piece: int,
        began: Floats,
    ) -> None:
        if not step.draws.collections:
            return
        for row, (stage, ordinal) in enumerate(zip(stages.tolist(), ordinals.tolist(), strict=True)):
            for one in step.draws.collections.get((direction, stage), ()):
                if (one.ordinal, one.piece) == (ordinal, piece):
                    begin = float(began[row][one.place[1:]])
                    rank = int(np.ravel_multi_index(one.place, self.job.layout.shape))
                    step.pauses.append((rank, "gc", begin, begin + one.seconds_ns))

    def _collective(
        self,
        piece: Piece,
        stages: np.ndarray,
        ordinals: np.ndarray,
        direction: Direction,
        enter: Floats,
        noise: tuple[Floats, Floats],
        step: Step,
    ) -> Floats:
        what = piece.after
        assert what is not None
        way = self._ways[what.group]
        hold = self._hosts.hold(stages, way)
        factor, delay = way.split(noise[0]), way.split(noise[1])
        came = way.split(enter)
        if what.op != "all_to_all":
            latency, per_byte = self._tables.way_ring(way)
            size, hops = ring_sizes(what, way.size)
            gap = per_byte[stages] * size * factor + delay / hops
            return way.join(ring(came, gap, latency[stages], hops, hold))
        latency, per_byte, usual = self._tables.way_pairs(way)
        rows = self.rows_of(step.draws, direction, ordinals, piece.layer, stages)
        share = way.split(rows)
        if what.combines:
            own = np.broadcast_to(share[..., None, :], (*share.shape[:-1], way.size - 1, way.size))
        else:
            own = share[..., (np.arange(way.size) + np.arange(1, way.size)[:, None]) % way.size]
        each = own * (what.size / way.size)
        gap = usual[stages] * each * factor[..., None, :] + delay[..., None, :] / (way.size - 1)
        extra = (per_byte - usual)[stages] * each
        return way.join(all_to_all(came, gap, latency[stages], extra, hold))

    def rows_of(
        self, draws: Draws, direction: Direction, ordinals: np.ndarray, layer: int, stages: np.ndarray
    ) -> Floats:
        """Rows of each rank's experts against the mean, [stages, dp, cp, tp]."""
        assert draws.rows is not None
        # The backward pass goes through the layers from the last to the first.
        at = layer if direction == "forward" else self.job.layers - 1 - layer
        batches = self._drawing.batch_of[direction][ordinals]
        rows: Floats = draws.rows[batches, at, stages]
        return rows

    def _exchange(self, level: Level, step: Step, posted: dict[tuple[int, int], Floats]) -> None:
        """Transfers between stages whose other sides are there too."""
        for place in level.places:
            posted[place] = self.now[place[0]].copy()
        left = {}
        size = self.job.activation_bytes / self.job.layout.cp
        for place in level.places:
            stage, position = place
            operation = self.plan.programs[stage][position]
            assert isinstance(operation, Exchange)
            over = posted[place]
            for index, each in enumerate(operation.transfers):
                other = each.target if each.source == stage else each.source
                partner, identity = self.plan.partners[stage, position, index]
                there = posted.get((other, partner))
                there = self.now[other] if there is None else there
                latency, per_byte = self._tables.stages(each.source, each.target)
                factor, delay = step.draws.transfers
                gap = per_byte * size * factor[identity] + delay[identity]
                holds = self._hosts.hold(each.source), self._hosts.hold(each.target)
                sent, received = transfer(posted[place], there, gap, latency, *holds)
                over = np.maximum(over, sent if each.source == stage else received)
            column = self.template.columns.places[place]
            for index in range(len(operation.transfers)):
                step.begin[column + index, stage], step.end[column + index, stage] = posted[place], over
            left[stage] = over
        for stage, over in left.items():
            self.now[stage] = over

    # -- after the last micro-batch

    def _end_of_step(self, step: Step, began: Floats) -> None:
        layout, tail = self.job.layout, self.template.columns.tail
        everyone = np.arange(layout.pp)
        parts = layout.vpp * self.job.buckets
        for index in range(parts):
            self._over_groups(step, f"gradients {index}")
        self._over_groups(step, "embedding")
        optimizer = self.now.copy()
        self._over_groups(step, "norm")
        self._over_groups(step, "agreement")
        self.now = self._hosts.worked(self.now, step.draws.optimizer, everyone)
        for index in range(parts):
            self._over_groups(step, f"parameters {index}")
        self._mark(step, tail["optimizer"], optimizer, self.now)
        bookkeeping = _BETWEEN * self.noise.factors("bookkeeping", [2, *layout.shape], 0.2)
        self.now = self._hosts.worked(self.now, bookkeeping[0], everyone)
        self._mark(step, tail["step"], began, self.now)
        self.now = self._hosts.worked(self.now, bookkeeping[1], everyone)
        if self.job.checkpoint_every and step.number % self.job.checkpoint_every == 0:
            before = self.now
            written = self._hosts.worked(before, step.draws.checkpoint, everyone)
            self.now = written
            if layout.world_size > 1:
                self.now = self._across.small(self.now, "world")
            step.checkpoint = before, written, self.now.copy()

    def _mark(self, step: Step, columns: list[int], begin: Floats, end: Floats) -> None:
        for stage, column in enumerate(columns):
            if column >= 0:
                step.begin[column, stage], step.end[column, stage] = begin[stage], end[stage]

    def _over_groups(self, step: Step, name: str) -> None:
        """The collective of the step's end that is called ``name``, if there is one."""
        columns = self.template.columns.tail.get(name)
        if columns is None:
            return
        what, before = self.template.columns.communications[name], self.now
        few = what.group in ("tp-pp", "world")
        left = self._across.small(before, what.group) if few else self._across.large(before, what)
        # Who comes last to an exchange of a few bytes finds all others there.
        self.now = np.maximum(left, before + _CALL)
        self._mark(step, columns, before, self.now)


def _ordinals(made: Plan) -> dict[Direction, list[dict[int, int]]]:
    """Per direction and stage: position in the program -> the how-many-eth pass of that direction."""
    found: dict[Direction, list[dict[int, int]]] = {"forward": [], "backward": []}
    for program in made.programs:
        counts: dict[Direction, dict[int, int]] = {"forward": {}, "backward": {}}
        for position, operation in enumerate(program):
            if not isinstance(operation, Exchange):
                own = counts[operation.direction]
                own[position] = len(own)
        for direction, own in counts.items():
            found[direction].append(own)
    return found


class AcrossStages:
    """Takes the times at which ranks come and gives those at which they leave, [pp, dp, cp, tp]."""

    def __init__(self, job: Job, noise: Noise, tables: Tables, hosts: Hosts) -> None:
        self._job, self._noise, self._tables, self._hosts = job, noise, tables, hosts

    def small(self, now: Floats, group: str) -> Floats:
        """An all-reduce of a few bytes."""
        rows = self._tables.members(group)
        latency, _ = self._tables.doubling(group)
        jitter = self._noise.factors(f"small {group}", latency.shape, 4 * self._job.link_jitter)
        left: Floats = now.copy()
        flat = left.reshape(-1)
        flat[rows] = doubling(flat[rows], latency * jitter, self._hosts.hold_rows(rows))
        return left

    def large(self, now: Floats, what: Communication) -> Floats:
        """A ring."""
        rows = self._tables.members(what.group)
        latency, per_byte = self._tables.ring(what.group)
        size, hops = ring_sizes(what, rows.shape[-1])
        factor = self._noise.factors(f"large {what.group}", rows.shape, self._job.link_jitter)
        delay = self._noise.delays(f"large {what.group}", rows.shape) / hops
        gap = per_byte * size * factor + delay
        left: Floats = now.copy()
        flat = left.reshape(-1)
        flat[rows] = ring(flat[rows], gap, latency, hops, self._hosts.hold_rows(rows))
        return left


def ring_sizes(what: Communication, members: int) -> tuple[float, int]:
    """Bytes of each hop, and hops."""
    if what.op == "all_reduce":
        return what.size / members, 2 * (members - 1)
    if what.op == "reduce_scatter":
        return what.size / members, members - 1
    return float(what.size), members - 1
