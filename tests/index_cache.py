"""Where the training runs of one pytest process keep the indices of their mock data.

Megatron's mock data has one size: its three indices are 120 MB and take a third of the time of a
run of a few steps. They are named after all that they depend on, so runs can share them.
"""

from __future__ import annotations

import os

FOLDER = "MT_MEGATRON_TEST_INDEX_CACHE"
"""Environment variable, set by tests/conftest.py: a folder of this pytest process."""


def flags() -> str:
    """Arguments of ``mt-megatron pretrain``, none outside of the tests."""
    folder = os.environ.get(FOLDER)
    return f" --data-cache-path {folder}" if folder else ""
