"""``mt-megatron doctor``: complete where all is well, and alive where nothing is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.cli.doctor import command as doctor
from mt_megatron.cli.doctor import host
from mt_megatron.cli.doctor.command import text, verdict
from mt_megatron.cli.main import main
from tests.launch import run_command

ROOT = Path(__file__).parent.parent.parent


def run(
    *arguments: str, python: str = sys.executable, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """``mt-megatron doctor``, with ``path`` before everything else on the module path."""
    paths = [str(each) for each in (path, ROOT) if each is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return run_command(
        [python, "-m", "mt_megatron.cli", "doctor", *arguments],
        cold=path is not None,
        timeout=300,
        env=environment,
    )


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """The report of this machine."""
    done = run("--json")
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0)
    return found


def test_this_machine_is_fine(report: dict[str, Any]) -> None:
    assert report["problems"] == []
    assert report["patches"]["ok"] is True
    assert report["patches"]["applicable"] > 0
    assert len(report["patches"]["plan_digest"]) == 64


def test_report_holds_what_a_bug_report_needs(report: dict[str, Any]) -> None:
    assert report["versions"]["megatron-core"] == "0.9.0"
    # Metadata may lack the build's local part (+cu126).
    assert report["torch"]["version"].startswith(report["versions"]["torch"])
    assert report["versions"]["python"].startswith("3.1")
    assert report["torch"]["collectives"]["gloo"] is True
    assert report["backends"]["cpu"]["available"] is True
    assert report["backends"]["cpu"]["devices"]
    assert report["system"]["cores"] >= report["system"]["cores_allowed"] >= 1
    assert report["system"]["memory_bytes"] > report["system"]["memory_available_bytes"] > 0
    assert Path(report["megatron_core"]["dataset_helper"]).is_file()
    assert report["auto"]["name"] in report["backends"]
    assert report["would_run"]["training on cpu"]["works"] is True
    assert "cpu: delayed, tensorwise, rowwise" in report["would_run"]["fp8"]["why"]
    assert "emulated" in report["would_run"]["fp8"]["why"]
    for name in ("deep_gemm", "transformer_engine"):
        found = "is installed" if report["torch"]["fp8_libraries"][name] else "is not installed"
        assert f"{name} {found}" in report["would_run"]["fp8"]["why"]
    for facts in report["backends"].values():
        assert facts["why"]
    shared_memory = report["channels"]["shm"]
    assert shared_memory["works"] is True and shared_memory["uses"] in ("native", "python")
    assert ("C helper" if shared_memory["uses"] == "native" else "Python alone") in shared_memory["why"]


def test_report_warns_of_what_listens_on_all_addresses(report: dict[str, Any]) -> None:
    assert any("listens on all addresses" in line for line in report["network"]["listeners"])
    assert any("clock pings" in line and "--scan off" in line for line in report["network"]["listeners"])


def test_what_is_said_of_the_rendezvous_store_is_true() -> None:
    code = (
        "import psutil, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print([c.laddr.ip for c in psutil.Process().net_connections() if c.laddr.port == store.port\n"
        "       and c.status == 'LISTEN'])\n"
    )
    done = run_command([sys.executable, "-c", code], timeout=120)
    assert any(each in done.stdout for each in ("'::'", "'0.0.0.0'")), done


def test_text_shows_every_part_after_the_verdict(report: dict[str, Any]) -> None:
    shown = text(report)
    assert shown.splitlines()[0] == verdict(report)
    for heading in ("versions", "machine", "megatron.core", "torch", "backends", "network", "patches"):
        assert f"\n{heading}\n" in shown
    assert "\nchannels between pipeline stages\n  shm " in shown
    assert shown.index("\nwould run\n") < shown.index("\nversions\n")


@pytest.mark.parametrize(
    ("works", "problems", "says"),
    [
        ({"cpu": True, "cuda": False}, [], "OK: can train on cpu. Problems: none."),
        ({"cpu": True, "cuda": True}, [], "OK: can train on cuda, cpu. Problems: none."),
        ({"cpu": True}, ["one", "two"], "NOT OK: can train on cpu. Problems: 2."),
        ({"cpu": False}, ["one"], "NOT OK: cannot train here. Problems: 1."),
    ],
)
def test_the_verdict(works: dict[str, bool], problems: list[str], says: str) -> None:
    would_run = {f"training on {name}": {"works": each, "why": ""} for name, each in works.items()}
    found = {"would_run": would_run, "problems": problems, "warnings": [], "auto": {"name": "cuda"}}
    assert verdict(found) == says
    assert verdict({**found, "warnings": ["x"]}) == f"{says} Warnings: 1."


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["one"], 1)])
def test_text_is_the_default_and_the_exit_code_tells_of_problems(
    report: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    problems: list[str],
    code: int,
) -> None:
    monkeypatch.setattr(doctor, "make_report", lambda *_: {**report, "problems": problems})
    assert main(["doctor"]) == code
    looking, _, said = capsys.readouterr().out.splitlines()[:3]
    assert looking.startswith("mt_megatron ") and said.startswith(
        "NOT OK" if problems else "OK: can train on"
    )
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["problems"] == problems


def test_parts_are_named_as_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first words come before torch is there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mt_megatron.cli", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 4096)
        whole = first + process.stdout.read()
    assert b"looking" in first and b"torch backends" not in first and b"OK:" not in first
    assert b": machine torch backends choice channels patches cards\n\n" in whole


def test_environment_holds_known_variables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    found = host.environment()
    assert found["NCCL_DEBUG"] == "INFO"
    assert "SECRET_TOKEN" not in found


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('libdriver.so: cannot open shared object file')", "ImportError: libdriver.so"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("import sys\nsys.exit(7)", "SystemExit"),
        ("import os\nos._exit(7)", "exit code 7"),
    ],
)
def test_a_broken_torch_is_reported(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    done = run("--json", path=tmp_path)
    assert done.returncode == 1, done
    found = json.loads(done.stdout)
    assert message in "\n".join(found["problems"])
    assert "Traceback" not in done.stderr
    assert text(found)


def test_a_torch_that_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setattr(doctor, "_TIMEOUT", 3.0)
    found = doctor._probe()
    assert "no answer within 3 s" in found["torch_facts"]["error"] and not found["patches"]["ok"]


def test_an_empty_environment_is_reported(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True, timeout=120)
    python = str(tmp_path / "bin" / "python")
    done = run("--json", python=python)
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    problems = "\n".join(json.loads(done.stdout)["problems"])
    assert "pip install packaging" in problems
    assert "megatron.core cannot be found: pip install megatron-core==0.9.0" in problems
    assert "No module named 'torch'" in problems
    assert not any(each["works"] for each in json.loads(done.stdout)["would_run"].values())
    assert "\nproblems:\n" in run(python=python).stdout


def versions(**changes: str | None) -> dict[str, Any]:
    return {**host.versions(), **{name.replace("_", "-"): version for name, version in changes.items()}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": None}, "torch is not installed: pip install 'torch>=2.7,<=2.13.0'"),
        ({"torch": "2.6.0+cpu"}, "torch is 2.6.0+cpu; expected >=2.7,<=2.13.0"),
        ({"megatron_core": "0.10.0"}, "megatron-core is 0.10.0; expected ==0.9.0"),
        ({"numpy": None}, "numpy is not installed"),
    ],
)
def test_wrong_versions_are_named_with_the_fix(changes: dict[str, str | None], message: str) -> None:
    assert any(line.startswith(message) for line in host.version_problems(versions(**changes)))


def test_local_version_labels_are_no_problem() -> None:
    assert host.version_problems(versions(torch="2.13.0+cpu")) == []


LINUX = {"os": "Linux", "machine": "x86_64"}


@pytest.mark.parametrize(
    ("system", "version", "message"),
    [
        ({"os": "Windows", "machine": "AMD64"}, (3, 11), "Windows is not supported"),
        ({"os": "Darwin", "machine": "arm64"}, (3, 11), "Darwin is not supported"),
        ({"os": "Linux", "machine": "aarch64"}, (3, 11), "aarch64 has no wheel of megatron-core 0.9.0"),
        (LINUX, (3, 12), "Python 3.12 is not supported: megatron-core 0.9.0 has wheels for 3.10 and 3.11"),
        (LINUX, (3, 9), "Python 3.9 is not supported"),
    ],
)
def test_unsupported_platforms_are_refused(
    system: dict[str, str], version: tuple[int, int], message: str
) -> None:
    (problem,) = host.platform_problems(system, version)
    assert problem.startswith(message)


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_supported_platforms_pass(version: tuple[int, int]) -> None:
    assert host.platform_problems(LINUX, version) == []


def test_a_missing_dataset_helper_is_a_problem() -> None:
    (problem,) = host.megatron_problems({"path": "/x", "dataset_helper": None})
    assert "no compiled helper" in problem
    (problem,) = host.megatron_problems({"path": None, "dataset_helper": None})
    assert "pip install megatron-core==0.9.0" in problem


def test_warnings_name_what_may_surprise(report: dict[str, Any]) -> None:
    surprising = {
        **report,
        "versions": {**report["versions"], "apex": "0.1", "transformer-engine": "1.9"},
        "megatron_core": {**report["megatron_core"], "namespace": ["/a/megatron", "/b/megatron"]},
        "system": {**report["system"], "shared_memory_free_bytes": 64 * 2**20},
    }
    lines = "\n".join(doctor._warnings(surprising))
    for part in ("transformer-engine 1.9", "apex 0.1", "/a/megatron, /b/megatron", "64 MiB free"):
        assert part in lines


def test_patches_that_do_not_fit_are_a_problem() -> None:
    assert doctor._patch_problems({"ok": False, "problems": ["a: b", "c: d"]}) == ["a: b", "c: d"]
    assert doctor._patch_problems({"ok": False, "error": "exit code 1: x"}) == ["exit code 1: x"]
    assert doctor._patch_problems({"ok": True, "problems": []}) == []


def test_another_megatron_core_is_reported_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 3\n")
    done = run("--json", path=tmp_path)
    assert done.returncode == 1
    problems = "\n".join(json.loads(done.stdout)["problems"])
    assert "megatron-core is 0.12.3" in problems and "pip install megatron-core==0.9.0" in problems


def test_an_untested_version_is_a_warning(monkeypatch: pytest.MonkeyPatch, report: dict[str, Any]) -> None:
    from mt_megatron import _session

    monkeypatch.setattr(_session, "TESTED", {"numpy": "<1"})
    assert any(line.startswith("numpy ") and "<1" in line for line in doctor._warnings(report))


def test_torch_is_imported_by_one_process_only(tmp_path: Path) -> None:
    """Which is what the report costs: each process that imports it takes more than all the rest."""
    (tmp_path / "torch").mkdir()
    asked = tmp_path / "asked"
    source = f"import os\nopen({str(asked)!r}, 'a').write(f'{{os.getpid()}}\\n')\nraise ImportError('none')\n"
    (tmp_path / "torch" / "__init__.py").write_text(source)
    assert run("--json", path=tmp_path).returncode == 1
    assert len(set(asked.read_text().split())) == 1
