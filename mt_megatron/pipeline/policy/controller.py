"""The policy over many steps: takes in measured times, proposes schedules, and looks what they brought.

Nothing here knows of processes. Ranks that are given the same numbers propose the same schedules.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ...errors import ConfigError
from ...version import __version__
from ..actions import Placement
from ..simulate.costs import Costs, Edge, Link, PerStage
from .candidates import Candidate, default_of
from .decide import Decision, decide
from .list_schedule import rules
from .situation import WEIGHT_SHARE, EdgeTime, Measured, Situation, link_of
from .smoothing import SMOOTHING, Smoothed

MEMORY_SHARE = 0.95
"""Part of the device's memory that a schedule may be predicted to fill; the rest is other libraries' and the
allocator's own."""

UNKNOWN = 0.03
"""Standard error of what is predicted for a family of schedules that has hardly run, as a part of it: what
a split backward or another order of passes costs beside their simulated times is not known then."""

GAIN_TO_NOISE = 1.0
"""Standard errors of the mean step time that a predicted gain must pass to be worth a switch: below it,
the gain could not be told from noise afterwards."""

WINDOW = 16
"""Steps whose times the noise is measured on, at most."""

CHANGE = 0.1
"""Change of a delay, or of a stage's time, since the last decision that is worth another one: in parts of the
mean time that a rank needs for one forward of its chunks, and besides of the delay itself. Smaller ones shift
a schedule by less than it can be wrong."""

DECISION_SHARE = 0.01
"""Part of the steps' time that decisions may take."""

SECONDS_PER_ACTION = 10e-6
"""Seconds that laying out one action takes by one rule: about twice what a core of today takes."""

VARIES = 2.0
"""Usual deviations of single values from their mean by which the mean must have moved besides: by chance it
moves by less than one."""

REVIEW = 50
"""Steps after which a decision is made again though nothing changed by more than ``CHANGE``."""

SETTLED = math.ceil(1 / SMOOTHING)
"""Steps after a decision by which means that began anew with it have settled: it is made once more, as a
single measured delay is wrong by some per cent of itself."""

OUTCOME = 10
"""Steps after a switch over which the gain is measured, and before it at most."""

FEWEST = 3
"""Steps after a switch by which its gain is measured at least. Before it one may be all there is: a slow
link is answered in the next step."""

OPTIONS, RUNNING = "options or versions", "the schedule that runs"
"""Parts of a controller's state that ranks cannot reckon differently from the same options."""

AGREED = (OPTIONS, RUNNING)

_MESSAGE = 1.0
"""Size of a message: bandwidths are in messages per second, as nothing depends on bytes."""

MOST_AHEAD = 8
"""Computations by which a receive is made ready before it is needed, at most: each holds the buffer of one
message."""

_COMPUTE_FLOOR = 0.02
"""Usual spread of a stage's time between steps, as a part of it: smaller deviations are no jump."""

_DELAY_FLOOR = 0.1
"""The same for the delay of a link."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a switch."""

    decided_at: int
    """Step whose measurements led to the decision."""

    steps_before: int
    """Steps under the old schedule that were compared."""

    steps: int
    """And under the new one: both with inputs like those of the decision."""

    seconds_before: float
    """Median step of those before the switch, with like inputs."""

    seconds: float
    """Median step after it, with like inputs."""

    predicted_gain: float

    @property
    def gain(self) -> float:
        """Part of a step's time that is saved."""
        return 1.0 - self.seconds / self.seconds_before


@dataclass
class _Trial:
    """A switch whose outcome is not known yet."""

    decision: Decision
    decided_at: int
    old: Candidate
    """Schedule before the switch, and its simulated step from the decision's inputs."""

    simulated: float

    before: list[float]
    after: list[float]
    """Measured steps with like inputs."""

    steps: int = 0
    """All that were measured after the switch."""


class Controller:
    """The policy of one pipeline, or of several that run the same schedule."""

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        *,
        cap: Sequence[float] | None = None,
        cap_is_given: bool = True,
        splits: bool = True,
    ) -> None:
        """``cap``: activations (micro-batches of one chunk) that each rank may keep, [ranks]; None: no
        limit. ``cap_is_given``: it holds for ever; otherwise until the device has said how much memory
        there is and how much an activation takes. ``splits``: weight gradients can be deferred. Raises
        ConfigError where no schedule fits the cap."""
        self.placement, self.microbatches = placement, microbatches
        self.cap = None if cap is None else tuple(cap)
        self.splits = splits
        self._cap_is_given = cap_is_given
        self._cap_is_measured = False
        """The device has said how much memory there is: ``cap`` is in bytes."""
        self._activation = [1.0] * placement.stages
        stages = range(placement.stages)
        self._forward = [Smoothed(_COMPUTE_FLOOR) for _ in stages]
        # The rest in parts of the stage's forward: what one kind of schedule measured once holds on where the
        # machine has become faster or slower since.
        self._backward = [Smoothed(_COMPUTE_FLOOR) for _ in stages]
        self._input = [Smoothed(_COMPUTE_FLOOR) for _ in stages]
        self._weight = [Smoothed(_COMPUTE_FLOOR) for _ in stages]
        self._delay: dict[Edge, Smoothed] = {}
        self._wire: dict[Edge, Smoothed] = {}
        self._static = [0.0] * placement.ranks
        self._expected = [0.0] * placement.ranks
        """Activations at most of all schedules that have run, in bytes."""
        self._headroom: float | None = None
        self._ratios: dict[str, deque[float]] = {}
        """Measured over simulated time of the last steps of each family."""
        self._times: deque[tuple[float, float]] = deque(maxlen=OUTCOME)
        """Measured time of each step under ``current``, and what its own inputs give by simulation."""
        self._decided: tuple[int, Situation] | None = None
        self._again = math.inf
        """Step in which the last decision is made once more (``SETTLED``)."""
        self._trial: _Trial | None = None
        self._last = -1
        self.current = default_of(placement, microbatches)
        if not self.current.fits(self._costs_of_ones(), self.cap):
            self.current = decide(
                Situation(
                    placement=placement, microbatches=microbatches, costs=self._costs_of_ones(), cap=self.cap
                ),
                self.current,
            ).chosen

    # -- what comes in

    def observe(self, measured: Measured, ran: Candidate | None = None) -> Outcome | None:
        """Take in one step that ran ``ran`` (None: ``current``); the outcome of the last switch once it is
        known. Of a step that ran another schedule than ``current``, as the last one before a switch where
        times are read late, times of stages and links are taken in and nothing else."""
        is_current = ran is None or ran is self.current
        self._last = measured.step
        for stage, forward in enumerate(measured.forward):
            self._forward[stage].add(forward)
            for smoothed, values in (
                (self._backward, measured.backward),
                (self._input, measured.input),
                (self._weight, measured.weight),
            ):
                if values:
                    smoothed[stage].add(values[stage] / forward)
        for edge, time in measured.edges.items():
            self._delay.setdefault(edge, Smoothed(_DELAY_FLOOR)).add(time.delay)
            self._wire.setdefault(edge, Smoothed(_DELAY_FLOOR)).add(time.wire)
        if not is_current:
            return None
        if measured.memory is not None and not self._cap_is_given:
            self._take_memory(measured)
        if self._is_known():
            self._compare(measured)
        return self._outcome(measured)

    def _take_memory(self, measured: Measured) -> None:
        """Take the cap from the device: bytes instead of numbers of activations."""
        memory, activation, capacity = measured.memory, measured.activation, measured.capacity
        assert memory is not None and activation is not None and capacity is not None
        if not self._cap_is_measured:
            self._activation = list(activation)
        self._cap_is_measured = True
        self._activation = [max(each) for each in zip(self._activation, activation, strict=True)]
        self.cap = tuple(MEMORY_SHARE * each for each in capacity)
        self._static = [0.0] * self.placement.ranks
        peaks = self.current.peaks(self._costs_of_ones())
        # What is held at most was held under whichever schedule kept most.
        self._expected = [max(each) for each in zip(self._expected, peaks, strict=True)]
        self._static = [max(0.0, found - most) for found, most in zip(memory, self._expected, strict=True)]
        self._headroom = min(
            (most - static - peak) / most
            for most, static, peak in zip(self.cap, self._static, peaks, strict=True)
        )

    def _compare(self, measured: Measured) -> None:
        """Compare the step with a simulation of it from its own inputs: how wrong predictions are, by family,
        and how much step times scatter about them."""
        simulated = self.current.program.makespan(self._costs(measured))
        ratios = self._ratios.setdefault(self.current.family, deque(maxlen=WINDOW))
        ratios.append(measured.seconds / simulated)
        self._times.append((measured.seconds, simulated))

    def _outcome(self, measured: Measured) -> Outcome | None:
        trial = self._trial
        if trial is None or not math.isfinite(measured.seconds):
            return None
        trial.steps += 1
        # A link that healed meanwhile is no gain of the switch: the old schedule would be quick again too.
        if abs(trial.old.program.makespan(self._costs(measured)) / trial.simulated - 1.0) < CHANGE:
            trial.after.append(measured.seconds)
        return self._ended() if trial.steps >= OUTCOME else None

    def _ended(self) -> Outcome | None:
        trial, self._trial = self._trial, None
        if trial is None or not trial.before or len(trial.after) < FEWEST:
            return None
        return Outcome(
            decided_at=trial.decided_at,
            steps_before=len(trial.before),
            steps=len(trial.after),
            seconds_before=median(trial.before),
            seconds=median(trial.after),
            predicted_gain=trial.decision.gain,
        )

    def learn_from(self, other: Controller) -> None:
        """Take over what ``other`` measured: of the same placement, with another number of micro-batches."""
        for name in ("_forward", "_backward", "_input", "_weight", "_delay", "_wire", "_ratios"):
            setattr(self, name, copy.deepcopy(getattr(other, name)))
        # A cap in activations belongs to the number of micro-batches that it was counted for.
        if not self._cap_is_given and other._cap_is_measured:
            self.cap, self._activation, self._static = other.cap, other._activation, other._static
            # The device's peak is that of the process: it holds the other schedules' activations.
            self._expected = list(other._expected)
            self._cap_is_measured = True

    # -- what goes out

    @property
    def cap_is_in_bytes(self) -> bool:
        """True where ``cap`` is the device's memory; otherwise it counts activations."""
        return self._cap_is_measured

    def situation(self) -> Situation:
        """Inputs of a decision now; of ones where nothing has been measured."""
        return Situation(
            placement=self.placement,
            microbatches=self.microbatches,
            costs=self._costs() if self._is_known() else self._costs_of_ones(),
            cap=self.cap,
            headroom=self._headroom,
        )

    def bias(self) -> dict[str, float]:
        """Measured over simulated time of each family that has run."""
        return {family: median(ratios) for family, ratios in self._ratios.items()}

    def noise(self, family: str | None = None) -> float:
        """Part of a step's time that the predicted gain of a switch to ``family`` must pass; None: to the one
        that runs."""
        own = self._error(self.current.family)
        return GAIN_TO_NOISE * math.hypot(own, self._error(family or self.current.family))

    def _error(self, family: str) -> float:
        """Standard error of what is predicted for ``family``, as a part of it."""
        ratios = self._ratios.get(family, ())
        if len(ratios) < 3:
            return UNKNOWN
        middle = median(ratios)
        # Of a mean absolute deviation: 1.25 of them are a standard deviation where values are normal.
        deviation = 1.25 * sum(abs(each / middle - 1.0) for each in ratios) / len(ratios)
        return deviation / math.sqrt(len(ratios))

    def ahead(self) -> int:
        """Computations before the one that needs it by which a receive is made ready: the word of it must
        travel to the sender before the message can."""
        situation = self.situation()
        delays = [situation.delay(edge) for edge in situation.edges()]
        unit = _mean_forward(situation) / self.placement.chunks
        if not self._is_known() or not delays:
            return 1
        return min(MOST_AHEAD, 1 + math.ceil(2 * max(delays) / unit))

    def is_due(self) -> bool:
        """True where ``propose`` looks for a better schedule: something changed since the last decision.
        Reckoned by additions, products, comparisons and roundings of single numbers, which are the same on
        every machine."""
        return self._is_known() and self._is_due(self.situation())

    def propose(self) -> Decision | None:
        """A decision, if one ``is_due``; the caller runs ``adopt`` once all ranks agree. A decision that does
        not switch is one too."""
        if not self.is_due():
            return None
        situation = self.situation()
        self._decided = self._last, situation
        self._again = math.inf if self._last >= self._again else self._last + SETTLED
        try:
            return decide(situation, self.current, noise=self.noise, bias=self.bias())
        except ConfigError:
            return None  # Nothing fits a cap that what runs has passed already: no better schedule is known.

    def run(self, chosen: Candidate) -> None:
        """Run ``chosen`` from the next step on, whatever was decided before."""
        self._trial = None
        self._times.clear()
        self.current = chosen

    def adopt(self, decision: Decision) -> Outcome | None:
        """Run ``decision`` from the next step on; the outcome of the switch before, as far as it is known."""
        ended = self._ended()
        if decision.switches:
            bias = self.bias().get(self.current.family, 1.0)
            like = [
                seconds
                for seconds, simulated in self._times
                if abs(simulated * bias / decision.seconds_before - 1.0) < CHANGE
            ]
            simulated = self.current.program.makespan(self.situation().costs)
            self._trial = _Trial(decision, self._last, self.current, simulated, like, [])
            self._times.clear()
        self.current = decision.chosen
        return ended

    def _is_due(self, situation: Situation) -> bool:
        """True where something changed since the last decision by more than ``CHANGE`` and than it usually
        varies."""
        if self._decided is None:
            return True
        step, before = self._decided
        if self._last - step >= REVIEW:
            return True
        if situation.headroom is not None and (before.headroom or 0.0) - situation.headroom > CHANGE:
            return True
        changed = self._last >= self._again or self._has_changed(before, situation)
        return changed and self._affords(situation, self._last - step)

    def _has_changed(self, before: Situation, now: Situation) -> bool:
        unit = _mean_forward(now)
        for edge in now.edges():
            smoothed = self._delay.get(edge)
            usual = 0.0 if smoothed is None else smoothed.deviation()
            if _differs(before.delay(edge), now.delay(edge), unit, usual):
                return True
        old, new = _listed(before.costs.forward), _listed(now.costs.forward)
        return any(
            _differs(one, other, unit, each.deviation())
            for each, one, other in zip(self._forward, old, new, strict=True)
        )

    def _affords(self, situation: Situation, steps: int) -> bool:
        """True where a decision after ``steps`` steps takes no more than its share of their time. Reckoned,
        not measured: all ranks must come to the same answer."""
        kinds = 3 if self.splits else 2
        actions = kinds * self.placement.stages * self.microbatches
        tried = sum(
            len(rules(self.placement, self.microbatches, split=split)) for split in {self.splits, False}
        )
        seconds = SECONDS_PER_ACTION * actions * tried
        step = self.current.program.makespan(situation.costs)
        return seconds <= DECISION_SHARE * steps * step

    def state(self) -> dict[str, str]:
        """Everything that later decisions depend on, as text, by what it is: two controllers with equal texts
        that are given equal measurements have decisions due in the same steps. Those of ``AGREED`` follow
        from options, versions and integers; the others are reckoned from measurements."""
        means = [
            [(each.mean, each.deviation()) for each in smoothed]
            for smoothed in (self._forward, self._backward, self._input, self._weight)
        ]
        links = [
            (edge, self._delay[edge].mean, self._delay[edge].deviation(), self._wire[edge].mean)
            for edge in sorted(self._delay)
        ]
        given = self.cap if self._cap_is_given else None
        decided = None if self._decided is None else self._decided[0]
        return {
            OPTIONS: repr((__version__, self.placement, self.microbatches, self.splits, given)),
            RUNNING: repr((self.current.digest, self._last, decided, self._again)),
            "times of stages": repr(means),
            "delays of links": repr(links),
            "memory": repr((self.cap, self._activation, self._static, self._expected, self._headroom)),
            "times of past steps": repr((sorted(self._ratios.items()), list(self._times))),
        }

    # -- costs

    def _is_known(self) -> bool:
        return not any(math.isnan(each.mean) for each in self._forward) and not any(
            math.isnan(whole.mean) and (math.isnan(part.mean) or math.isnan(weight.mean))
            for whole, part, weight in zip(self._backward, self._input, self._weight, strict=True)
        )

    def _costs(self, measured: Measured | None = None) -> Costs:
        """Smoothed costs; or those of one step alone, with smoothed ones where it says nothing."""
        stages = range(self.placement.stages)
        forward = [each.mean for each in self._forward]
        if measured is not None:
            forward = [new if new == new else old for old, new in zip(forward, measured.forward, strict=True)]

        def of(smoothed: list[Smoothed], values: Sequence[float] | None) -> list[float]:
            found = [each.mean * unit for each, unit in zip(smoothed, forward, strict=True)]
            if values:
                found = [new if new == new else old for old, new in zip(found, values, strict=True)]
            return found

        whole = of(self._backward, measured.backward if measured else None)
        part = of(self._input, measured.input if measured else None)
        weight = of(self._weight, measured.weight if measured else None)
        for stage in stages:
            if math.isnan(whole[stage]):
                whole[stage] = part[stage] + weight[stage]
            if math.isnan(weight[stage]):
                weight[stage] = WEIGHT_SHARE * whole[stage]
            if math.isnan(part[stage]):
                part[stage] = whole[stage] - weight[stage]
        links = {}
        for edge, delay in self._delay.items():
            time = (measured.edges.get(edge) if measured else None) or EdgeTime(
                delay=delay.mean, wire=self._wire[edge].mean
            )
            links[edge] = link_of(time, _MESSAGE)
        static = [0.0] * self.placement.stages
        for rank, kept in enumerate(self._static):
            static[self.placement.stage(rank, 0)] = kept
        return Costs(
            forward=forward,
            backward=whole,
            weight=weight if self.splits else None,
            input=part if self.splits else None,
            message=_MESSAGE,
            link=Link(),
            links=links,
            activation=self._activation,
            static=static,
        )

    def _costs_of_ones(self) -> Costs:
        """Costs before anything is measured: a forward of 1, a backward of 2."""
        stages = self.placement.stages
        return Costs(
            forward=[1.0] * stages,
            backward=[2.0] * stages,
            weight=[2.0 * WEIGHT_SHARE] * stages if self.splits else None,
            activation=self._activation,
        )


def _mean_forward(situation: Situation) -> float:
    """Mean seconds that a rank needs for one forward of all its chunks."""
    return sum(_listed(situation.costs.forward)) / situation.placement.ranks


def _listed(values: PerStage) -> list[float]:
    """Values of a ``Costs`` of this module, [stages]."""
    found: list[float] = values  # type: ignore[assignment]
    return found


def _differs(old: float, new: float, unit: float, usual: float) -> bool:
    return abs(new - old) > max(CHANGE * (unit + max(old, new)), VARIES * usual)
