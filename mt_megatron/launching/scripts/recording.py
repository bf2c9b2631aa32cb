"""Record an unmodified script: open MegaScan and MegaScope, and report the script's steps to them.

The group by which ranks agree is made where ``initialize_model_parallel`` ends; recording begins with the
first training schedule, by which the model, its sizes and the number of the step are known. A step ends where
the next schedule begins, be it an evaluation, which is no step, and the last one with the process.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import mt_megatron
from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.errors import ScopeError
from mt_megatron.launching.scripts.choice import Recorded, is_main
from mt_megatron.launching.scripts.script_trainer import Ranks, ScriptTrainer, megatron_lm
from mt_megatron.parallel.rank_layout import RankLayout, layout_of_groups, place_in_groups
from mt_megatron.scope.interfaces import Facts, Options, StepFigures
from mt_megatron.seams import events, script
from mt_megatron.training.lr import learning_rate
from mt_megatron.training.run_folder import agreed_folder
from mt_megatron.training.scan_session import Tracing
from mt_megatron.training.scope_session import Scope


def record(asked: Recorded) -> None:
    """Observe this process's script from now on, until it ends."""
    recording = Recording(asked)
    script.observe(recording)
    atexit.register(recording.end, os.getpid())


@dataclass(kw_only=True)
class _Step:
    """A training step under way."""

    number: int
    tokens: int
    """Positions of its sequences; which of them count in the loss is the script's business."""

    whole: bool = False
    """Whether its schedule has returned, and no update has failed."""

    updated: bool = False
    loss: float = math.nan
    grad_norm: float | None = None
    lr: float = math.nan
    skipped: bool = False
    attend: bool = False
    measure: bool = False


@dataclass(frozen=True)
class _Alone:
    """An optimizer of torch's, as those of Megatron-Core hold one."""

    optimizer: Any

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


class Recording:
    """``seams.script.Observer``."""

    def __init__(self, asked: Recorded) -> None:
        self._asked = asked
        self._ranks: Ranks | None = None
        """None without Megatron-Core's groups, and once ranks could not agree."""

        self._opened = False
        self._trainer: ScriptTrainer | None = None
        """None before the first step, and where nothing can be recorded."""

        self._scan, self._scope = Tracing(), Scope()
        self._step: _Step | None = None
        self._updating: Any = None
        """The optimizer that is inside of its step."""

        self._scheduler: Any = None
        self._closing: list[Callable[[], object]] = []
        self._missed = "the script never called initialize_model_parallel"
        """Why nothing was recorded; empty once a training step has begun."""

    # What the script does.

    def groups_made(self) -> None:
        self.close()
        self._ranks = Ranks()
        self._closing.append(self._ranks.close)
        if self._missed:
            self._missed = "no training step was made by a schedule of get_forward_backward_func"

    def schedule(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._end_step()
        if self._ranks is None or kwargs.get("forward_only"):
            return run(*args, **kwargs)
        if not self._opened:
            self._open(self._ranks, kwargs)
        if self._trainer is None:
            return run(*args, **kwargs)
        number, samples = self._trainer.iteration + 1, _samples(kwargs, self._trainer.layout)
        self._step, self._updating = _Step(number=number, tokens=samples * int(kwargs["seq_length"])), None
        self._trainer.scheduler = self._scheduler
        self._scope.begin_step(number)
        events.begin("step", iteration=number)
        reports = run(*args, **kwargs)
        self._agree(self._ranks, self._step, loss_sums(reports))
        return reports

    def update(self, optimizer: Any, step: Callable[[Any], Any]) -> Any:
        if not self._begin_update(optimizer):
            return step(optimizer)
        result = step(optimizer)
        self._end_update(bool(result[0]), result[1])
        return result

    def gradients_ready(self, optimizer: Any) -> None:
        if optimizer is self._updating:
            self._scope.gradients_ready()

    def scheduled(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def _torch_updates(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer of torch's begins its step, by itself or inside of one of Megatron-Core's."""
        if self._begin_update(_Alone(optimizer)):
            self._scope.gradients_ready()

    def _torch_updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._updating == _Alone(optimizer):
            self._end_update(True, None)

    # Begin and end.

    def _open(self, ranks: Ranks, call: Mapping[str, Any]) -> None:
        """Begin, with the model and the sizes of ``call``, which a schedule was given; collective."""
        from mt_megatron.scan.monitor.watcher_process import Alerting
        from mt_megatron.scan.record.levels import level_of
        from mt_megatron.scan.session import Session as ScanSession
        from mt_megatron.scope.control.control import PAUSE_MINUTES
        from mt_megatron.scope.lab.agreement import gathered
        from mt_megatron.scope.session import Session as ScopeSession

        self._opened, self._missed = True, ""
        asked, problem, trainer = self._asked, None, None
        folder = agreed_folder(asked.run, ranks.world_size) or asked.run
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if ranks.rank == 0:
                lock = FileLock(folder / ".recorded.lock", create=True)
                self._closing.append(lock.close)
                if lock.state == "busy":
                    raise ScopeError(
                        f"another script is recorded in {folder}; give each a --run-dir of its own"
                    )
            layout = layout_of_groups()
            trainer = ScriptTrainer(
                call["model"],
                ranks,
                mt_megatron.backend(),
                layout,
                place_in_groups() or layout.coordinates(ranks.rank),
                seq_length=int(call["seq_length"]),
                micro_batch_size=int(call["micro_batch_size"]),
            )
            trainer.iteration, counted = self._steps_made(_samples(call, layout))
        except Exception as error:  # noqa: BLE001 - whatever it is, the script goes on, on all ranks alike
            problem = f"rank {ranks.rank}: {type(error).__name__}: {error}"
        problem = next((each for each in gathered(problem) if each is not None), None)
        self._closing.append(register_optimizer_step_pre_hook(self._torch_updates).remove)
        self._closing.append(register_optimizer_step_post_hook(self._torch_updated).remove)
        if problem is not None or trainer is None:
            self._say(f"nothing is recorded, the script goes on: {problem}")
            return
        self._trainer = trainer
        self._say(f"recording into {folder} from step {trainer.iteration + 1} on: {counted}")
        of_rank: dict[str, Any] = {
            "rank": trainer.rank,
            "layout": trainer.layout,
            "place": trainer.at,
            "backend": trainer.backend,
            "say": self._say,
        }
        if asked.scan != "off":
            facts = {"num_microbatches": call["num_microbatches"], "model": trainer.facts()}
            traced = ScanSession(
                folder,
                level=level_of(asked.scan),
                alerting=Alerting(),
                facts={**facts, "script": sys.argv[0]},
                modules=trainer.chunks,
                **of_rank,
            )
            self._scan = Tracing(traced)
        if asked.scope != "off":
            recorded = ScopeSession(
                folder,
                chunks=trainer.chunks,
                optimizer=None,
                options=Options(live=asked.scope == "live", interval=asked.interval),
                facts=Facts(
                    micro_batch_size=trainer.micro_batch_size,
                    seq_length=trainer.seq_length,
                    global_batch_size=_samples(call, trainer.layout),
                    model={**trainer.facts(), "interval": asked.interval},
                ),
                **of_rank,
            )
            self._scope = Scope(recorded)
            self._scope.command(trainer, pause_minutes=PAUSE_MINUTES, say=self._say)
        self._closing += [self._scan.close, self._scope.close]
        self._scan.start()
        self._scope.start()

    def _steps_made(self, samples: int) -> tuple[int, str]:
        """Training steps that the script made before the one that begins, and how that is known."""
        arguments = megatron_lm("_GLOBAL_ARGS")
        made = getattr(arguments, "curr_iteration", getattr(arguments, "iteration", None))
        if made is not None:
            return int(made), f"Megatron-LM has made {made}"
        # It counts samples, as Megatron-LM has it do, and a script may have another batch size than before.
        counted = int(getattr(self._scheduler, "num_steps", 0))
        if not counted:
            return 0, "no scheduler says that any was made before"
        about = "" if counted % samples == 0 else "about "
        made = counted // samples or counted
        return made, f"{about}{made} by the {counted} samples of its scheduler, {samples} a step now"

    def close(self) -> None:
        """End what was opened, the last step with it; no collective."""
        self._finish_step()
        closing, self._closing = self._closing, []
        for close in reversed(closing):
            close()
        self._ranks = self._trainer = self._updating = None
        self._opened = False
        self._scan, self._scope = Tracing(), Scope()

    groups_end = close

    def end(self, process: int) -> None:
        """``process`` ends, which may be another one: a child that was forked off it."""
        if os.getpid() != process:
            return
        script.observe(None)
        self.close()
        if self._missed and is_main(os.environ) and os.environ.get("RANK", "0") == "0":
            self._say(f"nothing was recorded: {self._missed}")

    # Steps.

    def _agree(self, ranks: Ranks, step: _Step, sums: tuple[float, float]) -> None:
        """The schedule has returned, on all ranks: its loss, and what they want."""
        step.whole = True
        try:
            total, weight, attend, measure = ranks.sum(
                [*sums, self._scope.wants_attention, self._scan.wants_measurement]
            )
        except RuntimeError as error:
            self._say(f"nothing more is recorded: the ranks cannot agree any more: {error}")
            self.close()
            return
        step.loss = total / weight if weight else math.nan
        step.attend, step.measure = attend > 0, measure > 0

    def _begin_update(self, optimizer: Any) -> bool:
        step, trainer = self._step, self._trainer
        if step is None or trainer is None or step.updated or self._updating is not None:
            return False
        if not self._scope.updating(optimizer):
            return False
        self._updating = trainer.optimizer = optimizer
        step.lr, step.whole = learning_rate(optimizer), False
        return True

    def _end_update(self, successful: bool, norm: Any) -> None:
        step, self._updating = self._step, None
        assert step is not None
        step.updated, step.whole, step.skipped = True, True, not successful
        step.grad_norm = None if norm is None else float(norm)
        self._scope.updated(skipped=step.skipped)

    def _end_step(self) -> None:
        """The step under way, if any, is over; follows what was commanded: collective."""
        step = self._finish_step()
        if step is not None and step.attend:
            self._scope.attend()
        if step is not None and step.measure:
            self._scan.measure()

    def _finish_step(self) -> _Step | None:
        step, self._step = self._step, None
        if step is None or self._trainer is None:
            return None
        events.end("step")
        self._trainer.iteration += step.whole
        figures = StepFigures(
            loss=step.loss, grad_norm=step.grad_norm, lr=step.lr, tokens=step.tokens, skipped=step.skipped
        )
        self._scope.end_step(step.number, figures if step.whole else None)
        return step

    def _say(self, text: str) -> None:
        if self._ranks is None or self._ranks.rank == 0:
            print(f"mt-megatron: {text}", file=sys.stderr, flush=True)


def loss_sums(reports: Any) -> tuple[float, float]:
    """Sum and weight of the loss that a schedule returned ``reports`` of, one per micro-batch: a number, a
    sum and what it counts, or a map with one of them, of which the first that is called a loss is taken.
    Zeros on the stages that have none, and for what is no loss."""
    pairs: list[Any] = []
    for report in reports or ():
        if isinstance(report, Mapping):
            report = next((report[name] for name in report if "loss" in str(name)), None)
        if isinstance(report, torch.Tensor) and report.numel() <= 2:
            report = report.flatten().unbind()
        numbers = [*report] if isinstance(report, list | tuple) else [report]
        if len(numbers) in (1, 2) and all(map(_is_number, numbers)):
            pairs += [*numbers, 1.0][:2]
    if not pairs:
        return 0.0, 0.0
    device = next((each.device for each in pairs if isinstance(each, torch.Tensor)), None)
    # One look at the device for all of them.
    joined = torch.cat(
        [torch.as_tensor(each, dtype=torch.float32, device=device).reshape(1) for each in pairs]
    )
    total, weight = joined.detach().cpu().double().view(-1, 2).sum(dim=0).tolist()
    return total, weight


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)


def _samples(call: Mapping[str, Any], layout: RankLayout) -> int:
    """Sequences of the step that a schedule was called for with ``call``."""
    return int(call["num_microbatches"]) * int(call["micro_batch_size"]) * layout.dp
