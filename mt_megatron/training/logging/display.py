"""What a person sees of a run: plain lines, or on a terminal a panel with notes above it.

The panel is the last lines of the terminal, drawn again and again: progress, loss, speed, time left.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

from mt_megatron.training.logging.moe_metrics import shown
from mt_megatron.training.logging.quantities import DASH, duration, gibibytes, significant

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


_WIDEST = 104
_WIDE = 92
_NARROW = 60
_HISTORY = 240
_BLOCKS = "▁▂▃▄▅▆▇█"
_LABEL, _VALUE, _LOSS, _VALID, _BAR = "grey62", "bold", "bold cyan", "bold orange3", "cyan"


class Panel:
    """The newest state of a run, and how to draw it at any size of terminal."""

    def __init__(
        self, train_iters: int, *, title: str = "", subtitle: str = "", encoding: str | None = None
    ) -> None:
        self.train_iters = train_iters
        self.title = title
        self.subtitle = subtitle
        self.iteration = 0
        self.validation: float | None = None
        self.values: Mapping[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._console_made: Console | None = None
        self._encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"

    def update(self, iteration: int, values: Mapping[str, Any]) -> None:
        """A report: the values of the JSON record of ``iteration``."""
        self.iteration = iteration
        self.values = values
        loss = values.get("loss")
        if loss is not None and math.isfinite(loss):
            self._losses.append(float(loss))

    def render(self, columns: int, rows: int) -> tuple[str, int]:
        """The panel as text with colours, and the width of its lines; one line where there is no room."""
        width = min(columns - 1, _WIDEST) if columns > 1 else 1
        console = self._console(width)
        lines = 8 if width >= _WIDE else 10
        if width < _NARROW or rows < lines + 2:
            text = self.one_line()[:width]
            return text, width
        with console.capture() as capture:
            console.print(self.renderable(width), width=width)
        return capture.get().rstrip("\n"), width

    def one_line(self) -> str:
        """Step, loss and remaining time, for a terminal without room."""
        loss = self.values.get("loss")
        shown = DASH if loss is None else f"{loss:.4f}"
        line = f"step {self.iteration}/{self.train_iters}  loss {shown}  {self._left()} left"
        return line.encode(self._encoding, errors="replace").decode(self._encoding)

    def renderable(self, width: int) -> RenderableType:
        """The panel as rich draws it, ``width`` columns wide."""
        from rich import box
        from rich.console import Group
        from rich.panel import Panel as Frame
        from rich.text import Text

        return Frame(
            Group(self._progress(), Text(""), self._figures(width)),
            title=Text(self.title, style="bold default") if self.title else None,
            title_align="left",
            subtitle=Text(self.subtitle, style=_LABEL) if self.subtitle else None,
            subtitle_align="left",
            border_style="grey37",
            box=box.ROUNDED,
            padding=(0, 1),
            width=width,
        )

    def _progress(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        for _ in range(2):
            row.add_column(no_wrap=True, justify="right")
        share = self.iteration / max(1, self.train_iters)
        done = Text.assemble(
            ("step ", _LABEL), (f"{self.iteration:,}", _VALUE), (f" / {self.train_iters:,}", _LABEL)
        )
        left = Text.assemble((self._left(), _VALUE), (" left", _LABEL))
        done.append(" ")
        bar = ProgressBar(
            total=max(1, self.train_iters),
            completed=self.iteration,
            complete_style=_BAR,
            finished_style="green",
            style="grey23",
        )
        row.add_row(done, bar, Text(f"{100 * share:.0f} %", style=_VALUE), left)
        return row

    def _figures(self, width: int) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        wide = width >= _WIDE
        columns = self._columns(curve=14 if width >= 100 else 6 if width >= 70 else 0)
        table = Table.grid(expand=True, padding=(0, 2 if wide else 1))
        for index in range(3 if wide else 2):
            table.add_column(no_wrap=True, style=_LABEL)
            table.add_column(no_wrap=True, ratio=1 if index == 0 else None)
        if not wide:
            first, second, third = columns
            columns = [[*first, *second[2:]], [*second[:2], *third]]
        for row in zip(*columns, strict=True):
            table.add_row(*(Text(part) if isinstance(part, str) else part for cell in row for part in cell))
        return table

    def _columns(self, *, curve: int) -> list[list[tuple[str, Any]]]:
        """Three columns of four cells, each a label and a value; ``curve`` is the loss curve's width."""
        from rich.text import Text

        values = self.values

        def shown(name: str, form: str, scale: float = 1.0) -> Text:
            value = values.get(name)
            return Text(DASH if value is None else form.format(scale * value), style=_VALUE)

        loss = shown("loss", "{:.4f}")
        loss.stylize(_LOSS)
        blocks = sparkline(list(self._losses), curve, self._encoding)
        if blocks:
            loss.append(f"  {blocks}", style="cyan")
        valid = Text(DASH if self.validation is None else f"{self.validation:.4f}", style=_VALID)
        flops = values.get("flops_per_second_per_device")
        per_device = Text(DASH if flops is None else significant(flops / 1e12), style=_VALUE)
        used, total = values.get("memory_bytes"), values.get("device_memory_total")
        memory = DASH if used is None else f"{gibibytes(used)} GiB"
        if used is not None and total is not None:
            memory = f"{gibibytes(used)} / {gibibytes(total)} GiB"
        lr = values.get("lr")
        return [
            [
                ("loss", loss),
                ("validation", valid),
                ("grad norm", shown("grad_norm", "{:.3f}")),
                ("learning rate", Text(DASH if lr is None else f"{lr:.3g}", style=_VALUE)),
            ],
            [
                ("tokens/s", shown("tokens_per_second", "{:,.0f}")),
                ("TFLOP/s / device", per_device),
                ("MFU", self._mfu()),
                ("step", shown("step_seconds", "{:.3g} s")),
            ],
            [
                ("utilisation", shown("utilization", "{:.0f} %")),
                ("communication", shown("communication_share", "{:.0f} %", 100)),
                ("memory", Text(memory, style=_VALUE)),
                ("skipped", self._skipped()),
            ],
        ]

    def _mfu(self) -> Any:
        from rich.text import Text

        mfu = self.values.get("mfu")
        if mfu is not None:
            return Text(f"{100 * mfu:.1f} %", style=_VALUE)
        return Text("no peak" if self.values else DASH, style=_LABEL if self.values else _VALUE)

    def _skipped(self) -> Any:
        from rich.text import Text

        skipped = self.values.get("skipped_iterations", 0)
        return Text(f"{skipped:,}", style="bold red" if skipped else _VALUE)

    def _left(self) -> str:
        seconds = self.values.get("step_seconds")
        return DASH if seconds is None else duration((self.train_iters - self.iteration) * seconds)

    def _console(self, width: int) -> Console:
        from rich.console import Console

        if self._console_made is not None and self._console_made.width == width:
            return self._console_made
        # Written to nowhere: only its capture is used. The real stream's encoding decides about boxes.
        stream = io.TextIOWrapper(io.BytesIO(), encoding=self._encoding, errors="replace")
        colours = "NO_COLOR" not in os.environ
        self._console_made = Console(
            file=stream,
            force_terminal=True,
            color_system="auto" if colours else None,
            width=width,
            legacy_windows=False,
            highlight=False,
        )
        return self._console_made


def sparkline(values: list[float], width: int, encoding: str = "utf-8") -> str:
    """``values`` as at most ``width`` blocks, lowest to highest; empty where they cannot be shown."""
    if width < 2 or len(values) < 2 or not encoding.lower().startswith("utf"):
        return ""
    count = min(width, len(values))
    means = []
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    if high - low <= 0:
        return _BLOCKS[3] * count
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in means)


Render = Callable[[int, int], tuple[str, int]]
"""(columns, rows of the terminal) -> text without a final line break, and the columns of its widest line."""

_SECONDS_BETWEEN = 1.0


def can_be_redrawn(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that understands cursor movements."""
    try:
        terminal = stream.isatty()
    except ValueError:
        return False
    return terminal and os.environ.get("TERM", "") not in ("", "dumb")


class LiveRegion:
    """A region below everything else that is printed.

    While it is open ``sys.stdout``, ``sys.stderr`` and the root logger's handlers write above
    it, line by line. What goes to the terminal past Python (a library's C code, a child process)
    lands below and may leave a copy of the region behind; it never breaks the run. No thread draws:
    loader processes are forked while this is open, and a thread's lock could be copied locked.
    """

    def __init__(
        self, stream: TextIO, render: Render, *, size: Callable[[], tuple[int, int]] | None = None
    ) -> None:
        self._stream = stream
        self._render = render
        self._size = size if size is not None else self._terminal_size
        self._lock = threading.RLock()
        self._lines = 0
        self._width = 0
        self._columns = 0
        self._drawn_at = 0.0
        self._open = True
        self._undo = contextlib.ExitStack()
        self._divert()

    def draw_if_due(self) -> None:
        """Draw unless it was drawn a moment ago."""
        if time.monotonic() - self._drawn_at >= _SECONDS_BETWEEN:
            self.draw()

    def draw(self) -> None:
        """Draw it as it is now."""
        self._put("")

    def print(self, text: str) -> None:
        """``text``, whole lines, above the region; they stay."""
        self._put(text)

    def close(self) -> None:
        """Draw it a last time, leave it standing, and give the streams back."""
        self.draw()
        self._open = False
        self._undo.close()

    def _put(self, above: str) -> None:
        with self._lock:
            if not self._open:
                return
            columns, rows = self._size()
            body, width = self._render(columns, rows)
            text = self._clear(columns, rows) + above + body + "\n"
            self._lines, self._width, self._columns = body.count("\n") + 1, width, columns
            self._drawn_at = time.monotonic()
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                # The terminal is gone, the run is not.
                self._open = False
                self._undo.close()

    def _clear(self, columns: int, rows: int) -> str:
        """Cursor to where the region began, and everything below removed."""
        if not self._lines:
            return ""
        # A terminal that became narrower has broken each of our lines into several.
        per_line = -(-self._width // columns) if columns < self._columns else 1
        up = min(self._lines * max(1, per_line), rows - 1)
        # Not all at once: cleared from its first cell on, a screen may be kept in the scrollback.
        return f"\r\x1b[{up}A\x1b[K\x1b[1B\x1b[J\x1b[1A"

    def _terminal_size(self) -> tuple[int, int]:
        try:
            found = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            found = shutil.get_terminal_size()
        # Some terminals say 0 x 0 while they start.
        return max(1, found.columns or 80), max(1, found.lines or 24)

    def _divert(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not self._stream and not can_be_redrawn(stream):
                continue
            above = _Above(stream, self)
            setattr(sys, name, above)
            self._undo.callback(_give_back, name, above, stream)
            for handler in logging.root.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                    handler.setStream(above)
                    self._undo.callback(handler.setStream, stream)


def _give_back(name: str, above: _Above, stream: TextIO) -> None:
    above.finish()
    if getattr(sys, name) is above:
        setattr(sys, name, stream)


class _Above:
    """A stream whose whole lines appear above the region; the rest of a line waits for its end."""

    def __init__(self, stream: TextIO, region: LiveRegion) -> None:
        self._stream = stream
        self._region = region
        self._pending = ""
        self._process = os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._process:
            # A forked child has no region of its own.
            return self._stream.write(text)
        whole, newline, self._pending = (self._pending + text).rpartition("\n")
        if newline:
            self._region.print(whole + newline)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Write what never became a line."""
        if self._pending:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(self._pending + "\n")
            self._pending = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


Mode = Literal["auto", "panel", "plain"]


class Display:
    """Lines for a person, of one rank. On a terminal a panel shows the newest report below them.

    Nothing here raises because nobody reads any longer: a run does not end with its terminal.
    """

    def __init__(
        self,
        train_iters: int,
        *,
        enabled: bool,
        stream: TextIO | None = None,
        mode: Mode = "auto",
        title: str = "",
        subtitle: str = "",
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._enabled = enabled
        self._train_iters = train_iters
        self._wants_panel = enabled and (mode == "panel" or (mode == "auto" and can_be_redrawn(self._stream)))
        self.panel = Panel(train_iters, title=title, subtitle=subtitle)
        self._region: LiveRegion | None = None

    def open(self) -> None:
        """Show the panel, where there is one; until then, and after ``close``, lines are plain."""
        if self._wants_panel and self._region is None:
            self._region = LiveRegion(self._stream, self.panel.render)

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self._enabled:
            return
        if self._region is not None:
            self._region.print(line + "\n")
        else:
            self._print(line)

    def tick(self, iteration: int) -> None:
        """A step is done; a panel moves its bar, at most once a second."""
        if self._region is not None:
            self.panel.iteration = iteration
            self._region.draw_if_due()

    def step(self, iteration: int, values: Mapping[str, Any]) -> None:
        """The state after ``iteration``; ``values`` are those of the JSON record."""
        if not self._enabled:
            return
        if self._region is not None:
            self.panel.update(iteration, values)
            self._region.draw()
        else:
            self._print(format_step(iteration, self._train_iters, values))

    def validation(self, loss: float) -> None:
        """The newest validation loss, for the panel; the line about it is said by the caller."""
        self.panel.validation = loss

    def close(self) -> None:
        """Leave the newest state standing."""
        if self._region is not None:
            self._region.close()
            self._region = None

    def _print(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except (OSError, ValueError) as error:
            self._enabled = False
            _let_go(self._stream, error)


def _let_go(stream: TextIO, error: Exception) -> None:
    # Python would flush what is left once more at exit, complain, and change the exit code.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    with contextlib.suppress(OSError, ValueError):
        print(f"mt-megatron: no more lines are shown ({error}); training goes on", file=sys.stderr)


def format_step(iteration: int, train_iters: int, values: Mapping[str, Any]) -> str:
    """One step as text, with the time the rest will take. What is not known is left out."""
    norm = values["grad_norm"]
    parts = [
        f"step {iteration:>{len(str(train_iters))}}/{train_iters}",
        f"loss {values['loss']:.4f}",
        f"lr {values['lr']:.3g}",
        "grad norm " + ("-" if norm is None else f"{norm:.3f}"),
        f"{values['tokens_per_second']:,.0f} tokens/s",
        f"{duration((train_iters - iteration) * values['step_seconds'])} left",
    ]
    flops, share = values.get("flops_per_second_per_device"), values.get("communication_share")
    if flops is not None:
        parts.append(f"{significant(flops / 1e12)} TFLOP/s")
    if values.get("mfu") is not None:
        parts.append(f"MFU {100 * values['mfu']:.1f} %")
    if share is not None:
        parts.append(f"communication {100 * share:.0f} %")
    if values.get("memory_bytes") is not None:
        parts.append(f"memory {gibibytes(values['memory_bytes'])} GiB")
    parts += shown(values)
    if values["skipped_iterations"]:
        parts.append(f"{values['skipped_iterations']} skipped")
    return "  ".join(parts)
