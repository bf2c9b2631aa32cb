"""The build that the package carries is that of the source, small, and loads nothing from elsewhere."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

from mt_megatron.scope.control.generate import MOST_TOKENS
from mt_megatron.scope.web.assets import PAGE, assets, built_from
from mt_megatron.scope.web.messages import COMMANDS, MOST_GENERATED
from tests.launch import ROOT
from tools.scope_page import build


def test_build_is_current() -> None:
    assert built_from() == build.source_digest(), "run: python -m tools.scope_page.build"


def test_digest_sees_every_change(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(build.SOURCE, copy, ignore=shutil.ignore_patterns("node_modules", "dist"))
    before = build.source_digest(copy)
    assert before == build.source_digest()
    (copy / "node_modules").mkdir()
    (copy / "node_modules" / "x.js").write_text("1")
    assert build.source_digest(copy) == before
    (copy / "src" / "App.svelte").write_text((copy / "src" / "App.svelte").read_text() + " ")
    assert build.source_digest(copy) != before


def test_build_may_be_shipped() -> None:
    build.check(PAGE)
    assert build.compressed_bytes(PAGE) <= 250_000
    assert {"/", "/assets/page.js", "/assets/page.css"} <= set(assets())
    assert "scope/web/page/**" in (ROOT / "pyproject.toml").read_text()


def test_large_files_are_packed_and_come_out_the_same(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text("<p>")
    (tmp_path / "assets" / "page.js").write_text("let x = 1;\n" * 2_000)
    (tmp_path / "assets" / "open.js").write_text("go();")
    build.compress(tmp_path)
    build.compress(tmp_path)  # a second time changes nothing
    files = assets(tmp_path)
    assert {name: each.encoding for name, each in files.items()} == {
        "/": None,
        "/assets/page.js": "gzip",
        "/assets/open.js": None,
    }
    assert files["/assets/page.js"].content_type.startswith("text/javascript")
    assert gzip.decompress(files["/assets/page.js"].body).decode() == "let x = 1;\n" * 2_000
    assert sum(path.stat().st_size for path in PAGE.rglob("*") if path.is_file()) < 250_000


@pytest.mark.parametrize(
    "name,more,match",
    [
        ("assets/page.js", "fetch('https://cdn.example/x')", "cdn.example"),
        ("assets/page.css", "@import url(http://fonts.example/a.css);", "fonts.example"),
        ("index.html", "<script>alert(1)</script>", "script"),
        ("index.html", '<b onclick="x()">', "onclick"),
    ],
)
def test_check_finds_what_may_not_be_shipped(tmp_path: Path, name: str, more: str, match: str) -> None:
    shutil.copytree(PAGE, tmp_path / "page")
    path = tmp_path / "page" / name
    if path.exists():
        path.write_text(path.read_text() + more)
    else:
        packed = path.with_name(f"{path.name}.gz")
        packed.write_bytes(gzip.compress(build.plain(packed) + more.encode()))
    with pytest.raises(ValueError, match=match):
        build.check(tmp_path / "page")


def test_lock_file_names_no_registry() -> None:
    lock = json.loads((build.SOURCE / "package-lock.json").read_text())
    packages = {name: row for name, row in lock["packages"].items() if name}
    assert packages and not [name for name, row in packages.items() if "resolved" in row]
    assert all(row.get("integrity") for row in packages.values())


def test_texts_exist_in_both_languages() -> None:
    """Every text that a view asks for by ``t('…')`` has its Chinese; ``say`` has both where it is used."""
    source = build.SOURCE / "src"
    table = (source / "lib" / "i18n.js").read_text()
    known = {a or b for a, b in re.findall(r"(?:'((?:[^'\\]|\\.)+)'|\b(\w+)): '", table)}
    asked: set[str] = set()
    for path in source.rglob("*.svelte"):
        asked |= set(re.findall(r"\bt\('((?:[^'\\]|\\.)+)'\)", path.read_text()))
    assert len(asked) > 50
    assert asked - known - {"Top k", "RMS", "NaN"} == set()


def test_page_asks_for_as_many_tokens_as_are_generated_at_most() -> None:
    view = (build.SOURCE / "src" / "views" / "Generate.svelte").read_text()
    assert f'min="1" max="{MOST_TOKENS}" bind:value={{n}}' in view and MOST_GENERATED == MOST_TOKENS
    assert COMMANDS["generate"]["n"].most == MOST_TOKENS
    assert "mt-megatron generate" not in view
