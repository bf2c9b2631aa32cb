"""Targets are found in source files, and nothing is imported on the way."""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

import pytest

from mt_megatron.errors import PatchTargetError
from mt_megatron.patching.source import Definition, Parameter, define, exists, locate, parse_target

from .conftest import Toy


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("a:f", ("a", "f")),
        ("a.b.c:C.m", ("a.b.c", "C.m")),
        ("a.b:", ("a.b", "")),
        ("a:_x1.__init__", ("a", "_x1.__init__")),
    ],
)
def test_parses_a_target(target: str, parts: tuple[str, str]) -> None:
    assert parse_target(target) == parts


@pytest.mark.parametrize(
    "target", ["a", "a.b", ":f", "a..b:f", "a:f.", "a:f g", "a-b:f", "a:1f", "", "a:b:c"]
)
def test_refuses_what_is_no_target(target: str) -> None:
    with pytest.raises(PatchTargetError, match="expected 'package.module:Name'"):
        parse_target(target)


def test_locates_modules_and_packages_without_importing(toy: Toy) -> None:
    bomb = "raise AssertionError('imported')"
    toy.write("__init__", bomb)
    owner = toy.write("owner", bomb)
    inner = toy.write("sub.inner", bomb)
    package = toy.write("sub.__init__", bomb)
    assert locate(f"{toy.name}.owner") == owner
    assert locate(f"{toy.name}.sub.inner") == inner
    assert locate(f"{toy.name}.sub") == package
    assert locate(toy.name) == toy.root / "__init__.py"
    assert not [name for name in sys.modules if name.startswith(toy.name)]


def test_locates_through_nested_namespace_packages(toy: Toy) -> None:
    deep = toy.write("space.deeper.leaf", "")
    (toy.root / "__init__.py").unlink()
    assert locate(f"{toy.name}.space.deeper.leaf") == deep
    assert toy.name not in sys.modules


def test_namespace_package_over_two_path_entries(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (toy.root / "__init__.py").unlink()
    toy.write("one", "")
    second = tmp_path / "second" / toy.name
    second.mkdir(parents=True)
    (second / "two.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "second"))
    assert locate(f"{toy.name}.one") == toy.root / "one.py"
    assert locate(f"{toy.name}.two") == second / "two.py"


def test_a_copied_tree_earlier_on_the_path_is_what_counts(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.write("owner", "x = 1")
    copy = tmp_path / "copy" / toy.name
    copy.mkdir(parents=True)
    (copy / "__init__.py").write_text("")
    (copy / "owner.py").write_text("x = 2")
    monkeypatch.syspath_prepend(str(tmp_path / "copy"))
    assert locate(f"{toy.name}.owner") == copy / "owner.py"


def test_an_imported_module_says_itself_where_it_is(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = toy.write("owner", "x = 1")
    toy.load()
    other = tmp_path / "later" / toy.name
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    (other / "owner.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "later"))
    assert locate(f"{toy.name}.owner") == owner


def test_a_path_extended_by_an_imported_package_is_followed(toy: Toy, tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.mkdir()
    (more / "plugin.py").write_text("")
    toy.write("__init__", f"__path__.append({str(more)!r})")
    __import__(toy.name)
    assert locate(f"{toy.name}.plugin") == more / "plugin.py"


def test_other_finders_are_asked_too(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.machinery import ModuleSpec
    from importlib.util import spec_from_file_location

    hidden = tmp_path / "hidden.py"
    hidden.write_text("")

    class Editable:
        def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, hidden) if name == "editable_toy" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable()])
    assert locate("editable_toy") == hidden


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("surely_not_installed", "no module 'surely_not_installed' on sys.path"),
        ("json.nothing", "no module 'json.nothing' on the path of 'json'"),
        ("abc.nothing", "'abc' is not a package"),
        ("math", "has no Python source file"),
        ("sys", "has no Python source file"),
    ],
)
def test_says_why_there_is_no_source(module: str, message: str) -> None:
    with pytest.raises(PatchTargetError, match=message):
        locate(module)


def test_exists_needs_no_source() -> None:
    assert exists("math") and exists("json.decoder")
    assert not exists("surely_not_installed") and not exists("json.nothing")


def test_a_module_without_a_file_has_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    assert exists("made_up")
    with pytest.raises(PatchTargetError, match="no Python source file"):
        locate("made_up")


SOURCE = """\
import os.path as path, sys
from a.b import thing as other

def plain(a, b=1):
    return a

@decorated(
    1
)
def fancy(): pass

class Outer:
    field: int = 3

    class Inner:
        @staticmethod
        def deep(x): ...

    @property
    def p(self): return 1

    @p.setter
    def p(self, value): ...

    async def later(self): ...

if CONDITION:
    def chosen(): return 1
elif OTHER:
    def chosen(): return 2

try:
    import fast
    HAVE = True
except ImportError:
    HAVE = False

(left, [right, *rest]) = 1, [2]
for loop in range(3): pass
with open("x") as handle: pass
total = 0
total += 1
"""


def find(qualname: str) -> Definition | None:
    return define(ast.parse(SOURCE), qualname)


@pytest.mark.parametrize(
    ("qualname", "kind", "segments"),
    [
        ("plain", "function", ((4, 5),)),
        ("fancy", "function", ((7, 10),)),
        ("Outer", "class", ((12, 25),)),
        ("Outer.field", "assignment", ((13, 13),)),
        ("Outer.Inner", "class", ((15, 17),)),
        ("Outer.Inner.deep", "function", ((16, 17),)),
        ("Outer.p", "function", ((19, 20), (22, 23))),
        ("Outer.later", "function", ((25, 25),)),
        ("chosen", "function", ((27, 27), (28, 28), (29, 29), (30, 30))),
        ("HAVE", "assignment", ((32, 36),)),
        ("fast", "import", ((32, 36),)),
        ("left", "assignment", ((38, 38),)),
        ("right", "assignment", ((38, 38),)),
        ("rest", "assignment", ((38, 38),)),
        ("loop", "assignment", ((39, 39),)),
        ("handle", "assignment", ((40, 40),)),
        ("total", "assignment", ((41, 41), (42, 42))),
    ],
)
def test_defines(qualname: str, kind: str, segments: tuple[tuple[int, int], ...]) -> None:
    found = find(qualname)
    assert found is not None
    assert (found.kind, found.segments) == (kind, segments)


@pytest.mark.parametrize(
    ("qualname", "source"), [("path", "os.path:"), ("sys", "sys:"), ("other", "a.b:thing"), ("fast", "fast:")]
)
def test_an_import_says_what_it_imports(qualname: str, source: str) -> None:
    found = find(qualname)
    assert found is not None and found.kind == "import"
    assert found.imported_from == source


@pytest.mark.parametrize("qualname", ["nothing", "Outer.nothing", "plain.a", "Outer.p.fget", "thing", "os"])
def test_does_not_define(qualname: str) -> None:
    assert find(qualname) is None


def test_a_name_inside_a_function_is_no_definition() -> None:
    assert define(ast.parse("def f():\n    g = 1\n    def h(): ...\n"), "g") is None
    assert define(ast.parse("def f():\n    g = 1\n    def h(): ...\n"), "f.h") is None


def test_both_definitions_of_a_class_are_looked_into() -> None:
    tree = ast.parse("class A:\n    def f(self): ...\nclass A:\n    def f(self, x): ...\n")
    found = define(tree, "A.f")
    assert found is not None and found.segments == ((2, 2), (4, 4))
    assert found.parameters is not None and len(found.parameters) == 2


def test_reads_parameters() -> None:
    found = define(ast.parse("def f(a, b=1, /, c=2, *more, d, e=3, **named): ..."), "f")
    assert found is not None
    assert found.parameters == (
        Parameter(name="a", kind="positional", required=True),
        Parameter(name="b", kind="positional", required=False),
        Parameter(name="c", kind="normal", required=False),
        Parameter(name="more", kind="args", required=False),
        Parameter(name="d", kind="keyword", required=True),
        Parameter(name="e", kind="keyword", required=False),
        Parameter(name="named", kind="kwargs", required=False),
    )
    assert find("Outer") is not None and find("Outer").parameters is None  # type: ignore[union-attr]


def test_reads_decorators() -> None:
    found = find("fancy")
    assert found is not None and found.decorators == ("decorated(1)",)
