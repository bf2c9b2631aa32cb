"""The declared patches as a file, so that they can be listed without importing torch.

``mt-megatron patches record`` writes it. It is used only while it is certain to be true: for the versions of
torch and of this package's source that it was written with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import PatchError
from ..patching.records import read_record, write_record
from ..patching.spec import Patch

PATH = Path(__file__).with_name("declared.json.gz")
_FOLDERS = ("patches", "backends")
_FIELDS = ("id", "target", "kind", "reason", "feature", "digest", "after", "scope", "unless")


def recorded(backend: str) -> list[Patch] | None:
    """The patches of ``backend`` without their bodies; None where the file may be out of date."""
    try:
        found = read_record(PATH)
        if found["of"] != _of():
            return None
        return [_patch(each) for each in found["patches"][backend]]
    except (PatchError, OSError, KeyError, TypeError, PackageNotFoundError):
        return None


def write(patches: Mapping[str, Sequence[Patch]]) -> None:
    """Record the patches of each backend."""
    listed = {name: [_data(patch) for patch in found] for name, found in sorted(patches.items())}
    write_record(PATH, {"of": _of(), "patches": listed})


def _of() -> dict[str, str]:
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return {"torch": version("torch").split("+")[0], "source": digest.hexdigest()}


def _data(patch: Patch) -> dict[str, Any]:
    return {
        **{name: getattr(patch, name) for name in _FIELDS if getattr(patch, name)},
        "backends": None if patch.backends is None else sorted(patch.backends),
        "requires": dict(patch.requires),
    }


def _patch(data: dict[str, Any]) -> Patch:
    given = {**data, "body": None}
    given["backends"] = None if data["backends"] is None else frozenset(data["backends"])
    for name in ("after", "scope", "unless"):
        given[name] = tuple(data.get(name, ()))
    return Patch(**given)
