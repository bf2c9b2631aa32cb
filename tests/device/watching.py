"""Values that the scope watches in trainings on the device, against the host's float64 oracle."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from tests.device.result import Result
from tests.scope.watch.layouts import CHECKED

ROOT = Path(__file__).resolve().parent.parent.parent
_TEST = "tests/scope/watch/test_oracle.py"


def results(backend: str, devices: int, environment: Mapping[str, str]) -> list[Result]:
    """One result per test and layout; layouts that need more devices are left out and named."""
    # On a device every layout is deferred.
    layouts = [each for each in CHECKED if backend == "cpu" or not each.deferred]
    fits = [each.name for each in layouts if each.world <= devices]
    others = [each for each in layouts if each.world > devices]
    with tempfile.TemporaryDirectory(prefix="mt_megatron_watching_") as folder:
        report = Path(folder, "results.xml")
        chosen = " or ".join(f"[{name}]" for name in fits)
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-pno:cacheprovider", _TEST]
        command += ["-k", chosen, f"--junitxml={report}", f"--basetemp={folder}/tests"]
        variables = {**os.environ, **environment, "MT_MEGATRON_TEST_BACKEND": backend}
        seconds = 60 * len(fits)
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, cwd=ROOT, env=variables, check=False
            )
            said = ran.stdout + ran.stderr
        except subprocess.TimeoutExpired as error:
            said = f"not over after {seconds} s: {error.stdout!r}"
        cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ()
        found = [_of(case) for case in cases]
    for name in fits:
        if not any(result.name.endswith(f"[{name}]") for result in found):
            reason = f"no result; the tests said: {said[-3000:]}"
            found.append(Result(section="watching", name=name, outcome="failed", reason=reason))
    found += [
        Result(
            section="watching",
            name=each.name,
            outcome="skipped",
            reason=f"needs {each.world} devices and {devices} is used",
        )
        for each in others
    ]
    return found


def _of(case: ElementTree.Element) -> Result:
    trouble = next((each for kind in ("failure", "error") for each in case.iter(kind)), None)
    return Result(
        section="watching",
        name=case.get("name", ""),
        outcome="passed" if trouble is None else "failed",
        seconds=float(case.get("time", 0)),
        reason="" if trouble is None else (trouble.text or trouble.get("message", ""))[-4000:],
    )
