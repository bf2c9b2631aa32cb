"""Interface of sinks, and sinks by name: each imports its package only when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from mt_megatron.errors import ScopeError

DEFAULTS = {"tensorboard": "scope/tensorboard", "wandb": "mt_megatron", "trackio": "mt_megatron"}
"""Sinks, each named like its package, and what they write to unless told: a folder of the run, a project."""

FORM = "tensorboard[:FOLDER], wandb[:PROJECT] or trackio[:PROJECT]"


class Sink(Protocol):
    """Receiver of the numbers of steps. Methods raise whatever the package raises; the caller then does
    without it."""

    title: str

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of ``step`` by name; the same step may come again with further names."""

    def close(self) -> None:
        """Finish."""


class SinkError(ScopeError):
    """A sink cannot be made: its package is missing, or it refuses."""


def parsed(text: str) -> tuple[str, str]:
    """Name and argument of a sink. Raises ``SinkError`` for a text that is not of ``FORM``."""
    name, colon, argument = text.partition(":")
    if name not in DEFAULTS or bool(colon) != bool(argument) or not text.isprintable():
        raise SinkError(f"found the sink {text[:80]!r}; expected {FORM}")
    return name, argument or DEFAULTS[name]


def is_installed(name: str) -> bool:
    """Whether the package of the sink ``name`` is there; it is not imported."""
    return find_spec(name) is not None


def make(text: str, run: Path) -> Sink:
    """One sink. Raises ``SinkError``."""
    name, argument = parsed(text)
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
