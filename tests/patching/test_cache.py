"""The digest cache is fast when it is right, and as if absent when anything is wrong with it."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from mt_megatron.errors import PatchTargetError
from mt_megatron.patching import digest as digest_module
from mt_megatron.patching.digest import SCHEME, DigestCache, default_path, source_of

from .conftest import Toy

SOURCE = "def f(a, *, b=1): return a\nclass C:\n    x: int = 1\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "mt_megatron" / "digests.json"


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file that is parsed."""
    seen: list[Path] = []
    real = digest_module.parse_file
    monkeypatch.setattr(digest_module, "parse_file", lambda path: (seen.append(path), real(path))[1])
    return seen


def filled(toy: Toy, file: Path, *names: str) -> None:
    toy.write("owner", SOURCE)
    cache = DigestCache(file, SCHEME)
    for name in names or ("f", "C"):
        source_of(toy.target(name), cache)
    cache.save()


def test_remembers_everything_about_a_source(toy: Toy, file: Path, parses: list[Path]) -> None:
    filled(toy, file)
    fresh = [source_of(toy.target(name)) for name in ("f", "C")]
    parses.clear()
    cache = DigestCache(file, SCHEME)
    assert [source_of(toy.target(name), cache) for name in ("f", "C")] == fresh
    assert parses == []


def test_remembers_what_a_file_does_not_define(toy: Toy, file: Path, parses: list[Path]) -> None:
    toy.write("owner", SOURCE)
    cache = DigestCache(file, SCHEME)
    with pytest.raises(PatchTargetError, match="does not define"):
        source_of(toy.target("nothing"), cache)
    cache.save()
    parses.clear()
    with pytest.raises(PatchTargetError, match="does not define"):
        source_of(toy.target("nothing"), DigestCache(file, SCHEME))
    assert parses == []


def test_another_size_is_another_file(toy: Toy, file: Path) -> None:
    filled(toy, file)
    path = toy.root / "owner.py"
    before = path.stat()
    path.write_text(SOURCE.replace("return a", "return a + 1"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source_of(toy.target("f"), DigestCache(file, SCHEME)) == source_of(toy.target("f"))


def test_another_time_is_another_file(toy: Toy, file: Path) -> None:
    filled(toy, file)
    path = toy.root / "owner.py"
    before = path.stat()
    path.write_text(SOURCE.replace("return a", "return b"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert source_of(toy.target("f"), DigestCache(file, SCHEME)) == source_of(toy.target("f"))


def test_a_changed_file_drops_all_that_was_known_of_it(toy: Toy, file: Path) -> None:
    filled(toy, file, "f", "C")
    toy.write("owner", SOURCE + "# longer\n")
    cache = DigestCache(file, SCHEME)
    source_of(toy.target("f"), cache)
    cache.save()
    (entry,) = json.loads(file.read_text())["files"].values()
    assert list(entry["names"]) == ["f"]


def test_only_the_owner_can_read_the_file(toy: Toy, file: Path) -> None:
    filled(toy, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def poison(file: Path, digest: object) -> None:
    content = json.loads(file.read_text())
    for entry in content["files"].values():
        for known in entry["names"].values():
            known["digest"] = digest
    file.write_text(json.dumps(content))


def test_a_poisoned_cache_shows_that_these_tests_can_fail(toy: Toy, file: Path) -> None:
    filled(toy, file)
    poison(file, "0" * 64)
    assert source_of(toy.target("f"), DigestCache(file, SCHEME)).digest == "0" * 64


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_believed(toy: Toy, file: Path, mode: int) -> None:
    filled(toy, file)
    poison(file, "0" * 64)
    file.chmod(mode)
    cache = DigestCache(file, SCHEME)
    assert source_of(toy.target("f"), cache) == source_of(toy.target("f"))
    cache.save()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_another_users_file_is_not_believed(toy: Toy, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(toy, file)
    poison(file, "0" * 64)
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    assert source_of(toy.target("f"), DigestCache(file, SCHEME)) == source_of(toy.target("f"))


def test_another_scheme_is_not_read(toy: Toy, file: Path) -> None:
    filled(toy, file)
    poison(file, "0" * 64)
    assert source_of(toy.target("f"), DigestCache(file, SCHEME + 1)) == source_of(toy.target("f"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "\x00" * 100,
        lambda text: "[]",
        lambda text: "null",
        lambda text: json.dumps({"scheme": SCHEME}),
        lambda text: json.dumps({"scheme": SCHEME, "files": []}),
        lambda text: json.dumps({"scheme": SCHEME, "files": {"x": 3}}),
        lambda text: text.replace('"segments"', '"segment"'),
        lambda text: text.replace('"kind": "normal"', '"sort": "normal"'),
        lambda text: text.replace('"digest": "', '"digest": ["').replace('", "', '"], "', 1),
        lambda text: text.replace('"key": [', '"key": [[],'),
    ],
)
def test_a_damaged_file_is_ignored_and_written_anew(toy: Toy, file: Path, damage: object) -> None:
    filled(toy, file)
    file.write_text(damage(file.read_text()))  # type: ignore[operator]
    cache = DigestCache(file, SCHEME)
    assert source_of(toy.target("f"), cache) == source_of(toy.target("f"))
    cache.save()
    assert DigestCache(file, SCHEME)[toy.root / "owner.py", "f"] is not None


def test_an_unwritable_folder_is_no_error(toy: Toy, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    filled(toy, blocked / "digests.json")  # a file is in the place of the folder
    assert blocked.read_text() == ""


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    toy: Toy, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(toy, file)
    before = file.read_text()

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    cache = DigestCache(file, SCHEME)
    toy.write("owner", SOURCE + "x = 1\n")
    source_of(toy.target("x"), cache)
    cache.save()
    assert file.read_text() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_files_that_are_gone_are_forgotten(toy: Toy, file: Path) -> None:
    filled(toy, file)
    (toy.root / "owner.py").unlink()
    toy.write("other", "y = 1\n")
    cache = DigestCache(file, SCHEME)
    source_of(toy.target("y", "other"), cache)
    cache.save()
    assert list(json.loads(file.read_text())["files"]) == [str(toy.root / "other.py")]


def test_nothing_new_writes_nothing(toy: Toy, file: Path) -> None:
    filled(toy, file)
    before = file.stat().st_mtime_ns
    cache = DigestCache(file, SCHEME)
    source_of(toy.target("f"), cache)
    cache.save()
    assert file.stat().st_mtime_ns == before


def test_no_path_keeps_nothing(toy: Toy, parses: list[Path]) -> None:
    toy.write("owner", SOURCE)
    cache = DigestCache(None, SCHEME)
    source_of(toy.target("f"), cache)
    source_of(toy.target("f"), cache)
    cache.save()
    assert len(parses) == 1, "within one plan it is remembered"


def test_the_file_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_path() == Path(f"/somewhere/mt_megatron/digests-{version}.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_path() == Path(f"/home/someone/.cache/mt_megatron/digests-{version}.json")
