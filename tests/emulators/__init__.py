"""Stand-ins for accelerators that are not here. They prove code paths, never speed and never a driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SURFACE = FOLDER / "torch_musa_surface.txt"
"""The public names of torch_musa 2.7.1, with their signatures."""


def environment(capability: str | None = None) -> dict[str, str]:
    """Variables for a process (``run_ranks(env=...)``) that shall find the emulated ``torch_musa``;
    ``capability``, such as ``3.1``: of another card than the emulator's."""
    root = FOLDER.parent.parent
    path = [str(FOLDER), str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "MT_MEGATRON_TEST_BACKEND": "musa",
        # Each process has one emulated device, as where a launcher shows every process its own.
        "MUSA_VISIBLE_DEVICES": "0",
        **({"EMULATED_MUSA_CAPABILITY": capability} if capability else {}),
    }


def can_emulate_musa() -> bool:
    """Whether this torch lets Python code register a device."""
    from torch.utils import backend_registration

    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def needs_emulated_musa() -> Any:
    """A mark for tests on the emulated device."""
    import pytest

    return pytest.mark.skipif(
        not can_emulate_musa(),
        reason="this torch registers PrivateUse1 devices from C++ only: nothing to emulate musa with",
    )
