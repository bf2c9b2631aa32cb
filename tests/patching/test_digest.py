"""A digest changes with every token that means something, and with nothing else."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_megatron.errors import PatchTargetError
from mt_megatron.patching import digest as digest_module
from mt_megatron.patching.digest import digest_of, main, source_of
from mt_megatron.patching.source import define

from .conftest import Toy

BASE = '''\
class C:
    """About C."""

    LIMIT = 3

    @staticmethod
    def run(device="cuda", *, flag=False):
        """About run."""
        values = {"a": 1, "b": [2, 3]}
        if flag and device == "cuda":
            for name in values:
                print(f"{name!r:>{10}} on {device}")
            return None
        return values
'''


def digest(source: str, qualname: str = "C.run") -> str:
    tree = ast.parse(source)
    found = define(tree, qualname)
    assert found is not None
    return digest_of(source, tree, found)


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("a comment at the end of a line", 'values = {"a"', 'values = {  # why\n            "a"'),
        ("a comment line", "        if flag", "        # why\n        if flag"),
        ("an outdented comment", "        if flag", "# why\n        if flag"),
        ("another docstring", '"""About run."""', "'''Entirely\n        different.'''"),
        ("no docstring", '        """About run."""\n', ""),
        ("a blank line", "        return values", "\n\n        return values"),
        ("a line break in brackets", '{"a": 1, "b"', '{"a": 1,\n    "b"'),
        ("spaces between tokens", "flag and device", "flag  and   device"),
        ("a continued line", "flag and device", "flag \\\n   and device"),
        ("lines before the target", "    LIMIT = 3\n", "    LIMIT = 3\n    MORE = 4\n\n"),
        ("a form feed", "        return values", "\x0c\n        return values"),
    ],
)
def test_layout_does_not_matter(what: str, old: str, new: str) -> None:
    assert old in BASE
    assert digest(BASE.replace(old, new)) == digest(BASE), what


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("a literal", '"cuda", *', '"cpu", *'),
        ("quotes", 'device == "cuda"', "device == 'cuda'"),
        ("a name", "return None", "return Nope"),
        ("an operator", "device ==", "device !="),
        ("a default", "flag=False", "flag=True"),
        ("a decorator", "@staticmethod", "@classmethod"),
        ("no decorator", "    @staticmethod\n", ""),
        ("inside of an f-string", "on {device}", "at {device}"),
        ("in an f-string's format", ":>{10}", ":>{11}"),
        ("a line less", "            return None\n", ""),
        ("another block", "            return None\n", "                return None\n"),
        ("two statements joined", "return values", "return values; print()"),
        ("a trailing comma", "[2, 3]", "[2, 3,]"),
    ],
)
def test_meaning_matters(what: str, old: str, new: str) -> None:
    assert old in BASE
    assert digest(BASE.replace(old, new)) != digest(BASE), what


def test_indentation_width_does_not_matter() -> None:
    assert digest(BASE.replace("    ", "  ")) == digest(BASE)
    assert digest(BASE.replace("    ", "\t")) == digest(BASE)


def test_a_string_that_is_no_docstring_matters() -> None:
    one, two = "def f():\n    x = 1\n    'note'\n", "def f():\n    x = 1\n    'other'\n"
    assert digest(one, "f") != digest(two, "f")


def test_nested_docstrings_do_not_matter() -> None:
    source = "def f():\n    def g():\n        'one'\n        return 1\n    return g\n"
    assert digest(source, "f") == digest(source.replace("'one'", "'two' 'three'"), "f")


def test_a_docstring_after_wide_characters_is_found() -> None:
    one = "def f(ä='ü'): 'one'; return 1\n"
    assert digest(one, "f") == digest(one.replace("'one'", "'two'"), "f")


def test_conditions_around_a_definition_matter() -> None:
    source = "if A:\n    def f(): return 1\nelse:\n    def f(): return 2\n"
    for old, new in [("if A", "if B"), ("return 1", "return 3"), ("return 2", "return 3")]:
        assert digest(source.replace(old, new), "f") != digest(source, "f")


def test_the_whole_try_around_an_assignment_matters() -> None:
    source = "try:\n    import apex\n    HAVE = True\nexcept ImportError:\n    HAVE = False\n"
    assert digest(source, "HAVE") != digest(source.replace("import apex", "import epax"), "HAVE")


LINES = BASE.splitlines(keepends=True)


def _swaps() -> list[tuple[str, str]]:
    """Every token of ``C.run`` that can be exchanged for another one and leave valid Python."""
    found = []
    others = {tokenize.NAME: "other", tokenize.NUMBER: "99", tokenize.STRING: "'other'"}
    for token in tokenize.generate_tokens(io.StringIO(BASE).readline):
        (row, start), (_, end) = token.start, token.end
        if row < 6 or row == 8 or (token.type not in others and token.type != tokenize.OP):
            continue
        line, new = LINES[row - 1], others.get(token.type, "!=" if token.string == "==" else "+")
        changed = "".join([*LINES[: row - 1], line[:start] + new + line[end:], *LINES[row:]])
        try:
            ast.parse(changed)
        except SyntaxError:
            continue
        found.append((f"{row}:{start} {token.string}", changed))
    return found


@pytest.mark.parametrize(("what", "changed"), _swaps(), ids=lambda one: one if len(one) < 40 else "")
def test_every_single_token_matters(what: str, changed: str) -> None:
    found = define(ast.parse(changed), "C.run")
    assert found is None or digest_of(changed, ast.parse(changed), found) != digest(BASE), what


def test_there_are_enough_tokens_to_exchange() -> None:
    assert len(_swaps()) > 20


@settings(max_examples=150, deadline=None)
@given(
    breaks=st.lists(st.integers(0, 13), max_size=6),
    comments=st.lists(st.tuples(st.integers(0, 13), st.text("abc #'\"({[", max_size=8)), max_size=6),
)
def test_any_mix_of_blank_lines_and_comments_is_layout(
    breaks: list[int], comments: list[tuple[int, str]]
) -> None:
    lines = list(LINES)
    for index, text in comments:
        if index not in (1, 7):  # docstrings
            lines[index] = lines[index].rstrip("\n") + f"  # {text}\n"
    for index in sorted(breaks, reverse=True):
        lines.insert(index, "\n")
    assert digest("".join(lines)) == digest(BASE)


def test_a_source_names_file_and_lines(toy: Toy) -> None:
    path = toy.write("owner", BASE)
    found = source_of(toy.target("C.run"))
    assert (found.path, found.first_line, found.last_line) == (str(path), 6, 14)
    assert found.digest == digest(BASE)
    assert len(found.digest) == 64


def test_a_whole_module_has_a_digest_too(toy: Toy) -> None:
    toy.write("owner", BASE)
    before = source_of(toy.target("")).digest
    toy.write("owner", "# a comment\n" + BASE)
    assert source_of(toy.target("")).digest == before
    toy.write("owner", "x = 1\n" + BASE)
    assert source_of(toy.target("")).digest != before


@pytest.mark.parametrize(
    ("source", "qualname", "message"),
    [
        ("def g(): pass\n", "f", "does not define 'f'"),
        ("def f(:\n", "f", "not valid Python here"),
    ],
)
def test_says_what_is_wrong(toy: Toy, source: str, qualname: str, message: str) -> None:
    toy.write("owner", source)
    with pytest.raises(PatchTargetError, match=message):
        source_of(toy.target(qualname))


def test_declared_encodings_are_respected(toy: Toy) -> None:
    path = toy.write("owner", "")
    path.write_bytes("# coding: latin-1\ndef f(): return 'é'\n".encode("latin-1"))
    latin = source_of(toy.target("f")).digest
    path.write_text("def f(): return 'é'\n", encoding="utf-8")
    assert source_of(toy.target("f")).digest == latin


def test_command_prints_digest_target_and_lines(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    path = toy.write("owner", BASE)
    assert main([toy.target("C.run"), toy.target("C.LIMIT")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{digest(BASE)}  {toy.target('C.run')}  {path}:6-14"
    assert second.endswith(f"{path}:4-4")


def test_command_fails_for_an_unknown_target(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    toy.write("owner", BASE)
    assert main([toy.target("C.nothing")]) == 1
    assert "does not define 'C.nothing'" in capsys.readouterr().err


def test_command_runs_as_a_module_and_imports_nothing(toy: Toy) -> None:
    toy.write("owner", "raise AssertionError('imported')\ndef f(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", digest_module.__name__, toy.target("f")],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": f"{toy.folder}:{Path(__file__).parents[2]}"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == toy.target("f")


def test_every_python_version_agrees() -> None:
    """The committed digests hold on all of them, so the definition must not move unnoticed."""
    assert digest(BASE)[:16] == "77bcdc47ed94eb6c"
    assert digest(BASE, "C")[:16] == "513eed97cc73c1d5"
