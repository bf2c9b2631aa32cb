"""Which tensors this rank writes and where in its file: Megatron-Core's plan, asked for once.

Planning exchanges metadata between ranks and wraps every tensor in a ``ShardedTensor`` of torch:
tens of milliseconds for a small model. What it answers depends on names and shapes alone, so it is
kept for as long as they stay the same. The tensors themselves are looked up anew for every save.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_megatron.checkpoint.files import sync_file
from mt_megatron.checkpoint.items import frame_of
from mt_megatron.checkpoint.run_parts import Job
from mt_megatron.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Content:
    """What this rank adds to one checkpoint, still in the tensors that training changes."""

    tensors: list[Tensor]
    """In the plan's order."""

    objects: list[bytes]
    """Serialised objects, in the plan's order; they follow the tensors in the file."""

    common: dict[str, Any]
    """Everything that is not sharded; rank 0 writes it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """This rank's part of every checkpoint of one structure."""

    structure: list[Any]
    file_name: str
    tensor_indices: list[Any]
    """``MetadataIndex`` of each tensor."""

    tensor_keys: list[tuple[str, tuple[int, ...]]]
    """Name and offset, by which each is found."""

    tensor_shapes: list[tuple[int, ...]]
    """Shapes as they are stored: with an axis for each that was prepended."""

    object_indices: list[Any]
    metadata: Any
    """torch's ``Metadata`` of all ranks; rank 0 has it, others None."""


class Planner:
    """Plans saves of one model and optimizer; collective, and the same on every rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._plan: Plan | None = None

    def content(self, state: Mapping[str, Any]) -> tuple[Plan, Content]:
        """The plan for ``state`` (a sharded state dict) and what it asks for; collective."""
        from megatron.core.dist_checkpointing.state_dict_transformation import save_preprocess

        sharded, common = save_preprocess(dict(state), validate_access_integrity=False)
        bases = list(_bases(sharded))
        structure = [_signature(base) for base in bases]
        known = self._plan is not None and self._plan.structure == structure
        # One rank alone cannot plan anew: the others would not take part.
        unknown = self._job.sum_over_ranks([0.0 if known else 1.0])[0]
        if unknown or self._plan is None:
            self._plan = _planned(sharded, structure)
        plan = self._plan
        tensors = {_tensor_key(base): base.data for base in bases if not _is_object(base)}
        objects: dict[str, list[Any]] = {}
        for base in bases:
            if _is_object(base):
                objects.setdefault(base.unique_key, []).append(base.data)
        return plan, Content(
            tensors=[
                tensors[key].detach().reshape(shape)
                for key, shape in zip(plan.tensor_keys, plan.tensor_shapes, strict=True)
            ],
            objects=[_serialised(objects[index.fqn]) for index in plan.object_indices],
            common=common,
        )


def write_results(plan: Plan, content: Content) -> list[Any]:
    """torch's record of where in the file each item is: what ``.metadata`` is made of."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    sizes = [frame_of(tuple(tensor.shape), tensor.dtype).total for tensor in content.tensors]
    sizes += [len(each) for each in content.objects]
    results, offset = [], 0
    for index, size in zip((*plan.tensor_indices, *plan.object_indices), sizes, strict=True):
        info = _StorageInfo(plan.file_name, offset, size)
        results.append(WriteResult(index=index, size_in_bytes=size, storage_data=info))
        offset += size
    return results


def write_metadata(folder: Path, metadata: Any, results: list[list[Any]]) -> None:
    """Write torch's ``.metadata`` and Megatron-Core's ``metadata.json``."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    FileSystemWriter(folder).finish(metadata, results)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    for name in (".metadata", "metadata.json"):
        sync_file(folder / name)


def _bases(sharded: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    return (base for base in nested_values(sharded) if is_main_replica(base.replica_id))


def _is_object(base: Any) -> bool:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return isinstance(base, ShardedObject)


def _signature(base: Any) -> Any:
    if _is_object(base):
        return base.unique_key
    part = base.flattened_range
    return (
        base.key,
        base.global_shape,
        base.global_offset,
        base.axis_fragmentations,
        base.local_shape,
        None if part is None else (part.start, part.stop),
        base.dtype,
        tuple(base.data.shape),
    )


def _tensor_key(base: Any) -> tuple[str, tuple[int, ...]]:
    """Name and offset as torch sees them; upstream regards a slice of a flattened tensor as one of a
    grid with another axis."""
    offset = tuple(base.global_offset)
    if base.flattened_range is not None:
        start = base.flattened_range.start
        if len(base.global_shape) == 1:
            return base.key, (offset[0] + start,)
        return base.key, (*base.local_chunk_offset_in_global(), start)
    return base.key, offset


def _serialised(objects: list[Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(objects, stream)
    return stream.getvalue()


def _planned(sharded: Any, structure: list[Any]) -> Plan:
    from megatron.core.dist_checkpointing.strategies import torch as strategy
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
    from megatron.core.dist_checkpointing.validation import (
        determine_global_metadata,
        validate_sharding_integrity,
    )
    from torch.distributed.checkpoint.planner import WriteItemType

    class Unwritten(FileSystemWriterAsync):  # type: ignore[misc]
        """Plans, and leaves the files alone."""

        def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            pass

        def prepare_local_plan(self, plan: Any) -> Any:
            return plan

        def prepare_write_data(self, plan: Any, planner: Any) -> None:
            pass

    validate_sharding_integrity(determine_global_metadata(sharded)[1])
    flat, _, _ = strategy._replace_state_dict_keys_with_sharded_keys(sharded, True)
    (_, metadata, _), central, *_ = save_state_dict_async_plan(
        strategy.mcore_to_pyt_state_dict(flat, False),
        Unwritten(Path("unwritten"), thread_count=1),
        planner=strategy.MCoreSavePlanner(dedup_replicated_tensors=False),
    )
    tensors = [item.index for item in central.items if item.type != WriteItemType.BYTE_IO]
    keys = [(index.fqn, tuple(index.offset)) for index in tensors]
    # Planning has given the tensors the shapes that it stores.
    shapes = {_tensor_key(base): tuple(base.data.shape) for base in _bases(sharded) if not _is_object(base)}
    missing = [key for key in keys if key not in shapes]
    if missing or len(set(keys)) != len(keys):
        raise CheckpointError(
            f"the plan of a checkpoint names {missing or 'a tensor twice'}, which rank {dist.get_rank()} "
            "cannot find; use a tested version of torch"
        )
    return Plan(
        structure=structure,
        file_name=f"{central.storage_data.prefix}0.distcp",
        tensor_indices=tensors,
        tensor_keys=keys,
        tensor_shapes=[shapes[key] for key in keys],
        object_indices=[item.index for item in central.items if item.type == WriteItemType.BYTE_IO],
        metadata=metadata,
    )
