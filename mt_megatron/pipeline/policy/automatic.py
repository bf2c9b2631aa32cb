"""``--pipeline-schedule auto`` while training: measures each step, and switches all ranks together.

At the end of a training step each rank starts one sum over all ranks of what it measured (``exchange``),
beside the optimizer; at the begin of the next step it waits for it, and every rank makes the same decision
from the same numbers. That they do is checked. A digest of all that a rank's decisions depend on is in the
same sum: where the digests differ every rank sees it before the step's first message, and one more sum says
in what. Ranks with other options or versions raise. Ranks that reckon other numbers from equal measurements
(processors or libraries that round otherwise) go back together to the schedule that the run began with, and
stay there. Where a decision is due, which follows from numbers that are equal by then, the ranks compare what
they decided by one more sum of two integers: if one differs, all keep the schedule that they have. So no rank
waits for one that went on."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...backends.current import current_backend, current_device
from ...errors import ConfigError, MtMegatronError
from ...parallel import stage_order
from ..actions import Placement, Schedule, Style
from ..execute.agreement import are_equal, digest_of, squared
from ..execute.step_times import StepTimes
from ..forward_only import forward_only
from ..lowering import lowered
from ..simulate.costs import Costs
from .candidates import Candidate, default_of
from .controller import AGREED, Controller, Outcome
from .decision_log import FILE, DecisionLog, to_standard_error
from .exchange import Vector, watched

EXTRA = 2
"""Activations of a rank's layers above those of Megatron-Core's own schedule that a rank may keep where
neither the user nor the device says how many: enough for a delay of about one forward, little beside the
rest."""


LOG_FOLDER = "MT_MEGATRON_PIPELINE_LOG"
"""Variable with the folder for the decisions of a script, which has no folder of its own."""

_forward_only = lru_cache(maxsize=64)(forward_only)
"""Always the same object for the same arguments: a schedule is checked once, by identity."""


def automatic(*, ranks: int, chunks: int, cap: int | None = None) -> Automatic:
    """What ``set_pipeline_schedule`` takes for ``auto``. ``cap``: activations (micro-batches of one chunk)
    that every rank may keep."""
    style = Style.V if stage_order.is_v() else Style.LOOP
    return Automatic(Placement(ranks, chunks, style), cap)


def controller(placement: Placement, microbatches: int, cap: int | None) -> Controller:
    """The policy before anything is measured. ``cap`` as in ``automatic``; None: what Megatron-Core's own
    schedule keeps and ``EXTRA`` more, until the device says how much memory there is. Raises ConfigError
    where no schedule fits."""
    if cap is not None:
        caps = (float(cap),) * placement.ranks
    else:
        most = max(default_of(placement, microbatches).peaks(Costs()))
        caps = (most + EXTRA * placement.chunks,) * placement.ranks
    return Controller(placement, microbatches, cap=caps, cap_is_given=cap is not None)


class Automatic:
    """A source of schedules that adapts. Every rank of the job has one; calls come in the same order."""

    def __init__(self, placement: Placement, cap: int | None = None) -> None:
        self.placement = placement
        self.reductions = 0
        """Sums over all ranks so far: one a step, one a decision, one for each number of micro-batches."""
        self._cap = cap
        self._first = self._step = 0
        self._log: DecisionLog | None = None
        self._say: Callable[[str], None] = to_standard_error
        self._given_up = False
        self._adapts = True
        """False once ranks have found that they reckon differently."""
        self._pipelines: dict[int, _Pipeline] = {}
        """By micro-batches of a step."""
        self._latest: _Pipeline | None = None
        self._unread: tuple[_Ran, StepTimes] | None = None
        """Times of a step that no sum has taken up yet."""
        self._sum: tuple[_Ran, _Sum] | None = None

    def begin_at(self, step: int, *, folder: Path | None, say: Callable[[str], None]) -> None:
        """The next training step follows ``step`` others; rank 0 writes its decisions into ``folder`` (None:
        nowhere) and ``say`` takes lines for the user. Without it steps count from 0 and lines go to standard
        error."""
        self._first, self._say = step, say
        self._log = _log(folder, say, counts_run=True)

    @property
    def decision_seconds(self) -> float:
        """Seconds that decisions took on this rank so far."""
        return sum(each.decision_seconds for each in self._pipelines.values())

    @property
    def log(self) -> DecisionLog:
        """Where decisions go."""
        if self._log is None:
            folder = os.environ.get(LOG_FOLDER)
            self._log = _log(Path(folder) if folder else None, self._say, counts_run=False)
        return self._log

    @property
    def running_label(self) -> str | None:
        """The schedule that the last step ran; None before the first."""
        return None if self._latest is None else self._latest.control.current.label

    # -- as a source of schedules

    def __call__(self, step: int, microbatches: int, forward_only: bool) -> Schedule | None:
        """The schedule of one step, with its transfers; None where steps are left to Megatron-Core."""
        if self._given_up:
            return None
        if forward_only:
            return _forward_only(self.placement, microbatches)
        self._step = self._first + step
        self._take_in()
        current = self._pipelines.get(microbatches)
        if current is None:
            current = self._begin(microbatches)
        if self._adapts:
            self._decide(current)
        self._latest = current
        return current.running()[0]

    def begin_step(self, schedule: Schedule) -> StepTimes | None:
        """Marks of the step that begins; None where no step is measured any more."""
        return StepTimes(current_backend()) if self._adapts else None

    def end_step(self, schedule: Schedule, times: StepTimes) -> None:
        """Tell the other ranks: now, beside the optimizer, where the host computes; before the next step on a
        device that queues its work. Not as soon as the device is through: that moment differs between ranks,
        and collectives of one group must begin in the same order on all of them."""
        current = self._pipelines[schedule.microbatches]
        self._unread = _Ran(self._step, current, current.control.current, current.running()[1]), times
        if times.is_host:
            self._tell()

    def leaves_to_upstream(self, error: ConfigError) -> bool:
        """Give up: the model, or its settings, cannot run on a schedule of ours."""
        self._given_up = True
        if dist.get_rank() == 0:
            self._say(f"pipeline schedule auto: Megatron-Core's own schedule runs: {error}")
            self.log.note(self._step, f"Megatron-Core's own schedule runs: {error}")
        return True

    # -- a step's measurements

    def _take_in(self) -> None:
        if self._sum is not None:
            ran, pending = self._sum
            self._sum = None
            *summed, digests, squares = pending.wait()
            if not are_equal(digests, squares, dist.get_world_size()):
                self._stop_adapting(ran.pipeline, f"after step {ran.step + 1}")
                return
            measured = ran.vector.unpack(summed, ran.step)
            # The first step of a process compiles, allocates and connects: it is like no other.
            if measured is not None and ran.step != self._first:
                self._report(ran.pipeline, ran.pipeline.control.observe(measured, ran.schedule))
        if self._unread is not None:
            current_backend().synchronize()
            self._tell()

    def _tell(self) -> None:
        """Start the sum of the step that none has taken up; its times can be read."""
        if self._unread is None:
            return
        ran, times = self._unread
        read = times.read()
        if read is None:
            raise MtMegatronError("the device is synchronised, and the end of the last step is not known")
        rank, pipeline, tells = _place()
        values = ran.vector.pack(read, rank, pipeline) if tells else [0] * len(ran.vector)
        told = _Sum([*values, *squared(digest_of(repr(ran.pipeline.control.state())))])
        self._unread, self._sum = None, (ran, told)
        self.reductions += 1

    def _report(self, current: _Pipeline, outcome: Outcome | None) -> None:
        """Tell what the last switch of ``current`` brought, once that is known."""
        if outcome is None or dist.get_rank() != 0:
            return
        self.log.outcome(self._step, outcome, switch=current.switched)
        self._say(
            f"pipeline schedule auto: the switch before step {current.switched + 1} saved "
            f"{outcome.gain:.1%} of a step ({outcome.predicted_gain:.1%} predicted)"
        )

    # -- decisions

    def _begin(self, microbatches: int) -> _Pipeline:
        """Steps of another number of micro-batches: what was measured on others holds on."""
        from megatron.core import parallel_state

        control = controller(self.placement, microbatches, self._cap)
        if self._latest is not None and self._adapts:
            control.learn_from(self._latest.control)
        self.reductions += 1
        digests, squares = _Sum(squared(digest_of(repr(control.state())))).wait()
        pipelines = parallel_state.get_data_parallel_world_size()
        self._pipelines[microbatches] = made = _Pipeline(control, pipelines)
        if dist.get_rank() == 0:
            self.log.start(self._step, control, pipelines=pipelines)
        if not are_equal(digests, squares, dist.get_world_size()):
            self._stop_adapting(made, "at the start")
        if dist.get_rank() == 0:
            self._say(
                f"pipeline schedule auto: {control.current.label} to begin with, {microbatches} micro-batches"
                + ("; measured times decide from the second step on" if self._adapts else ", to the end")
            )
        return made

    def _stop_adapting(self, current: _Pipeline, when: str) -> None:
        """Go back to the schedules that steps began with, which all ranks know, for good; where a rank says
        now that it passes its cap, what runs stays. All ranks come here together. Raises ConfigError on all
        of them where it is options or versions that differ."""
        state, ranks = current.control.state(), dist.get_world_size()
        digests = [0] * (len(state) * ranks)
        for number, text in enumerate(state.values()):
            digests[number * ranks + dist.get_rank()] = digest_of(text)
        pipelines = list(self._pipelines.values())
        self.reductions += 1
        summed = _Sum([*digests, *(int(each.fits()) for each in pipelines)]).wait()
        digests, fit = summed[: len(digests)], summed[len(digests) :]
        others: dict[str, list[int]] = {}
        for number, name in enumerate(state):
            own = digests[number * ranks : (number + 1) * ranks]
            usual = Counter(own).most_common(1)[0][0]
            if found := [rank for rank, digest in enumerate(own) if digest != usual]:
                others[name] = found
        if differing := [name for name in AGREED if name in others]:
            what = _told(differing, others)
            raise ConfigError(
                f"found ranks that know different things of the pipeline {when} ({what}), and would run "
                "different schedules; expected the same options and the same version of mt_megatron on all "
                "of them. Correct that, or choose a schedule by name "
                "(--pipeline-schedule NAME)"
            )
        self._adapts, self._unread = False, None
        for each, count in zip(pipelines, fit, strict=True):
            if count == ranks:
                each.control.run(each.begun)
        if dist.get_rank() == 0:
            what = _told(list(others), others)
            text = (
                f"{current.control.current.label} from step {self._step + 1} on, to the end: {when} ranks "
                f"have reckoned different {what} from equal measurements, as processors or versions of numpy "
                "do that round differently"
            )
            self._say(f"pipeline schedule auto: {text}")
            self.log.note(self._step, text)

    def _decide(self, current: _Pipeline) -> None:
        control = current.control
        begin = time.perf_counter()
        if not control.is_due():
            return
        situation, decision = control.situation(), control.propose()
        took = time.perf_counter() - begin
        current.decision_seconds += took
        is_main = dist.get_rank() == 0
        # Also where this rank keeps its schedule: another one may have chosen otherwise.
        if not self._all_agree(control.current if decision is None else decision.chosen):
            if is_main:
                self._say("pipeline schedule auto: ranks decided differently; the schedule stays")
                self.log.note(self._step, "ranks decided differently; the schedule stays")
            return
        if decision is None:
            return
        noise = control.noise(decision.chosen.family)
        self._report(current, control.adopt(decision))
        if decision.switches:
            current.switched = self._step
        if not is_main:
            return
        self.log.decision(
            self._step, decision, situation, noise=noise, seconds=took, reductions=self.reductions
        )
        if decision.switches:
            self._say(
                f"pipeline schedule auto: {decision.chosen.label} from step {self._step + 1} on, predicted "
                f"to save {decision.gain:.1%} of a step: {decision.reason}"
            )

    def _all_agree(self, chosen: Candidate) -> bool:
        """True where all ranks chose ``chosen``; all ranks come to the same answer."""
        self.reductions += 1
        digests, squares = _Sum(squared(digest_of(chosen.digest))).wait()
        return are_equal(digests, squares, dist.get_world_size())


_MOST_NAMED = 4
"""Ranks that a sentence names."""


def _told(names: Sequence[str], others: Mapping[str, Sequence[int]]) -> str:
    """What differs, and the ranks on which it is not what it is on most."""
    ranks = sorted({rank for name in names for rank in others[name]})
    shown = ", ".join(str(rank) for rank in ranks[:_MOST_NAMED])
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    what = ", ".join(names) if names else "numbers"
    return f"{what} (rank{'s' * (len(ranks) > 1)} {shown}{more})" if ranks else what


def _log(folder: Path | None, say: Callable[[str], None], *, counts_run: bool) -> DecisionLog:
    """Rank 0's log in ``folder``; one that writes nothing elsewhere, and for None."""
    path = None if folder is None or dist.get_rank() != 0 else folder / FILE
    return DecisionLog(path, say, counts_run=counts_run)


class _Pipeline:
    """A controller, and the schedule that it has chosen, ready to run and to be measured."""

    def __init__(self, control: Controller, pipelines: int) -> None:
        self.control = control
        self.begun = control.current
        """The schedule before anything was measured."""
        self.decision_seconds = 0.0
        self.switched = -1
        """First step of the schedule that was switched to last; -1: none was."""
        self._pipelines = pipelines
        self._running: tuple[Candidate, int, Schedule, Vector] | None = None

    def fits(self) -> bool:
        """True where the schedule that steps began with passes no cap that is known now."""
        return self.begun.fits(self.control.situation().costs, self.control.cap)

    def running(self) -> tuple[Schedule, Vector]:
        """The schedule with its transfers, and where its measurements go."""
        chosen, ahead, known = self.control.current, self.control.ahead(), self._running
        if known is None or known[0] is not chosen:
            watch = watched(chosen.program, self.control.situation().costs)
            vector = Vector(chosen.schedule, watch, self._pipelines)
            known = chosen, ahead, lowered(chosen.schedule, ahead=ahead), vector
        elif ahead > known[1]:
            # A link has become slower: the same order, with receives made ready earlier.
            known = chosen, ahead, lowered(chosen.schedule, ahead=ahead), known[3]
        self._running = known
        return known[2:]


@dataclass(frozen=True)
class _Ran:
    """A step that was measured."""

    step: int
    pipeline: _Pipeline
    schedule: Candidate
    """Schedule that it ran: ``control.current`` may be another one when its times are read."""

    vector: Vector


class _Sum:
    """A sum of integers over all ranks that goes on in the background."""

    def __init__(self, values: Sequence[int]) -> None:
        # Of integers: the same bits on every rank, in whatever order they are added.
        self._tensor = torch.tensor(values, dtype=torch.int64, device=current_device())
        self._work: Any = dist.all_reduce(self._tensor, async_op=True)

    def wait(self) -> list[int]:
        self._work.wait()
        found: list[int] = self._tensor.tolist()
        return found


def _place() -> tuple[int, int, bool]:
    """Pipeline rank, pipeline, and whether this rank tells what it measured: of ranks that share a stage of a
    pipeline (tensor and context parallel) the first."""
    from megatron.core import parallel_state

    first = not (
        parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_context_parallel_rank()
    )
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        first,
    )
