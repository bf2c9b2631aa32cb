"""``mt-megatron scan simulate``: a labelled trace of a simulated run, for drills, tests and measurements.

The simulator is ``tools/scan_simulator`` of a checkout; the installed package does not carry it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mt_megatron
from mt_megatron.errors import ConfigError

_CHECKOUT = Path(mt_megatron.__file__).resolve().parents[1]

_DESCRIPTION = """\
Simulate the training of a dense or expert model and write the trace that its ranks would have written.
Waiting follows from what must have happened before; nothing is measured. run.json says "simulated": true.
What is wrong with the run is written to --truth alone, which must lie outside OUT.
Needs a checkout of the repository: the simulator is not part of the installed package.
"""

_EPILOG = """\
faults (each --fault one; first= and last= are steps, from 1):
  slow_compute:rank=3,factor=1.2             the same work takes longer
  host_contention:rank=3,share=0.3           others take that part of its processor (mode=load), or a
                                             quota keeps it (mode=quota)
  host_pause:rank=3,seconds=0.5,every=2      its process stands still (mode=stop), or collects garbage (gc)
  slow_data:rank=3,factor=4                  its batches take longer to make
  slow_checkpoint:rank=3,factor=3            its checkpoint takes longer to write
  uneven_work:rank=3,factor=1.3              more tokens for its experts, or without experts its replica
  slow_link:ranks=2-3,latency_ms=5           both directions of one pair; or bandwidth=0.25
  slow_group:group=tp,rank=3,bandwidth=0.25  every link of the group that the rank is in
  slow_node_link:host=1,bandwidth=0.25       every link across the border of a machine
  hang:rank=3,first=20                       it stops for ever in that step

example:
  mt-megatron scan simulate RUN --layout dp=4,tp=2,pp=2 --fault slow_compute:rank=3,factor=1.2,first=20 \\
      --steps 50 --truth truth.json

exit codes: 0 fine, 2 wrong use
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "simulate",
        help="write the trace of a simulated run with known faults",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the run's folder; made if needed")
    parser.add_argument(
        "--layout",
        default="dp=2,tp=2,pp=2",
        help="sizes out of dp, tp, pp, cp, ep, vpp and ranks_per_node (default: %(default)s; 8 a node)",
    )
    parser.add_argument("--fault", action="append", default=[], metavar="FAULT", help="see below; repeatable")
    parser.add_argument("--steps", type=int, default=50, help="steps (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="per step (default: %(default)s)")
    parser.add_argument(
        "--events-per-step",
        type=int,
        metavar="N",
        help="about so many spans per rank and step, by the number of layers (default: 2 layers a chunk)",
    )
    parser.add_argument("--packed", action="store_true", help="micro-batches differ in tokens")
    parser.add_argument(
        "--distributed-optimizer", action="store_true", help="reduce-scatter and all-gather, not all-reduce"
    )
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="N", help="steps (default: none)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random (default: 0)")
    parser.add_argument("--truth", type=Path, metavar="FILE", help="where to write what is wrong, as JSON")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Simulate; returns the exit code."""
    _find_simulator()
    from tools.scan_simulator import (
        Job,
        parse_fault,
        parse_layout,
        simulate,
        with_events,
        write_truth,
    )

    faults = [parse_fault(text) for text in args.fault]
    job = Job(
        layout=parse_layout(args.layout),
        steps=args.steps,
        microbatches=args.microbatches,
        packed=args.packed,
        distributed_optimizer=args.distributed_optimizer,
        checkpoint_every=args.checkpoint_every,
    )
    if args.events_per_step is not None:
        if args.events_per_step < 1:
            raise ConfigError(f"--events-per-step {args.events_per_step}; expected at least 1")
        job = with_events(job, args.events_per_step)
    if args.truth is not None and args.truth.resolve().is_relative_to(args.out.resolve()):
        raise ConfigError(f"--truth {args.truth} lies within {args.out}; choose a file elsewhere")
    if args.truth is not None and not args.truth.resolve().parent.is_dir():
        raise ConfigError(f"--truth is {args.truth}; expected a file in a folder that exists")

    def said(step: int) -> None:
        if sys.stderr.isatty():
            print(f"\rstep {step} of {job.steps}", end="", file=sys.stderr, flush=True)

    truth = simulate(args.out, job, faults, seed=args.seed, progress=said)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if args.truth is not None:
        write_truth(args.truth, args.out, truth)
    print(
        f"simulated {truth.steps} steps of {job.layout.world_size} ranks: {truth.events} events in {args.out}"
        + (f", {len(faults)} fault(s) in {args.truth}" if args.truth is not None else "")
    )
    return 0


def _find_simulator() -> None:
    """Make ``tools.scan_simulator`` importable. Raises ``ConfigError`` where there is no checkout."""
    if not (_CHECKOUT / "tools" / "scan_simulator" / "__init__.py").is_file():
        raise ConfigError(
            f"mt_megatron is installed in {_CHECKOUT}, without tools/scan_simulator; scan simulate needs a "
            "checkout of the repository. Clone it, install it there with pip install -e . and run the "
            "command again"
        )
    # The scripts of an editable install have the package alone on their path.
    if str(_CHECKOUT) not in sys.path:
        sys.path.insert(0, str(_CHECKOUT))
