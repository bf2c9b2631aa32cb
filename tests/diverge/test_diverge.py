"""Planted faults are found in the module they are in; healthy pairs have no finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mt_megatron.diverge.compare import Comparison, Record, compare, read_record
from mt_megatron.diverge.report import jump
from tests import emulators
from tests.diverge.faults import FAULTS, FP8_FAULTS
from tests.launch import run_ranks
from tests.second_lane import DAILY

TP2 = "--tensor-model-parallel-size 2"
ONE_PROCESS = [
    ("a", "", None),
    ("again", "", None),
    ("recompute", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", None),
    ("bf16", "--bf16", None),
    *((name, "", name) for name in FAULTS if name != "missing_all_reduce"),
    ("bf16_with_wrong_mask", "--bf16", "mask_off_by_one"),
    ("fp8", "--bf16 --fp8-recipe blockwise", None),
    ("fp8_scale", "--bf16 --fp8-recipe blockwise", "fp8_scale"),
]
TWO_PROCESSES = [
    ("tp2", TP2, None),
    ("tp2_sp", f"{TP2} --sequence-parallel", None),
    ("vpp2", "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2", None),
    ("dp2_zero1", "--use-distributed-optimizer", None),
    ("cp2", "--context-parallel-size 2", None),
    ("missing_all_reduce", TP2, "missing_all_reduce"),
]
EMULATED_MUSA = [("musa", "", None), ("musa_wrong_scale", "", "wrong_scale")]
FIRST_LANE = {"a", "bf16", "wrong_scale", "swapped_weight", "wrong_backward", "tp2_sp", "missing_all_reduce"}


def _daily(name: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(name, marks=(*marks, *(() if name in FIRST_LANE else (pytest.mark.daily,))))


def _of_lane(cases: list[tuple[str, str, str | None]]) -> list[tuple[str, str, str | None]]:
    return [case for case in cases if DAILY or case[0] in FIRST_LANE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All records, from three launches; the first writes the weights that all start from."""
    path = tmp_path_factory.mktemp("diverge")
    run_ranks(1, "tests.diverge.recordings:record", str(path), _of_lane(ONE_PROCESS), timeout=600)
    run_ranks(2, "tests.diverge.recordings:record", str(path), _of_lane(TWO_PROCESSES), timeout=600)
    if DAILY and emulators.can_emulate_musa():
        target, environment = "tests.diverge.recordings:record", emulators.environment()
        run_ranks(1, target, str(path), EMULATED_MUSA, "musa", timeout=600, env=environment)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Record:
    return read_record(folder / "a", 1)


def against(reference: Record, folder: Path, name: str) -> Comparison:
    processes = 2 if any(name == each for each, _, _ in TWO_PROCESSES) else 1
    return compare(reference, read_record(folder / name, processes))


def test_the_same_run_twice_is_equal_to_the_bit(reference: Record, folder: Path) -> None:
    found = against(reference, folder, "again")
    assert found.first is None and all(entry.equal for entry in found.entries)
    phases = {entry.phase for entry in found.entries}
    assert phases == {
        "batch",
        "initial weight",
        "forward",
        "backward",
        "parameter gradient",
        "updated weight",
    }
    forward = [entry.name for entry in found.entries if entry.phase == "forward"]
    for name in (
        "embedding",
        "decoder.layers.1.mlp.linear_fc1",
        "decoder.final_layernorm",
        "output_layer",
        "loss",
    ):
        assert name in forward
    assert forward.index("decoder.layers.0") < forward.index("decoder.layers.1.input_layernorm")
    assert forward[-1] == "loss" and not any("cross_attention" in name for name in forward)


@pytest.mark.parametrize(
    "name",
    [
        *map(_daily, ("recompute", "bf16", "tp2", "tp2_sp", "vpp2", "dp2_zero1", "cp2")),
        _daily("musa", emulators.needs_emulated_musa()),
    ],
)
def test_a_healthy_pair_has_no_finding(reference: Record, folder: Path, name: str) -> None:
    found = against(reference, folder, name)
    assert found.first is None, found.first
    assert found.only_a == found.only_b == found.not_placed == []
    near = [entry for entry in found.entries if entry.error > entry.tolerance / 2]
    assert near == [], "the tolerance leaves no room"
    assert jump(found) is None
    names = {entry.name for entry in found.entries if entry.phase == "backward"}
    assert "decoder.layers.0.self_attention.core_attention" in names and "decoder.final_layernorm" in names


@pytest.mark.parametrize("fault", map(_daily, FAULTS))
def test_a_fault_is_found_in_the_module_it_is_in(reference: Record, folder: Path, fault: str) -> None:
    found = against(reference, folder, fault)
    suspect = found.suspect()
    assert suspect is not None and found.first is not None
    assert suspect == FAULTS[fault][1] or suspect == FAULTS[fault][1] + ".weight", found.first
    expected = {"swapped_weight": "initial weight", "wrong_backward": "backward"}.get(fault, "forward")
    assert found.first.phase == expected


@pytest.mark.daily
@emulators.needs_emulated_musa()
def test_a_fault_on_another_device_is_found(reference: Record, folder: Path) -> None:
    """The device is the emulator's: it computes on the cpu, behind torch_musa's names."""
    assert against(reference, folder, "musa_wrong_scale").suspect() == FAULTS["wrong_scale"][1]


def test_a_missing_all_reduce_is_seen_between_the_ranks_too(reference: Record, folder: Path) -> None:
    found = against(reference, folder, "missing_all_reduce").first
    assert found is not None and found.error > 0.1


@pytest.mark.daily
def test_a_gross_fault_is_found_under_bf16s_tolerance(reference: Record, folder: Path) -> None:
    found = against(reference, folder, "bf16_with_wrong_mask")
    assert found.suspect() == FAULTS["mask_off_by_one"][1]


@pytest.mark.daily
def test_fp8_parts_in_its_layers_and_a_broken_cast_in_its_module(reference: Record, folder: Path) -> None:
    """The first and the last of the four layers stay in bf16."""
    sound, broken = (against(reference, folder, name) for name in ("fp8", "fp8_scale"))
    assert sound.suspect() is None or sound.suspect().split(".")[2] in "12", sound.first
    assert broken.first is not None and broken.first.phase == "forward"
    assert broken.suspect() == FP8_FAULTS["fp8_scale"][1] and broken.first.error > 1
    closer = compare(reference, read_record(folder / "fp8", 1), tolerance=0.02).suspect()
    assert closer is not None and closer.startswith("decoder.layers.1."), closer


def test_a_tolerance_of_zero_finds_rounding(reference: Record, folder: Path) -> None:
    found = compare(reference, read_record(folder / "tp2_sp", 2), tolerance=0.0)
    assert found.first is not None and found.first.phase == "forward" and found.first.error < 1e-5
