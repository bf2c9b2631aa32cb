"""Tensors of a device over shared memory, on the emulated one: code paths, not a driver."""

from __future__ import annotations

import pytest

from tests.emulators import environment, needs_emulated_musa
from tests.launch import run_ranks


@needs_emulated_musa()
@pytest.mark.parametrize("streams", [False, True], ids=["no pinned memory", "side streams"])
def test_emulated_musa(streams: bool) -> None:
    for found in run_ranks(2, "tests.comm.device_ranks:exchange", streams, env=environment(), timeout=90):
        assert found["devices"] == ["musa"]
        assert found["equal"] == [True] * 5
        assert len(found["calls"]) == (8 if streams else 0)
        assert found["own stream"] is True
        if streams:
            assert "(20000,) was written to in place 1 time(s) between its post to rank" in found["written"]
