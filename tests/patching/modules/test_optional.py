"""Targets whose module is found only after the plan was made: checked when it is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.errors import PatchImportError, PatchTargetError
from mt_megatron.patching.digest import source_of
from mt_megatron.patching.plan import Settings, make_plan

from ..conftest import Toy

OWNER = "def f(): return 'original'\n"
OTHER = "def f(): return 'another'\n"


@pytest.fixture
def toy(toy: Toy, tmp_path: Path) -> Toy:
    """``here`` is on the path from the start; ``late`` is written later, in a folder of its own."""
    toy.write("here", OWNER)
    toy.write("late", OWNER)
    toy.write("__init__", f"__path__ = [*__path__, {str(tmp_path / 'added')!r}]\n")
    (tmp_path / "added").mkdir()
    return toy


def wrap(toy: Toy, module: str, **options: Any) -> Any:
    digest = source_of(toy.target("f", "here")).digest
    return toy.patch("f", "wrap", lambda original: "patched", module=module, digest=digest, **options)


def moved(toy: Toy, source: str | None) -> None:
    """``late`` leaves the package's folder, and comes to the added one with ``source``."""
    (toy.root / "late.py").unlink()
    if source is not None:
        (toy.folder / "added" / "late.py").write_text(source)


def test_a_module_that_is_found_later_is_patched(toy: Toy) -> None:
    patches = [wrap(toy, "here", id="here"), wrap(toy, "late", id="late", optional=True)]
    with_it = make_plan(patches, backend="cpu").digest
    moved(toy, None)
    applied = toy.commit(*patches)
    assert [each.id for each in applied.report().pending] == ["here", "late"]
    assert applied.report().plan_digest == with_it, "the expected source is part of the plan"
    (toy.folder / "added" / "late.py").write_text(OWNER)
    assert toy.load("late").f() == toy.load("here").f() == "patched"
    assert applied.report().plan_digest == with_it
    applied.revert()
    assert toy.load("late").f() == "original"


@pytest.mark.parametrize("late", [False, True])
def test_a_dispensable_patch_of_another_source_is_left_out(toy: Toy, late: bool) -> None:
    patches = [wrap(toy, "here", id="here"), wrap(toy, "late", id="late", optional=True, dispensable=True)]
    if late:
        moved(toy, None)
    else:
        toy.write("late", OTHER)
    applied = toy.commit(*patches)
    (toy.folder / "added" / "late.py").write_text(OTHER)
    assert toy.load("late").f() == "another" and toy.load("here").f() == "patched"
    assert any(each.startswith("left out: patch late") for each in applied.report().warnings)


@pytest.mark.parametrize(
    ("source", "says"),
    [(OTHER, "patch late: the installed source of"), ("g = 1\n", "patch late: .* does not define 'f'")],
)
@pytest.mark.parametrize("seen", ["nowhere", "elsewhere"])
def test_a_module_of_another_source_undoes_the_plan(toy: Toy, source: str, says: str, seen: str) -> None:
    """Found nowhere when the plan was made, or in a file that another one has come before since."""
    if seen == "nowhere":
        moved(toy, None)
    applied = toy.commit(wrap(toy, "here", id="here"), wrap(toy, "late", id="late", optional=True))
    assert toy.load("here").f() == "patched"
    moved(toy, source) if seen == "elsewhere" else (toy.folder / "added" / "late.py").write_text(source)
    with pytest.raises(PatchImportError, match=says):
        toy.load("late")
    assert toy.load("here").f() == "original" and not applied.active


def test_a_drift_that_is_allowed_is_in_the_digest_and_the_warnings(toy: Toy) -> None:
    from mt_megatron.patching.engine import commit

    moved(toy, None)
    plan = make_plan([wrap(toy, "late", optional=True)], backend="cpu", settings=Settings(allow_drift=True))
    toy.applied.append(applied := commit(plan))
    before = applied.report()
    (toy.folder / "added" / "late.py").write_text(OTHER)
    assert toy.load("late").f() == "patched"
    after = applied.report()
    assert after.plan_digest != before.plan_digest == plan.digest
    assert not before.warnings and "the installed source of" in after.warnings[0]


def test_an_absent_module_of_another_patch_is_an_error(toy: Toy) -> None:
    moved(toy, None)
    with pytest.raises(PatchTargetError, match="is it installed here"):
        toy.commit(wrap(toy, "late"))


def test_patches_of_megatron_lm_wait_for_it() -> None:
    from mt_megatron.backends.registry import get
    from mt_megatron.patches.compat.megatron_lm import patches

    assert "megatron.training" not in sys.modules
    found = [each for each in patches(get("cpu")) if not each.module.startswith("megatron.core")]
    assert len(found) == 3 and all(each.optional for each in found)
