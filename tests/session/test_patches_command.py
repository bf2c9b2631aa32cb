"""``mt-megatron patches``: exit codes, data, and that it changes nothing."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mt_megatron import _session
from mt_megatron.cli.main import main
from mt_megatron.errors import MtMegatronError
from mt_megatron.patching.digest import read_fingerprints
from mt_megatron.patching.records import read_record


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(["patches", *arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    found = capsys.readouterr()
    return code, found.out, found.err


def test_list_shows_every_patch_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = output(capsys, "list", "--backend", "cpu")
    assert code == 0
    assert "+ device.torch " in text and "groups.destroy_model_parallel" in text
    code, data, _ = output(capsys, "list", "--backend", "cpu", "--json")
    found = json.loads(data)
    assert code == 0 and len(found) >= 60
    assert all(one["reason"] and one["target"] and one["state"] for one in found)


def test_explain_shows_source_and_digest(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = output(capsys, "explain", "groups.destroy_model_parallel", "--backend", "cpu")
    assert code == 0 and "parallel_state.py:" in text and "installed_digest" in text
    code, data, _ = output(capsys, "explain", "groups.destroy_model_parallel", "--backend", "cpu", "--json")
    found = json.loads(data)
    assert found["digest"] == found["installed_digest"]


def test_explain_of_an_unknown_patch_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, problem = output(capsys, "explain", "device.torhc", "--backend", "cpu")
    assert (code, text) == (2, "") and "did you mean 'device.torch'" in problem


def test_check_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = output(capsys, "check", "--backend", "cpu")
    assert code == 0 and "patches fit what is installed" in text
    code, data, _ = output(capsys, "check", "--backend", "cpu", "--json")
    found = json.loads(data)
    assert code == 0 and found["ok"] and found["problems"] == []
    assert len(found["plan_digest"]) == 64 and len(found["patches"]) >= 60


@pytest.mark.parametrize("as_json", [True, False])
def test_check_lists_every_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    import dataclasses

    import mt_megatron.patches as patches_package

    real = patches_package.collect

    def two_wrong(backend: object) -> object:
        found = real(backend)  # type: ignore[arg-type]
        digested = [index for index, patch in enumerate(found) if patch.digest]
        for index in digested[:2]:
            found[index] = dataclasses.replace(found[index], digest="0" * 64)
        return found

    monkeypatch.setattr(patches_package, "collect", two_wrong)
    code, text, _ = output(capsys, "check", "--backend", "cpu", *(["--json"] if as_json else []))
    assert code == 1
    if as_json:
        found = json.loads(text)
        assert not found["ok"]
        assert [one["error"] for one in found["problems"]] == ["UpstreamDriftError"] * 2
    else:
        assert text.count("UpstreamDriftError:") == 2 and "2 problem(s) found" in text


def test_check_of_another_version_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_session, "MEGATRON_CORE", "0.8.0")
    code, text, _ = output(capsys, "check", "--backend", "cpu")
    assert code == 1 and "UpstreamVersionError" in text and "pip install megatron-core==0.8.0" in text


def test_an_unknown_backend_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = output(capsys, "check", "--backend", "cpuu")
    assert code == 1 and "did you mean 'cpu'" in text


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["explain"], ["check", "--wrong"], ["list", "x"]])
def test_wrong_use(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert output(capsys, *arguments)[0] == 2


@pytest.mark.parametrize("arguments", [[], ["list"], ["explain"], ["check"], ["record"]])
def test_help_has_an_example_and_the_exit_codes(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, text, _ = output(capsys, *arguments, "--help")
    assert code == 0 and "example" in text and "exit codes: 0" in text and "mt-megatron patches" in text


def test_nothing_is_applied_or_installed(capsys: pytest.CaptureFixture[str]) -> None:
    finders = list(sys.meta_path)
    for arguments in (["list"], ["check"], ["explain", "device.torch", "--backend", "cpu"]):
        output(capsys, *arguments)
    assert sys.meta_path == finders and _session._applied is None


def test_record_rewrites_the_line_hashes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mt_megatron.patches import catalogue

    committed = read_fingerprints(_session.FINGERPRINTS)
    monkeypatch.setattr(_session, "FINGERPRINTS", tmp_path / "upstream.json.gz")
    monkeypatch.setattr(catalogue, "PATH", tmp_path / "declared.json.gz")
    code, text, _ = output(capsys, "record")
    assert code == 0 and f"{len(committed)} targets recorded" in text
    assert read_fingerprints(tmp_path / "upstream.json.gz") == committed
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in first:
        (tmp_path / name).unlink()
    assert output(capsys, "record")[0] == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    assert sorted(first) == ["declared.json.gz", "upstream.json.gz"]
    found = catalogue.recorded("cpu")
    assert found is not None and len(found) >= 60


@pytest.mark.parametrize("damage", ["none there", "cut", "another format", "no list of patches"])
def test_the_list_is_made_anew_without_the_recorded_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    from mt_megatron.patches import catalogue

    expected = output(capsys, "list", "--backend", "cpu", "--json")
    packed = catalogue.PATH.read_bytes()
    contents = {"cut": packed[:1000], "another format": b"{}", "no list of patches": gzip.compress(b"[]")}
    monkeypatch.setattr(catalogue, "PATH", tmp_path / "declared.json.gz")
    if damage in contents:
        catalogue.PATH.write_bytes(contents[damage])
    assert catalogue.recorded("cpu") is None
    assert output(capsys, "list", "--backend", "cpu", "--json") == expected


def test_the_recorded_list_is_what_is_declared() -> None:
    """Or ``mt-megatron patches record`` has to be run. For another torch the list is made anew."""
    from mt_megatron.backends import registry
    from mt_megatron.cli.patches import _as_data
    from mt_megatron.patches import catalogue, collect

    recorded = catalogue.recorded("cpu")
    if recorded is None:
        written = read_record(catalogue.PATH)["of"]
        assert catalogue._of()["torch"] != written["torch"], "run 'mt-megatron patches record'"
        return
    declared = collect(registry.get("cpu"))
    assert [_as_data(patch, None) for patch in recorded] == [_as_data(patch, None) for patch in declared]


def test_the_list_needs_no_torch(tmp_path: Path) -> None:
    """Importing it takes longer than the list; the list is grouped by feature."""
    code = (
        "import sys\n"
        "from mt_megatron.cli.main import main\n"
        "code = main(['patches', 'list', '--backend', 'cpu'])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "\nmoe (" in done.stdout and "\nerrata (" in done.stdout


def test_errata_are_listed_with_their_issues(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patches", "list", "--backend", "cpu", "--errata", "--json"]) == 0
    found = {each["id"]: each for each in json.loads(capsys.readouterr().out)}
    assert "errata.shared_parameters" in found and {each["feature"] for each in found.values()} == {"errata"}
    for name, each in found.items():
        assert re.search(r"NVIDIA/Megatron-LM [#!]\d+|no issue upstream", each["reason"]), name


def test_a_word_filters_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "list", "--filter", "RoPE", "--json")
    found = [each["id"] for each in json.loads(out)]
    assert code == 0 and "rope.embedding" in found and "norm.fused_layer_norm" not in found
    code, _, err = output(capsys, "list", "--filter", "nothing-like-it")
    assert code == 2 and "mentions 'nothing-like-it'" in err


def test_the_list_of_a_backend_whose_device_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "list", "--backend", "cuda", "--json")
    assert code == 0 and len(json.loads(out)) > 50
    code, out, _ = output(capsys, "explain", "rope.embedding", "--backend", "cuda")
    assert code == 0 and "would be applied" in out
    assert output(capsys, "list", "--backend", "cudaa")[0] != 0


def test_an_unknown_id_gets_what_mentions_it_and_the_features(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = output(capsys, "explain", "yarn")
    assert "mentioned by rope.apply" in err
    _, _, err = output(capsys, "explain", "foo")
    assert "'patches list --filter WORD'" in err and "errata" in err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"backend": 3}, "backend=3 is a int: expected a name, auto or one of cpu"),
        ({"backend": ["cpu"]}, "is a list: expected a name"),
        ({"backend": "cpu", "features": 3}, "features=3 is one int: expected a list"),
        ({"backend": "cpu", "scope": 3}, "scope=3 is one int: expected a list"),
    ],
)
def test_an_argument_of_another_type_is_an_error_that_says_so(given: dict[str, Any], says: str) -> None:
    import mt_megatron

    with pytest.raises(MtMegatronError, match=says):
        mt_megatron.patch(**given)


def test_upstreams_future_warnings_are_hidden_while_patched() -> None:
    code = """
import warnings, mt_megatron
def hidden():
    ours = [getattr(each[3], "pattern", "") for each in warnings.filters if each[2] is FutureWarning]
    return [each for each in ours if each.startswith("megatron")]
with mt_megatron.patched("cpu", features=["device"]):
    assert len(hidden()) == 1
assert not hidden()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
