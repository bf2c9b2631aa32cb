"""What is loaded, what is refused and what is told: damage, other layouts, a full disk, the files beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.resume.loading import LAYOUTS

RANKS = "tests.resume.loading:"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("damaged"))
    return dict(run_ranks(2, RANKS + "damaged", folder, timeout=300)[0])


def test_a_flipped_byte_is_named_whatever_the_file(damaged: dict[str, Any]) -> None:
    files = {"COMPLETE", "mt_megatron.json", "config.yaml", "common.pt", ".metadata", "metadata.json"}
    assert files | {"__0_0.distcp", "__1_0.distcp", "rng/rank_00001.pt"} <= set(damaged["names"])
    for name, error in damaged["errors"].items():
        assert f"{name} is damaged: found" in error and "expected" in error, (name, error)
        assert "--resume-skip-damaged or --resume" in error and "iter_0000002" in error


def test_only_the_checksum_notices_a_flipped_weight(damaged: dict[str, Any]) -> None:
    assert "__0_0.distcp is damaged" in damaged["weights"] and "not loaded" in damaged["weights"]
    assert damaged["unverified"]["finished"]


def test_on_request_the_one_before_is_continued(damaged: dict[str, Any]) -> None:
    assert sorted(damaged["skipped"]["steps"], key=int)[0] == "3"
    assert "No older checkpoint is whole" in damaged["none"]


def test_a_rank_that_cannot_write_is_named_and_training_goes_on(tmp_path: Path) -> None:
    found = run_ranks(2, RANKS + "full_disk", str(tmp_path), timeout=200)[0]
    assert found["middle"]["finished"] and found["middle"]["checkpoint"] == "iter_0000006"
    assert not (tmp_path / "middle" / "iter_0000004").exists()
    records = (tmp_path / "middle.jsonl").read_text()
    assert "rank 1 cannot write" in records and "File too large" in records
    error = found["end"]["error"]
    assert "the checkpoint of step 6 is lost: rank 1 cannot write" in error and "iter_0000004" in error
    for name in ("middle", "end"):
        assert [each.name for each in (tmp_path / name).glob(".*")] == []


def test_what_lies_beside_a_checkpoint_starts_the_same_run_and_what_is_kept(tmp_path: Path) -> None:
    found = run_ranks(1, RANKS + "stored_configuration", str(tmp_path))[0]
    assert found["same"]
    assert found["manifest"]["progress"]["iteration"] == 2
    assert found["manifest"]["tokenizer"].keys() == {"eod", "eod_token"}
    assert isinstance(found["manifest"]["tokenizer"]["eod"], int)
    assert {"python", "torch", "numpy", "megatron-core", "mt_megatron", "backend"} <= set(
        found["manifest"]["versions"]
    )
    assert found["patches"] > 0
    assert "saved without the distributed optimizer and this run is with it" in found["refused"]
    assert found["kept"] == [f"iter_000000{step}" for step in (3, 6, 7)]
    assert sorted([*found["listed"], "COMPLETE", "mt_megatron.json"]) == found["there"]


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"], ids=["plain", "distributed"])
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_loads_into_every_other(
    tmp_path: Path, record_property: Any, source: str, optimizer: str
) -> None:
    arguments = (str(tmp_path), source, list(LAYOUTS), optimizer)
    found = run_ranks(2, RANKS + "moved", *arguments, timeout=600)[0]
    assert [result.get("error") for result in found.values()] == [None] * len(LAYOUTS)
    found["one process"] = run_ranks(1, RANKS + "continued", str(tmp_path), optimizer)[0]
    expected = found[source]["steps"]["4"][0]
    differences = [abs(result["steps"]["4"][0] / expected - 1) for result in found.values()]
    record_property("largest relative difference of the next loss", f"{max(differences):.1e}")
    assert max(differences) <= 1e-5
