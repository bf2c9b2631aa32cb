"""Another upstream than the one the patches were written against: named, explained, or let through."""

from __future__ import annotations

import ast
import io
import shutil
import tokenize
from pathlib import Path

import pytest

import mt_megatron
from mt_megatron import _session
from mt_megatron.backends import registry
from mt_megatron.errors import UpstreamVersionError
from mt_megatron.patches import collect
from mt_megatron.patching.digest import digest_of, fingerprint, read_fingerprints, source_of
from mt_megatron.patching.source import define, exists, locate, parse_target
from mt_megatron.patching.spec import Patch

from .scenarios import run_scenario

BACKENDS = ("cpu", "cuda", "musa")


@pytest.fixture(scope="module")
def declared() -> list[Patch]:
    found = {patch.id: patch for name in BACKENDS for patch in collect(registry.get(name))}
    return list(found.values())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the installed Megatron that comes first on the path."""
    installed = locate("megatron.core.package_info").parent
    shutil.copytree(installed, tmp_path / "megatron" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def plan_of(tree: Path, **environment: str) -> dict[str, object]:
    cache = {"XDG_CACHE_HOME": str(tree / "cache")}
    path = f"{tree}:{Path(mt_megatron.__file__).parents[1]}"
    return run_scenario("plan_of", "cpu", env={"PYTHONPATH": path, **cache, **environment})


CHANGED = "megatron/core/parallel_state.py"


def change_a_token(tree: Path) -> int:
    """In ``destroy_model_parallel``, which is patched; returns the line."""
    file = tree / CHANGED
    lines = file.read_text().split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("def destroy_model_parallel"))
    index = next(
        i for i in range(start, len(lines)) if lines[i].strip() == "_TENSOR_MODEL_PARALLEL_GROUP = None"
    )
    lines[index] = lines[index].replace("None", "True")
    file.write_text("\n".join(lines))
    return index + 1


def test_one_changed_token_is_an_error_that_names_patch_file_and_lines(tree: Path) -> None:
    line = change_a_token(tree)
    found = plan_of(tree)
    assert found["error"] == "UpstreamDriftError"
    message = str(found["message"])
    for part in (
        "groups.destroy_model_parallel",
        "megatron.core.parallel_state:destroy_model_parallel",
        str(tree / CHANGED),
        f"line(s) {line} of",
        "_TENSOR_MODEL_PARALLEL_GROUP = True",
    ):
        assert part in message
    assert found["megatron"] == [], "nothing was imported to find out"


def test_the_environment_turns_drift_into_a_warning_that_the_report_keeps(tree: Path) -> None:
    line = change_a_token(tree)
    found = plan_of(tree, MT_MEGATRON_ALLOW_DRIFT="1")
    warnings = found["warnings"]
    assert isinstance(warnings, list) and all(f"line(s) {line} of" in each for each in warnings)
    # One for each patch of that function.
    assert [
        name
        for name in ("groups.destroy_model_parallel", "transfers.close")
        for each in warnings
        if name in each
    ] == [
        "groups.destroy_model_parallel",
        "transfers.close",
    ]
    assert len(warnings) == 2
    assert found["json"] == found["warnings"]


def test_comments_and_layout_are_no_drift(tree: Path) -> None:
    file = tree / CHANGED
    file.write_text(
        file.read_text().replace("def destroy_model_parallel():", "def destroy_model_parallel(\n):  # other")
    )
    assert plan_of(tree) == {"warnings": [], "json": []}


def test_a_tree_of_another_version_is_a_named_error_with_the_fix(tree: Path) -> None:
    """Its files come first on the path, so what the installed distribution says does not count."""
    file = tree / "megatron/core/package_info.py"
    file.write_text(file.read_text().replace("MINOR = 9", "MINOR = 10"))
    found = plan_of(tree)
    assert found["error"] == "UpstreamVersionError"
    for part in ("0.10.0", "0.9.0", "pip install megatron-core==0.9.0", str(file)):
        assert part in str(found["message"])
    assert found["megatron"] == []


def test_a_missing_megatron_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from mt_megatron.patching import plan

    monkeypatch.setattr(_session, "_source_version", lambda: (None, ""))
    monkeypatch.setattr(plan, "installed_version", lambda name: None)
    with pytest.raises(UpstreamVersionError, match="megatron-core is not installed.*pip install"):
        _session.check_upstream_version()


def test_without_a_readable_source_the_metadata_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from mt_megatron.patching import plan

    monkeypatch.setattr(_session, "_source_version", lambda: (None, ""))
    monkeypatch.setattr(plan, "installed_version", lambda name: "0.9.0")
    _session.check_upstream_version()
    monkeypatch.setattr(plan, "installed_version", lambda name: "0.12.3")
    with pytest.raises(UpstreamVersionError, match=r"is 0\.12\.3 \(its metadata\)"):
        _session.check_upstream_version()


def test_pre_releases_are_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mt_megatron.patching import source

    file = tmp_path / "package_info.py"
    file.write_text("MAJOR = 0\nMINOR = 9\nPATCH = 0\nPRE_RELEASE = 'rc0'\n")
    monkeypatch.setattr(source, "locate", lambda module: file)
    with pytest.raises(UpstreamVersionError, match="0.9.0rc0"):
        _session.check_upstream_version()


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ({"torch": "2.13.0+cpu", "numpy": "2.4.6"}, []),
        ({"torch": "2.6.0", "numpy": "2.4.6"}, ["torch 2.6.0"]),
        ({"torch": "2.14.0", "numpy": "3.0.0"}, ["torch 2.14.0", "numpy 3.0.0"]),
        ({"torch": "2.13.0"}, []),
    ],
)
def test_untested_versions_are_named(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], named: list[str]
) -> None:
    from mt_megatron.patching import plan

    monkeypatch.setattr(plan, "installed_version", installed.get)
    found = _session.untested_versions()
    assert len(found) == len(named)
    assert all(text.startswith(name) for text, name in zip(found, named, strict=True))


def is_here(patch: Patch) -> bool:
    return not patch.optional or exists(patch.module)


def test_every_declared_digest_is_the_installed_one(declared: list[Patch]) -> None:
    wrong = {
        patch.id: source_of(patch.target).digest
        for patch in declared
        if patch.digest and is_here(patch) and source_of(patch.target).digest != patch.digest
    }
    assert wrong == {}


def test_the_recorded_lines_are_those_of_the_declared_digests(declared: list[Patch]) -> None:
    """``mt-megatron patches record`` writes them anew."""
    recorded = read_fingerprints(_session.FINGERPRINTS)
    expected = {patch.target: patch.digest for patch in declared if patch.digest}
    assert {target: entry["digest"] for target, entry in recorded.items()} == expected
    here = {patch.target for patch in declared if is_here(patch)}
    for target, entry in recorded.items():
        assert target in here or entry["lines"]
        if target not in here:
            continue
        assert entry["lines"].split() == [mark for _, mark in fingerprint(source_of(target))], target


def test_every_patch_says_why_and_belongs_to_a_feature(declared: list[Patch]) -> None:
    for patch in declared:
        assert len(patch.reason) > 15 and "\n" not in patch.reason, patch.id
        assert patch.id.count(".") >= 1, patch.id
        assert patch.feature in FEATURES, patch.id


FEATURES = {
    *("device", "collectives", "compat", "optimizer", "norm", "attention", "linear", "loss", "events"),
    *(
        "model_config",
        "moe",
        "mla",
        "mtp",
        "rope",
        "te_layers",
        "loader_workers",
        "errata",
        "fp8",
        "pipeline",
    ),
}


@pytest.mark.daily
def test_every_patched_source_notices_any_changed_name(declared: list[Patch]) -> None:
    """Each name and number in the span of each target, one at a time, on a copy in memory."""
    targets = {patch.target for patch in declared if patch.digest and is_here(patch)}
    assert len(targets) >= 40
    for target in sorted(targets):
        module, qualname = parse_target(target)
        text = locate(module).read_text()
        tree = ast.parse(text)
        definition = define(tree, qualname)
        assert definition is not None
        plain = digest_of(text, tree, definition)
        lines = text.splitlines(keepends=True)
        first, last = definition.segments[-1]
        tokens = [
            token
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if first < token.start[0] <= last
            and token.type == tokenize.NAME
            and token.string.isupper() is False
        ]
        for token in tokens[:: max(1, len(tokens) // 5)]:
            line = lines[token.start[0] - 1]
            changed = line[: token.start[1]] + "zz" + line[token.end[1] :]
            source = "".join([*lines[: token.start[0] - 1], changed, *lines[token.start[0] :]])
            try:
                again = ast.parse(source)
            except SyntaxError:
                continue
            other = define(again, qualname)
            assert other is None or digest_of(source, again, other) != plain, f"{target}: {token}"
