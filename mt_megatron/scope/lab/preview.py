"""Preview of a perturbation: modules, shapes, elements and ranks, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mt_megatron.scope.lab.snapshot import MIB
from mt_megatron.scope.lab.specification import Perturbation
from mt_megatron.scope.lab.targets import ModuleTarget, ParameterTarget


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of a preview; plain enough to be sent to the others."""

    rank: int
    items: tuple[dict[str, Any], ...]
    snapshot_bytes: int
    limit_bytes: float


def items_of(
    one: Perturbation, targets: Sequence[ParameterTarget | ModuleTarget]
) -> tuple[dict[str, Any], ...]:
    """Each target of this rank: path, class, shape of the whole tensor (None: known when it runs), type, and
    elements of the whole tensor that are meant (of a share: expected)."""
    return tuple(_item(one, target) for target in targets)


def _item(one: Perturbation, target: ParameterTarget | ModuleTarget) -> dict[str, Any]:
    if isinstance(target, ModuleTarget):
        return {
            "path": target.path,
            "class": target.module._get_name(),
            "shape": None if target.features is None else ["tokens", "samples", target.features],
            "dtype": None,
            "elements": None if one.index is None else len(one.index),
        }
    shape = target.shape
    if ".local_experts." in target.path and len(shape) > target.parameter.dim():
        # The first axis counts all experts, and the path is one expert's.
        shape = shape[1:]
    whole = math.prod(shape)
    elements: float = whole
    if target.along is not None:
        elements = whole // target.along.size * int(target.along.chosen.sum())
    if one.index is not None:
        elements = len(one.index)
    if one.fraction is not None:
        elements *= one.fraction
    return {
        "path": target.path,
        "class": "parameter",
        "shape": list(target.shape),
        "dtype": str(target.parameter.dtype).removeprefix("torch."),
        "elements": round(elements),
    }


def preview_of(one: Perturbation, shares: Sequence[Share]) -> dict[str, Any]:
    """The whole run's preview out of all ranks'."""
    found: dict[str, dict[str, Any]] = {}
    for share in shares:
        for item in share.items:
            found.setdefault(item["path"], {**item, "ranks": []})["ranks"].append(share.rank)
    needs = one.snapshot and bool(shares)
    return {
        "perturbation": one.to_dict(),
        "text": one.text(),
        "targets": sorted(found.values(), key=lambda item: _natural(item["path"])),
        "snapshot_mib": sum(share.snapshot_bytes for share in shares) / MIB if needs else 0.0,
        "snapshot_mib_of_a_rank": max(share.snapshot_bytes for share in shares) / MIB if needs else 0.0,
        "limit_mib_of_a_rank": min(share.limit_bytes for share in shares) / MIB if needs else None,
    }


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
