"""How long everything of one step will take each rank: usual times, unsteadiness and faults together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .faults import Fault
from .job import Job
from .noise import Floats, Lasting, Noise
from .schedule import DIRECTIONS, Direction, Pass, Plan
from .work import Piece, stage_extras, tables

_SLICE = 4e6
"""Nanoseconds for which a competing thread typically holds the processor."""

_GC_STEPS = 50
"""A rank collects garbage once in about so many steps."""

_GC_NS = 8e6


@dataclass(frozen=True, kw_only=True)
class Collection:
    """A garbage collection within a piece of work."""

    ordinal: int
    piece: int
    place: tuple[int, ...]
    """[pp, dp, cp, tp]."""

    seconds_ns: float


@dataclass(kw_only=True)
class Draws:
    """One step. Shapes: passes of one direction P, pieces of it J, ranks [pp, dp, cp, tp]."""

    work: dict[Direction, Floats]
    """[P, J, ranks] ns."""

    data: Floats
    """What a data worker needs for each forward pass's batch, [P, ranks] ns."""

    tokens: Floats
    """Of each forward pass's batch, [P, dp]."""

    rows: Floats | None
    """Of each rank's experts against the mean, [P, layers, ranks]; None without experts."""

    messages: dict[Direction, tuple[Floats, Floats]]
    """Factor of the time per byte, and ns on top, of what a rank sends after a piece; [P, J, ranks] each."""

    transfers: tuple[Floats, Floats]
    """The same of each transfer between stages, by its id; [transfers, dp, cp, tp] each."""

    optimizer: Floats
    """[ranks] ns."""

    checkpoint: Floats
    """[ranks] ns."""

    queued: Floats
    """Nanoseconds for which threads waited for a processor in this step, [ranks]."""

    switches: Floats
    """How often, [ranks]."""

    collections: dict[tuple[Direction, int], list[Collection]] = field(default_factory=dict)
    """By direction and stage."""


class Drawing:
    """Draws one step after another."""

    def __init__(
        self, job: Job, noise: Noise, plan: Plan, pieces: dict[Direction, tuple[Piece, ...]]
    ) -> None:
        """``pieces`` by direction."""
        layout = job.layout
        self._job, self._noise, self._pieces = job, noise, pieces
        self._shape = layout.shape
        self._transfers = (len(plan.transfers), *layout.shape[1:])
        # All stages take their passes of one direction in the same order.
        self._passes: dict[Direction, list[Pass]] = {"forward": [], "backward": []}
        for operation in plan.programs[0]:
            if isinstance(operation, Pass):
                self._passes[operation.direction].append(operation)
        numbers = {(one.microbatch, one.chunk): index for index, one in enumerate(self._passes["forward"])}
        self.batch_of: dict[Direction, np.ndarray] = {
            direction: np.array([numbers[one.microbatch, one.chunk] for one in passes])
            for direction, passes in self._passes.items()
        }
        """The forward pass in which each pass's micro-batch goes through the same chunk."""

        self._rank_speed = noise.factors("rank speed", self._shape, job.rank_spread)
        self._disk = noise.factors("disk speed", self._shape, 0.05)
        self._stage_share = 1 + noise.generator("stages").uniform(-0.05, 0.05, (layout.vpp, layout.pp))
        self._rank_steps = Lasting(noise, "rank steps", self._shape, job.step_spread)
        self._job_steps = Lasting(noise, "job steps", (1,), job.job_spread)

    def step(self, faults: Sequence[Fault]) -> Draws:
        """The next step, with the ``faults`` that are on in it."""
        job, noise, layout = self._job, self._noise, self._job.layout
        speed = self._rank_speed * self._rank_steps.next() * self._job_steps.next()
        by_cause: dict[str, list[tuple[Fault, tuple[int, ...]]]] = defaultdict(list)
        for fault in faults:
            if fault.rank is not None:
                where = tuple(int(each) for each in np.unravel_index(fault.rank, self._shape))
                by_cause[fault.cause].append((fault, where))
        for fault, where in by_cause["slow_compute"]:
            speed[where] *= fault.factor
        tokens = self._tokens([(fault, where) for fault, where in by_cause["uneven_work"] if layout.ep == 1])
        rows = self._rows([(fault, where) for fault, where in by_cause["uneven_work"]])
        work = {direction: self._work(direction, speed, tokens, rows) for direction in DIRECTIONS}
        queued, switches = self._ordinary_queueing()
        for fault, where in by_cause["host_contention"]:
            if fault.mode == "load":
                self._compete(fault, where, work, queued, switches)
        collections = self._collect(work, [each for each in by_cause["host_pause"] if each[0].mode == "gc"])
        data = np.multiply(
            job.microbatch_ms * 1e6 / layout.vpp * job.data_part,
            noise.factors("data", [len(self._passes["forward"]), *self._shape], 0.15),
        )
        data += 5 * noise.delays("data", data.shape)
        checkpoint = job.checkpoint_seconds * 1e9 * self._disk * noise.factors("disk", self._shape, 0.1)
        checkpoint += 20 * noise.delays("disk", self._shape)
        for fault, where in by_cause["slow_data"]:
            _of(data, where)[...] *= fault.factor
        for fault, where in by_cause["slow_checkpoint"]:
            checkpoint[where] *= fault.factor
        optimizer = job.optimizer_ms * 1e6 * speed * noise.factors("optimizer", self._shape, job.jitter)
        optimizer += noise.delays("optimizer", self._shape)
        return Draws(
            work=work,
            data=data,
            tokens=tokens,
            rows=rows,
            messages={direction: self._messages(direction) for direction in DIRECTIONS},
            transfers=(
                noise.factors("transfers", self._transfers, job.link_jitter),
                noise.delays("transfers", self._transfers),
            ),
            optimizer=optimizer,
            checkpoint=checkpoint,
            queued=queued,
            switches=switches,
            collections=collections,
        )

    def _work(self, direction: Direction, speed: Floats, tokens: Floats, rows: Floats | None) -> Floats:
        job, parts = self._job, self._pieces[direction]
        passes = self._passes[direction]
        plain, expert = tables(parts)
        chunks = np.array([one.chunk for one in passes])
        # [P, J, pp]: pieces, embedding and head, and what the stage has more or less of.
        base = np.broadcast_to(plain[None, :, None], (len(passes), len(parts), job.layout.pp)).copy()
        extras = stage_extras(job, direction)[chunks]
        share = self._stage_share[chunks]
        base *= share[:, None, :]
        base[:, 0] += extras[:, :, 0]
        base[:, -1] += extras[:, :, 1]
        batches = self.batch_of[direction]
        whole = base[:, :, :, None, None, None] * (tokens[batches] / job.tokens)[:, None, None, :, None, None]
        if rows is not None:
            layers = np.array([part.layer for part in parts])
            # The backward pass goes through the layers from the last to the first.
            layers = layers if direction == "forward" else job.layers - 1 - layers
            own = expert[None, :, None] * share[:, None, :]
            whole = whole + own[:, :, :, None, None, None] * rows[batches][:, layers]
        shape = (len(passes), len(parts), *self._shape)
        made: Floats = whole * speed * self._noise.factors(f"work {direction}", shape, job.jitter)
        has_work = (plain + expert) > 0
        made += self._noise.delays(f"work {direction}", shape) * has_work[None, :, None, None, None, None]
        return made

    def _tokens(self, uneven: Sequence[tuple[Fault, tuple[int, ...]]]) -> Floats:
        job = self._job
        each = np.full((job.microbatches, job.layout.dp), float(job.tokens))
        if job.packed:
            each *= self._noise.factors("tokens", each.shape, 0.1)
        for fault, where in uneven:
            each[:, where[1]] *= fault.factor
        tokens: Floats = np.rint(each)[[one.microbatch for one in self._passes["forward"]]]
        return tokens

    def _rows(self, uneven: Sequence[tuple[Fault, tuple[int, ...]]]) -> Floats | None:
        job, layout = self._job, self._job.layout
        if layout.ep == 1:
            return None
        shape = (len(self._passes["forward"]), job.layers, *self._shape)
        rows = self._noise.factors("routing", shape, job.routing_spread)
        for fault, where in uneven:
            _of(rows, where)[...] *= fault.factor
        # Tokens that one rank gets, the others of its group do not.
        split = rows.reshape(*shape[:3], layout.dp // layout.ep, layout.ep, layout.cp, layout.tp)
        split /= split.mean(axis=4, keepdims=True)
        return rows

    def _messages(self, direction: Direction) -> tuple[Floats, Floats]:
        shape = (len(self._passes[direction]), len(self._pieces[direction]), *self._shape)
        factor = self._noise.factors(f"messages {direction}", shape, self._job.link_jitter)
        return factor, self._noise.delays(f"messages {direction}", shape)

    def _ordinary_queueing(self) -> tuple[Floats, Floats]:
        """Threads of a quiet host wait a little too: some hundred microseconds a step."""
        switches = self._noise.generator("quiet host").poisson(20, self._shape).astype(float)
        return switches * 2e4 * self._noise.factors("quiet host", self._shape, 0.3), switches

    def _compete(
        self,
        fault: Fault,
        where: tuple[int, ...],
        work: dict[Direction, Floats],
        queued: Floats,
        switches: Floats,
    ) -> None:
        """Other threads take ``share`` of the time in slices; the more work, the more of them."""
        generator = self._noise.generator("competing load")
        for each in work.values():
            own = _of(each, where)
            slices = generator.poisson(own / _SLICE * fault.share / (1 - fault.share))
            waits = generator.gamma(np.maximum(slices, 1), _SLICE) * (slices > 0)
            own += waits
            queued[where] += waits.sum()
            switches[where] += slices.sum()

    def _collect(
        self, work: dict[Direction, Floats], faulty: Sequence[tuple[Fault, tuple[int, ...]]]
    ) -> dict[tuple[Direction, int], list[Collection]]:
        """Garbage collections, a few everywhere and long ones where it is the fault."""
        generator = self._noise.generator("garbage")
        chosen = generator.random(self._shape) < 1 / _GC_STEPS
        lengths = _GC_NS * self._noise.factors("garbage", self._shape, 0.4)
        pausing = self._noise.generator("pausing garbage")
        wanted = [
            (tuple(place), float(lengths[tuple(place)]), generator) for place in np.argwhere(chosen).tolist()
        ]
        for fault, where in faulty:
            if pausing.random() < 1 / fault.every:
                wanted.append((where, fault.seconds * 1e9 * float(pausing.uniform(0.7, 1.3)), pausing))
        made: dict[tuple[Direction, int], list[Collection]] = defaultdict(list)
        for place, length, source in wanted:
            direction: Direction = "forward" if source.random() < 0.5 else "backward"
            ordinal = int(source.integers(work[direction].shape[0]))
            piece = int(source.integers(work[direction].shape[1]))
            _of(work[direction], place)[ordinal, piece] += length
            made[direction, place[0]].append(
                Collection(ordinal=ordinal, piece=piece, place=place, seconds_ns=length)
            )
        return dict(made)


def _of(values: Floats, where: tuple[int, ...]) -> Floats:
    """The part of [..., pp, dp, cp, tp] that is one rank's, a view."""
    pp, dp, cp, tp = where
    return values[..., pp, dp, cp, tp]
