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
import sys
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..errors import PatchTargetError
from .cache import DigestCache, Known
from .source import Definition, define, locate, parse_target

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
    path = locate(module)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Print digests, or write the line digests that a drift report compares with."""
    parser = argparse.ArgumentParser(
        prog="python -m mt_megatron.patching.digest",
        description="Print 'digest  target  file:first-last' for every target; imports nothing.",
        epilog="exit codes: 0 fine, 1 a target was not found, 2 wrong use",
    )
    parser.add_argument("targets", nargs="+", metavar="module:qualname")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write line digests to a JSON file")
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
        from .drift import write_fingerprints  # it imports this module

        write_fingerprints(options.write, found)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
