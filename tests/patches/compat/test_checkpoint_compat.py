"""dist_checkpointing of 0.9.0 on newer torch, numpy and zarr; writers without fork."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch import run_command, run_ranks

RANKS = "tests.patches.ranks:"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format_name", ["torch_dist", "zarr"])
def test_round_trip(tmp_path: Path, format_name: str, dtype: str) -> None:
    for found in run_ranks(2, RANKS + "checkpoint_round_trip", str(tmp_path), format_name, dtype):
        assert found == {"weight": True, "flat": True, "object": True, "common": [7, 0.1], "resharded": True}


def test_asynchronous_save_keeps_what_the_tensors_were(tmp_path: Path) -> None:
    for found in run_ranks(2, RANKS + "asynchronous_save_is_a_snapshot", str(tmp_path)):
        assert found["finished"] == [0] and found["snapshot"]


def test_a_class_from_outside_is_not_built_by_loading(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    code = f"""
import torch, subprocess
from pathlib import Path
from types import SimpleNamespace
arguments = SimpleNamespace(save=Path("a"), lr=None)
torch.save({{"args": arguments}}, {str(tmp_path / "plain" / "common.pt")!r})
torch.save({{"x": subprocess.Popen}}, {str(tmp_path / "common.pt")!r})
import mt_megatron; mt_megatron.patch("cpu")
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
try: TorchCommonLoadStrategy().load_common(Path({str(tmp_path)!r}))
except Exception as error: assert "Popen" in str(error), error
else: raise SystemExit("built a class nobody trusted")
assert TorchCommonLoadStrategy().load_common(Path({str(tmp_path / "plain")!r})) == {{"args": arguments}}
"""
    run_command([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_the_straggler_detector_listens_on_loopback_only() -> None:
    addresses = run_ranks(1, RANKS + "straggler_listens_on")[0]
    assert addresses and addresses[0] == "127.0.0.1", addresses
