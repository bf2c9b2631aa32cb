"""Runs of the trainer under ``auto``; each function returns JSON-able results."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from tests.training import loop_cases

PLAIN = "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 16 --train-iters 10 --eval-iters 0"
SLOW_FROM = 4
"""The step from which on messages are late, in a run from the first step on."""


def late(seconds: float, step: int) -> float:
    return seconds if step >= SLOW_FROM else 0.0


def adapting(folder: str, flags: str, seconds: float) -> dict[str, Any]:
    """A run by upstream's schedule, one by ``auto`` over a link that becomes slow, that one stopped after 6
    steps and gone on with, and one in which ranks reckon differently."""
    from mt_megatron.pipeline.execute.source import set_transport
    from mt_megatron.pipeline.policy import controller
    from tests.pipeline.policy.delayed import Delayed

    # On a busy machine step times scatter by more than the gain, and nothing would switch.
    controller.GAIN_TO_NOISE = 0.0
    loop_cases.start()
    found = {"upstream": loop_cases.run(f"{PLAIN} {flags}", folder, "upstream")}
    auto = f"{PLAIN} {flags} --pipeline-schedule auto"
    for name, more in (
        ("auto", ""),
        ("first", f"--save {folder}/saved --exit-interval 6"),
        ("second", f"--save {folder}/saved"),
        ("mixed", ""),
    ):
        made: list[Any] = []

        def slow(group: Any, device: Any, made: list[Any] = made) -> Any:
            made.append(Delayed(group, device, partial(late, seconds)))
            return made[-1]

        set_transport(slow)
        logs = Path(folder) / {"first": "resumed", "second": "resumed"}.get(name, name)
        logs.mkdir(exist_ok=True)
        observe = controller.Controller.observe
        if name == "mixed":
            controller.Controller.observe = rounding_otherwise(observe)  # type: ignore[method-assign]
        found[name] = loop_cases.run(f"{auto} {more}", str(logs), name)
        controller.Controller.observe = observe  # type: ignore[method-assign]
        assert len(made) == 1
    set_transport(None)
    return {name: {key: result.get(key) for key in ("steps", "error")} for name, result in found.items()}


def rounding_otherwise(observe: Any) -> Any:
    """``Controller.observe`` of a processor that rounds the mean of a time otherwise from the first step
    over the slow link on: on rank 1."""
    import torch.distributed as dist

    def observed(control: Any, measured: Any, ran: Any) -> Any:
        outcome = observe(control, measured, ran)
        if dist.get_rank() == 1 and measured.step >= SLOW_FROM:
            control._forward[0].mean = math.nextafter(control._forward[0].mean, 2.0)
        return outcome

    return observed


def in_both_directions(folder: str) -> dict[str, Any]:
    """Losses of data-, tensor- and pipeline-parallel runs under upstream and ``auto``, without a slow
    link."""
    loop_cases.start()
    found = {}
    for name, flags in {
        "dp": "--pipeline-model-parallel-size 2",
        "tp": "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
        "vpp": "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2",
    }.items():
        for schedule in ("", " --pipeline-schedule auto"):
            result = loop_cases.run(f"{PLAIN} {flags}{schedule}", folder, f"{name}{bool(schedule)}")
            found[name + schedule] = {key: result.get(key) for key in ("steps", "error")}
    return found


class Queued:
    """Times of a device that queues its work: they cannot be read at the end of a step."""

    is_host = False

    def read(self) -> None:
        raise AssertionError("read before the device was synchronised")


class Told:
    """Times of a step that tell nothing."""

    is_host = True

    def read(self) -> Any:
        from mt_megatron.pipeline.execute.step_times import RankTimes

        return RankTimes(seconds=0)


def agreement() -> dict[str, Any]:
    """What ranks find that chose the same schedule, and others; and what ``auto`` does that gave up."""
    import torch.distributed as dist

    from mt_megatron.errors import ConfigError
    from mt_megatron.pipeline.actions import Placement
    from mt_megatron.pipeline.policy.automatic import automatic
    from mt_megatron.pipeline.policy.candidates import named
    from tests.pipeline.execute import small_models

    small_models.start(2)
    said: list[str] = []
    auto = automatic(ranks=2, chunks=1)
    auto.begin_at(0, folder=None, say=said.append)
    known = {each.label: each for each in named(Placement(2), 4)}
    same = auto._all_agree(known["zb_h1"])
    other = auto._all_agree(known["zb_h1" if dist.get_rank() else "1f1b"])
    schedule = auto(0, 4, False)
    asked = auto.reductions
    auto.end_step(schedule, Queued())
    early = auto.reductions - asked
    left = auto.leaves_to_upstream(ConfigError("found an encoder"))
    return {
        "same": same,
        "other": other,
        "early": early,
        "left": left,
        "next": auto(0, 4, False),
        "said": said,
    }


def disagreement() -> dict[str, Any]:
    """What happens where one rank alone wants to switch, where one rank knows something else, and where one
    has another cap: by what each rank runs next or raises."""
    import torch.distributed as dist

    from mt_megatron.errors import ConfigError
    from mt_megatron.pipeline.actions import Placement
    from mt_megatron.pipeline.policy.automatic import automatic
    from mt_megatron.pipeline.policy.candidates import named
    from mt_megatron.pipeline.policy.decide import Decision
    from tests.pipeline.execute import small_models

    small_models.start(2)
    rank, said = dist.get_rank(), list[str]()
    auto: Any = automatic(ranks=2, chunks=1)
    auto.begin_at(0, folder=None, say=said.append)

    def step(number: int, microbatches: int = 4) -> str:
        try:
            schedule = auto(number, microbatches, False)
        except ConfigError as error:
            return str(error)
        if auto.begin_step(schedule) is not None:
            auto.end_step(schedule, Told())
        return str(auto.running_label)

    found = {"first": step(0), "second": step(1)}
    control = auto._latest.control
    better = next(each for each in named(Placement(2), 4) if each.label == "zb_h1")
    switch = Decision(chosen=better, seconds=1.0, before=control.current, seconds_before=2.0, reason="")
    control.is_due = lambda: True
    control.propose = lambda: None if rank else switch
    found["one switches"] = step(2)
    control.propose = lambda: switch
    found["both switch"] = step(3)
    control.is_due = lambda: False
    control._forward[0].add(1.0)
    if rank:
        # The last bit.
        control._forward[0].mean = math.nextafter(control._forward[0].mean, 2.0)
    # It is told after the step, and seen before the next one.
    found["other times"], found["seen"] = step(4), step(5)
    asked = auto.reductions
    found["to the end"], found["asked"] = step(6), auto.reductions - asked
    found["other micro-batches"] = step(7, 6)
    auto = automatic(ranks=2, chunks=1, cap=4 + rank)
    found["other cap"] = step(0)
    return {**found, "said": said}
