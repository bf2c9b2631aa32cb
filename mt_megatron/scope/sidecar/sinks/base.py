"""What a sink is, and sinks by name: each imports its package only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from mt_megatron.errors import ScopeError

NAMES = ("tensorboard", "wandb", "trackio")

FORM = "tensorboard:FOLDER, wandb:PROJECT or trackio:PROJECT"


class Sink(Protocol):
    """Takes numbers of steps. Methods raise what the package raises; the caller then does without it."""

    title: str

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of ``step`` by name; the same step may come again with further names."""

    def close(self) -> None:
        """Finish."""


class SinkError(ScopeError):
    """A sink cannot be made: its package is missing, or it refuses."""


def made(texts: Sequence[str], run: Path, say: Callable[[str], None]) -> list[Sink]:
    """Sinks of ``texts`` (``FORM``); one that cannot be made is told in a line and left out."""
    found: list[Sink] = []
    for text in texts:
        try:
            found.append(make(text, run))
        except SinkError as error:
            say(f"scope: nothing goes to {text}: {error}")
    return found


def make(text: str, run: Path) -> Sink:
    """One sink. Raises ``SinkError``."""
    name, _, argument = text.partition(":")
    if name not in NAMES or not argument:
        raise SinkError(f"found the sink {text!r}; expected {FORM}")
    try:
        sink: Sink = import_module(f"mt_megatron.scope.sidecar.sinks.{name}").open_sink(argument, run)
        return sink
    except ImportError as error:
        raise SinkError(
            f"the package {name} is not installed; pip install 'mt_megatron[{name}]' ({error})"
        ) from error
    except SinkError:
        raise
    except Exception as error:
        raise SinkError(f"{type(error).__name__}: {error}") from error
