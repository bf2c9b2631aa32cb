"""Megatron-Core's configuration fields, read from its source so that nothing has to be imported.

Importing ``megatron.core`` imports torch and takes seconds; ``--help``, ``plan`` and a check of a
configuration need only the fields' names, annotations and defaults, and those are in the source.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mt_megatron.errors import ConfigError

TRANSFORMER = "transformer"
OPTIMIZER = "optimizer"
DDP = "ddp"

_SOURCES: dict[str, tuple[tuple[str, str], ...]] = {
    TRANSFORMER: (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    OPTIMIZER: (("optimizer/optimizer_config.py", "OptimizerConfig"),),
    DDP: (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
}


@dataclass(frozen=True, kw_only=True)
class CoreField:
    """One field of one of Megatron-Core's dataclasses."""

    name: str
    """The attribute's name."""

    annotation: str
    """The annotation as written upstream, for example ``Optional[int]``."""

    default: object
    """The default. ``torch.float32`` and ``F.gelu`` are given by their last name, as text."""

    doc: str
    """Upstream's description, on one line; empty where there is none."""


def core_root() -> Path:
    """The directory of the installed ``megatron.core``, found without importing it.

    Raises ``ConfigError`` when it is not installed.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "megatron-core is not installed: its configuration fields cannot be read. "
            "Install it with: pip install megatron-core==0.9.0"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def core_fields(which: str) -> dict[str, CoreField]:
    """The fields of ``TRANSFORMER``, ``OPTIMIZER`` or ``DDP``, bases first, by name."""
    return dict(_read(which, core_root()))


@cache
def _read(which: str, root: Path) -> dict[str, CoreField]:
    fields: dict[str, CoreField] = {}
    for relative, class_name in _SOURCES[which]:
        path = root / relative
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError) as error:
            raise ConfigError(
                f"megatron-core's {relative} cannot be read at {path}: {error}. "
                "Reinstall it with: pip install --force-reinstall --no-deps megatron-core==0.9.0"
            ) from error
        fields.update(_fields_of(tree, class_name, path))
    return fields


def _fields_of(tree: ast.Module, class_name: str, path: Path) -> dict[str, CoreField]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            break
    else:
        raise ConfigError(
            f"{path} has no class {class_name}: expected megatron-core 0.9.0. "
            "Install it with: pip install megatron-core==0.9.0"
        )
    fields = {}
    for index, statement in enumerate(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if name.startswith("_") or statement.value is None:
            continue
        fields[name] = CoreField(
            name=name,
            annotation=ast.unparse(statement.annotation),
            default=_constant(statement.value),
            doc=docstring_after(node.body, index),
        )
    return fields


def docstring_after(body: list[ast.stmt], index: int) -> str:
    """The text below the field at ``index`` of a class body, on one line; empty if there is none."""
    following = body[index + 1] if index + 1 < len(body) else None
    if not isinstance(following, ast.Expr) or not isinstance(following.value, ast.Constant):
        return ""
    text = following.value.value
    return " ".join(text.split()) if isinstance(text, str) else ""


def _constant(node: ast.expr) -> object:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = ast.literal_eval(node.left), ast.literal_eval(node.right)
        return base**exponent
    value: object = ast.literal_eval(node)
    return value
