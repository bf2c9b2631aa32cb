"""A step that is sampled: its open taps, and what they have seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from mt_megatron.scope.watch.parts import Parts
from mt_megatron.scope.watch.tensors import Tensors
from mt_megatron.seams.taps import Watch


@dataclass(kw_only=True)
class SampledStep:
    """State of one."""

    iteration: int
    sampled: bool
    """Whether the statistics are recorded of it, not requests alone."""

    parts: Parts
    tensors: Tensors
    opened: list[Watch] = field(default_factory=list)

    def close(self) -> None:
        """Leave every module as it was."""
        for watch in reversed(self.opened):
            watch.close()
        self.opened = []
