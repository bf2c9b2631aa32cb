"""CSV of schedules: written and read back, torch's form, and what is said about files that are wrong."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import _Action

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.actions import Placement
from mt_megatron.pipeline.csv_form import from_csv, read_csv, to_csv
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.lowering import lowered
from mt_megatron.pipeline.validate import validate

from .draws import drawn


def test_every_generated_schedule_comes_back() -> None:
    for seed in range(60):
        schedule, _ = drawn(random.Random(seed), ranks=4, microbatches=6)
        for each in (schedule, lowered(schedule)):
            found = from_csv(to_csv(each), each.name)
            if each.placement.ranks == 1:  # Every placement is the same there.
                found = replace(found, placement=each.placement)
            assert found == each, f"seed {seed}"


def test_torch_reads_what_is_written() -> None:
    for name in ("zb_h1", "dualpipev"):
        schedule = lowered(generate(name, ranks=2, microbatches=4))
        for row, actions in zip(to_csv(schedule).splitlines(), schedule.ranks, strict=True):
            cells = [_Action.from_str(cell) for cell in row.split(",")]
            assert [(cell.stage_index, cell.microbatch_index) for cell in cells] == [
                (action.stage, action.microbatch if action.microbatch >= 0 else None) for action in actions
            ]
            # The whole cell was understood, not only its beginning.
            assert [str(cell) for cell in cells] == row.split(",")


def test_torch_s_own_form_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,,0F1, ,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n,1F0,1I0,1F1,1I1,1W0,1W1,1F2,1B2\n")
    schedule = read_csv(file)
    assert schedule.name == "mine" and schedule.placement == Placement(2) and schedule.microbatches == 3
    assert [str(action) for action in schedule.ranks[0]] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    assert schedule.splits_backward == {(1, 0), (1, 1)}
    assert validate(schedule) == []


def test_forward_only_is_seen() -> None:
    schedule = from_csv("0F0,0F1\n1F0,1F1\n", "evaluate")
    assert schedule.forward_only and validate(schedule) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "line 2, column 2: found '1X0'; expected"),
        ("0F0,0B0,0F\n", "line 1, column 3: found '0F'; expected"),
        ("0F0;0B0\n", "line 1, column 1: found '0F0;0B0'"),
        ("0F0,0I0\n", "line 1, column 2: found 0I0 without 0W0"),
        ("0F0,0B0,0W0\n", "line 1, column 2: found 0B0, a whole backward, beside 0W0 in line 1, column 3"),
        ("0F0,0B0\n\n1F0,1B0\n", "line 2: found an empty line"),
        ("0F0,1F0\n2F0,3F0\n", "line 1, column 2: found an action of stage 1 in row 1"),
        ("0F0\n1F0\n2F0,3F0\n", "found 4 stages in 3 rows"),
        (",,\n", "found no action"),
        ('0F0,"0B0\n', "line 1: unexpected end of data"),
        ("0UNSHARD\n", "found '0UNSHARD'"),
        ("0F0,0B0,0F1000000000000\n1F0,1B0\n", "line 1, column 3: found 0F1000000000000 among 5 actions"),
        (f"0F{'0' * 5000}\n", "line 1, column 1: found '0F000"),
        ("0F0,0B0\n1F0,1B0,1000000000001REDUCE_GRAD\n", "line 2, column 3: found 1000000000001REDUCE_GRAD"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_csv(text, "bad", where="bad.csv")
    assert message in str(error.value) and str(error.value).startswith("bad.csv")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one row of actions per rank"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ConfigError, match="one row of actions per rank"):
        read_csv(tmp_path / "bytes.csv")
