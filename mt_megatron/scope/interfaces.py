"""Arguments of a session: options, facts of the run, the control that hears commands, the sidecar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Options:
    """Extent of the recording, and where it goes."""

    live: bool = True
    """Whether the sidecar of rank 0's node serves the page."""

    interval: int = 20
    """Steps from one recording of the statistics to the next."""

    watch: tuple[str, ...] = ()
    """Requests from the start on."""

    port: int = 0
    retain_mib: int = 512
    sinks: tuple[str, ...] = ()
    """Where the sidecar of rank 0's node also sends its numbers, as ``scope.sidecar.sinks.base`` reads it."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of the run that the session cannot see."""

    micro_batch_size: int
    seq_length: int
    global_batch_size: int | None = None
    """Sequences of a step, at most where their number rises; None: not known."""

    vocab_size: int | None = None
    """Of the tokenizer; None: every row of the embedding counts."""

    model: Mapping[str, Any]
    """Name, sizes and precision, for readers."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of a completed step."""

    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    skipped: bool


class Perturbing(Protocol):
    """Perturbations (``scope.lab``)."""

    @property
    def perturbed(self) -> str | None:
        """What the weights or values of this step were perturbed by; None: nothing."""


class Controlling(Protocol):
    """Commands (``scope.control``). All calls but ``put`` are the training thread's."""

    @property
    def lab(self) -> Perturbing:
        """What perturbs the run."""

    @property
    def wants_attention(self) -> bool:
        """Whether all ranks should call ``attend`` after this step; any rank's word counts."""

    def start(self) -> None:
        """Hear commands from now on."""

    def put(self, command: Mapping[str, Any]) -> None:
        """Take a ``command`` frame; any thread."""

    def begin_step(self, step: int) -> None:
        """Before the step."""

    def end_step(self, step: int) -> None:
        """After the step."""

    def attend(self) -> None:
        """Do what was commanded; collective, between two steps."""

    def close(self) -> None:
        """End it; no collective."""


class Sidecar(Protocol):
    """The process beside a node's first rank."""

    @property
    def socket(self) -> Path:
        """Where ranks connect."""

    def start(self) -> None:
        """Start it; returns at once."""

    def has_told(self, seconds: float) -> bool:
        """Whether it has ended by an error, and said so, or does within ``seconds``; any thread."""

    def close(self) -> None:
        """End it."""


@dataclass(frozen=True, kw_only=True)
class NoLab:
    """Perturbs nothing."""

    perturbed: str | None = None


class NoControl:
    """Hears nothing and does nothing."""

    lab = NoLab()
    wants_attention = False

    def start(self) -> None:
        pass

    def put(self, command: Mapping[str, Any]) -> None:
        pass

    def begin_step(self, step: int) -> None:
        pass

    def end_step(self, step: int) -> None:
        pass

    def attend(self) -> None:
        pass

    def close(self) -> None:
        pass


MakeSidecar = Callable[..., Sidecar]
"""``(run, node, *, ranks, retain_mib, port, sinks, say)``; ``port`` None where no page is served."""
