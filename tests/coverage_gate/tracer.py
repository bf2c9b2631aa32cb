"""Records which touch points a process really evaluates, by the bytecode that implements them.

Lines are too coarse (one line may hold both arms of a conditional), so each point is tied to the
instructions that CPython 3.11 attributes to its source span, and only functions that hold a point
are traced, instruction by instruction. A point counts as executed when one of its instructions is
about to run while a named test is current.
"""

from __future__ import annotations

import sys
import threading
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.coverage_gate.points import Point, Span

_FOLDABLE = frozenset({"literal", "tensor-type", "collective", "environment"})
IMPORTS = "import"
"""Name that executions outside any named test are recorded under."""


def anchors(source: str, points: Iterable[Point]) -> dict[Span, list[str]]:
    """Source span of the instructions that evaluate each point -> keys of those points.

    Normally that is the point's own span. Where the name of an attribute stands on a later line
    than its base, the compiler narrows the span to the name; a string in a constant list is folded
    into that list, whose span is taken. A point without an instruction of its own is left out and
    so can never count as executed.
    """
    spans = set(_spans(compile(source, "<anchors>", "exec", dont_inherit=True)))
    table: dict[Span, list[str]] = defaultdict(list)
    for point in points:
        if point.set_aside:
            continue
        narrow = (point.span[2], point.span[3] - len(point.text.rpartition(".")[2]), *point.span[2:])
        if point.span in spans:
            table[point.span].append(point.key)
        elif "." in point.text and narrow in spans:
            table[narrow].append(point.key)
        elif point.kind in _FOLDABLE:
            same_line = [s for s in spans if s[0] == s[2] == point.span[0] and _holds(s, point.span)]
            if same_line:
                table[min(same_line, key=lambda span: span[3] - span[1])].append(point.key)
    return dict(table)


class Tracer:
    """Traces one process; ``named`` switches the test that executions are booked to."""

    def __init__(self, root: Path, points: Iterable[Point]) -> None:
        self._prefix = str(root) + "/"
        by_file: dict[str, list[Point]] = defaultdict(list)
        for point in points:
            by_file[point.file].append(point)
        self._anchors = {
            self._prefix + file: anchors((root / file).read_text(encoding="utf-8"), held)
            for file, held in by_file.items()
        }
        self._plans: dict[types.CodeType, dict[int, list[str]] | None] = {}
        self._current: set[str] = set()
        self.records: dict[str, set[str]] = {IMPORTS: self._current}

    def start(self) -> None:
        """Trace this thread and every thread started from now on."""
        if sys.version_info[:2] != (3, 11):
            found = ".".join(map(str, sys.version_info[:2]))
            raise RuntimeError(f"the coverage gate reads CPython 3.11 bytecode positions, found {found}")
        threading.settrace(self._call)
        sys.settrace(self._call)

    def stop(self) -> None:
        """Stop tracing this thread and threads to come."""
        threading.settrace(None)  # type: ignore[arg-type]
        sys.settrace(None)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Book what runs inside to ``name``."""
        before, self._current = self._current, self.records.setdefault(name, set())
        try:
            yield
        finally:
            self._current = before

    def _call(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        try:
            plan = self._plans[code]
        except KeyError:
            plan = self._plans[code] = self._plan(code)
        if plan is None:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False

        def step(inner: types.FrameType, kind: str, value: Any) -> Any:
            if kind == "opcode":
                keys = plan.get(inner.f_lasti)
                if keys:
                    self._current.update(keys)
            return step

        return step

    def _plan(self, code: types.CodeType) -> dict[int, list[str]] | None:
        table = self._anchors.get(code.co_filename)
        if not table:
            return None
        plan: dict[int, list[str]] = {}
        for index, span in enumerate(code.co_positions()):
            start, end, column, last = span
            if None not in span and (keys := table.get((start, column, end, last))):  # type: ignore[arg-type]
                plan[index * 2] = keys
        return plan or None


def _spans(code: types.CodeType) -> Iterator[Span]:
    for start, end, column, last in code.co_positions():
        if start is not None and end is not None and column is not None and last is not None:
            yield start, column, end, last
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _spans(constant)


def _holds(outer: Span, inner: Span) -> bool:
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]
