"""What a person sees of a run: plain lines, or on a terminal a panel with notes above it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

from mt_megatron.training.logging.moe_metrics import shown
from mt_megatron.training.logging.panel import Panel
from mt_megatron.training.logging.quantities import duration, gibibytes, significant
from mt_megatron.training.logging.terminal import LiveRegion, can_be_redrawn

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
