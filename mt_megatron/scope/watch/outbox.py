"""Statistics and tensors of a step as parcels for the sender."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from mt_megatron.backends.base import Backend
from mt_megatron.scope.interfaces import StepFigures
from mt_megatron.scope.watch.head import SeenTokens
from mt_megatron.scope.watch.host_copies import Arrays, Copier
from mt_megatron.scope.watch.parts import Layout, Parts
from mt_megatron.scope.watch.sender import Frame, Parcel, Sender
from mt_megatron.scope.watch.tensors import Held, Tensors, frames_of

_TOGETHER = 64
"""Tensors of one parcel, at most."""

_PARCEL_BYTES = 4 * 2**20
"""Bytes of a parcel after which the next one begins: some copies are made of one that is encoded."""

_ABOUT = 512
"""Bytes of a frame beside its arrays."""


class Outbox:
    """One rank's frames. Nothing waits, neither for the device nor for the sidecar."""

    def __init__(self, sender: Sender, backend: Backend, *, tensor_parallel_size: int) -> None:
        self._sender = sender
        self._backend = backend
        self._copier = Copier(backend)
        self._parts = tensor_parallel_size
        self._schemas: dict[Layout, int] = {}
        self._left_out = (0, 0)
        """Parcels and bytes of tensors beyond what a rank sends of a step."""

        self._attempt, self._last = 0, -1
        self._beside = -1
        """The last attempt that is a step made beside the run."""

        self._sent: set[tuple[str, str | None]] = set()
        """Kinds and marks of the frames of the step ``_last``, be they dropped or not."""

    def frame(self, frame: Frame, *, must: bool = False) -> None:
        """Send ``frame``, which holds no tensor; ``must``: also where the queue is full."""
        self._sender.put(Parcel(frames=lambda: [frame], size=_ABOUT, must=must))

    def step(self, iteration: int, figures: StepFigures, seconds: float, perturbed: str | None) -> None:
        """What the step came to."""
        self.frame(
            {
                "k": "step",
                "i": iteration,
                "t": time.time_ns(),
                "seconds": seconds,
                "loss": figures.loss,
                "grad_norm": math.nan if figures.grad_norm is None else figures.grad_norm,
                "lr": figures.lr,
                "tokens": figures.tokens,
                "tokens_per_second": figures.tokens / seconds,
                "memory_bytes": self._backend.memory_allocated(),
                "skipped": figures.skipped,
                "perturbed": perturbed,
                "attempt": self._attempt_at(iteration, "step", perturbed),
            }
        )

    def _attempt_at(self, iteration: int, kind: str, mark: str | None) -> int:
        """Number of times that the run has gone back, or made a step beside itself, before this frame.
        Counted here, where all ranks do the same: the sidecar learns nothing of dropped frames."""
        if kind == "beside":
            self._attempt += 1
            self._beside, self._last, self._sent = self._attempt, iteration, set()
        elif iteration != self._last:
            self._attempt += iteration < self._last or self._attempt == self._beside
            self._last, self._sent = iteration, set()
        elif (kind, mark) in self._sent or any(sent != mark for _, sent in self._sent):
            self._attempt += 1
            self._sent = set()
        self._sent.add((kind, mark))
        return self._attempt

    def beside(self, iteration: int, mark: str) -> None:
        """A step begins that is made beside the run, whether something is recorded of it here or not."""
        self._attempt_at(iteration, "beside", mark)

    def back(self, iteration: int) -> None:
        """The run has gone back to the end of step ``iteration``."""
        self._attempt += 1
        self._last, self._sent = iteration, set()
        self.frame({"k": "back", "first": iteration + 1, "attempt": self._attempt}, must=True)

    def stats(self, iteration: int, parts: Parts, perturbed: str | None) -> None:
        """The step's partial sums."""
        attempt = self._attempt_at(iteration, "stats", perturbed)
        layout, vector, values = parts.taken()
        if not layout:
            return
        schema, copies = self._schema(layout), self._copier.copy([vector])
        beside = attempt == self._beside

        def frames() -> list[Frame]:
            found = values(copies()[0])
            about = {"k": "stats", "i": iteration, "perturbed": perturbed, "attempt": attempt}
            return [about | {"beside": beside, "id": schema, "values": found}]

        self._sender.put(Parcel(frames=frames, size=_size([vector]) + parts.nbytes + _ABOUT))

    def validation(self, iteration: int, sums: tuple[float, float], perturbed: str | None) -> None:
        """Sums of losses and tokens of an evaluation after ``iteration``. Left out where that step is not the
        one that was sent last: a start that only evaluates goes on from no step."""
        if iteration != self._last:
            return
        schema = self._schema((("", "validation_loss", 2),))
        about = {"k": "stats", "i": iteration, "perturbed": perturbed, "attempt": self._attempt}
        self.frame(about | {"beside": False, "id": schema, "values": np.asarray(sums, np.float64)})

    def tensors(self, iteration: int, tensors: Tensors, perturbed: str | None) -> None:
        """The step's tensors; what was left out of them counts as dropped."""
        if tensors.dropped:
            self._sender.count(tensors.dropped)
            self._left_out = (self._left_out[0] + 1, self._left_out[1] + tensors.dropped)
        common = {"i": iteration, "perturbed": perturbed, "attempt": self._attempt}
        for held in _parcelled(tensors.held):
            copied = [tensor for each in held for tensor in each.tensors()]
            size = _size(copied) + _ABOUT * len(held)
            about = [each.about() for each in held]
            self._sender.put(Parcel(frames=_Tensors(about, self._copier.copy(copied), common), size=size))

    def tokens(
        self, iteration: int, seen: Sequence[SeenTokens], perturbed: str | None, *, left_out: int = 0
    ) -> None:
        """Tokens of the step's logits; bytes ``left_out`` of them count as dropped."""
        if left_out:
            self._sender.count(left_out)
            self._left_out = (self._left_out[0] + 1, self._left_out[1] + left_out)
        for each in seen:
            frame = {
                "k": "tokens",
                "i": iteration,
                "perturbed": perturbed,
                "attempt": self._attempt,
                "path": each.path,
                "microbatch": each.microbatch,
                "sample": each.sample,
                "position": each.position,
                "parts": self._parts,
            }
            arrays = self._copier.copy(each.tensors)
            self._sender.put(Parcel(frames=_Tokens(frame, arrays), size=_size(each.tensors) + _ABOUT))

    @property
    def waiting(self) -> int:
        """Bytes that the sender has still to encode."""
        return self._sender.waiting

    @property
    def dropped(self) -> tuple[int, int]:
        """Parcels and bytes that the sidecar did not take in time."""
        frames, size = self._sender.dropped
        return frames - self._left_out[0], size - self._left_out[1]

    @property
    def ended(self) -> bool:
        """Whether nothing is sent any more."""
        return self._sender.ended is not None

    @property
    def connected(self) -> bool:
        """Whether a sidecar has ever listened."""
        return self._sender.connected

    def close(self) -> None:
        """Say goodbye and end the connection."""
        self.frame({"k": "bye"}, must=True)
        self._sender.close()

    def _schema(self, layout: Layout) -> int:
        """The number of ``layout``, which the sidecar is told first."""
        known = self._schemas.get(layout)
        if known is None:
            known = self._schemas[layout] = len(self._schemas)
            self.frame({"k": "schema", "id": known, "entries": [list(each) for each in layout]}, must=True)
        return known


def _parcelled(held: Sequence[Held]) -> Iterator[list[Held]]:
    together: list[Held] = []
    size = 0
    for each in held:
        own = _size(each.tensors())
        if together and (len(together) == _TOGETHER or size + own > _PARCEL_BYTES):
            yield together
            together, size = [], 0
        together.append(each)
        size += own
    if together:
        yield together


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


class _Tensors:
    def __init__(self, about: Sequence[Frame], arrays: Arrays, common: Frame) -> None:
        self._about, self._arrays, self._common = about, arrays, common

    def __call__(self) -> Iterable[Frame]:
        return frames_of(self._about, self._arrays, self._common)


class _Tokens:
    def __init__(self, frame: Mapping[str, Any], arrays: Arrays) -> None:
        self._frame, self._arrays = frame, arrays

    def __call__(self) -> Iterable[Frame]:
        ids, loss, entropy, top_ids, top_logprobs, lse = self._arrays()
        yield {
            **self._frame,
            "ids": ids,
            "loss": loss,
            "entropy": entropy,
            "top_ids": top_ids,
            "top_logprobs": top_logprobs,
            "lse": lse,
        }
