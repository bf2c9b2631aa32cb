"""The lab of one rank: perturbations are previewed, armed, act in their steps, and are undone.

Every method but ``perturbed`` and ``wants_attention`` is called on all ranks at the same point between two
steps, with the same arguments, so all ranks come to the same decisions; what one of them alone finds wrong is
gathered first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint.run_parts import synchronised_parameters
from mt_megatron.errors import ConfigError, MtMegatronError
from mt_megatron.scope.lab.agreement import gathered
from mt_megatron.scope.lab.changes import (
    Acting,
    ChangedGradients,
    ChangedModules,
    ChangedWeights,
    require_changeable,
)
from mt_megatron.scope.lab.links import acting_on_links, require_ranks
from mt_megatron.scope.lab.placement import Geometry
from mt_megatron.scope.lab.preview import Share, items_of, preview_of
from mt_megatron.scope.lab.snapshot import MIB, Snapshot, bytes_of, default_limit_mib
from mt_megatron.scope.lab.specification import (
    LabFile,
    Perturbation,
    Steps,
    is_over,
    perturbation_from,
    snapshot_limit_of,
    starting_at,
)
from mt_megatron.scope.lab.targets import (
    ModuleTarget,
    ParameterTarget,
    module_targets,
    nothing_found,
    parameter_targets,
    paths_of,
)
from mt_megatron.scope.recording.audit import Audit
from mt_megatron.scope.recording.files import ScopeFiles
from mt_megatron.scope.trainer import Trainer

logger = logging.getLogger("mt_megatron")

Handler = Callable[[Mapping[str, Any]], Any]

AroundStep = Callable[[int, str], AbstractContextManager[Any]]
"""(step, mark) -> a context around a step that is made beside the run, whose frames carry the mark."""


@dataclass
class _Armed:
    one: Perturbation
    targets: Sequence[ParameterTarget | ModuleTarget]
    acting: Acting | None = None
    snapshot: Snapshot | None = None
    began: int | None = None
    """Completed steps when it first acted."""

    over: bool = False
    """Whether its steps are over, or it was disarmed."""

    disarmed: bool = False
    acted: int | None = None
    """What it changed in its first step on this rank; None before that step is over."""

    judged: bool = False
    """Whether all ranks know if it changed anything in that step."""


@dataclass
class _Rewind:
    """The state that an undo goes back to."""

    snapshot: Snapshot
    concerned: list[_Armed] = field(default_factory=list)


class Lab:
    """Made once for a run; does nothing, and holds no hook, while nothing is armed."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        folder: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
        limit_mib: float | None = None,
        around_step: AroundStep = lambda step, mark: nullcontext(),
        went_back: Callable[[int], None] = lambda step: None,
        began_perturbed: str | None = None,
    ) -> None:
        """``folder``: RUN/scope. ``limit_mib``: of the snapshots of a rank together; None: half of the
        free memory, shared among the ranks of the machine. ``went_back`` hears of each undo, with the step
        that the run is at then. ``began_perturbed``: what the weights that the run begins with were under
        when they were saved."""
        self.limit_mib = limit_mib
        self._trainer = trainer
        self._say = say if trainer.rank == 0 else lambda text: None
        self._tell = say if trainer.rank == 0 else logger.warning
        """Gets what this rank alone knows."""

        self._folder = folder
        self._audit = Audit(ScopeFiles(folder).audit if folder and trainer.rank == 0 else None, say)
        self._around_step = around_step
        self._went_back = went_back
        self._began_perturbed = began_perturbed
        self._armed: list[_Armed] = []
        self._step: int | None = None
        self._disarmed: list[tuple[str, int]] = []
        """Names of what was disarmed and has no snapshot, with the completed steps when it first acted."""

    # What others ask.

    @property
    def perturbed(self) -> str | None:
        """What the run is under, for frames; None when it is as it would be without the lab."""
        names = [] if self._began_perturbed is None else self._began_perturbed.split("; ")
        names += [name for name, _ in self._disarmed]
        names += [each.one.name for each in self._armed if each.began is not None]
        return "; ".join(dict.fromkeys(names)) or None

    @property
    def withholds_checkpoints(self) -> bool:
        """Whether no checkpoint is to be written: the weights are perturbed and can be undone."""
        return self._earliest() is not None

    @property
    def wants_attention(self) -> bool:
        """Whether something is to be undone or said after the step under way; the same on all ranks."""
        return self._step is not None and any(
            not each.judged or (each.one.undo_at is not None and self._step >= each.one.undo_at)
            for each in self._armed
            if each.began is not None
        )

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Commands by name."""
        return {
            "preview": self._limited(lambda arguments: self.preview(_given(arguments))),
            "arm": self._limited(lambda arguments: self.arm(_given(arguments))),
            "disarm": lambda arguments: self.disarm(str(arguments.get("id", ""))),
            "undo": lambda arguments: self.undo(_identity(arguments)),
            "pair": self._limited(lambda arguments: self.pair(_given(arguments), arguments)),
        }

    def status(self) -> dict[str, Any]:
        """What is armed, and what it does now."""
        return {
            "perturbed": self.perturbed,
            "armed": [
                {
                    "id": each.one.name,
                    "text": each.one.text(),
                    "state": "waiting" if each.began is None else "over" if each.over else "acting",
                    "since_step": each.began,
                    "can_undo": each.snapshot is not None,
                    "snapshot_mib": 0.0 if each.snapshot is None else each.snapshot.bytes / MIB,
                }
                for each in self._armed
            ],
        }

    # Commands.

    def arm_file(self, given: LabFile) -> None:
        """Arm what ``--scope-lab`` asks for, before the first step. Raises ``ConfigError`` on every rank."""
        if given.snapshot_limit_mib is not None:
            self.limit_mib = given.snapshot_limit_mib
        done = self._trainer.iteration
        for one in given.perturbations:
            if done and is_over(one, done):
                # A run that goes on from a checkpoint has the same options as the one before.
                self._say(f"scope: {one.name} is left out: its steps are over at step {done}: {one.text()}")
                continue
            told = self.arm(one)
            self._say(f"scope: {self._line(told)}")

    def preview(self, one: Perturbation) -> dict[str, Any]:
        """What ``one`` would change; nothing is changed. Raises ``ConfigError``."""
        return self._prepared(starting_at(self._kept_or_not(one), self._trainer.iteration + 1))[1]

    def arm(self, one: Perturbation) -> dict[str, Any]:
        """Let ``one`` act from its first step on; what ``preview`` says, and its ``id``. Raises
        ``ConfigError``: a name that is taken, no target on any rank, a snapshot that does not fit."""
        asked, one = one, starting_at(self._kept_or_not(one), self._trainer.iteration + 1)
        taken = next((each for each in self._armed if each.one.name == one.name), None)
        if taken is not None:
            # A disarmed perturbation keeps its name while it can be undone.
            first = "undo" if taken.disarmed else "undo or disarm"
            raise ConfigError(
                f"found the name {one.name!r} taken; {first} that one first, or give another name"
            )
        targets, told = self._prepared(one)
        if one.snapshot and told["snapshot_mib_of_a_rank"] > told["limit_mib_of_a_rank"]:
            raise ConfigError(
                f"found a snapshot of {told['snapshot_mib_of_a_rank']:,.0f} MiB a rank; expected at most "
                f"{told['limit_mib_of_a_rank']:,.0f} MiB. Raise snapshot_limit_mib, or arm it with snapshot: "
                "false, which cannot be undone"
            )
        if asked.snapshot and not one.snapshot:
            self._say(f"scope: {one.name} is armed without a snapshot: {self._trainer.refused['undo']}")
        self._armed.append(_Armed(one=one, targets=targets))
        self._audit.write(
            "armed", step=self._trainer.iteration, id=one.name, text=one.text(), perturbation=one.to_dict()
        )
        starts = max(one.steps.first or 0, self._trainer.iteration + 1)
        return {**told, "id": one.name, "starts_at": starts}

    def disarm(self, identity: str) -> dict[str, Any]:
        """End the perturbation; what it did stays until it is undone. Raises ``ConfigError``."""
        armed = self._named(identity)
        self._close(armed)
        armed.disarmed = True
        if armed.began is None:
            self._armed.remove(armed)
        elif armed.snapshot is None:
            self._armed.remove(armed)
            self._disarmed.append((armed.one.name, armed.began))
        self._audit.write("disarmed", step=self._trainer.iteration, id=identity)
        return {"id": identity, "perturbed": self.perturbed}

    def undo(self, identity: str | None = None) -> dict[str, Any]:
        """Go back to before ``identity`` (None: anything) first acted, with everything that acted since;
        the run goes on from that step as it would have without. Raises ``ConfigError`` where nothing can
        be undone."""
        if identity is not None and self._named(identity).began is None:
            return {**self.disarm(identity), "step": self._trainer.iteration, "undone": [identity]}
        rewind = self._rewind(identity)
        before = self._trainer.iteration
        self._go_back(rewind)
        names = [each.one.name for each in rewind.concerned]
        self._audit.write("undone", step=self._trainer.iteration, ids=names, after=before)
        self._say(
            f"scope: {', '.join(names)} undone after step {before}: the run goes on from step "
            f"{self._trainer.iteration} as it would have without"
        )
        return {
            "step": self._trainer.iteration,
            "undone": names,
            "after": before,
            "perturbed": self.perturbed,
        }

    def pair(self, one: Perturbation, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Make the next step twice from the same state, without ``one`` and with it, and put the state
        back; what differs. Raises ``ConfigError``."""
        from mt_megatron.scope.lab.pair import Comparison

        step = self._trainer.iteration + 1
        one = starting_at(_for_one_step(one, step), step)
        targets, told = self._prepared(one)
        self._require_room(told)
        self._audit.write("pair", step=step - 1, id=one.name, text=one.text())
        # Its taps are closed where no snapshot can be taken, too: they would look at every later step.
        with closing(Comparison(self._trainer, one, arguments)) as comparison:
            snapshot = Snapshot(self._trainer)
            try:
                with self._around_step(step, f"pair {one.name}: baseline"), comparison.baseline():
                    without = self._trainer.rehearse()
                snapshot.restore()
                acting = self._acting(one, targets)
                try:
                    with self._around_step(step, f"pair {one.name}: {one.text()}"), comparison.perturbed():
                        self._begin_acting([(one, acting)], step)
                        changed = self._trainer.rehearse()
                finally:
                    if acting is not None:
                        acting.close()
            finally:
                snapshot.restore()
        rows = comparison.rows(gathered)
        return {**told, "step": step, **comparison.result(without, changed, rows)}

    # Steps.

    def begin_step(self, step: int) -> None:
        """``step`` begins: what starts with it is snapshotted and begins to act."""
        self._step = step
        if not self._armed:
            return
        now = [each for each in self._armed if not each.over and step in each.one.steps]
        first = [each for each in now if each.began is None]
        # Before anything acts in this step: what is kept is the state between two steps.
        snapshot = Snapshot(self._trainer) if any(each.one.snapshot for each in first) else None
        for each in first:
            each.snapshot = snapshot if each.one.snapshot else None
            each.began = step - 1
            each.acting = self._acting(each.one, each.targets)
            self._audit.write("acts", step=step - 1, id=each.one.name, can_undo=each.snapshot is not None)
            self._say(f"scope: {each.one.name} acts from step {step}: {each.one.text()}")
        self._begin_acting([(each.one, each.acting) for each in now], step)

    def end_step(self, step: int) -> None:
        """``step`` is over: nothing acts until the next begins, in validation or generation."""
        self._step = None
        for each in self._armed:
            if each.began is not None and each.acted is None:
                each.acted = 0 if each.acting is None else each.acting.acted
            if each.acting is not None:
                each.acting.rest()
            last = each.one.steps.last
            if each.began is not None and not each.over and last is not None and step >= last:
                self._close(each)
                self._audit.write("over", step=step, id=each.one.name)

    def attend(self) -> None:
        """Say what changed nothing, and undo what is to be undone by itself."""
        self._judge()
        due = [
            each
            for each in self._armed
            if each.one.undo_at is not None
            and each.began is not None
            and self._trainer.iteration >= each.one.undo_at
        ]
        if due:
            self.undo(min(due, key=lambda each: each.began or 0).one.name)

    def _judge(self) -> None:
        new = [each for each in self._armed if each.acted is not None and not each.judged]
        if not new:
            return
        counts = self._trainer.sum_over_ranks([float(each.acted or 0) for each in new])
        for each, count in zip(new, counts, strict=True):
            each.judged = True
            if not count:
                step = (each.began or 0) + 1
                self._audit.write("no effect", step=step, id=each.one.name)
                self._say(
                    f"scope: {each.one.name} has changed nothing in step {step}: what it means did not come "
                    "by (a module that is not called, a micro-batch, sample or link that no step has)"
                )

    def diverged(self, step: int, reason: str) -> bool:
        """A step diverged: where it was perturbed and that can be undone, the run goes back. Whether it
        did."""
        if self._earliest() is None:
            return False
        self._say(f"scope: step {step} diverged under {self.perturbed}: {reason}")
        self._audit.write("diverged", step=step, perturbed=self.perturbed, reason=reason)
        self.undo()
        return True

    def rolled_back(self, step: int, perturbed: str | None) -> None:
        """The weights are those of the checkpoint of ``step`` again, saved while they were ``perturbed``: by
        what has acted since they are no more; what goes on acting does so from the next step on."""
        self._began_perturbed = perturbed
        self._disarmed = [(name, began) for name, began in self._disarmed if began < step]
        for each in [each for each in self._armed if each.began is not None and each.began >= step]:
            if each.over:
                self._armed.remove(each)
                continue
            self._close(each)
            each.over, each.began, each.acted, each.judged = False, None, None, False

    def undo_before_end(self) -> int | None:
        """Go back to the last state that no perturbation has touched, where that can be undone; its step.
        Local, for a run that ends or has met an error."""
        if self._earliest() is None:
            return None
        return int(self.undo()["step"])

    def close(self) -> None:
        """Leave every callable as it was; nothing is undone."""
        for each in self._armed:
            self._close(each)
        self._armed.clear()

    # Inner parts.

    def _kept_or_not(self, one: Perturbation) -> Perturbation:
        """``one`` without a snapshot where this program cannot go back to one."""
        why = self._trainer.refused.get("undo")
        if why is None or not one.snapshot:
            return one
        if one.undo_at is not None:
            raise ConfigError(f"found undo_at: {one.undo_at}; {why}")
        return replace(one, snapshot=False)

    def _prepared(self, one: Perturbation) -> tuple[Sequence[ParameterTarget | ModuleTarget], dict[str, Any]]:
        """Targets of this rank and the whole preview; what one rank finds wrong is raised on all."""
        problem: str | None = None
        share: Share | None = None
        targets: Sequence[ParameterTarget | ModuleTarget] = []
        try:
            targets = self._targets(one)
            limit = self.limit_mib if self.limit_mib is not None else default_limit_mib()
            at_once = self._at_once(one)
            share = Share(
                rank=self._trainer.rank,
                items=items_of(one, targets),
                snapshot_bytes=(bytes_of(self._trainer) * at_once if at_once else 0) + self._held(),
                limit_bytes=limit * MIB,
            )
        except MtMegatronError as error:
            problem = str(error)
        said = gathered((problem, share))
        for wrong, _ in said:
            if wrong is not None:
                raise ConfigError(wrong)
        told = preview_of(one, [each for _, each in said if each is not None])
        if one.module and not told["targets"]:
            every = sorted({path for each in gathered(paths_of(one, self._bare())) for path in each})
            raise nothing_found(one, every)
        return targets, told

    def _targets(self, one: Perturbation) -> Sequence[ParameterTarget | ModuleTarget]:
        layout = self._trainer.layout
        require_ranks(one, layout)
        if not one.module or (one.ranks is not None and self._trainer.rank not in one.ranks):
            return []
        if one.on in ("weight", "weight_gradient"):
            found = parameter_targets(one, self._bare())
            for target in found:
                target.selection(one)
            return found
        modules = module_targets(one, self._bare())
        for module in modules:
            require_changeable(one, module.path)
            module.require_index(one, self._trainer.seq_length)
        return modules

    def _acting(self, one: Perturbation, targets: Sequence[Any]) -> Acting | None:
        trainer = self._trainer
        if one.on in ("communication", "host"):
            return acting_on_links(one, trainer, self._folder, self._say)
        if not targets:
            return None
        if one.on == "weight":
            return ChangedWeights(one, targets, trainer.optimizer)
        if one.on == "weight_gradient":
            return ChangedGradients(one, targets, trainer.core)
        return ChangedModules(
            one,
            targets,
            self._geometry(),
            trainer.rank,
            lambda text: self._tell(f"scope: rank {trainer.rank}: {text}"),
        )

    def _begin_acting(self, now: Sequence[tuple[Perturbation, Acting | None]], step: int) -> None:
        """``now``: all that acts in ``step``."""
        of_weights = [acting for one, acting in now if one.on == "weight"]
        if of_weights:
            # On every rank, those without a target too: gathers that are under way are completed together.
            # Around all of them: another gather would overwrite what one has changed on its ranks alone.
            with synchronised_parameters(self._trainer):  # type: ignore[arg-type]
                _begin(of_weights, step)
        _begin([acting for one, acting in now if one.on != "weight"], step)

    def _geometry(self) -> Geometry:
        trainer = self._trainer
        return Geometry(
            layout=trainer.layout,
            at=trainer.at,
            seq_length=trainer.seq_length,
            micro_batch_size=trainer.micro_batch_size,
            sequence_parallel=bool(trainer.core.sequence_parallel),
        )

    def _bare(self) -> list[Any]:
        return self._trainer.bare_chunks()

    def _named(self, identity: str) -> _Armed:
        for each in self._armed:
            if each.one.name == identity:
                return each
        known = ", ".join(each.one.name for each in self._armed) or "none"
        raise ConfigError(f"found the id {identity!r}; armed: {known}")

    def _earliest(self) -> Snapshot | None:
        kept = [each.snapshot for each in self._armed if each.snapshot is not None]
        return min(kept, key=lambda each: each.step, default=None)

    def _limited(self, handler: Handler) -> Handler:
        """``handler`` under the ``snapshot_limit_mib`` of its command, where that has one."""

        def handle(arguments: Mapping[str, Any]) -> Any:
            before, limit = self.limit_mib, snapshot_limit_of(arguments)
            try:
                self.limit_mib = before if limit is None else limit
                return handler(arguments)
            finally:
                self.limit_mib = before

        return handle

    def _held(self) -> int:
        kept = {id(each.snapshot): each.snapshot.bytes for each in self._armed if each.snapshot is not None}
        return sum(kept.values())

    def _at_once(self, one: Perturbation) -> int:
        """How many snapshots ``one`` and those that wait may come to hold at a time: those that begin in one
        step share theirs, and an undo lets it go."""
        until: dict[int, float] = {}
        for each in (one, *(known.one for known in self._armed if known.began is None)):
            if each.snapshot:
                first = max(each.steps.first or 0, self._trainer.iteration + 1)
                until[first] = max(until.get(first, 0.0), math.inf if each.undo_at is None else each.undo_at)
        return max(
            (sum(first <= at <= last for first, last in until.items()) for at in until),
            default=0,
        )

    def _require_room(self, told: Mapping[str, Any]) -> None:
        if told["snapshot_mib_of_a_rank"] > (told["limit_mib_of_a_rank"] or 0.0):
            raise ConfigError(
                f"found a snapshot of {told['snapshot_mib_of_a_rank']:,.0f} MiB a rank; expected at most "
                f"{told['limit_mib_of_a_rank']:,.0f} MiB. Raise snapshot_limit_mib"
            )

    def _rewind(self, identity: str | None) -> _Rewind:
        snapshot = self._earliest() if identity is None else self._named(identity).snapshot
        if snapshot is None:
            raise ConfigError(
                "found nothing that can be undone"
                if identity is None
                else f"{identity} was armed with snapshot: "
                "false and cannot be undone; load a checkpoint from before it"
            )
        concerned = [each for each in self._armed if each.began is not None and each.began >= snapshot.step]
        return _Rewind(snapshot=snapshot, concerned=concerned)

    def _go_back(self, rewind: _Rewind) -> None:
        for each in rewind.concerned:
            self._close(each)
        rewind.snapshot.restore()
        step = rewind.snapshot.step
        self._went_back(step)
        self._armed = [each for each in self._armed if each not in rewind.concerned]
        self._disarmed = [(name, began) for name, began in self._disarmed if began < step]
        for each in self._armed:
            last = each.one.steps.last
            if each.over and not each.disarmed and last is not None and last > step:
                # It acted in steps that are now made again.
                each.over = False
                each.acting = self._acting(each.one, each.targets)

    def _close(self, armed: _Armed) -> None:
        armed.over = True
        if armed.acting is not None:
            armed.acting.close()
            armed.acting = None

    def _line(self, told: Mapping[str, Any]) -> str:
        targets = told["targets"]
        what = f"{len(targets)} target(s)" if targets else "the ranks named"
        kept = told["snapshot_mib_of_a_rank"]
        end = "; the end of the run undoes all since then, unless undo_at has" if kept else ""
        return (
            f"{told['id']} is armed for step {told['starts_at']}: {told['text']}; {what}, snapshot "
            f"{kept:,.0f} MiB a rank{end}"
        )


def _given(arguments: Mapping[str, Any]) -> Perturbation:
    return perturbation_from(arguments.get("perturbation"))


def _identity(arguments: Mapping[str, Any]) -> str | None:
    identity = arguments.get("id")
    return None if identity is None else str(identity)


def _begin(acting: Sequence[Acting | None], step: int) -> None:
    for each in acting:
        if each is not None:
            each.before_step(step)


def _for_one_step(one: Perturbation, step: int) -> Perturbation:
    return replace(one, steps=Steps(first=step, last=step), undo_at=step, snapshot=True)
