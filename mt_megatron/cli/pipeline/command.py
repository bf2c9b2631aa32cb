"""``mt-megatron pipeline``: schedules of a pipeline, simulated. Each action is a module of this folder.

Such a module has ``add_parser(subparsers) -> argparse.ArgumentParser``, which sets ``func(args) -> int``.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

WORDS = ("simulate", "draw", "compare", "explain")
"""Actions, in the order of ``--help``."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand and its actions."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "pipeline",
        description="Simulate the schedules of a pipeline: how long a step takes, how long ranks wait, what\n"
        "it keeps in memory and asks of the links (simulated); and what 'auto' decided in a run (measured).",
        epilog="examples:\n  mt-megatron pipeline simulate zb_h1 --from runs/llama3\n"
        "  mt-megatron pipeline draw interleaved --ranks 4 --chunks 2 --microbatches 8 --output step.svg\n"
        "  mt-megatron pipeline compare --cluster 64x200g\n"
        "  mt-megatron pipeline explain runs/llama3\n\n"
        "exit codes: 0 fine, 1 a problem was found, 2 wrong use or no such trace",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for word in WORDS:
        import_module(f"mt_megatron.cli.pipeline.{word}").add_parser(actions)
    return parser
