"""The panel of a run: one look says how far it is, how it learns, how fast it is and how long it takes."""

from __future__ import annotations

import io
import math
import os
import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
