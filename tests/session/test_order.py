"""Real Megatron, real patches: whatever was imported before, everybody sees them, and they leave no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .scenarios import run_scenario

EARLY = ("nothing", "half", "everything")


@pytest.fixture(scope="module", params=EARLY)
def outcome(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"early": request.param, **run_scenario("order", request.param)}


def test_all_is_applied_once_everything_is_imported(outcome: dict[str, Any]) -> None:
    assert outcome["applied"] >= 60
    # Of modules that nobody imported, or that need mamba_ssm, zarr or Megatron-LM.
    elsewhere = (
        "training.loader",
        "training.load_",
        "training.fused",
        "errata.blend_",
        "errata.t5_",
        "errata.masked_words_padding",
        "script.OptimizerParamScheduler.step",
        "experts.validate",
        "zarr.",
        "rope.bert_model",
        "rope.t5_model",
        "rope.mamba_model",
        "stage_layers.mamba",
        "te_layers.retro_kernels",
    )
    assert [one for one in outcome["pending"] if not one.startswith(elsewhere)] == []
    assert outcome["unrebindable"] == []


def test_no_holder_keeps_an_original(outcome: dict[str, Any]) -> None:
    assert outcome["holders"] == []
    assert outcome["holders of the second round"] == []
    if outcome["early"] == "everything":
        assert outcome["kept"] >= 30 and outcome["rebound"] >= 50, "there was something to rebind"


def test_patch_changes_something(outcome: dict[str, Any]) -> None:
    assert outcome["changed"] >= (100 if outcome["early"] == "everything" else 5)


def test_the_same_again_changes_nothing(outcome: dict[str, Any]) -> None:
    assert outcome["again is a no-op"] is True


def test_another_plan_on_top_is_refused(outcome: dict[str, Any]) -> None:
    backend, features = outcome["on top"]
    assert "backend 'cpu', all features" in backend and "now backend 'cuda'" in backend
    assert "features compat" in features
    assert all("call mt_megatron.unpatch() first" in text for text in outcome["on top"])


def test_every_attribute_is_what_it_was(outcome: dict[str, Any]) -> None:
    """Of torch only what importing more of torch changes may differ in the first round."""
    assert outcome["not restored by the second round"] == []
    expected_of_torch = (
        "torch._C._distributed:Placement.",
        "torch._weights_only_unpickler.",
        "torch.distributed.",
        "torch.manual_seed",  # torch 2.7 wraps it when its compiler is imported
    )
    assert [name for name in outcome["not restored"] if not name.startswith(expected_of_torch)] == []
    if outcome["early"] == "everything":
        assert outcome["not restored"] == []


def test_nothing_of_ours_is_left_behind(outcome: dict[str, Any]) -> None:
    assert outcome["left behind"] == []
    assert outcome["finders are back"] is True


def test_no_target_is_taken_for_changed_by_others(outcome: dict[str, Any]) -> None:
    """All kinds of functions and decorators of upstream are among the targets of the three backends."""
    assert outcome["taken for changed"] == []
    assert outcome["judged"] >= 120


def test_importing_the_package_changes_nothing() -> None:
    found = run_scenario("importing")
    assert found["finders"] is True
    assert found["heavy"] == []


@pytest.mark.parametrize(("method", "wrapped"), [("fork", True), ("spawn", False)])
def test_data_loader_workers(method: str, wrapped: bool) -> None:
    """A forked worker is patched as its parent is; a spawned one has imported nothing of us."""
    assert run_scenario("workers", method)["wrapped"] == [wrapped]


@pytest.mark.parametrize("early", ["nothing", "everything"])
def test_a_scope_beside_megatron(tmp_path: Path, early: str) -> None:
    """Modules of a folder and of a name see the device whenever they were imported, and are left as
    they were; an installed module below the folder sees the truth throughout."""
    found = run_scenario("scoped", str(tmp_path), early)
    redirected, truth = [True, True, True, False, True, True], [False, False, True, True, False, False]
    if early == "everything":
        redirected[1] = True  # a module imported from torch is rebound too
    assert found["seen"] == {"one": redirected, "package.two": redirected, "installed": truth}
    same, less, other = found["again"]
    assert same is True and less is True, "who names no scope is content with the one in force"
    assert "scope package was asked for" in other and "unpatch() first" in other
    assert found["importer is back"] is True
    assert all(found["originals"]) and len(found["originals"]) == 18
    assert found["defaults"] == [True] * 3 and found["honest"] == [[False, False]] * 3
    assert found.get("not restored", []) == []
