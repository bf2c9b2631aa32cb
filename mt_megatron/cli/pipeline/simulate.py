"""``mt-megatron pipeline simulate``: one schedule under the costs of a run, a configuration or a cluster."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.actions import Schedule
from mt_megatron.pipeline.compare import has_sizes, typical
from mt_megatron.pipeline.draw import figures, seconds
from mt_megatron.pipeline.generate.catalogue import NAMES, V_SHAPED
from mt_megatron.pipeline.simulate.demands import TOLERANCE, demands
from mt_megatron.pipeline.simulate.memory import activation_peaks
from mt_megatron.pipeline.simulate.program import Program
from mt_megatron.pipeline.simulate.timeline import Timeline
from mt_megatron.pipeline.upstream import upstream_calls
from mt_megatron.scan.analysis.pipeline_steps import MeasuredPipeline

from .setting import Setting, add_options, require_used, setting_of


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    text = "one schedule: step, bubble, memory, links"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "simulate",
        help=text,
        description="Simulate a step: how long it takes, who waits, what every rank keeps, which link costs\n"
        "how much, and what the schedule demands of its links. SCHEDULE is NAME, NAME:NUMBER or FILE.csv;\n"
        "with --from the run's own schedule unless another is named.",
        epilog="examples:\n  mt-megatron pipeline simulate --from runs/llama3\n"
        "  mt-megatron pipeline simulate zb_h1 --ranks 8 --microbatches 32 --slow-link 3-4:latency_ms=500\n"
        "  mt-megatron pipeline simulate --cluster 8x200g --json\n\n"
        "exit codes: 0 fine, 1 a problem was found, 2 wrong use or no such trace",
    )
    parser.usage = "mt-megatron pipeline simulate [--schedule SCHEDULE] [options] [options of pretrain]"
    parser.add_argument("--schedule", metavar="SCHEDULE", help="the first word is it too (1f1b)")
    parser.add_argument(
        "--blocking",
        action="store_true",
        help="1f1b and interleaved as Megatron-Core runs them, whose ranks wait for their exchanges",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser)
    parser.set_defaults(func=run, config_arguments=True, leading_word="--schedule")
    return parser


def timed(args: argparse.Namespace) -> tuple[Setting, Timeline]:
    """The step that ``args`` ask for."""
    setting = setting_of(args)
    if args.schedule is None and setting.measured is not None:
        schedule = _own_schedule(setting, setting.measured, args)
        program = setting.measured.program(schedule, "blocking" if args.blocking else None)
    else:
        schedule = setting.schedule(args.schedule or "1f1b")
        program = Program(schedule, calls=upstream_calls(schedule) if args.blocking else None)
    require_used(args.slow_link, program.edges, f"schedule {schedule.name}")
    return setting, program.run(typical(program, setting.samples_of(schedule)))


def _own_schedule(setting: Setting, measured: MeasuredPipeline, args: argparse.Namespace) -> Schedule:
    """The schedule of a traced run, made anew for the sizes that ``args`` change."""
    if args.chunks is None and args.microbatches is None:
        return measured.schedule
    name = measured.schedule.name
    if name not in NAMES:
        raise ConfigError(
            "the run's schedule is none of the generated ones, so that it cannot have other sizes; expected "
            f"--schedule beside --chunks or --microbatches, one of {', '.join(NAMES)}, or neither"
        )
    chunks = measured.schedule.placement.chunks
    if name in V_SHAPED and args.chunks not in (None, chunks):
        raise ConfigError(
            f"--chunks is {args.chunks} and the run's schedule is {name}, which has {chunks} on each rank; "
            "expected --schedule with the name of another beside it, such as depth_first, or no --chunks"
        )
    if name in ("1f1b", "interleaved"):  # Names of Megatron-Core's schedule by the number of chunks.
        name = "interleaved" if setting.placement.chunks > 1 else "1f1b"
    return setting.schedule(name)


def run(args: argparse.Namespace) -> int:
    """Print the simulated step; returns the exit code."""
    setting, timeline = timed(args)
    data = as_data(setting, timeline)
    if args.json:
        print(json.dumps(data, indent=2))
        return 0
    print("\n".join([*setting.about, "", figures(timeline), ""]))
    for rank in data["ranks"]:
        memory = f", {rank['peak_bytes'] / 2**30:.1f} GiB" if rank["peak_bytes"] else ""
        print(
            f"  rank {rank['rank']}: computes {seconds(rank['busy_seconds'])}, idle {rank['idle']:.1%}, "
            f"keeps {rank['peak_activations']} activations{memory}"
        )
    print("\nlinks (a perfect one would shorten the step by):")
    for link in data["links"]:
        gbit = f", {link['gbit']:.4g} Gb/s" if link["gbit"] is not None else ""
        print(
            f"  {link['from']} -> {link['to']}: {seconds(link['latency_seconds'])}{gbit}, {link['messages']} "
            f"messages: {seconds(link['costs_seconds'])}"
        )
    needs = data["demands"]
    print(
        f"\nlinks may cost {TOLERANCE:.0%} of the step: "
        + (f"{needs['bandwidth'] * 8 / 1e9:.4g} Gb/s, or " if needs["bandwidth"] else "")
        + f"{seconds(needs['latency'])} of delay on every message\na message may take "
        f"{seconds(needs['send_window'])} before it is waited for, a gradient reduction "
        f"{seconds(needs['reduction_window'])}; on average, over perfect links"
    )
    return 0


def as_data(setting: Setting, timeline: Timeline) -> dict[str, Any]:
    """The step as plain values; bytes are 0 where sizes are not known."""
    program, costs = timeline.program, timeline.costs
    lost = program.edge_costs(costs)
    messages = [transfer.edge for transfer in timeline.transfers]
    peaks = timeline.peaks
    known = has_sizes(costs)
    return {
        "simulated": True,
        "about": list(setting.about),
        "schedule": program.schedule.name,
        "chunks": program.schedule.placement.chunks,
        "microbatches": program.schedule.microbatches,
        "step_seconds": timeline.makespan,
        "bubble": timeline.bubble,
        "ranks": [
            {
                "rank": rank,
                "busy_seconds": float(timeline.busy[rank]),
                "idle": float(timeline.idle[rank] / timeline.makespan),
                "peak_activations": peak,
                "peak_bytes": float(peaks[rank]) if known else 0.0,
            }
            for rank, peak in enumerate(activation_peaks(program.schedule))
        ],
        "links": [
            {
                "from": edge[0],
                "to": edge[1],
                "latency_seconds": costs.link_of(edge).latency,
                "gbit": _gbit(costs.link_of(edge).bandwidth),
                "messages": messages.count(edge),
                "costs_seconds": lost[edge],
            }
            for edge in sorted(program.edges)
        ],
        "demands": asdict(demands(program, costs)),
    }


def _gbit(bandwidth: float) -> float | None:
    return None if bandwidth == float("inf") else bandwidth * 8 / 1e9
