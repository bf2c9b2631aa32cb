"""Source of the schedule of each step: ``set_pipeline_schedule`` sets it, upstream's entry point asks it.

``megatron.core.pipeline_parallel.get_forward_backward_func``, patched, returns ``forward_backward`` of this
module while a source is set and there is a pipeline; so both scripts and ``seams.schedule.run_schedule`` come
here, without another switch.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch

from mt_megatron.backends.current import current_device
from mt_megatron.comm.collective import CollectiveTransport
from mt_megatron.comm.transport import Transport
from mt_megatron.errors import ConfigError
from mt_megatron.parallel import stage_order
from mt_megatron.pipeline import forward_only as forward_only_schedules
from mt_megatron.pipeline.actions import Schedule
from mt_megatron.pipeline.execute.agreement import are_equal, digest_of, squared
from mt_megatron.pipeline.execute.executor import ReadySchedule, StepCall, StepRun
from mt_megatron.pipeline.execute.refusals import require_fit
from mt_megatron.pipeline.execute.step_times import StepTimes
from mt_megatron.pipeline.lowering import lowered
from mt_megatron.pipeline.validate import check
from mt_megatron.seams import collectives
from mt_megatron.seams import transport as seam

Choose = Callable[[int, int, bool], "Schedule | None"]
"""(step, micro-batches, forward only) -> the schedule, on all ranks of the job the same; None: upstream's.
``step`` counts the training steps that this process has asked for since the source was set, from 0;
an evaluation has the number of the next step."""


@runtime_checkable
class NeedsPipeline(Protocol):
    """A source that was asked for, so that a run without a pipeline is an error."""

    @property
    def is_upstream(self) -> bool:
        """True where Megatron-Core's own schedule is meant."""

    def require_pipeline(self) -> None:
        """Raise ConfigError: there is one pipeline rank."""


@runtime_checkable
class Watches(Protocol):
    """A source that wants to know how long its steps take."""

    def begin_step(self, schedule: Schedule) -> StepTimes | None:
        """Where to mark the training step that begins, which runs ``schedule``; None: nowhere."""

    def end_step(self, schedule: Schedule, times: StepTimes) -> None:
        """That step is over."""

    def leaves_to_upstream(self, error: ConfigError) -> bool:
        """True where a step that cannot be run, because of ``error``, and all later ones are left to
        Megatron-Core's own schedule."""


MakeTransport = Callable[[Any, torch.device], Transport]
"""(the pipeline's process group, this rank's device) -> its channels."""

_source: Schedule | Choose | None = None
_step = 0
_make_transport: MakeTransport | None = None
_transport: tuple[weakref.ref[Any], Transport] | None = None
_checked: OrderedDict[int, tuple[Schedule, ReadySchedule]] = OrderedDict()
"""By identity of the schedule; the latest last."""

_agreed: weakref.ref[Any] | None = None
"""The process group whose ranks have what is in ``_checked``."""

_MOST_CHECKED = 64

_forward_only = lru_cache(maxsize=64)(forward_only_schedules.forward_only)
"""Always the same object for the same arguments: ``_checked`` goes by identity."""


def set_pipeline_schedule(source: Schedule | Choose | None) -> None:
    """Run steps by ``source`` from now on; None goes back to Megatron-Core's own schedules.

    A ``Schedule`` runs every training step, which must have its number of micro-batches; evaluations of any
    number run over its placement. Raises ConfigError with the validator's sentences for a schedule that
    cannot be run.
    """
    global _source, _step
    if isinstance(source, Schedule):
        check(source)
    _source, _step = source, 0


def pipeline_schedule() -> Schedule | Choose | None:
    """What ``set_pipeline_schedule`` was last given."""
    return _source


def remember_step() -> Callable[[], None]:
    """Keeps the number of the next training step; what is returned brings it back, where a run goes back."""
    step = _step

    def restore() -> None:
        global _step
        _step = step

    return restore


def takes_over() -> bool:
    """True where steps come here: there is a pipeline, and a source or stages that upstream does not know.
    Raises ConfigError without a pipeline where a user asked for a schedule."""
    from megatron.core import parallel_state

    if _source is None and not stage_order.is_v():
        return False
    is_pipeline = parallel_state.get_pipeline_model_parallel_world_size() > 1
    if isinstance(_source, NeedsPipeline):
        if not is_pipeline:
            _source.require_pipeline()
        return bool(is_pipeline) and not _source.is_upstream
    return bool(is_pipeline)


def set_transport(make: MakeTransport | None) -> None:
    """Send activations and gradients through what ``make`` returns, from the next step on; None goes back to
    what ``seams.transport`` has, or ``CollectiveTransport``."""
    global _make_transport, _transport
    _make_transport, _transport = make, None


def forward_backward(
    upstream: Callable[..., list[Any]],
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]],
    model: torch.nn.Module | Sequence[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
) -> list[Any]:
    """One step by the schedule that the source gives, or by ``upstream``; arguments and result are those of
    ``get_forward_backward_func()`` of Megatron-Core.

    Raises ConfigError, before anything is sent, for a schedule that is invalid, does not fit the process
    groups or the number of micro-batches, and for what cannot be executed; TransportError after a step that
    failed.
    """

    def left_to_upstream() -> list[Any]:
        if stage_order.is_v():
            raise ConfigError(
                "found stages laid out as a V and a step left to Megatron-Core's own schedules, which do not "
                "know it; expected a schedule over the V. Take zbv or dualpipev for all steps"
            )
        return upstream(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
        )

    _require_open()
    schedule = _chosen(num_microbatches, forward_only)
    if schedule is None:
        return left_to_upstream()
    call = StepCall(
        forward_step_func=forward_step_func,
        batches=list(data_iterator) if isinstance(data_iterator, (list, tuple)) else [data_iterator],  # type: ignore[list-item]
        model=list(model) if isinstance(model, (list, tuple)) else [model],  # type: ignore[list-item]
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
    )
    watch = _source if isinstance(_source, Watches) else None
    try:
        require_fit(schedule, call, decoder_seq_length)
        times = None if watch is None or forward_only else watch.begin_step(schedule)
        run = StepRun(_ready(schedule), call, _transport_of_pipeline(), times)
    except ConfigError as error:
        if watch is not None and watch.leaves_to_upstream(error):
            return left_to_upstream()
        raise
    reports = run.run()
    if watch is not None and times is not None:
        watch.end_step(schedule, times)
    return reports


def _chosen(num_microbatches: int, forward_only: bool) -> Schedule | None:
    global _step
    step = _step
    if not forward_only:
        _step += 1
    if _source is None:
        return None
    if not isinstance(_source, Schedule):
        return _source(step, num_microbatches, forward_only)
    if not forward_only or _source.forward_only:
        return _source
    return _forward_only(_source.placement, num_microbatches)


def _ready(schedule: Schedule) -> ReadySchedule:
    """``schedule`` with its transfers, after the validator had nothing to say and all ranks have the same
    one. Collective over all ranks of the job where it is new. Raises ConfigError."""
    from megatron.core import parallel_state

    global _agreed
    rank = parallel_state.get_pipeline_model_parallel_rank()
    group = parallel_state.get_pipeline_model_parallel_group()
    if _agreed is None or _agreed() is not group:
        # Other ranks: on all of them everything is new.
        _checked.clear()
        _agreed = weakref.ref(group)
    known = _checked.get(id(schedule))
    if known is None or known[0] is not schedule:
        _require_same(schedule)
        known = schedule, ReadySchedule(schedule if schedule.is_lowered else lowered(schedule), rank)
        _checked[id(schedule)] = known
        while len(_checked) > _MOST_CHECKED:
            _checked.popitem(last=False)
    _checked.move_to_end(id(schedule))
    return known[1]


def _require_same(schedule: Schedule) -> None:
    """Raise ConfigError on all ranks of the job where ``schedule`` is not valid or not the same on all. Ranks
    of other pipelines count too: they share collectives of tensors and of gradients."""
    problem: ConfigError | None = None
    try:
        check(schedule)
    except ConfigError as error:
        problem = error
    actions = [[str(action) for action in actions] for actions in schedule.ranks]
    own = [*squared(digest_of(repr(actions))), int(problem is not None)]
    summed = torch.tensor(own, dtype=torch.int64, device=current_device())
    with collectives.announced("all_reduce", "world", None, summed):
        torch.distributed.all_reduce(summed)
    digests, squares, failed = summed.tolist()
    if problem is not None:
        raise problem
    if failed or not are_equal(digests, squares, torch.distributed.get_world_size()):
        what = "a schedule that is not valid" if failed else "another order of actions"
        raise ConfigError(
            f"found {what} on another rank, which runs pipeline schedule {schedule.name} too; expected one "
            "schedule. Give all nodes the same file and version of mt_megatron, and choose a schedule by "
            "what all ranks know alike"
        )


def _require_open() -> None:
    """Raise TransportError if an earlier step failed: before a source asks the other ranks anything."""
    from megatron.core import parallel_state

    exchange = seam.installed()
    if exchange is not None and _make_transport is None:
        exchange.transport.require_open()
    elif _transport is not None and _transport[0]() is parallel_state.get_pipeline_model_parallel_group():
        _transport[1].require_open()


def _transport_of_pipeline() -> Transport:
    """One for each process group, which a test or another layout may have replaced."""
    global _transport
    from megatron.core import parallel_state

    exchange = seam.installed()
    if exchange is not None and _make_transport is None:
        chosen: Transport = exchange.transport
        return chosen
    group = parallel_state.get_pipeline_model_parallel_group()
    if _transport is None or _transport[0]() is not group:
        make = CollectiveTransport if _make_transport is None else _make_transport
        _transport = weakref.ref(group), make(group, current_device())
    return _transport[1]
