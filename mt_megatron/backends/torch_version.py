"""Which torch this is, where its behaviour differs and no feature tells."""

from __future__ import annotations

import torch


def torch_is_before(major: int, minor: int) -> bool:
    """Whether torch's release is older than ``major.minor``."""
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return found < (major, minor)
