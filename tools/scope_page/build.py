"""Build the live page into the package: ``python -m tools.scope_page.build [--modules FOLDER] [--check]``.

Node and npm are needed here and nowhere else: the build is committed, the wheel carries it. ``source.json``
beside it has the digest of the source, by which a test sees whether the build is current.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mt_megatron.scope.web.assets import DIGEST, PAGE

SOURCE = Path(__file__).parent / "source"

MOST_BYTES = 250_000
"""Of all files of the build, compressed."""

_WORTH_IT = 4_096
"""Bytes from which on a file is compressed."""

_SKIPPED = {"node_modules", "dist"}


def source_files(folder: Path = SOURCE) -> list[Path]:
    """Files of the source, by path."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not _SKIPPED.intersection(path.relative_to(folder).parts)
    )


def source_digest(folder: Path = SOURCE) -> str:
    """SHA-256 of names and bytes of all files of the source."""
    digest = hashlib.sha256()
    for path in source_files(folder):
        name, body = path.relative_to(folder).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %s %d\n" % (len(name), name, len(body)))
        digest.update(body)
    return digest.hexdigest()


def build_into(target: Path, *, modules: Path | None = None) -> None:
    """Replace ``target`` by a new build. ``modules``: a ``node_modules`` folder to use; None: npm installs
    what the lock file names. Raises ``subprocess.CalledProcessError`` where npm or vite fails, ``ValueError``
    for a build that may not be shipped."""
    with tempfile.TemporaryDirectory(prefix="scope-page-") as name:
        work = Path(name) / "source"
        shutil.copytree(SOURCE, work, ignore=shutil.ignore_patterns(*_SKIPPED))
        if modules is not None:
            (work / "node_modules").symlink_to(modules.resolve())
        else:
            subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=work, check=True)
        subprocess.run(["node", "node_modules/vite/bin/vite.js", "build"], cwd=work, check=True)
        made = work / "dist"
        check(made)
        compress(made)
        (made / DIGEST).write_text(json.dumps({"sha256": source_digest()}) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(made, target)


def compress(folder: Path) -> None:
    """Replace large files by compressed ones: wheel and ssh carry a third of the bytes."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".gz" and path.stat().st_size > _WORTH_IT:
            body = gzip.compress(path.read_bytes(), 9, mtime=0)
            path.with_name(f"{path.name}.gz").write_bytes(body)
            path.unlink()


def plain(path: Path) -> bytes:
    """What a file of a build holds, compressed or not."""
    body = path.read_bytes()
    return gzip.decompress(body) if path.suffix == ".gz" else body


def compressed_bytes(folder: Path) -> int:
    """Of all files that a browser loads, with gzip."""
    return sum(
        len(gzip.compress(plain(path), 9))
        for path in folder.rglob("*")
        if path.is_file() and path.name != DIGEST
    )


def check(folder: Path) -> None:
    """Raises ``ValueError`` for a build that is too large, loads something from elsewhere, or needs inline
    code or style."""
    size = compressed_bytes(folder)
    if size > MOST_BYTES:
        raise ValueError(f"found {size:,} bytes compressed; expected at most {MOST_BYTES:,}")
    for path in folder.rglob("*"):
        if not {".html", ".js", ".css", ".svg"}.intersection(path.suffixes):
            continue
        text = plain(path).decode()
        for url in foreign_urls(text):
            raise ValueError(f"found {url} in {path.name}; the page may load nothing from elsewhere")
    page = (folder / "index.html").read_text(encoding="utf-8")
    for tag in re.findall(r"<script\b[^>]*>(?!</script>)|<style\b|\sstyle=|\son\w+=", page):
        raise ValueError(f"found {tag} in index.html; the policy allows files of this server only")


def foreign_urls(text: str) -> list[str]:
    """Addresses of other machines in ``text`` that a browser could load; names of XML vocabularies and
    addresses of Svelte's error texts are none."""
    found = re.findall(r"(?:https?|wss?)://[A-Za-z0-9.-]+[^\s\"'`)]*", text)
    names = ("http://www.w3.org/", "https://svelte.dev/e/")
    return [url for url in found if not url.startswith(names)]


def main() -> int:
    """Build, or say whether the build is current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", type=Path, help="a node_modules folder to use instead of npm ci")
    parser.add_argument("--check", action="store_true", help="build nothing; 1 if the build is not current")
    chosen = parser.parse_args()
    if chosen.check:
        from mt_megatron.scope.web.assets import built_from

        return int(built_from() != source_digest())
    build_into(PAGE, modules=chosen.modules)
    print(f"{PAGE}: {compressed_bytes(PAGE):,} bytes compressed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
