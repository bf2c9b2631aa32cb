"""A rank that has no memory left for a measurement leaves no other one waiting for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mt_megatron.backends import registry
from mt_megatron.scan.format.run_files import run_files
from mt_megatron.scan.respond import measures
from mt_megatron.scan.respond.agent import Attendant
from mt_megatron.scan.respond.confirm import Request


@pytest.mark.parametrize("own", [True, False])
def test_all_ranks_give_up_a_measurement_that_one_has_no_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    def full(backend: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    if own:
        monkeypatch.setattr(measures, "Measures", full)
    asked: list[float] = []

    def sum_over_ranks(without: torch.Tensor) -> None:
        asked.append(without.item())
        without.fill_(1.0)

    monkeypatch.setattr("torch.distributed.all_reduce", sum_over_ranks)
    said: list[str] = []
    attendant = Attendant(
        run_files(tmp_path),
        rank=0,
        hosts={0: "a", 1: "b"},
        backend=registry.get("cpu"),
        progress=int,
        note=lambda note: None,
        say=said.append,
    )
    attendant._asked = Request(identity="x", what="compute", ranks=(1,))
    attendant.measure()
    assert asked == [float(own)] and not attendant.wants_measurement
    assert said == ["nothing is measured: a rank has no memory left for it; training goes on"]
