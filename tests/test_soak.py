"""Which tests are selected, and what the record of an acceptance run holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.soak import SoakReport, as_markdown, machine

ROOT = Path(__file__).resolve().parent.parent

SUITE = """
import os
import pytest

def test_always(record_property):
    record_property("soak", os.environ.get("MT_MEGATRON_SOAK", "no"))

@pytest.mark.soak
def test_volume(record_property):
    record_property("repetitions", 200)

@pytest.mark.soak
def test_broken(record_property):
    record_property("gap", 0.5)
    assert False

@pytest.mark.backend("abacus")
def test_device():
    pass
"""


def _pytest(folder: Path, *options: str) -> dict:
    """Run the suite above under the real ``conftest.py``, with its record beside it."""
    (folder / "conftest.py").write_text(
        "from pathlib import Path\n"
        "from tests import conftest, soak\n"
        f"class Here(soak.SoakReport):\n"
        f"    def __init__(self, config, name=None): "
        f"super().__init__(config, Path({str(folder)!r}) / 'results', name)\n"
        "conftest.SoakReport = Here\n"
        "from tests.conftest import *\n"
    )
    (folder / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    run = subprocess.run(
        [*command, *options, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )
    records = list((folder / "results").glob("soak-*.json"))
    return {
        "closing": run.stdout.strip().splitlines()[-1] if run.stdout.strip() else run.stderr,
        "record": json.loads(records[0].read_text()) if records else None,
        "markdown": records[0].with_suffix(".md").read_text() if records else None,
    }


def test_acceptance_volumes_and_devices_are_left_out_by_default(tmp_path: Path) -> None:
    found = _pytest(tmp_path)
    assert found["closing"].startswith("1 passed, 3 deselected")
    assert found["record"] is None


def test_soak_runs_them_and_leaves_a_record(tmp_path: Path) -> None:
    found = _pytest(tmp_path, "--soak")
    assert "1 failed, 2 passed, 1 deselected" in found["closing"]
    tests = {entry["test"].split("::")[1]: entry for entry in found["record"]["tests"]}
    assert tests["test_volume"]["figures"] == {"repetitions": 200}
    assert tests["test_always"]["figures"] == {"soak": "1"}
    assert tests["test_broken"]["outcome"] == "failed" and tests["test_broken"]["figures"] == {"gap": 0.5}
    assert found["record"]["exit_status"] == 1
    assert "1 failed, 2 passed; pytest ended with 1." in found["markdown"]
    assert "| failed |" in found["markdown"] and "repetitions = 200" in found["markdown"]


def test_a_named_record_goes_on_where_it_stopped(tmp_path: Path) -> None:
    options = ["--soak", "--soak-record", "soak-mine"]
    first = _pytest(tmp_path, *options)
    assert "1 failed, 2 passed, 1 deselected" in first["closing"]
    second = _pytest(tmp_path, *options)
    assert "1 failed, 3 deselected" in second["closing"]
    outcomes = [
        {entry["test"].split("::")[1]: entry["outcome"] for entry in found["record"]["tests"]}
        for found in (first, second)
    ]
    assert outcomes[0] == outcomes[1] and sorted(outcomes[0].values()) == ["failed", "passed", "passed"]
    path = tmp_path / "results" / "soak-mine.json"
    path.write_text(path.read_text().replace(second["record"]["sources"], "of other sources"))
    assert "1 failed, 2 passed, 1 deselected" in _pytest(tmp_path, *options)["closing"]


def test_a_backend_selects_its_own_tests(tmp_path: Path) -> None:
    assert _pytest(tmp_path, "--backend", "abacus")["closing"].startswith("2 passed, 2 deselected")


def test_the_machine_is_named() -> None:
    here = machine()
    assert here["processor"] and here["cores"] >= 1 and here["memory_gib"] > 0
    assert here["packages"]["megatron-core"] == "0.9.0"
    text = as_markdown(
        {"date": "2026-01-01", "backend": "cpu", "machine": here, "exit_status": 0, "tests": []}
    )
    assert here["processor"] in text


def test_nothing_is_written_when_nothing_ran(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    SoakReport(pytestconfig, tmp_path / "results").pytest_sessionfinish(5)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--help"], 0, "usage: bash"),
        (["--backend"], 2, "needs a name"),
        (["--backend", "abacus"], 2, "abacus"),
    ],
)
def test_run_sh_knows_its_options(arguments: list[str], code: int, message: str) -> None:
    missing = [name for name in ("ruff", "mypy", "hypothesis", "transformers") if find_spec(name) is None]
    if missing:
        pytest.skip(f"the script would make an environment: this one lacks {missing} of the extra dev")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        ["bash", "tests/run.sh", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == code, run.stderr
    assert message in run.stdout + run.stderr


def test_an_interrupted_test_is_unfinished(tmp_path: Path) -> None:
    class Phase:
        nodeid, outcome, duration, user_properties = "a", "passed", 1.0, ()

        def __init__(self, when: str) -> None:
            self.when = when

    for phases, outcome in ((("setup",), "unfinished"), (("setup", "call", "teardown"), "passed")):
        report = SoakReport(None, tmp_path)  # type: ignore[arg-type]
        for when in phases:
            report.pytest_runtest_logreport(Phase(when))  # type: ignore[arg-type]
        assert [test["outcome"] for test in report._tests.values()] == [outcome]
