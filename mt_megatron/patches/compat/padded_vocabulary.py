"""A checkpoint loads into a model whose vocabulary is padded to another size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch


def _create_local_plan(original: Callable[..., Any], self: Any) -> Any:
    """Plan with the wanted sizes in place of the stored ones, where Megatron allows them to differ.

    The padding depends on the tensor-parallel size, so upstream marks these tensors
    (``allow_shape_mismatch``) and reads the rows that both have. Newer torch compares sizes first.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    changed = []
    try:
        for key, wanted in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(key)
            sharded = getattr(wanted, "mcore_sh_ten", None)
            if isinstance(stored, TensorStorageMetadata) and getattr(sharded, "allow_shape_mismatch", False):
                changed.append((stored, stored.size))
                stored.size = wanted.size()
        return original(self)
    finally:
        for stored, size in changed:
            stored.size = size


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="padded_vocabulary.load_plan",
            target="megatron.core.dist_checkpointing.strategies.torch:MCoreLoadPlanner.create_local_plan",
            kind="wrap",
            feature="compat",
            reason="newer torch refuses another stored size before Megatron is asked whether it may differ",
            body=_create_local_plan,
            digest="75dd3ec3961368363cff55e692c6c8d8286f672d255fbbc764fba6bb6b4e8095",
        )
    ]
