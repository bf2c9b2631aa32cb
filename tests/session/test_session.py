"""The public functions: what they return, refuse and log, and what a checkpoint written under them holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mt_megatron
from mt_megatron import _session
from mt_megatron.errors import BackendError, PatchError, PatchImportError
from mt_megatron.patching.spec import Patch
from tests.launch import run_ranks
from tests.patching.conftest import Toy, toy

from .scenarios import run_scenario

__all__ = ["toy"]  # the fixture of the engine's tests


@pytest.fixture
def toys(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Patch]]:
    """The public functions on a toy package: the patches in the answer are the declared ones."""
    import mt_megatron.patches as patches_package

    toy.write("owner", "def f(): return 'original'\ndef g(): return 'original'\n")
    declared = [
        toy.patch("f", "wrap", lambda original: "patched", id="toy.f", feature="one"),
        toy.patch("g", "wrap", lambda original: "patched", id="toy.g", feature="two"),
    ]
    monkeypatch.setattr(patches_package, "collect", lambda backend: declared)
    mt_megatron.unpatch()
    yield declared
    mt_megatron.unpatch()


def test_patch_report_backend_unpatch(toy: Toy, toys: list[Patch]) -> None:
    owner = toy.load()
    found = mt_megatron.patch("cpu")
    assert found.backend == "cpu" and [one.id for one in found.applied] == ["toy.f", "toy.g"]
    assert owner.f() == "patched" and mt_megatron.backend().name == "cpu"
    assert mt_megatron.report() == found
    mt_megatron.unpatch()
    assert owner.f() == "original"
    mt_megatron.unpatch()


@pytest.mark.parametrize("call", [mt_megatron.report, mt_megatron.backend])
def test_without_a_plan_there_is_nothing_to_ask(toys: list[Patch], call: Any) -> None:
    with pytest.raises(PatchError, match="call mt_megatron.patch"):
        call()


def test_features_are_selected_and_checked(toy: Toy, toys: list[Patch]) -> None:
    owner = toy.load()
    found = mt_megatron.patch("cpu", features=["two"])
    assert (owner.f(), owner.g()) == ("original", "patched")
    assert found.features == ("two",) and [one.id for one in found.left_out] == ["toy.f"]
    mt_megatron.unpatch()
    with pytest.raises(PatchError, match="no patch has the feature 'tow'.*did you mean 'two'"):
        mt_megatron.patch("cpu", features=["tow"])
    with pytest.raises(PatchError, match="is one string"):
        mt_megatron.patch("cpu", features="two")


def test_features_may_come_from_a_generator(toy: Toy, toys: list[Patch]) -> None:
    first = mt_megatron.patch("cpu", features=(name for name in ("one", "two")))
    assert mt_megatron.patch("cpu", features=["two", "one"]) == first


REQUESTS: list[dict[str, Any]] = [
    {},
    {"features": ["one"]},
    {"strict": False},
    {"features": ["one"], "strict": False},
]


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(REQUESTS, 2)))
def test_another_plan_on_top_is_refused(
    toy: Toy, toys: list[Patch], first: dict[str, Any], second: dict[str, Any]
) -> None:
    before = mt_megatron.patch("cpu", **first)
    with pytest.raises(PatchError, match=r"call mt_megatron\.unpatch\(\) first"):
        mt_megatron.patch("cpu", **second)
    assert mt_megatron.report() == before
    mt_megatron.unpatch()
    mt_megatron.patch("cpu", **second)


def test_auto_is_the_backend_that_is_in_force(toy: Toy, toys: list[Patch]) -> None:
    first = mt_megatron.patch("auto")
    assert mt_megatron.patch(first.backend) == first == mt_megatron.patch()


def test_an_unknown_backend_changes_nothing(toy: Toy, toys: list[Patch]) -> None:
    with pytest.raises(BackendError, match="cpuu.*did you mean 'cpu'"):
        mt_megatron.patch("cpuu")
    assert toy.load().f() == "original"
    mt_megatron.patch("cpu")


def test_a_context_of_patches(toy: Toy, toys: list[Patch]) -> None:
    owner = toy.load()
    with mt_megatron.patched("cpu") as found:
        assert owner.f() == "patched" and found.backend == "cpu"
    assert owner.f() == "original"
    with pytest.raises(KeyError), mt_megatron.patched("cpu"):
        raise KeyError
    assert owner.f() == "original"


def test_a_context_inside_of_a_plan_is_refused(toy: Toy, toys: list[Patch]) -> None:
    mt_megatron.patch("cpu")
    with pytest.raises(PatchError, match="already in force"), mt_megatron.patched("cpu"):
        pass
    assert toy.load().f() == "patched"


def test_after_a_late_failure_nothing_is_in_force(toy: Toy, toys: list[Patch]) -> None:
    toys.append(toy.patch("g", "value", lambda original: 1 / 0, id="toy.bad"))
    del toys[1]
    mt_megatron.patch("cpu")
    with pytest.raises(PatchImportError, match="toy.bad"):
        toy.load()
    with pytest.raises(PatchError, match="a late patch failed.*toy.bad"):
        mt_megatron.report()
    del toys[1]
    assert mt_megatron.patch("cpu").backend == "cpu", "one can begin anew"
    assert toy.load().f() == "patched"


def test_a_refused_unpatch_can_be_repeated(toy: Toy, toys: list[Patch]) -> None:
    owner = toy.load()
    mt_megatron.patch("cpu")
    ours, owner.f = owner.f, None
    with pytest.raises(PatchError, match="name 'f' of module"):
        mt_megatron.unpatch()
    assert mt_megatron.report().applied
    owner.f = ours
    mt_megatron.unpatch()
    assert owner.f() == "original"


def test_who_cannot_give_a_patched_value_back_is_logged(
    toy: Toy, toys: list[Patch], caplog: pytest.LogCaptureFixture
) -> None:
    toy.write("user", "from {toy}.owner import f\nfrom collections import deque\nd = deque([f])\n")
    mt_megatron.patch("cpu")
    toy.load("user")
    mt_megatron.unpatch()
    assert "an instance of collections.deque got a patched value" in caplog.text


@pytest.mark.parametrize(("rank", "lines"), [(None, 1), ("0", 1), ("1", 0)])
def test_rank_0_logs_one_line(
    toy: Toy,
    toys: list[Patch],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rank: str | None,
    lines: int,
) -> None:
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    caplog.set_level("INFO", logger="mt_megatron")
    mt_megatron.patch("cpu")
    mt_megatron.patch("cpu")
    found = [record for record in caplog.records if record.name == "mt_megatron"]
    assert len(found) == lines
    if lines:
        assert "backend cpu" in found[0].getMessage() and "plan " in found[0].getMessage()


def test_untested_versions_are_logged_and_reported(
    toy: Toy, toys: list[Patch], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_session, "TESTED", {"torch": "<1"})
    monkeypatch.delenv("RANK", raising=False)
    found = mt_megatron.patch("cpu")
    (warning,) = found.warnings
    assert warning.startswith("torch ") and "(<1)" in warning
    assert warning in caplog.text


def test_real_patch_logs_one_line() -> None:
    (line,) = run_scenario("logging_of", "INFO")["lines"]
    assert line.startswith("INFO backend cpu (cpu was asked for")


def test_what_is_saved_under_patches_can_be_read_without_us(tmp_path: Path) -> None:
    """Weights as a state dict, as a distributed checkpoint, and a pickled upstream configuration."""
    saved = run_scenario("save", str(tmp_path))
    found = run_scenario("read", str(tmp_path))
    assert found["weights"] == saved and len(saved) > 10
    assert found["config"] == ["megatron.core.transformer.transformer_config", 2]
    # The distributed form stacks the layers of the model; the sum over everything stays.
    for index in range(2):
        of_shards = sum(value[index] for value in found["sharded"].values())
        assert of_shards == pytest.approx(sum(value[index] for value in saved.values()), rel=1e-12)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"mt_megatron" not in path.read_bytes(), path


@pytest.mark.parametrize("features", [[], ["compat"]])
def test_ranks_compare_their_plans(features: list[str]) -> None:
    answers = run_ranks(2, "tests.session.scenarios:compare", features)
    if not features:
        assert answers == ["same", "same"]
        return
    assert answers[0] == answers[1]
    assert "on rank(s) [0]" in answers[0] and "on rank(s) [1]" in answers[0]
