"""The dated record of an acceptance run: what ran where, how it ended, and every figure it reported.

A test adds a figure with pytest's ``record_property(name, value)``. ``--soak-record NAME`` makes the record
continuable: it is written after every test, and a later run with the same sources leaves out what passed.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("mt_megatron", "megatron-core", "torch", "numpy", "transformers")


class SoakReport:
    """A pytest plugin that writes ``results/soak-YYYY-MM-DD.json`` and ``.md`` when the session ends, or with
    a name ``results/NAME.json`` and ``.md`` after every test."""

    def __init__(
        self, config: pytest.Config, folder: Path = ROOT / "results", name: str | None = None
    ) -> None:
        self._config = config
        self._folder = folder
        self._started = datetime.datetime.now(datetime.timezone.utc)
        self._tests: dict[str, dict[str, Any]] = {}
        self._name = name
        self._sources = "" if name is None else sources()
        self.passed: frozenset[str] = frozenset()
        """Tests that an earlier run of the same sources passed under this name."""

        if name is not None:
            self._go_on(folder / f"{name}.json")

    def _go_on(self, earlier: Path) -> None:
        if not earlier.exists():
            return
        record = json.loads(earlier.read_text(encoding="utf-8"))
        if record.get("sources") != self._sources:
            return
        self._started = datetime.datetime.fromisoformat(record["date"])
        self._tests = {each["test"]: each for each in record["tests"] if each["outcome"] == "passed"}
        self.passed = frozenset(self._tests)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self._tests.setdefault(
            report.nodeid, {"test": report.nodeid, "outcome": "unfinished", "seconds": 0.0, "figures": {}}
        )
        entry["seconds"] = round(entry["seconds"] + report.duration, 2)
        entry["figures"].update(report.user_properties)
        # A test has three phases, and is as good as the worst of them; one that was interrupted never
        # reports the second, and must not read as passed.
        if report.outcome == "passed":
            if report.when == "call" and entry["outcome"] == "unfinished":
                entry["outcome"] = "passed"
        elif entry["outcome"] != "failed":
            entry["outcome"] = report.outcome
        # Of parallel runs the controller alone hears all tests.
        if self._name is not None and report.when == "teardown" and not hasattr(self._config, "workerinput"):
            failed = any(each["outcome"] not in ("passed", "skipped") for each in self._tests.values())
            self._write(int(failed))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # A continued record has what earlier runs found as well: its status is that of all of them.
        if self._tests and self._name is None:
            self._write(int(exitstatus))

    def _write(self, exitstatus: int) -> None:
        record = {
            "date": self._started.isoformat(timespec="seconds"),
            "backend": self._config.getoption("--backend"),
            "exit_status": exitstatus,
            "machine": machine(),
            **({"sources": self._sources} if self._name is not None else {}),
            "tests": list(self._tests.values()),
        }
        self._folder.mkdir(exist_ok=True)
        stem = self._folder / (self._name or f"soak-{self._started.date().isoformat()}")
        stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(as_markdown(record), encoding="utf-8")

    def pytest_report_header(self) -> str:
        return f"acceptance volumes; the record goes to {self._folder}"


def sources() -> str:
    """A digest of the package, its tests and the versions that they run on."""
    versions = [platform.python_version(), {name: _version(name) for name in _PACKAGES}]
    digest = hashlib.sha256(json.dumps(versions, sort_keys=True).encode())
    kinds = ("py", "c", "json", "yaml")
    found = (
        path
        for folder in ("mt_megatron", "tests")
        for kind in kinds
        for path in (ROOT / folder).rglob(f"*.{kind}")
    )
    for path in sorted(found):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def as_markdown(record: dict[str, Any]) -> str:
    """The record as a table, one row a test."""
    where = record["machine"]
    counts: dict[str, int] = {}
    for test in record["tests"]:
        counts[test["outcome"]] = counts.get(test["outcome"], 0) + 1
    lines = [
        f"# Acceptance run of {record['date']}",
        "",
        f"Backend {record['backend']}; {where['cores']} cores of {where['processor']}, "
        f"{where['memory_gib']} GiB, Python {where['python']}, "
        + ", ".join(f"{name} {version}" for name, version in where["packages"].items() if version)
        + f"; commit {where['commit']}.",
        "",
        ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        + f"; pytest ended with {record['exit_status']}.",
        "",
        "| test | outcome | seconds | figures |",
        "|---|---|---|---|",
    ]
    for test in record["tests"]:
        figures = "; ".join(f"{name} = {value}" for name, value in test["figures"].items())
        lines.append(f"| `{test['test']}` | {test['outcome']} | {test['seconds']} | {figures} |")
    return "\n".join(lines) + "\n"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    asked = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return asked.stdout.strip() or "unknown"
