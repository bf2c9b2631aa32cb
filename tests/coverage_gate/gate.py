"""Judges the records of named tests against the touch points of a source tree and the list of exceptions."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.coverage_gate.points import Point
from tests.coverage_gate.tracer import IMPORTS

UNREACHABLE = Path(__file__).with_name("unreachable.toml")


class GateError(AssertionError):
    """The gate is shut; the message names every point that is to blame."""


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """Why a touch point cannot be executed on the cpu backend."""

    reason: str
    patch: str = ""
    """Id of the patch that puts other code in the point's place, when that is the reason."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the gate found."""

    executed: Mapping[str, Sequence[str]]
    """Point key -> names of the tests that executed it."""
    unreachable: Mapping[str, Unreachable]
    """Point key -> reason."""
    set_aside: Mapping[str, int]
    """Rule -> number of mentions that it set aside."""
    problems: Sequence[str]

    def summary(self) -> str:
        """The two counts, and what was set aside by rule."""
        replaced = sum(1 for entry in self.unreachable.values() if entry.patch)
        lines = [
            "device touch points in megatron.core:",
            f"  {len(self.executed):3d} executed by a named test on cpu",
            f"  {len(self.unreachable):3d} unreachable there, with a reason ({replaced} replaced by a patch)",
            "mentions that are no touch point:",
            *(f"  {count:3d} {rule}" for rule, count in sorted(self.set_aside.items())),
        ]
        return "\n".join(lines)

    def require(self) -> None:
        """Raise ``GateError`` when anything is wrong."""
        if self.problems:
            raise GateError("\n".join([f"{len(self.problems)} problem(s):", *self.problems, self.summary()]))


def read_unreachable(path: Path = UNREACHABLE) -> dict[str, Unreachable]:
    """Point key -> reason, from ``[[group]]`` tables of ``file``, ``reason``, ``points``, ``patch``."""
    import tomllib

    table = tomllib.loads(path.read_text(encoding="utf-8"))
    entries: dict[str, Unreachable] = {}
    for number, group in enumerate(table.get("group", []), start=1):
        if set(group) - {"patch"} != {"reason", "file", "points"}:
            raise GateError(
                f"{path.name}: group {number} has the keys {sorted(group)}; "
                "expected file, points and reason, and at most patch beside them"
            )
        if len(group["reason"].split()) < 4:
            raise GateError(f"{path.name}: group {number} gives no reason that a reader could check")
        for at in group["points"]:
            key = f"{group['file']} {at}"
            if key in entries:
                raise GateError(f"{path.name}: {key} is listed twice")
            entries[key] = Unreachable(reason=group["reason"], patch=group.get("patch", ""))
    return entries


def read_records(folder: Path) -> dict[str, set[str]]:
    """Test name -> keys of the points it executed, merged over the ranks that ran it."""
    merged: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        merged[record["test"]].update(record["points"])
    return dict(merged)


def judge(
    points: Sequence[Point],
    records: Mapping[str, Collection[str]],
    unreachable: Mapping[str, Unreachable],
    patches: Collection[str],
) -> Verdict:
    """Compare; executions outside named tests (``IMPORTS``) do not count."""
    tests: dict[str, list[str]] = defaultdict(list)
    for test, keys in sorted(records.items()):
        if test != IMPORTS:
            for key in keys:
                tests[key].append(test)
    touch = {point.key: point for point in points if not point.set_aside}
    set_aside: dict[str, int] = defaultdict(int)
    for point in points:
        if point.set_aside:
            set_aside[point.set_aside] += 1
    problems = []
    for key, point in touch.items():
        if key not in tests and key not in unreachable:
            problems.append(
                f"not executed by any named test: {point.where}\n    in {point.file}: {key.partition(' ')[2]}"
            )
        elif key in tests and key in unreachable:
            problems.append(
                f"listed as unreachable, but executed by {', '.join(tests[key])}: {point.where}\n"
                f"    take it off {UNREACHABLE.name}"
            )
    for key, entry in unreachable.items():
        if key not in touch:
            problems.append(f"stale entry in {UNREACHABLE.name}: no such touch point: {key}")
        elif entry.patch and entry.patch not in patches:
            problems.append(
                f"{touch[key].where} is said to be replaced by {entry.patch}, which is not applied"
            )
    return Verdict(
        executed={key: tests[key] for key in touch if key in tests},
        unreachable={k: e for k, e in unreachable.items() if k in touch and k not in tests},
        set_aside=set_aside,
        problems=problems,
    )
