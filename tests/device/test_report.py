"""The device run as far as it goes without a device: exit codes, the report, and failures in it."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import __main__ as device_run
from tests.device import report
from tests.device.result import Result, Unsupported, checked

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", str(ROOT / "tests" / "device" / "run.sh"), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage:"),
        (("tpu",), "invalid choice: 'tpu'"),
        (("musa", "--output", "/nonexistent"), "looked for musa: torch_musa is not installed"),
    ],
)
def test_wrong_use_and_a_missing_device_end_with_2(arguments: tuple[str, ...], message: str) -> None:
    found = run(*arguments)
    assert found.returncode == 2 and message in found.stderr, found.stderr
    assert not Path("/nonexistent").exists()


@pytest.mark.daily
def test_a_dry_run_on_the_cpu_says_what_it_is(tmp_path: Path) -> None:
    found = run(
        "cpu", "--devices", "1", "--only", "device", "--only", "collectives", "--output", str(tmp_path)
    )
    assert found.returncode == 0, found.stdout + found.stderr
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert "unfinished" not in text
    assert "the cpu backend is the reference itself" in text and path.name.startswith("device-cpu-20")
    record = json.loads(text.split("```json\n")[1].split("\n```")[0])
    outcomes = {result["name"]: result["outcome"] for result in record["results"]}
    assert outcomes["backward_equals_the_host"] == "passed" and outcomes["all"] == "skipped"
    assert "needs 2 devices" in text


def test_a_run_that_is_ended_keeps_the_sections_that_were_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def done(backend: str, devices: int) -> list[Result]:
        return [Result(section="device", name="good", outcome="passed")]

    def ended(backend: str, devices: int) -> list[Result]:
        raise KeyboardInterrupt

    monkeypatch.setitem(device_run._SECTIONS, "device", done)
    monkeypatch.setitem(device_run._SECTIONS, "parity", ended)
    with pytest.raises(KeyboardInterrupt):
        device_run.main(["cpu", "--only", "device", "--only", "parity", "--output", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert "1 passed" in path.read_text() and "not run yet: parity" in path.read_text()


def test_a_failure_reaches_the_report_with_its_traceback(tmp_path: Path) -> None:
    def fails() -> dict[str, object]:
        raise AssertionError("deviates by 0.5")

    def unsupported() -> dict[str, object]:
        raise Unsupported("the device has no bf16 arithmetic")

    results = [
        checked("device", "good", lambda: {"largest_deviation": 1.5e-7}),
        checked("device", "bad", fails),
        checked("device", "absent", unsupported),
        Result(section="parity", name="tp2", outcome="skipped", reason="needs 2 devices and 1 is used"),
    ]
    now = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
    text = report.as_text("cuda", {"found": "1 x H100"}, results, now)
    first = report.new_path(tmp_path, "cuda", now)
    report.write(first, text)
    second = report.new_path(tmp_path, "cuda", now)
    assert (first.name, second.name) == ("device-cuda-2026-01-02.md", "device-cuda-2026-01-02-2.md")
    assert "1 passed, 1 failed, 2 skipped" in text and "largest_deviation = 1.5e-07" in text
    assert "| bad | failed |" in text and "AssertionError: deviates by 0.5" in text
    record = json.loads(text.split("```json\n")[1].split("\n```")[0])
    assert "Traceback" in record["results"][1]["reason"]


def test_a_report_names_no_folder_of_the_machine() -> None:
    reason = f'File "{ROOT}/tests/a.py", File "{os.path.dirname(pytest.__file__)}/b.py", File "/c.py"'
    failed = Result(section="device", name="one", outcome="failed", reason=reason)
    text = report.as_text("cuda", {}, [failed], datetime.datetime.now(datetime.timezone.utc))
    assert 'File "tests/a.py", File "pytest/b.py", File "/c.py"' in text
