"""What a person sees: plain lines that can be searched, a panel that survives prints and resizes."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_megatron.training import signals
from mt_megatron.training.logging.display import (
    Display,
    LiveRegion,
    Panel,
    can_be_redrawn,
    format_step,
    sparkline,
)

VALUES = {
    "loss": 3.14159,
    "lr": 2e-3,
    "grad_norm": 1.25,
    "tokens_per_second": 12345.6,
    "step_seconds": 0.5,
    "skipped_iterations": 0,
}
FULL = {
    **VALUES,
    "flops_per_second_per_device": 4.1e14,
    "mfu": 0.4143,
    "communication_share": 0.12,
    "utilization": 97.0,
    "memory_bytes": 3 * 2**30,
    "device_memory_total": 80 * 2**30,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Screen:
    """As much of a terminal as a region needs: lines wrap, and wrap anew when the width changes."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.logical: list[str] = [""]
        self.row = 0
        """The logical line of the cursor, which is always at a line's beginning or at the very end."""

    def physical(self, line: str) -> int:
        return max(1, -(-len(line) // self.columns))

    def feed(self, text: str) -> None:
        for part in re.split(r"(\x1b\[[0-9;]*[A-Za-z]|\r|\n)", text):
            if part == "\n":
                self.row += 1
                if self.row == len(self.logical):
                    self.logical.append("")
            elif part.endswith("A") and part.startswith("\x1b"):
                up = int(part[2:-1])
                while up > 0 and self.row > 0:
                    self.row -= 1
                    up -= self.physical(self.logical[self.row])
                assert up >= 0, "the cursor would stop within a wrapped line"
            elif part == "\x1b[1B":
                self.row += 1
            elif part == "\x1b[K":
                self.logical[self.row] = ""
            elif part == "\x1b[J":
                assert self.row > 0, "some terminals keep a screen that is cleared from its first cell on"
                del self.logical[self.row + 1 :]
                self.logical[self.row] = ""
            elif part and not part.startswith("\x1b") and part != "\r":
                self.logical[self.row] += part


@pytest.fixture(autouse=True)
def _a_terminal_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


def test_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    display = Display(100, enabled=True, stream=stream)
    display.open()
    display.step(1, VALUES)
    display.tick(2)
    display.step(2, VALUES)
    display.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()
    assert lines[0] == "step   1/100  loss 3.1416  lr 0.002  grad norm 1.250  12,346 tokens/s  0:50 left"


def test_what_is_known_is_on_the_line_and_the_rest_is_not() -> None:
    line = format_step(1, 10, FULL)
    assert line.endswith("410 TFLOP/s  MFU 41.4 %  communication 12 %  memory 3.00 GiB")
    unknown = {**FULL, "mfu": None, "communication_share": None, "memory_bytes": None}
    assert format_step(1, 10, unknown).endswith("left  410 TFLOP/s")


def test_skipped_steps_and_missing_norm_are_shown() -> None:
    line = format_step(1, 10, {**VALUES, "grad_norm": None, "skipped_iterations": 3})
    assert "grad norm -" in line and line.endswith("3 skipped")


def test_other_ranks_say_nothing() -> None:
    stream = Terminal()
    display = Display(100, enabled=False, stream=stream, mode="panel")
    display.open()
    display.step(1, VALUES)
    display.tick(2)
    display.say("x")
    display.close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("term", ["", "dumb"])
def test_a_terminal_without_cursor_gets_plain_lines(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    assert not can_be_redrawn(Terminal())
    stream = Terminal()
    display = Display(100, enabled=True, stream=stream)
    display.open()
    display.step(1, VALUES)
    assert "\x1b" not in stream.getvalue()


def test_a_reader_that_leaves_does_not_end_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    display = Display(100, enabled=True, stream=stream)
    display.say("one")
    os.close(reading)
    display.say("two")
    display.step(1, VALUES)
    display.close()
    stream.close()
    assert capfd.readouterr().err.count("no more lines are shown") == 1


def panel(columns: int, rows: int = 40, *, encoding: str = "utf-8", **values: Any) -> list[str]:
    drawn = Panel(800, title="run", subtitle="cpu", encoding=encoding)
    for step in range(1, 50):
        drawn.update(step, {**FULL, "loss": 9 - math.log(step), **values})
    drawn.validation = 4.25
    text, width = drawn.render(columns, rows)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).split("\n")
    assert all(len(line) <= width < max(2, columns) for line in lines)
    return lines


def test_the_panel_shows_everything() -> None:
    shown = "\n".join(panel(110))
    for piece in (
        "step 49 / 800", "6 %", "6:16 left", "5.1082", "4.2500", "1.250", "0.002", "12,346", "410", "41.4 %",
        "0.5 s", "97 %", "12 %", "3.00 / 80.0 GiB", "run", "cpu",
    ):  # fmt: skip
        assert piece in shown, piece


@pytest.mark.parametrize("columns", [109, 93, 80, 62])
def test_no_figure_is_cut_off_at_any_width_with_a_panel(columns: int) -> None:
    shown = "\n".join(panel(columns))
    assert "…" not in shown
    assert all(piece in shown for piece in ("5.1082", "12,346", "41.4 %", "3.00 / 80.0 GiB", "12 %", "97 %"))


@pytest.mark.parametrize(("columns", "rows"), [(59, 40), (20, 40), (3, 40), (1, 1), (120, 9)])
def test_without_room_it_is_one_line(columns: int, rows: int) -> None:
    lines = panel(columns, rows)
    assert len(lines) == 1
    assert "step 49/800".startswith(lines[0]) or lines[0].startswith("step 49/800")


def test_what_is_unknown_is_a_dash_and_never_zero() -> None:
    unknown = dict.fromkeys(
        ("utilization", "communication_share", "memory_bytes", "flops_per_second_per_device", "grad_norm"),
        None,
    )
    shown = "\n".join(panel(110, mfu=None, **unknown))
    for name in ("utilisation", "communication", "memory", "TFLOP/s / device", "grad norm"):
        assert re.search(rf"{name}\s+-", shown), name
    assert re.search(r"MFU\s+no peak", shown)


def test_an_ascii_terminal_gets_ascii() -> None:
    assert all(line.isascii() for line in panel(110, encoding="ascii"))


def test_the_curve_goes_from_lowest_to_highest() -> None:
    assert sparkline([3.0, 2.0, 1.0], 3) == "█▅▁"
    assert sparkline([1.0, 1.0], 8) == "▄▄"
    assert sparkline([1.0], 8) == "" == sparkline([2.0, 1.0], 8, "latin-1")


def region_on(screen: Screen, body: Callable[[], str]) -> LiveRegion:
    class Stream(Terminal):
        def write(self, text: str) -> int:
            screen.feed(text)
            return len(text)

    def render(columns: int, rows: int) -> tuple[str, int]:
        lines = [f"[{line}".ljust(min(columns - 1, 30), ".") for line in body().split("\n")]
        return "\n".join(lines), min(columns - 1, 30)

    sys.stdout = Stream()
    return LiveRegion(sys.stdout, render, size=lambda: (screen.columns, screen.rows))


EVENTS = st.one_of(
    st.tuples(st.just("say"), st.integers(0, 90)),
    st.tuples(st.just("resize"), st.integers(12, 60)),
    st.tuples(st.just("draw"), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=12))
def test_every_print_stays_and_the_region_is_there_once(happened: list[tuple[str, int]]) -> None:
    screen, said, before = Screen(40, 500), [], sys.stdout
    region = region_on(screen, lambda: "a\nb\nc")
    try:
        region.draw()
        for kind, number in happened:
            if kind == "say":
                said.append(str(number) * max(1, number % 30))
                print(said[-1])
            elif kind == "resize":
                screen.columns = number
            else:
                region.draw()
    finally:
        region.close()
        sys.stdout = before
    assert screen.logical[: len(said)] == said
    assert [line[:2] for line in screen.logical[len(said) :]] == ["[a", "[b", "[c", ""]


def test_prints_warnings_and_logs_go_above_and_streams_come_back() -> None:
    screen, before = Screen(80, 40), (sys.stdout, sys.stderr)
    handler = logging.StreamHandler(sys.stderr)
    logging.root.addHandler(handler)
    stream = Terminal()
    try:
        sys.stderr = stream
        handler.setStream(stream)
        region = region_on(screen, lambda: "panel")
        region.draw()
        sys.stderr.write("half ")
        assert not any("half" in line for line in screen.logical)
        sys.stderr.writelines(["a line\n", "tail"])
        logging.getLogger("colleague").warning("said")
        region.close()
        assert sys.stderr is stream and handler.stream is stream
    finally:
        sys.stdout, sys.stderr = before
        logging.root.removeHandler(handler)
    assert screen.logical[0] == "half a line"
    assert screen.logical[1].startswith("tail") and "said" in screen.logical[1]
    assert screen.logical[2].startswith("[panel")


def test_a_forked_child_writes_to_the_terminal_itself(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+") as real:
        before, sys.stderr = sys.stderr, real
        real.isatty = lambda: True  # type: ignore[method-assign]
        try:
            region = LiveRegion(real, lambda columns, rows: ("panel", 5))
            child = os.fork()
            if child == 0:
                sys.stderr.write("from the child")
                sys.stderr.flush()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            region.close()
        finally:
            sys.stderr = before
        real.seek(0)
        assert "from the child" in real.read()


def test_a_terminal_that_goes_away_gives_the_streams_back() -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    before = sys.stdout
    region = LiveRegion(Gone(), lambda columns, rows: ("panel", 5))
    region.draw()
    assert sys.stdout is before
    region.print("x\n")
    region.close()


def test_the_answer_to_a_ctrl_c_stays_above_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said by the thread that hears signals, at any moment of a panel's life."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    region = LiveRegion(stream, lambda columns, rows: ("PANEL", 5), size=lambda: (80, 24))
    region.draw()
    signals._say("Ctrl-C: saving after this step")
    for thread in threading.enumerate():
        if thread.name == "signals-say":
            thread.join(10)
    region.close()
    screen = Screen(80, 24)
    screen.feed(stream.getvalue())
    shown = [line for line in screen.logical if line]
    assert shown == ["Ctrl-C: saving after this step", "PANEL"]
