"""Entries of ``config.json`` that a model class of transformers reads, with the values of absent ones.

The installed release is read as source and never imported, which would take seconds. ``class_fields.json``
holds the same of one release, for machines without transformers; ``tools/class_fields.py`` writes it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

TABLE = Path(__file__).with_name("class_fields.json")

_SHARED = ("masking_utils.py", "cache_utils.py", "modeling_rope_utils.py", "configuration_utils.py")
"""Modules of transformers that read any model's configuration: masks, caches, rotary positions, loading."""


@cache
def read_by_class(model_type: str) -> tuple[str, Mapping[str, Any]]:
    """The release of transformers, and by name the entries that its class of ``model_type`` reads with the
    values that it takes for absent ones: those of ``TABLE``, and those that the installed release adds."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    fields: dict[str, Any] = table["fields"][model_type]
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return table["transformers"], fields
    installed = importlib.metadata.version("transformers")
    if Version(installed) <= Version(table["transformers"]):
        # Classes of earlier releases are written in other forms, and the table has what they read.
        return table["transformers"], fields
    return installed, scan(Path(spec.origin).parent, model_type) | fields


def scan(package: Path, model_type: str) -> dict[str, Any]:
    """The entries, by name, that the sources in ``package`` (transformers' folder) read for ``model_type``:
    fields of its configuration class, and what models and shared modules take from a configuration. The
    value is the literal default; None without one."""
    own = package / "models" / model_type
    found: dict[str, Any] = {}
    shared = (package / name for name in _SHARED)
    # Declared defaults come last.
    for path in (own / f"modeling_{model_type}.py", *shared, own / f"configuration_{model_type}.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")):
            found.update(_entries(node))
    return dict(sorted(found.items()))


def _entries(node: ast.AST) -> dict[str, Any]:
    """``config.NAME``, ``getattr(config, "NAME", default)``, or the fields of a configuration's class."""
    match node:
        case ast.Attribute(value=ast.Name(id="config") | ast.Attribute(attr="config"), attr=name):
            return {name: None}
        case ast.Call(
            func=ast.Name(id="getattr"),
            args=[ast.Name(id="config") | ast.Attribute(attr="config"), ast.Constant(value=str(name)), *rest],
        ):
            return {name: _literal(*rest)}
        case ast.ClassDef(name=name, body=body) if name.endswith("Config"):
            return {
                ast.unparse(each.target): _literal(each.value)
                for each in body
                if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
            }
    return {}


def _literal(node: ast.expr | None = None) -> Any:
    if isinstance(node, ast.Call):
        # A field with a range: its default is an argument by name.
        node = next((each.value for each in node.keywords if each.arg == "default"), None)
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
