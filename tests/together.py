"""How several workers share the test files: the longest first, files with shared launches together."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

_GATE, _PARITY = "the coverage gate's launches", "the parity runs"
SECONDS: dict[str, int] = {}
"""Files that take longer than the rest, with about what they take on two cores."""

TOGETHER = {
    "tests/coverage_gate/test_cases.py": _GATE,
    "tests/coverage_gate/test_fake_cuda.py": _GATE,
    "tests/coverage_gate/test_gate.py": _GATE,
    "tests/fake_cuda/test_forward.py": _GATE,
    "tests/parity/test_emulated_musa.py": _PARITY,
    "tests/parity/test_layouts.py": _PARITY,
}


class FilesScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Hands out whole files, the longest first; those of ``TOGETHER`` to the same worker."""

    def _split_scope(self, nodeid: str) -> Any:
        file = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)

    def _assign_work_unit(self, node: Any) -> None:
        # The next unit is the first: workers that end with short files end at the same time.
        longest = max(self.workqueue, key=lambda scope: (SECONDS.get(scope, 0), len(self.workqueue[scope])))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
