"""The C helper of shared-memory channels, built into the checkout where that is possible."""

from __future__ import annotations

import contextlib

import pytest

from mt_megatron.comm.shared_memory import native


@pytest.fixture(scope="session", autouse=True)
def _helper() -> None:
    if isinstance(native.load(), str):
        with contextlib.suppress(RuntimeError, OSError):
            native.build()
        native.load.cache_clear()


@pytest.fixture(params=["native", "python"])
def helper(request: pytest.FixtureRequest) -> str:
    """Each implementation of the ring that this machine can run."""
    kind = str(request.param)
    loaded, refused = native.load(), native.why_not_plain()
    if kind == "native" and isinstance(loaded, str):
        pytest.skip(loaded)
    if kind == "python" and refused is not None:
        pytest.skip(refused)
    return kind
