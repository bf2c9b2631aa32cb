"""Whether host memory can be pinned for a device: found out once, by doing it."""

from __future__ import annotations

import functools
import logging

import torch

_log = logging.getLogger("mt_megatron")


class PinnedMemory:
    """Pinned memory makes transfers asynchronous; without it they are right all the same."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    @functools.cache  # noqa: B019  (one object per backend, which lives as long as the process)
    def works(self) -> bool:
        """Whether ``torch.empty(..., pin_memory=True)`` works here. Says so, once, when it does not."""
        try:
            torch.empty(1, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            _log.warning(
                "pinned memory was asked for and %s cannot pin it (%s): ordinary memory is used, transfers "
                "wait for it",
                self._device_type,
                reason,
            )
            return False
        return True
