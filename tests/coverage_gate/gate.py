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
FAKE_CUDA = Path(__file__).with_name("unreachable_fake_cuda.toml")
TARGETS = ("cpu", "musa", "cuda")
"""Backends that points are executed on: the cpu, the emulated musa device, fake CUDA tensors."""


class GateError(AssertionError):
    """The gate is shut; the message names every point that is to blame."""


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """Why a touch point cannot be executed on a target."""

    reason: str
    patch: str = ""
    """Id of the patch that puts other code in the point's place, when that is the reason."""
    device: bool = False
    """Whether a named test executes it on the cpu here and, by ``tests/device``, on a real device."""


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
    target: str = "cpu"

    def summary(self) -> str:
        """The two counts, and what was set aside by rule."""
        replaced = sum(1 for entry in self.unreachable.values() if entry.patch)
        deferred = sum(1 for entry in self.unreachable.values() if entry.device)
        place = {"cpu": "cpu", "musa": "emulated musa", "cuda": "fake cuda"}[self.target]
        on_device = f", {deferred} left to a named test on a real device" if deferred else ""
        lines = [
            "device touch points in megatron.core:",
            f"  {len(self.executed):3d} executed by a named test on {place}",
            f"  {len(self.unreachable):3d} unreachable there, with a reason ({replaced} replaced by a patch"
            f"{on_device})",
            "mentions that are no touch point:",
            *(f"  {count:3d} {rule}" for rule, count in sorted(self.set_aside.items())),
        ]
        return "\n".join(lines)

    def require(self) -> None:
        """Raise ``GateError`` when anything is wrong."""
        if self.problems:
            raise GateError("\n".join([f"{len(self.problems)} problem(s):", *self.problems, self.summary()]))


def read_unreachable(path: Path = UNREACHABLE, target: str = "cpu") -> dict[str, Unreachable]:
    """Point key -> reason on ``target``, from ``[[group]]`` tables of ``file``, ``reason``, ``points``,
    ``patch``, ``device`` and ``targets`` (by default all of them)."""
    import tomllib

    table = tomllib.loads(path.read_text(encoding="utf-8"))
    entries: dict[str, Unreachable] = {}
    for number, group in enumerate(table.get("group", []), start=1):
        if set(group) - {"patch", "device", "targets"} != {"reason", "file", "points"}:
            raise GateError(
                f"{path.name}: group {number} has the keys {sorted(group)}; "
                "expected file, points and reason, and at most patch, device and targets beside them"
            )
        targets = group.get("targets", list(TARGETS))
        if not targets or set(targets) - set(TARGETS):
            raise GateError(f"{path.name}: group {number} names the targets {targets}; expected of {TARGETS}")
        if len(group["reason"].split()) < 4:
            raise GateError(f"{path.name}: group {number} gives no reason that a reader could check")
        for at in group["points"] if target in targets else ():
            key = f"{group['file']} {at}"
            if key in entries:
                raise GateError(f"{path.name}: {key} is listed twice")
            entries[key] = Unreachable(
                reason=group["reason"], patch=group.get("patch", ""), device=bool(group.get("device", False))
            )
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
    target: str = "cpu",
    on_cpu: Collection[str] = (),
) -> Verdict:
    """Compare; executions outside named tests (``IMPORTS``) do not count.

    ``on_cpu`` are keys that named tests executed on the cpu: what a list leaves to a real device, where
    the same tests run, must be among them.
    """
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
        elif entry.device and key not in on_cpu:
            problems.append(f"left to a real device, but no named test executes it: {touch[key].where}")
        elif entry.patch and entry.patch not in patches:
            problems.append(
                f"{touch[key].where} is said to be replaced by {entry.patch}, which is not applied"
            )
    return Verdict(
        executed={key: tests[key] for key in touch if key in tests},
        unreachable={k: e for k, e in unreachable.items() if k in touch and k not in tests},
        set_aside=set_aside,
        problems=problems,
        target=target,
    )
