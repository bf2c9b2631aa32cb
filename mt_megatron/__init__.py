"""Trains the unmodified, pip-installed Megatron-Core on other devices; importing this changes nothing.

import mt_megatron
mt_megatron.patch(backend="auto")
"""

from ._session import backend, compare_plan_across_ranks, patch, patched, report, unpatch

__version__ = "0.1.0"

__all__ = ["__version__", "backend", "compare_plan_across_ranks", "patch", "patched", "report", "unpatch"]
