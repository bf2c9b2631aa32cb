"""Digest of the source that defines a target: changes with its meaning, not with its layout.

The digest is a sha256 over the ``tokenize`` stream of the lines that bind the name. Comments,
docstrings, blank lines, line breaks inside brackets and the width of an indentation leave it as
it is; any other token, a new statement or another block structure changes it.

    python -m mt_megatron.patching.digest package.module:Class.method ...
    python -m mt_megatron.patching.digest --write FILE package.module:Class.method ...
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import stat
import sys
import tempfile
import tokenize
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from mt_megatron.errors import PatchError, PatchTargetError
from mt_megatron.patching.records import read_record, write_record
from mt_megatron.patching.source import Definition, Parameter, define, locate, parse_target

_Key = tuple[int, int]
Known = tuple[Definition, str]
"""How a name is defined, and the digest of that."""

SCHEME = 2
"""Number of this digest definition; a cache written under another one is not read."""

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER, tokenize.TYPE_COMMENT}
# No token of Python begins with a blank.
INDENT, DEDENT = " indent", " dedent"
_STRUCTURE = {tokenize.NEWLINE: " end", tokenize.INDENT: INDENT, tokenize.DEDENT: DEDENT}
_SEGMENT_END = " segment"
MARKERS = {*_STRUCTURE.values(), _SEGMENT_END}
"""Tokens that stand for structure and not for text."""
# Python 3.12 splits an f-string into many tokens; joined again, digests agree between versions.
_STRING_START = {getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "TSTRING_START", -1)}
_STRING_END = {getattr(tokenize, "FSTRING_END", -1), getattr(tokenize, "TSTRING_END", -1)}

Position = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The defining source of one target, as installed now."""

    target: str
    path: str
    definition: Definition
    digest: str

    @property
    def first_line(self) -> int:
        return self.definition.segments[0][0]

    @property
    def last_line(self) -> int:
        return self.definition.segments[-1][1]


def source_of(target: str, cache: DigestCache | None = None) -> Source:
    """Locate, define and digest ``target``. Nothing is imported. Raises PatchTargetError when the
    module has no source file or does not bind the name."""
    module, qualname = parse_target(target)
    path = locate(module) if cache is None else cache.locate(module)
    try:
        known = cache[path, qualname] if cache is not None else _digest_file(path, qualname, target)
    except KeyError:
        assert cache is not None
        known = cache[path, qualname] = _digest_file(path, qualname, target)
    if known is None:
        raise PatchTargetError(f"{path} does not define {qualname!r}, so {target} does not exist")
    definition, digest = known
    return Source(target=target, path=str(path), definition=definition, digest=digest)


def _digest_file(path: Path, qualname: str, target: str) -> Known | None:
    try:
        text, tree = parse_file(path)
    except SyntaxError as error:
        raise PatchTargetError(
            f"{path} is not valid Python here ({error}), so {target} cannot be checked"
        ) from error
    if not qualname:
        last = text.count("\n") + 1
        definition: Definition | None = Definition(kind="module", segments=((1, last),), parameters=None)
    else:
        definition = define(tree, qualname)
    if definition is None:
        return None
    return definition, digest_of(text, tree, definition)


def parse_file(path: Path) -> tuple[str, ast.Module]:
    """Text (in the encoding it declares) and syntax tree of a source file."""
    found = path.stat()
    return _parse(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=1)  # patches of one file come together; a tree is too large to keep
def _parse(path: Path, mtime_ns: int, size: int) -> tuple[str, ast.Module]:
    with tokenize.open(path) as file:
        text = file.read()
    return text, ast.parse(text, filename=str(path))


def digest_of(text: str, tree: ast.Module, definition: Definition) -> str:
    """The sha256 hex digest of ``definition`` in ``text``, whose syntax tree is ``tree``."""
    state = hashlib.sha256()
    for _, token in meaningful_tokens(text, tree, definition.segments):
        state.update(token.encode())
        state.update(b"\0")
    return state.hexdigest()


def meaningful_tokens(
    text: str, tree: ast.Module, segments: Sequence[tuple[int, int]]
) -> list[tuple[int, str]]:
    """``(line number, token)`` of everything in ``segments`` that carries meaning."""
    lines = list(io.StringIO(text))  # str.splitlines would also split at form feeds
    docstrings = _docstrings(tree, lines)
    found: list[tuple[int, str]] = []
    for first, last in segments:
        found += _segment_tokens(lines[first - 1 : last], first, docstrings)
        found.append((last, _SEGMENT_END))
    return found


def _segment_tokens(
    lines: list[str], first: int, docstrings: dict[Position, Position]
) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    skip_until: Position | None = None
    depth, opened = 0, (0, 0)
    # A method's lines are indented; tokenize wants the first line to be at the margin or to be
    # an INDENT, which it then closes, so both read the same once that pair is dropped.
    indented = lines[0][:1] in " \t"
    for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
        start = (token.start[0] + first - 1, token.start[1])
        if token.type in _LAYOUT:
            continue
        if start in docstrings and not depth:
            skip_until = docstrings[start]
        if skip_until is not None:
            if start < skip_until:
                continue
            skip_until = None
            if token.type == tokenize.NEWLINE:
                continue
        if token.type in _STRING_START:
            depth += 1
            opened = opened if depth > 1 else token.start
        elif token.type in _STRING_END:
            depth -= 1
            if not depth:
                found.append((opened[0] + first - 1, _between(lines, opened, token.end)))
        elif not depth:
            found.append((start[0], _STRUCTURE.get(token.type) or token.string))
    if indented:
        del found[0]
        found = [pair for index, pair in enumerate(found) if index != _last_dedent(found)]
    return found


def _last_dedent(found: list[tuple[int, str]]) -> int:
    return max((index for index, (_, token) in enumerate(found) if token == DEDENT), default=-1)


def _between(lines: list[str], start: Position, end: Position) -> str:
    taken = lines[start[0] - 1 : end[0]]
    taken[-1] = taken[-1][: end[1]]
    taken[0] = taken[0][start[1] :]
    return "".join(taken)


def _docstrings(tree: ast.Module, lines: list[str]) -> dict[Position, Position]:
    """Start position -> end position of every docstring, in characters."""
    found: dict[Position, Position] = {}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is None:
            continue
        value = node.body[0]
        end = (value.end_lineno or value.lineno, value.end_col_offset or 0)
        found[_characters(lines, (value.lineno, value.col_offset))] = _characters(lines, end)
    return found


def _characters(lines: list[str], position: Position) -> Position:
    line, offset = position
    return line, len(lines[line - 1].encode()[:offset].decode())


# Digests remembered by path, modification time and size, in memory and in the user's cache folder.


def default_path() -> Path:
    """``$XDG_CACHE_HOME/mt_megatron/digests-<python>.json`` (``~/.cache`` without the variable)."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root, "mt_megatron", f"digests-{sys.version_info[0]}.{sys.version_info[1]}.json")


class DigestCache:
    """Definitions and digests per file. A damaged, foreign or unwritable cache file is no error:
    it is as if nothing had been remembered, because everything in it can be computed again."""

    def __init__(self, path: Path | None, scheme: int) -> None:
        self._path = path
        self._scheme = scheme
        self._dirty = False
        self._stats: dict[str, _Key] = {}
        self._paths: dict[str, Path] = {}
        self._files: dict[str, dict[str, Any]] = self._load()

    def __getitem__(self, place: tuple[Path, str]) -> Known | None:
        """Of a file and a qualified name; None says that the file does not define it. Raises
        KeyError when nothing is remembered, or the file has changed since."""
        path, qualname = place
        entry = self._files[str(path)]
        try:
            if tuple(entry["key"]) == self._key(path):
                return _decode(entry["names"][qualname])
        except (ValueError, TypeError, AttributeError):  # A damaged entry is written anew.
            del self._files[str(path)]
        raise KeyError(place)

    def locate(self, module: str) -> Path:
        """``source.locate``, asked once for each module."""
        if module not in self._paths:
            self._paths[module] = locate(module)
        return self._paths[module]

    def __setitem__(self, place: tuple[Path, str], known: Known | None) -> None:
        path, qualname = place
        key = self._key(path)
        entry = self._files.get(str(path))
        if entry is None or entry.get("key") != list(key):
            entry = self._files[str(path)] = {"key": list(key)}
        names = entry.setdefault("names", {})
        names[qualname] = None if known is None else {**asdict(known[0]), "digest": known[1]}
        self._dirty = True

    def save(self) -> None:
        """Write what was learned, atomically and readable by the owner alone."""
        if not self._dirty or self._path is None:
            return
        self._dirty = False
        files = {path: entry for path, entry in self._files.items() if os.path.exists(path)}
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".digests-")  # is 0600
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"scheme": self._scheme, "files": files}, file)
                os.replace(temporary, self._path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError:
            return

    def _key(self, path: Path) -> _Key:
        name = str(path)
        if name not in self._stats:
            found = path.stat()
            self._stats[name] = (found.st_mtime_ns, found.st_size)
        return self._stats[name]

    def _load(self) -> dict[str, dict[str, Any]]:
        if self._path is None:
            return {}
        try:
            with open(self._path, encoding="utf-8") as file:
                found = os.fstat(file.fileno())
                # What another user can write could hide a drift.
                if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return {}
                content = json.load(file)
            return dict(content["files"]) if content["scheme"] == self._scheme else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._dirty = True
            return {}


def _decode(known: dict[str, Any] | None) -> Known | None:
    if known is None:
        return None
    parameters = known["parameters"]
    definition = Definition(
        kind=known["kind"],
        segments=tuple((first, last) for first, last in known["segments"]),
        parameters=None if parameters is None else tuple(Parameter(**one) for one in parameters),
        decorators=tuple(known["decorators"]),
        imported_from=known["imported_from"],
    )
    str.encode(known["digest"])  # a TypeError here makes a damaged cache be ignored
    return definition, known["digest"]


# Drift: hashes of the lines that a patch was written against say which of them differ. The file of
# fingerprints holds no upstream source, only a short hash of every line's tokens.

_SHOWN = 12


def fingerprint(source: Source) -> list[tuple[int, str]]:
    """``(line number, hash of the line's tokens and nesting)`` of every line that carries meaning."""
    text, tree = parse_file(Path(source.path))
    tokens = meaningful_tokens(text, tree, source.definition.segments)
    found: list[tuple[int, str]] = []
    depth = 0
    for line, group in groupby(tokens, key=lambda pair: pair[0]):
        words = [token for _, token in group]
        # The nesting itself and not its change, which would mark the next line as drifted too.
        depth += words.count(INDENT) - words.count(DEDENT)
        state = hashlib.sha256(str(depth).encode())
        state.update("\0".join(word for word in words if word not in MARKERS).encode())
        if any(word not in MARKERS for word in words):
            found.append((line, state.hexdigest()[:6]))
    return found


def write_fingerprints(path: Path, sources: Iterable[Source], kept: Collection[str] = ()) -> None:
    """Write what ``describe_drift`` reads: per target its digest and its lines' hashes, in order. Targets
    in ``kept``, whose source is not here, keep what ``path`` has of them."""
    known = {name: entry for name, entry in read_fingerprints(path).items() if name in kept} if kept else {}
    written = {
        source.target: {
            "digest": source.digest,
            "lines": " ".join(mark for _, mark in fingerprint(source)),
        }
        for source in sources
    }
    write_record(path, dict(sorted({**known, **written}.items())))


def read_fingerprints(path: Path) -> dict[str, dict[str, str]]:
    """The content of a file of fingerprints, empty when there is none. PatchError: it is damaged."""
    if not path.exists():
        return {}
    content: Any = read_record(path)
    entries = content.values() if isinstance(content, dict) else [None]
    if not all(isinstance(entry, dict) and {"digest", "lines"} <= entry.keys() for entry in entries):
        raise PatchError(
            f"{path} holds no fingerprints; expected a digest and lines for each target. Write it anew with "
            "'mt-megatron patches record'"
        )
    found: dict[str, dict[str, str]] = content
    return found


def describe_drift(
    source: Source, expected_digest: str, fingerprints: Mapping[str, Mapping[str, str]]
) -> str:
    """The drifted lines of ``source``, as installed, each with its line number.

    Without a fingerprint of the source that has ``expected_digest`` only the span can be named.
    """
    span = f"{source.path}:{source.first_line}-{source.last_line}"
    recorded = fingerprints.get(source.target)
    if recorded is None or recorded["digest"] != expected_digest:
        return f"somewhere in {span} (no line hashes are recorded for digest {expected_digest[:12]})"
    old = recorded["lines"].split()
    new = fingerprint(source)
    text = parse_file(Path(source.path))[0].split("\n")
    shown: list[str] = []
    places: list[str] = []
    matcher = SequenceMatcher(None, old, [mark for _, mark in new], autojunk=False)
    for tag, old_first, old_last, first, last in matcher.get_opcodes():
        if tag == "equal":
            continue
        lost = old_last - old_first
        if first == last:
            before = new[first][0] if first < len(new) else source.last_line + 1
            places.append(str(before))
            shown.append(f"    {before:>5} ! {lost} expected line(s) are missing before this line")
            continue
        numbers = [line for line, _ in new[first:last]]
        places.append(f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]}-{numbers[-1]}")
        shown += [f"    {line:>5} + {text[line - 1]}" for line in numbers if line <= len(text)]
        shown.append(
            f"          ! {f'in place of {lost} expected' if lost else 'not among the expected'} line(s)"
        )
    if len(shown) > _SHOWN:
        shown = [*shown[:_SHOWN], f"          ... and {len(shown) - _SHOWN} more"]
    return "\n".join([f"{source.path}, line(s) {', '.join(places)} of {span.rpartition(':')[2]}:", *shown])


def main(argv: Sequence[str] | None = None) -> int:
    """Print digests, or write the line digests that a drift report compares with."""
    parser = argparse.ArgumentParser(
        prog="python -m mt_megatron.patching.digest",
        description="Print 'digest  target  file:first-last' for every target; imports nothing.",
        epilog="exit codes: 0 fine, 1 a target was not found, 2 wrong use",
    )
    parser.add_argument("targets", nargs="+", metavar="module:qualname")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write line hashes as JSON; .gz: compressed"
    )
    options = parser.parse_args(argv)
    failed = 0
    found: list[Source] = []
    for target in options.targets:
        try:
            found.append(source_of(target))
        except PatchTargetError as error:
            failed = 1
            print(error, file=sys.stderr)
    for source in found:
        print(f"{source.digest}  {source.target}  {source.path}:{source.first_line}-{source.last_line}")
    if options.write is not None and not failed:
        write_fingerprints(options.write, found)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
