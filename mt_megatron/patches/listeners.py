"""No listener beyond loopback: the one 0.9.0 opens is pinned to 127.0.0.1."""

from __future__ import annotations

from ..backends.base import Backend
from ..patching.spec import Patch


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="listeners.straggler_controller",
            target="megatron.core.utils:StragglerDetector._controller",
            kind="constant",
            feature="device",
            reason="the straggler detector's control port listens on all interfaces, without a token",
            body={"0.0.0.0": "127.0.0.1"},
            digest="77d4d0684a1396656f41594d358805cd6fb24ef4052654d20e45fe10ec7a5a0a",
        )
    ]
