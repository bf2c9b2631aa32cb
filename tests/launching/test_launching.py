"""What travels to child processes, what is found to run, and the compiled helpers of the wheel."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mt_megatron.errors import RunError
from mt_megatron.launching.scripts import activation
from mt_megatron.launching.scripts.activation import NAME, DatasetHelpers, advice, clean
from mt_megatron.launching.scripts.choice import STARTUP, Choice, is_main
from mt_megatron.launching.scripts.script import find, rendezvous_defaults
from mt_megatron.patching import importlib_bootstrap


def test_a_choice_comes_back_from_the_environment(tmp_path: Path) -> None:
    choice = Choice(
        backend="musa",
        folders=(tmp_path / "a b", Path("/x")),
        modules=("mine", "other.y"),
        cpu_bf16_products="fp32",
    )
    found = choice.environment({"PYTHONPATH": f"/first{os.pathsep}/second", "KEPT": "1"})
    assert Choice.of_environment(found) == choice and found["KEPT"] == "1"
    assert found["PYTHONPATH"].split(os.pathsep) == [str(STARTUP), "/first", "/second"]
    assert choice.environment(found)["PYTHONPATH"] == found["PYTHONPATH"], "a second run inside of the first"
    assert is_main(found) and not is_main({**found, "MT_MEGATRON_MAIN": "1"})


def test_nobody_else_takes_it() -> None:
    found = Choice(backend="cpu").environment({})
    assert Choice.of_environment({}) is None
    assert Choice.of_environment({**found, "MT_MEGATRON_PREFIX": "/another/python"}) is None
    assert Choice.of_environment({"MT_MEGATRON_BACKEND": "cpu"}) is None, "a variable alone starts nothing"


def test_the_startup_folder_holds_nothing_that_could_hide_another_module() -> None:
    assert {path.name for path in STARTUP.glob("*.py")} == {"__init__.py", "sitecustomize.py"}


def test_the_folder_of_a_script_and_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "alone.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "package" / "__init__.py")
    monkeypatch.chdir(tmp_path)
    assert find(["alone.py", "-x"]).folder == tmp_path and find(["-m", "alone"]).folder == tmp_path
    assert find(["-m", "package.inside", "y"]).folder == tmp_path / "package"
    assert find(["link.py"]).folder == tmp_path / "package", "python puts a link's target on the path"
    assert find(["-m", "pytest"]).folder is None
    with pytest.raises(RunError, match="-m names no module"):
        find(["-m"])


def test_the_wheels_helpers_are_found_where_a_tree_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DatasetHelpers("0.9.0").find_spec(NAME)
    assert spec is not None and spec.origin is not None and "helpers." in Path(spec.origin).name
    assert DatasetHelpers("0.9.0").find_spec("megatron.core.datasets.other") is None
    assert DatasetHelpers("0.8.0").find_spec(NAME) is None, "of another version they may differ"

    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(activation, "distribution", missing)
    assert DatasetHelpers("0.9.0").find_spec(NAME) is None


def test_the_wrapper_is_cut_out_of_a_traceback_and_its_causes() -> None:
    class Nobody:
        def see(self, module: object, *_: object, **__: object) -> object:
            return module

    viewer = Nobody()
    importlib_bootstrap.watch(viewer)  # type: ignore[arg-type]
    try:
        try:
            import absent_for_sure  # noqa: F401
        except ImportError as error:
            raise ValueError("later") from error
    except ValueError as later:
        cause = later.__cause__
        assert cause is not None and len(frames(cause)) == 2, "a negative control: it was there"
        clean(later)
        assert frames(cause) == frames(later) == [sys._getframe().f_code]
    finally:
        importlib_bootstrap.unwatch(viewer)  # type: ignore[arg-type]


def frames(error: BaseException) -> list[object]:
    found, at = [], error.__traceback__
    while at is not None:
        found.append(at.tb_frame.f_code)
        at = at.tb_next
    return found


IDENTITY = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {**IDENTITY, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "free"}),
        ({"SLURM_NTASKS": "1", "RANK": "0", "MASTER_PORT": "7"}, {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}),
        ({"MASTER_ADDR": "host", "MASTER_PORT": "7"}, IDENTITY),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {}),
        ({"RANK": "1"}, {}),
        ({"WORLD_SIZE": "x"}, {}),
        ({"SLURM_NTASKS": "2"}, {}),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, {}),
    ],
)
def test_one_process_gets_what_torchrun_would_set(given: dict[str, str], added: dict[str, str]) -> None:
    """And one of several processes gets nothing: it would become a run of its own."""
    found = rendezvous_defaults(given)
    if found.get("MASTER_PORT", "").isdigit():
        assert 1024 <= int(found["MASTER_PORT"]) <= 65535
        found["MASTER_PORT"] = "free"
    if added and "MASTER_ADDR" not in given:
        added = {**added, "MASTER_ADDR": "127.0.0.1"}
    assert found == added


def raised(source: str, module: str) -> BaseException:
    try:
        exec(source, {"__name__": module})
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("source", "module", "says"),
    [
        ("raise ModuleNotFoundError(name='six')", "megatron.training.tokenizer", "mt_megatron[megatron-lm]"),
        ("raise ModuleNotFoundError(name='transformer_engine')", "mine", "only its names in Megatron-Core"),
        ("raise ModuleNotFoundError(name='six')", "mine", None),
        ("raise ModuleNotFoundError(name='tabulate')", "megatron.training", None),
        ("Linear", "megatron.core.models", None),
    ],
)
def test_what_megatron_lm_lacks_is_said(source: str, module: str, says: str | None) -> None:
    found = advice(raised(source, module))
    assert found is None if says is None else found is not None and says in found
