"""Lists, from source alone, every place in a package tree that touches the device.

A *touch point* is an expression (found in the syntax tree, never in a kept list of lines) of one of
the kinds in ``Kind``. Everything else that merely mentions a device (documentation, messages,
annotations that Python does not evaluate) is returned too, with the rule that set it aside.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Kind = Literal[
    "torch.cuda", "import", "imported-name", "literal", "method", "move", "collective", "is_cuda",
    "tensor-type", "environment", "torch._C", "mention",
]  # fmt: skip
Span = tuple[int, int, int, int]

DEVICE = re.compile(r"([\w:]*/)?cuda(:\d*)?")
TENSOR_TYPE = re.compile(r"torch\.cuda(\.\w+)?")
COLLECTIVE = re.compile(r"nccl|(\w+:\w+,)*\w+:nccl(,\w+:\w+)*")
ENVIRONMENT = re.compile(r"(CUDA|NCCL|TORCH_NCCL)_[A-Z0-9_]+")
BINDING = re.compile(r"_cuda_\w+")
MENTION = re.compile(r"cuda|nccl", re.IGNORECASE)

DOCSTRING = "a docstring or a bare string statement: never evaluated"
ANNOTATION = "an annotation that Python does not evaluate here"
MESSAGE = "text that mentions a device and is none (a message, a key, a name)"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One touch point, or one mention that a rule set aside."""

    kind: Kind
    file: str
    """Path below the package root, with forward slashes."""
    qualname: str
    """Enclosing classes and functions, joined by dots; ``<module>`` at the top."""
    text: str
    """The expression, as ``ast.unparse`` spells it."""
    digest: str
    """Eight hex digits over the enclosing statement and the expression: survives line shifts."""
    ordinal: int = 1
    """Counts points that are alike in all of the above, in source order."""
    span: Span
    """First line, first column, last line, last column; columns in UTF-8 bytes."""
    set_aside: str = ""
    """The rule that makes it not executable; empty for a touch point."""

    @property
    def key(self) -> str:
        """What records and the list of unreachable points name it by."""
        tail = f" #{self.ordinal}" if self.ordinal > 1 else ""
        return f"{self.file} {self.qualname} {self.digest}{tail}"

    @property
    def where(self) -> str:
        """For people: ``file:line text``."""
        text = self.text if len(self.text) <= 90 else self.text[:87] + "..."
        return f"{self.file}:{self.span[0]} {self.qualname}: {text}"


def installed_root() -> Path:
    """Folder of the installed ``megatron.core``, found without importing it."""
    spec = importlib.util.find_spec("megatron")
    for parent in (spec.submodule_search_locations or []) if spec else []:
        if (Path(parent) / "core" / "parallel_state.py").is_file():
            return Path(parent) / "core"
    raise FileNotFoundError("megatron.core is not installed: pip install megatron-core==0.9.0")


def list_points(root: Path) -> list[Point]:
    """Every touch point and every mention below ``root``, in file and line order."""
    found: list[Point] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of upstream's escape sequences
        for path in sorted(root.rglob("*.py")):
            found.extend(points_of(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()))
    return found


def points_of(source: str, file: str) -> list[Point]:
    """Touch points and mentions of one file's source text."""
    walker = _Walker(file)
    walker.run(ast.parse(source))
    walker.found.sort(key=lambda point: (point.span, point.kind))
    seen: Counter[str] = Counter()
    numbered = []
    for point in walker.found:
        seen[point.key] += 1
        numbered.append(replace(point, ordinal=seen[point.key]))
    return numbered


class _Walker:
    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Point] = []
        self.torch: set[str] = set()
        self.cuda: set[str] = set()
        self.imported: set[str] = set()
        self.postponed = False

    def run(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            self._learn_names(node)
        self._visit(tree, scope=(), statement=tree, in_function=False, aside="")

    def _learn_names(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch" or (alias.name.startswith("torch.") and not alias.asname):
                    self.torch.add(alias.asname or "torch")
                elif _below_cuda(alias.name):
                    self.cuda.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (node.module, alias.name) == ("__future__", "annotations"):
                    self.postponed = True
                if node.module == "torch" and alias.name == "cuda":
                    self.cuda.add(alias.asname or alias.name)
                elif _below_cuda(node.module):
                    self.imported.add(alias.asname or alias.name)

    def _visit(
        self, node: ast.AST, *, scope: tuple[str, ...], statement: ast.AST, in_function: bool, aside: str
    ) -> None:
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            statement = node
        if _is_bare_string(node):
            aside = DOCSTRING
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, scope, aside)
        elif isinstance(node, ast.expr) and self._expression(node, scope, statement, aside):
            return
        for name, child in _children(node):
            where, inside = scope, in_function
            if name == "body":
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    where, inside = (*scope, node.name), not isinstance(node, ast.ClassDef)
                elif isinstance(node, ast.Lambda):
                    where, inside = (*scope, "<lambda>"), True
            unevaluated = name in ("annotation", "returns") and (
                self.postponed or (isinstance(node, ast.AnnAssign) and in_function)
            )
            self._visit(
                child,
                scope=where,
                statement=statement,
                in_function=inside,
                aside=ANNOTATION if unevaluated else aside,
            )

    def _import(self, node: ast.Import | ast.ImportFrom, scope: tuple[str, ...], aside: str) -> None:
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            full = f"{module}.{alias.name}" if module else alias.name
            if not getattr(node, "level", 0) and _below_cuda(full):
                # The span is the statement's: the bytecode of an import knows no finer one.
                self._add("import", node, scope, node, aside, text=f"{ast.unparse(node)}  [{alias.name}]")

    def _expression(self, node: ast.expr, scope: tuple[str, ...], statement: ast.AST, aside: str) -> bool:
        """Record what ``node`` is; True when its children hold nothing of their own."""
        chain = _chain(node)
        if chain is not None and isinstance(node, ast.Attribute):
            head, *rest = chain
            if (head in self.torch and rest[0] == "cuda") or head in self.cuda:
                self._add("torch.cuda", node, scope, statement, aside)
                return True
            if head in self.torch and "ProcessGroupNCCL" in rest:
                self._add("collective", node, scope, statement, aside)
                return True
            if (rest[-2:-1] == ["_C"] or (head == "_C" and len(rest) == 1)) and BINDING.fullmatch(rest[-1]):
                self._add("torch._C", node, scope, statement, aside)
                return True
        if isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "cuda"):
            self._add("is_cuda" if node.attr == "is_cuda" else "method", node, scope, statement, aside)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id in self.imported:
                self._add("imported-name", node, scope, statement, aside)
            elif node.id in self.cuda:
                self._add("torch.cuda", node, scope, statement, aside)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            if any(self._names_cuda(part) for part in [*node.args, *(k.value for k in node.keywords)]):
                self._add("move", node, scope, statement, aside)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._string(node, node.value, scope, statement, aside)
        return False

    def _names_cuda(self, node: ast.expr) -> bool:
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and DEVICE.fullmatch(str(part.value)):
                return True
            chain = _chain(part)
            if chain and chain[0] in self.torch and chain[1:2] == ["cuda"]:
                return True
        return False

    def _string(
        self, node: ast.expr, value: str, scope: tuple[str, ...], statement: ast.AST, aside: str
    ) -> None:
        kinds: list[tuple[Kind, re.Pattern[str]]] = [
            ("literal", DEVICE),
            ("tensor-type", TENSOR_TYPE),
            ("collective", COLLECTIVE),
            ("environment", ENVIRONMENT),
            ("torch._C", BINDING),
        ]
        for kind, pattern in kinds:
            if pattern.fullmatch(value.strip()):
                self._add(kind, node, scope, statement, aside)
                return
        if MENTION.search(value):
            self._add("mention", node, scope, statement, aside or MESSAGE)

    def _add(
        self,
        kind: Kind,
        node: ast.AST,
        scope: tuple[str, ...],
        statement: ast.AST,
        aside: str,
        text: str | None = None,
    ) -> None:
        spelled = text or " ".join(ast.unparse(node).split())
        digest = hashlib.sha256(f"{_header(statement)}\0{kind}\0{spelled}".encode()).hexdigest()[:8]
        self.found.append(
            Point(
                kind=kind,
                file=self.file,
                qualname=".".join(scope) or "<module>",
                text=spelled,
                digest=digest,
                span=(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
                set_aside=aside,
            )
        )


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield name, item


def _chain(node: ast.AST) -> list[str] | None:
    """``["torch", "cuda", "x"]`` for ``torch.cuda.x``; None when the base is no plain name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return [node.id, *reversed(names)]


def _below_cuda(module: str) -> bool:
    return module == "torch.cuda" or module.startswith("torch.cuda.")


def _is_bare_string(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _header(statement: ast.AST) -> str:
    """The statement without the statements inside it, so that editing a body changes no digest above."""
    if isinstance(statement, ast.Module):
        return ""
    fields = {
        name: value
        for name, value in ast.iter_fields(statement)
        if name not in ("body", "orelse", "finalbody", "handlers", "cases")
    }
    parts = [type(statement).__name__]
    for name, value in fields.items():
        items = value if isinstance(value, list) else [value]
        parts.append(name + "=" + ",".join(ast.dump(i) if isinstance(i, ast.AST) else repr(i) for i in items))
    return ";".join(parts)
