"""MegaScan finds a slow link between two stages under schedules of ours as it does under 1F1B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mt_megatron.scan.diagnose.run import diagnose
from tests.launch import run_ranks

STEPS, FROM = 60, 25
SCHEDULES = {
    "1f1b": "--pipeline-schedule 1f1b",
    "zb_h1": "--pipeline-schedule zb_h1",
    "breadth_first": "--pipeline-schedule breadth_first --virtual-pipeline-model-parallel-size 2",
}


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["slow_link:ranks=0-1,latency_ms=20", None])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_slow_link_is_found(tmp_path: Path, name: str, fault: str | None, record_property: Any) -> None:
    flags = f"--pipeline-model-parallel-size 2 --global-batch-size 8 {SCHEDULES[name]}"
    target = "tests.pipeline.execute.diagnosed_ranks:trained"
    run_ranks(2, target, str(tmp_path), flags, STEPS, fault, FROM, timeout=300)
    links = [each for each in diagnose(tmp_path).findings if each.cause == "slow_link"]
    if fault is None:
        assert links == []
        return
    (found,) = links
    assert found.ranks == (0, 1) and abs(found.first_step - FROM) <= 2 and found.last_step == STEPS
    assert found.confidence >= 0.8
    record_property("confidence", found.confidence)
