"""``python -m tests.coverage_gate``: list the touch points of a tree, or run the gate and print a verdict."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.coverage_gate.case import all_cases
from tests.coverage_gate.gate import judge, read_unreachable
from tests.coverage_gate.points import installed_root, list_points
from tests.coverage_gate.runs import run_cases
from tests.emulators import environment


def main(arguments: list[str] | None = None) -> int:
    """0: listed, or the gate is open. 1: the gate is shut or a named test failed. 2: wrong use."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage_gate", description=__doc__)
    parser.add_argument("action", choices=("list", "run"))
    parser.add_argument("--root", type=Path, default=None, help="a megatron/core folder; default: installed")
    parser.add_argument("--all", action="store_true", help="list: also what the rules set aside")
    parser.add_argument("--target", choices=("cpu", "musa"), default="cpu", help="run: on which backend")
    parser.add_argument("--tests", action="store_true", help="run: print the tests that execute each point")
    chosen = parser.parse_args(arguments)
    points = list_points(chosen.root or installed_root())
    if chosen.action == "list":
        for point in points:
            if not point.set_aside:
                print(f"{point.kind:13s} {point.where}\n              {point.key}")
            elif chosen.all:
                print(f"{'-':13s} {point.where}\n              {point.set_aside}")
        return 0
    emulator = environment() if chosen.target == "musa" else None
    run = run_cases(all_cases(), chosen.target, environment=emulator)
    unreachable = read_unreachable(target=chosen.target)
    verdict = judge(points, run.records, unreachable, run.patches, chosen.target)
    for name, error in run.errors.items():
        print(f"FAILED {name}\n{error}")
    if chosen.tests:
        for point in points:
            if point.key in verdict.executed:
                print(f"{point.where}\n    {', '.join(verdict.executed[point.key])}")
    print("\n".join(verdict.problems))
    print(verdict.summary())
    return 1 if verdict.problems or run.errors else 0


if __name__ == "__main__":
    sys.exit(main())
