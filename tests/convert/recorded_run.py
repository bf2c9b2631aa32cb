"""What a conversion says, kept for a test to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mt_megatron.convert.request import Outcome, Request
from mt_megatron.convert.run import convert


class Quiet:
    """Progress that nobody watches."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.total = 0
        self.done = 0

    def say(self, line: str) -> None:
        self.lines.append(line)

    def expect(self, total: int) -> None:
        self.total = total

    def advance(self, count: int) -> None:
        self.done += count


def converted(source: Path, destination: Path, form: str, *arguments: str, **more: Any) -> Outcome:
    """Convert, without a word; the source is a published folder if it has a ``config.json``."""
    progress = more.pop("progress", None) or Quiet()
    request = Request(
        source=source,
        published=(source / "config.json").is_file(),
        destination=destination,
        form=form,  # type: ignore[arg-type]
        arguments=arguments,
        **more,
    )
    return convert(request, progress)
