"""Input of a simulation: times, bytes, links and sizes of a run, a configuration, a cluster, or by hand."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.errors import ConfigError
from mt_megatron.near_names import hint
from mt_megatron.pipeline.actions import Placement, Schedule
from mt_megatron.pipeline.compare import with_chunks
from mt_megatron.pipeline.csv_form import read_csv
from mt_megatron.pipeline.generate.catalogue import NAMES, SHORT_NAMES, V_SHAPED, generate
from mt_megatron.pipeline.simulate.costs import Costs, Edge, Link
from mt_megatron.pipeline.validate import check
from mt_megatron.scan.analysis.pipeline_steps import MeasuredPipeline, measured_pipelines, slowest
from mt_megatron.scan.analysis.trace import open_trace

_GBIT = 1e9 / 8
"""Bytes per second of 1 Gb/s."""


@dataclass(frozen=True)
class Cluster:
    """Devices and a model of a size for them: assumptions but for the number of devices and their network."""

    about: str
    options: tuple[str, ...]
    world_size: int
    devices_per_node: int
    gbit: float
    """Between nodes, of each device."""


CLUSTERS = {
    "8x200g": Cluster(
        "8 x H100 in 8 nodes with a 200 Gb/s port each, Llama 3 8B, PP 8, 32 micro-batches of 8,192 tokens",
        ("--model llama3_8b --bf16 --pipeline-model-parallel-size 8 --global-batch-size 32",),
        8,
        1,
        200.0,
    ),
    "64x200g": Cluster(
        "64 x H100 in 8 nodes with one 200 Gb/s port each, Llama 3 70B, TP 8, PP 8, 32 micro-batches of "
        "8,192 tokens",
        (
            "--model llama3_70b --bf16 --tensor-model-parallel-size 8 --sequence-parallel",
            "--pipeline-model-parallel-size 8 --global-batch-size 32",
        ),
        64,
        8,
        25.0,
    ),
}
"""The sizes and the network of MegatronApp's published clusters. Simulated: nothing was run on either."""

_LINK = re.compile(r"(\d+)-(\d+):(.+)")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Costs of a pipeline, and where they come from."""

    about: tuple[str, ...]
    """Lines for the reader."""

    samples: tuple[Costs, ...]
    """Costs of single steps where they were measured, otherwise one."""

    placement: Placement
    """That of ``samples``."""

    microbatches: int
    measured: MeasuredPipeline | None = None

    def samples_of(self, schedule: Schedule) -> list[Costs]:
        """The samples cut into as many chunks as ``schedule`` has."""
        return [with_chunks(each, self.placement, schedule.placement.chunks) for each in self.samples]

    def schedule(self, text: str) -> Schedule:
        """The schedule that NAME, NAME:NUMBER or FILE.csv stands for, checked."""
        made = self._made(text)
        check(made)
        return made

    def _made(self, text: str) -> Schedule:
        if text.endswith(".csv"):
            made = read_csv(text)
            if made.placement.ranks != self.placement.ranks:
                raise ConfigError(
                    f"{text} has {made.placement.ranks} ranks; expected {self.placement.ranks}, as what is "
                    "simulated has"
                )
            return made
        name, _, number = text.partition(":")
        name = SHORT_NAMES.get(name, name.replace("-", "_"))
        if name not in NAMES:
            raise ConfigError(
                f"found the pipeline schedule {text!r}; expected one of {', '.join(NAMES)}, or a FILE.csv."
                f"{hint(name, list(NAMES))}"
            )
        if number and not number.isdecimal():
            raise ConfigError(f"found the pipeline schedule {text!r}; expected {name}:NUMBER")
        chunks = self.placement.chunks
        if name in V_SHAPED:
            chunks = 2
        elif name == "1f1b":
            chunks = 1
        elif name == "interleaved":
            chunks = max(2, chunks)
        options: dict[str, Any] = {}
        if name == "memory_capped":
            options["costs"] = with_chunks(self.samples[0], self.placement, chunks)
        if number:
            options["cap" if name == "memory_capped" else "group"] = int(number)
        return generate(
            name, ranks=self.placement.ranks, chunks=chunks, microbatches=self.microbatches, **options
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare where the costs come from."""
    group = parser.add_argument_group(
        "what is simulated", "a traced run, a cluster, options of mt-megatron pretrain, or sizes and times"
    )
    group.add_argument("--from", dest="run_folder", type=Path, metavar="RUN", help="folder of a traced run")
    group.add_argument(
        "--cluster", choices=sorted(CLUSTERS), help="; ".join(f"{n}: {c.about}" for n, c in CLUSTERS.items())
    )
    group.add_argument("--world-size", type=int, metavar="N", help="devices, with --model")
    group.add_argument("--device", metavar="NAME", help="device, with --model (H100)")
    group.add_argument("--ranks", type=int, metavar="P", help="pipeline ranks (4)")
    group.add_argument("--chunks", type=int, metavar="V", help="model chunks of each rank (1)")
    group.add_argument("--microbatches", type=int, metavar="M", help="micro-batches of a step (2 P)")
    group.add_argument("--forward", type=float, metavar="S", help="seconds of a rank's forward (1)")
    group.add_argument("--backward", type=float, metavar="S", help="of its whole backward (2)")
    group.add_argument("--weight", type=float, metavar="S", help="of its weight gradients (half of that)")
    group.add_argument("--message-mb", type=float, metavar="MB", help="1e6 bytes of a message (0)")
    group.add_argument("--latency-ms", type=float, metavar="MS", help="of every link")
    group.add_argument("--link-gbit", type=float, metavar="GBIT", help="Gb/s of every link")
    group.add_argument(
        "--slow-link",
        action="append",
        default=[],
        metavar="A-B:latency_ms=X,gbit=Y",
        help="both directions between two pipeline ranks; repeatable",
    )


def setting_of(args: argparse.Namespace) -> Setting:
    """Setting that ``args`` describe. Raises ConfigError where they describe none, or more than one."""
    by_hand = [
        name for name in ("ranks", "forward", "backward", "weight", "message_mb") if _given(args, name)
    ]
    sources = {
        "--from": args.run_folder is not None,
        "--cluster": args.cluster is not None,
        "options of pretrain": bool(args.config_argv),
        "--" + "/--".join(by_hand).replace("_", "-"): bool(by_hand),
    }
    given = [name for name, is_given in sources.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"found {' and '.join(given)}; expected one of them: each says what is simulated")
    for name in ("world_size", "device"):
        if _given(args, name) and not args.config_argv:
            raise ConfigError(
                f"found --{name.replace('_', '-')} {getattr(args, name)} without options of pretrain; "
                "expected it beside --model: a traced run, a cluster and sizes by hand have their own devices"
            )
    if args.run_folder is not None:
        found = _of_run(args)
    elif args.cluster is not None:
        cluster = CLUSTERS[args.cluster]
        argv = [word for part in cluster.options for word in part.split()]
        found = _of_configuration(argv, cluster.world_size, "H100", cluster)
    elif args.config_argv:
        found = _of_configuration(args.config_argv, args.world_size, args.device or "H100", None)
    else:
        found = _by_hand(args)
    if args.microbatches is not None and args.microbatches < 1:
        raise ConfigError(f"--microbatches is {args.microbatches}; expected at least 1")
    if args.chunks is not None:
        _at_least_one(args, "chunks")
        cut = tuple(with_chunks(each, found.placement, args.chunks) for each in found.samples)
        found = replace(found, samples=cut, placement=Placement(found.placement.ranks, args.chunks))
    linked = tuple(_linked(each, found.placement.ranks, args) for each in found.samples)
    return replace(found, samples=linked, microbatches=args.microbatches or found.microbatches)


def _given(args: argparse.Namespace, name: str) -> bool:
    return getattr(args, name) is not None


def _at_least_one(args: argparse.Namespace, name: str) -> None:
    if getattr(args, name) < 1:
        raise ConfigError(f"--{name} is {getattr(args, name)}; expected at least 1")


def _of_run(args: argparse.Namespace) -> Setting:
    trace = open_trace(args.run_folder)
    measured = slowest(measured_pipelines(trace))
    simulated = measured.seconds(measured.program())
    ranks = ", ".join(map(str, measured.ranks))
    lines = [
        f"{trace.files.root}: ranks {ranks}, {measured.schedule.name}, "
        f"{measured.schedule.microbatches} micro-batches, {measured.steps} steps"
        + (" (a simulated trace)" if trace.simulated else ""),
        f"pipeline of a step: {measured.pipeline_seconds * 1e3:.4g} ms measured, {simulated * 1e3:.4g} ms "
        f"simulated ({simulated / measured.pipeline_seconds - 1:+.1%}); whole step "
        f"{measured.step_seconds * 1e3:.4g} ms",
    ]
    if not measured.weight_measured:
        lines.append("weight gradients were not measured apart: half of the backward is assumed")
    if unused := sorted(_ring(len(measured.ranks)) - set(measured.costs.links)):
        link = measured.costs.link
        took = link.latency + float(np.mean(measured.costs.message)) / link.bandwidth
        lines.append(
            f"links that the run did not use count like its median one, {took * 1e3:.4g} ms a message: "
            + ", ".join(f"{sender} -> {receiver}" for sender, receiver in unused)
        )
    return Setting(
        about=tuple(lines),
        # Other numbers of micro-batches than the run's have the medians.
        samples=measured.samples if args.microbatches is None else (measured.costs,),
        placement=measured.schedule.placement,
        microbatches=measured.schedule.microbatches,
        measured=measured,
    )


def _ring(ranks: int) -> set[Edge]:
    """Both directions between neighbours, the last and the first rank among them."""
    after = {(rank, (rank + 1) % ranks) for rank in range(ranks)}
    return after | {(receiver, sender) for sender, receiver in after}


def _of_configuration(
    argv: list[str], world_size: int | None, device: str, cluster: Cluster | None
) -> Setting:
    # These take a while to import, and a traced run needs none of them.
    from mt_megatron.planning.hardware import hardware_of
    from mt_megatron.planning.memory import placement_of
    from mt_megatron.planning.memory_estimate import memory_case
    from mt_megatron.planning.pipeline_costs import pipeline_costs
    from mt_megatron.planning.validate.experts import expert_problems
    from mt_megatron.planning.validate.fp8 import fp8_layer_problems
    from mt_megatron.planning.validate.model import model_problems
    from mt_megatron.planning.validate.parallel import parallel_problems
    from mt_megatron.training.init_from_hf import load_run

    config = load_run(argv)
    if world_size is None:
        raise ConfigError("--world-size is not given; expected the number of devices beside --model")
    if problems := [
        *model_problems(config),
        *parallel_problems(config, world_size),
        *expert_problems(config, world_size),
        *fp8_layer_problems(config),
    ]:
        raise ConfigError("the layout is impossible:\n" + "\n".join(f"- {line}" for line in problems))
    if config.parallel.pipeline_model_parallel_size == 1:
        raise ConfigError("--pipeline-model-parallel-size is 1; expected at least 2 ranks of a pipeline")
    hardware = hardware_of(
        device,
        devices_per_node=None if cluster is None else cluster.devices_per_node,
        inter_node_gbps=None if cluster is None else cluster.gbit / 8,
    )
    case = memory_case(config, world_size)
    about = (
        cluster.about if cluster else f"{config.model.preset or 'model'} on {world_size} x {hardware.name}"
    )
    return Setting(
        about=(about, "times and bytes by the cost model of mt-megatron plan: estimates, not measurements"),
        samples=(pipeline_costs(case, hardware),),
        placement=placement_of(case),
        microbatches=case.num_microbatches,
    )


def _by_hand(args: argparse.Namespace) -> Setting:
    ranks = 4 if args.ranks is None else args.ranks
    if ranks < 1:
        raise ConfigError(f"--ranks is {ranks}; expected at least 1")
    forward = 1.0 if args.forward is None else args.forward
    backward = 2.0 * forward if args.backward is None else args.backward
    weight = backward / 2 if args.weight is None else args.weight
    if not (0 < forward < math.inf and 0 <= weight <= backward < math.inf):
        raise ConfigError(
            f"found --forward {forward:g}, --backward {backward:g} and --weight {weight:g}; expected a time "
            "above 0, and weight gradients as a part of the backward"
        )
    message = 0.0 if args.message_mb is None else args.message_mb * 1e6
    return Setting(
        about=(
            f"{ranks} ranks; forward {forward:g} s, backward {backward:g} s of which weights {weight:g} s",
        ),
        samples=(Costs(forward=forward, backward=backward, weight=weight, message=message),),
        placement=Placement(ranks),
        microbatches=2 * ranks,
    )


def _linked(costs: Costs, ranks: int, args: argparse.Namespace) -> Costs:
    """``costs`` with the links that the options name."""
    if args.latency_ms is not None or args.link_gbit is not None:
        costs = replace(
            costs,
            link=_link(costs.link, args.latency_ms, args.link_gbit),
            links={edge: _link(link, args.latency_ms, args.link_gbit) for edge, link in costs.links.items()},
        )
    links: dict[Edge, Link] = dict(costs.links)
    for text in args.slow_link:
        match = _LINK.fullmatch(text)
        parts = dict(part.partition("=")[::2] for part in match[3].split(",")) if match else {}
        if match is None or not parts or not set(parts) <= {"latency_ms", "gbit"}:
            raise ConfigError(f"--slow-link is {text!r}; expected A-B:latency_ms=X, A-B:gbit=Y or both")
        one, other = int(match[1]), int(match[2])
        if max(one, other) >= ranks or one == other:
            raise ConfigError(f"--slow-link is {text!r}; expected two of the ranks 0 to {ranks - 1}")
        try:
            values = {name: float(value) for name, value in parts.items()}
        except ValueError:
            raise ConfigError(f"--slow-link is {text!r}; expected numbers") from None
        for edge in ((one, other), (other, one)):
            links[edge] = _link(costs.link_of(edge), values.get("latency_ms"), values.get("gbit"))
    return replace(costs, links=links)


def require_used(slow_links: Sequence[str], edges: Collection[Edge], what: str) -> None:
    """Raise ConfigError for a ``--slow-link`` that carries nothing: over none of ``edges``, those of
    ``what``."""
    for text in slow_links:
        match = _LINK.fullmatch(text)
        assert match is not None  # ``setting_of`` has read it.
        one, other = int(match[1]), int(match[2])
        if (one, other) not in edges and (other, one) not in edges:
            pairs = sorted({(min(edge), max(edge)) for edge in edges})
            raise ConfigError(
                f"--slow-link is {text!r}; expected two ranks that send each other something under {what}: "
                + (", ".join(f"{low}-{high}" for low, high in pairs) or "there are none")
            )


def _link(before: Link, latency_ms: float | None, gbit: float | None) -> Link:
    return Link(
        before.latency if latency_ms is None else latency_ms / 1e3,
        before.bandwidth if gbit is None else gbit * _GBIT,
        before.window,
    )
