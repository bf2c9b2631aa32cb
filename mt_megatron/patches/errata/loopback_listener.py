"""No listener beyond loopback: the one 0.9.0 opens is pinned to 127.0.0.1."""

from __future__ import annotations

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="listeners.straggler_controller",
            target="megatron.core.utils:StragglerDetector._controller",
            kind="constant",
            feature="device",
            reason="the straggler detector's control port listens on all interfaces, without a token",
            body={"0.0.0.0": "127.0.0.1"},
            digest="af7e81419077ee6e94d00418b4d3b4186665efab621ebf07701c31fbda414cac",
        )
    ]
