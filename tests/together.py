"""Test files that one of several workers runs, as they share launches that take long."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

_GATE = "the coverage gate's launches"
TOGETHER = {
    "tests/coverage_gate/test_cases.py": _GATE,
    "tests/coverage_gate/test_fake_cuda.py": _GATE,
    "tests/coverage_gate/test_gate.py": _GATE,
    "tests/fake_cuda/test_forward.py": _GATE,
}


class FilesScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Hands out whole files, those of ``TOGETHER`` to the same worker."""

    def _split_scope(self, nodeid: str) -> Any:
        file = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)
