"""Random numbers of a step, keyed by stage and micro-batch so that the order of execution does not matter.

Each generator of the device (the default one and those of Megatron-Core's tracker) gets, before each
computation, a state derived from its state at the step's begin, the stage, the micro-batch and the kind of
the computation. After the step it has a state derived from the one at the begin alone: the next step, and a
checkpoint between two steps, do not depend on the schedule. Megatron-Core's recomputation restores the states
of the forward pass by itself. The host's generators are left alone: batches may come from them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from mt_megatron.backends.base import Backend
from mt_megatron.errors import ConfigError

_DEFAULT = ""
"""The device's default generator among the names of the tracker."""


class KeyedRandom:
    """The device's random states from the begin of a step to its end."""

    def __init__(self, backend: Backend) -> None:
        """Notes the states as they are. Raises ConfigError for a tracker whose states are not tensors
        (Transformer Engine's, for CUDA graphs)."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        self._backend = backend
        self._tracker: Any = get_cuda_rng_tracker()
        self._begin: dict[str, torch.Tensor] = {
            _DEFAULT: backend.get_rng_state(),
            **self._tracker.get_states(),
        }
        for name, state in self._begin.items():
            if not isinstance(state, torch.Tensor):
                raise ConfigError(
                    f"found random state {name!r} of type {type(state).__name__}; expected a tensor: a "
                    "pipeline schedule of ours derives states per micro-batch. Leave use_te_rng_tracker and "
                    "enable_cuda_graph out, or take --pipeline-schedule 1f1b or interleaved"
                )
        self._keys = {
            name: hashlib.sha256(name.encode() + b"\0" + state.cpu().numpy().tobytes()).digest()
            for name, state in self._begin.items()
        }

    def enter(self, kind: str, stage: int, microbatch: int) -> None:
        """Set the states for one computation."""
        self._set(f"{kind} {stage} {microbatch}")

    def leave(self) -> None:
        """Set the states that the next step begins with."""
        self._set("next")

    def undo(self) -> None:
        """Set the states that this step began with."""
        self._put(dict(self._begin))

    def _set(self, text: str) -> None:
        seeds = {name: self._seed(name, text) for name in self._keys}
        states = {}
        for name, seed in seeds.items():
            self._backend.manual_seed(seed)
            states[name] = self._backend.get_rng_state()
        self._put(states)

    def _put(self, states: dict[str, torch.Tensor]) -> None:
        self._backend.set_rng_state(states.pop(_DEFAULT))
        if states:
            # Without any the tracker is not in use, and must not be told that it is.
            self._tracker.set_states(states)

    def _seed(self, name: str, text: str) -> int:
        digest = hashlib.blake2b(self._keys[name] + text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1
