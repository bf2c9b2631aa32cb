"""The spans of one simulated step, per stage and in the order in which they end, without their times."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.format.records import KIND, SPAN

from .job import Job
from .schedule import Exchange, Pass, Plan
from .work import Communication, Piece

STRINGS = (
    "",
    "step",
    "data",
    "forward",
    "backward",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "start_grad_sync",
    "start_param_sync",
    "experts",
    "send",
    "recv",
    "DistributedOptimizer",
    "FP32Optimizer",
    "checkpoint",
    "write",
    "gc",
    "stopped",
)
"""The table of strings at the beginning of every simulated file; counters' names follow."""


@dataclass(kw_only=True)
class Columns:
    """Where each span of a step lies; ``template`` has all of it but times and what differs between ranks."""

    groups: tuple[str, ...]
    """Kinds of groups; their number in every rank's file is their place here plus 1."""

    communications: dict[str, Communication] = field(default_factory=dict, repr=False)
    """Those of ``tail``."""

    places: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    """(stage, position in its program) -> its first column."""

    tail: dict[str, list[int]] = field(default_factory=dict, repr=False)
    """Name of a span after the last micro-batch -> column per stage, -1 where it has none."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """``Columns`` as arrays."""

    spans: NDArray[np.void]
    """``SPAN`` [stages, columns]; ``peer`` is a difference of ranks, ``seq`` that of the first step."""

    per_step: NDArray[np.int64]
    """What ``seq`` grows by with each step, [stages, columns]."""

    valid: NDArray[np.bool_]
    """Stages may have fewer spans than others; [stages, columns]."""

    rows: NDArray[np.int64]
    """Spans whose bytes or work are this rank's rows: 0 forward or 1 backward, pass, piece; -1 for none;
    [stages, columns, 3]."""

    data: NDArray[np.int64]
    """The forward pass whose batch this is, -1 for none; [stages, columns]."""

    world_seq: int
    """Number of the group of all ranks."""

    columns: Columns


def columns_of(job: Job, plan: Plan, forward: tuple[Piece, ...], backward: tuple[Piece, ...]) -> Template:
    """All spans of a step of ``plan``."""
    builder = _Builder(job, plan, forward, backward)
    for stage, program in enumerate(plan.programs):
        builder.stage(stage, program)
    return builder.template()


class _Builder:
    def __init__(self, job: Job, plan: Plan, forward: tuple[Piece, ...], backward: tuple[Piece, ...]) -> None:
        layout = job.layout
        self.job, self.plan = job, plan
        self.pieces = {"forward": forward, "backward": backward}
        self.gradients = "dp-cp" if layout.cp > 1 else "dp"
        kinds = ("tp", "cp", "ep", "pp", self.gradients, "embedding", "tp-pp", "world")
        self.named = {kind: layout.canonical(kind) for kind in kinds}
        names = tuple(dict.fromkeys(self.named.values()))
        self.groups = {name: number for number, name in enumerate(names, 1)}
        self.columns = Columns(groups=names)
        stages = len(plan.programs)
        self.seqs: list[dict[object, int]] = [defaultdict(int) for _ in range(stages)]
        self.keys: list[list[object]] = [[] for _ in range(stages)]
        self.rows: list[list[tuple[int, int, int]]] = [[] for _ in range(stages)]
        self.data: list[list[int]] = [[] for _ in range(stages)]
        self.records: list[list[tuple[int, ...]]] = [[] for _ in range(stages)]
        self.stride = layout.dp * layout.cp * layout.tp
        # How many transfers each directed edge carries in a step.
        self.on_edge: dict[tuple[int, int], int] = defaultdict(int)
        for transfer in plan.transfers:
            self.on_edge[transfer.source, transfer.target] += 1

    def stage(self, stage: int, program: tuple[object, ...]) -> None:
        passes = {"forward": 0, "backward": 0}
        for position, operation in enumerate(program):
            self.columns.places[stage, position] = len(self.records[stage])
            if isinstance(operation, Exchange):
                for index, transfer in enumerate(operation.transfers):
                    sends = transfer.source == stage
                    other = transfer.target if sends else transfer.source
                    identity = self.plan.partners[stage, position, index][1]
                    self.add(
                        stage,
                        "p2p",
                        "send" if sends else "recv",
                        group=self.named["pp"],
                        size=self.job.activation_bytes // self.job.layout.cp,
                        peer=(other - stage) * self.stride,
                        seq=self.plan.numbers[identity],
                        key=(transfer.source, transfer.target),
                    )
            elif isinstance(operation, Pass):
                self.one_pass(stage, operation, passes[operation.direction])
                passes[operation.direction] += 1
        self.end_of_step(stage)

    def one_pass(self, stage: int, one: Pass, ordinal: int) -> None:
        at: dict[str, Any] = {"microbatch": one.microbatch, "chunk": one.chunk}
        if one.direction == "forward":
            self.add(stage, "data", "data", data=ordinal, **at)
        for index, piece in enumerate(self.pieces[one.direction]):
            if piece.expert and one.direction == "forward":
                self.add(stage, "module", "experts", size=-1, rows=(0, ordinal, index), **at)
            if piece.after is not None:
                which = (
                    (int(one.direction == "backward"), ordinal, index)
                    if piece.after.combines
                    else (-1, -1, -1)
                )
                self.collective(stage, piece.after, rows=which, **at)
        self.add(stage, one.direction, one.direction, **at)
        self.add(stage, "microbatch", one.direction, **at)

    def end_of_step(self, stage: int) -> None:
        job, layout = self.job, self.job.layout
        shard = job.gradient_bytes // (layout.vpp * job.buckets)
        members = layout.dp * layout.cp
        for index in range(layout.vpp * job.buckets):
            if members > 1:
                op = "reduce_scatter" if job.distributed_optimizer else "all_reduce"
                what = Communication(op, self.gradients, shard, name="start_grad_sync")
                self.tail(stage, f"gradients {index}", what)
        if layout.pp > 1 and stage in (0, layout.pp - 1):
            self.tail(stage, "embedding", Communication("all_reduce", "embedding", job.gradient_bytes // 8))
        if layout.tp * layout.pp > 1:
            self.tail(stage, "norm", Communication("all_reduce", "tp-pp", 4))
        if layout.world_size > 1:
            self.tail(stage, "agreement", Communication("all_reduce", "world", 48))
        for index in range(layout.vpp * job.buckets):
            if members > 1 and job.distributed_optimizer:
                what = Communication("all_gather", self.gradients, shard // members, name="start_param_sync")
                self.tail(stage, f"parameters {index}", what)
        name = "DistributedOptimizer" if job.distributed_optimizer else "FP32Optimizer"
        self.remember(stage, "optimizer", self.add(stage, "optimizer", name))
        self.remember(stage, "step", self.add(stage, "step", "step"))

    def tail(self, stage: int, name: str, what: Communication) -> None:
        self.columns.communications[name] = what
        self.remember(stage, name, self.collective(stage, what))

    def remember(self, stage: int, name: str, column: int) -> None:
        self.columns.tail.setdefault(name, [-1] * len(self.records))[stage] = column

    def collective(
        self,
        stage: int,
        what: Communication,
        *,
        rows: tuple[int, int, int] = (-1, -1, -1),
        microbatch: int = -1,
        chunk: int = -1,
    ) -> int:
        group = self.named[what.group]
        seq = self.seqs[stage][group]
        self.seqs[stage][group] += 1
        return self.add(
            stage,
            "collective",
            what.name or what.op,
            group=group,
            size=what.size,
            seq=seq,
            key=group,
            rows=rows,
            microbatch=microbatch,
            chunk=chunk,
        )

    def add(
        self,
        stage: int,
        kind: str,
        name: str,
        *,
        group: str | None = None,
        size: int = -1,
        seq: int = -1,
        peer: int = 0,
        key: object = None,
        rows: tuple[int, int, int] = (-1, -1, -1),
        data: int = -1,
        microbatch: int = -1,
        chunk: int = -1,
    ) -> int:
        number = self.groups[group] if group else 0
        self.records[stage].append(
            (
                0,
                0,
                0,
                0,
                size,
                0,
                0,
                seq,
                peer,
                STRINGS.index(name),
                number,
                microbatch,
                chunk,
                KIND[kind],
                0,
                0,
            )
        )
        self.keys[stage].append(key)
        self.rows[stage].append(rows)
        self.data[stage].append(data)
        return len(self.records[stage]) - 1

    def template(self) -> Template:
        stages, width = len(self.records), max(map(len, self.records))
        spans = np.zeros((stages, width), SPAN)
        per_step = np.zeros((stages, width), np.int64)
        valid = np.zeros((stages, width), bool)
        rows = np.full((stages, width, 3), -1, np.int64)
        data = np.full((stages, width), -1, np.int64)
        for stage, records in enumerate(self.records):
            count = len(records)
            spans[stage, :count] = np.array(records, SPAN)
            valid[stage, :count] = True
            rows[stage, :count] = self.rows[stage]
            data[stage, :count] = self.data[stage]
            per_step[stage, :count] = [
                0 if key is None else self.on_edge[key] if isinstance(key, tuple) else self.seqs[stage][key]
                for key in self.keys[stage]
            ]
        return Template(
            spans=spans,
            per_step=per_step,
            valid=valid,
            rows=rows,
            data=data,
            world_seq=self.columns.groups.index(self.named["world"]) + 1,
            columns=self.columns,
        )
