"""Gradient buffers of 0.9.0 and of the erratum, without ranks and without memory."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

DATA_PARALLEL = (1, 2, 3, 4, 6, 8, 12, 16, 128)


class Group:
    """A data-parallel group of which one rank exists at a time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.rank = 0

    def size(self) -> int:
        return self._size


def drawn(seed: int) -> tuple[list[tuple[int, bool]], int, int | None]:
    """Elements of each parameter and whether it is shared, data-parallel size, bucket size."""
    draw = random.Random(seed)
    size = draw.choice((1, 8, 24, 64, 96, 200))
    sizes = [(draw.randint(1, 40) * size, False) for _ in range(draw.randint(1, 8))]
    shared = (draw.randint(64, 512) * draw.choice((32, 48, 64, 100)), True)
    place = draw.choice(("none", "first", "last", "both", "inside"))
    if place in ("first", "both"):
        sizes.insert(0, shared)
    if place in ("last", "both"):
        sizes.append(shared)
    if place == "inside":
        sizes.insert(draw.randint(0, len(sizes)), shared)
    return sizes, draw.choice(DATA_PARALLEL), draw.choice((None, None, 500, 2000, 20000))


def compared(seeds: int) -> dict[str, Any]:
    """Of ``seeds`` drawn layouts: those that 0.9.0 starts, those that it does not, and every difference."""
    from megatron.core.distributed import param_and_grad_buffer as upstream

    from mt_megatron.patches.errata.gradient_buckets import _buffer

    constructor = upstream._ParamAndGradBuffer.__init__
    found: dict[str, Any] = {"start": 0, "not": 0, "changed": [], "refused": [], "plan": []}
    with (
        mock.patch.object(upstream, "log_on_each_pipeline_stage"),
        mock.patch.object(torch.cuda, "current_device", lambda: "meta"),
        mock.patch.object(torch.distributed, "get_world_size", lambda group: group.size()),
        mock.patch.object(torch.distributed, "get_rank", lambda group: group.rank),
    ):
        for seed in range(seeds):
            layout = drawn(seed)
            before, starts = _built(constructor, layout)
            after, now = _built(lambda *given: _buffer(constructor, *given), layout)
            found["start" if starts else "not"] += 1
            if starts and before != after:
                found["changed"].append([seed, before, after])
            if not now:
                found["refused"].append(seed)
            if after["buckets"] != _planned(layout):
                found["plan"].append([seed, after["buckets"], _planned(layout)])
    return found


def _built(constructor: Any, layout: tuple[list[tuple[int, bool]], int, int | None]) -> tuple[Any, bool]:
    """The buffer's places; whether every rank's optimizer starts."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    sizes, ranks, bucket_size = layout
    params = []
    for numel, shared in sizes:
        params.append(torch.nn.Parameter(torch.empty(numel, device="meta")))
        if shared:
            params[-1].shared_embedding = True  # type: ignore[attr-defined]
    names = {param: str(index) for index, param in enumerate(params)}
    buffer, group = object.__new__(_ParamAndGradBuffer), Group(ranks)
    options = SimpleNamespace(use_distributed_optimizer=True)
    dtype, indices = torch.float32, list(range(len(params)))
    constructor(buffer, options, dtype, dtype, params, group, bucket_size, names, 1.0, indices)
    assert buffer.params is params and list(names) == params
    assert all(param.main_grad.shape == param.shape for param in params)  # type: ignore[attr-defined]
    starts = True
    for group.rank in range(ranks) if ranks <= 16 else (0, ranks - 1):
        try:
            DistributedOptimizer._build_model_param_gbuf_map(
                [DistributedOptimizer._build_gbuf_range_map(buffer)]
            )
        except AssertionError:
            starts = False
    places = {
        "offsets": {names[param]: list(place) for param, place in buffer.param_index_map.items()},
        "of": {names[param]: bucket.bucket_id for param, bucket in buffer.param_to_bucket.items()},
        "numel": [buffer.numel, buffer.numel_unpadded],
        "buckets": [
            [
                bucket.offset,
                bucket.offset + bucket.grad_data.numel(),
                bucket.numel_unpadded,
                [buffer.param_index_map[param][:2] for param in bucket.params_list],
            ]
            for bucket in buffer.buckets
        ],
        "sets": [sorted(names[param] for param in bucket.params) for bucket in buffer.buckets],
    }
    return places, starts


def _planned(layout: tuple[list[tuple[int, bool]], int, int | None]) -> list[Any]:
    from mt_megatron.parallel.gradient_buckets import buckets_of

    sizes, ranks, bucket_size = layout
    return [
        [bucket.start, bucket.end, bucket.numel_unpadded, list(bucket.spans)]
        for bucket in buckets_of(reversed(sizes), ranks, bucket_size)
    ]


def gathers() -> dict[str, list[Any]]:
    """Buckets in the order of their gathers, of a step whose modules use the buckets 0, 2 and 1."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    from mt_megatron.patches.errata.gradient_buckets import _finish_param_sync

    upstream = Group.finish_param_sync
    found: dict[str, list[Any]] = {}

    def ours(self: Any) -> None:
        _finish_param_sync(upstream, self)

    for name, finish in (("ours", ours), ("upstream", upstream)):
        order: list[Any] = found.setdefault(name, [])
        groups = [object.__new__(Group) for _ in range(4)]
        for index, group in enumerate(groups):

            def start(group: Any = group, index: int = index, order: list[Any] = order) -> None:
                assert group.param_gather_handle is None
                group.param_gather_dispatched, group.param_gather_handle = True, mock.Mock()
                order.append(index)

            group.ddp_config = SimpleNamespace(use_distributed_optimizer=True, overlap_param_gather=True)
            group.param_gather_dispatched, group.param_gather_handle = False, None
            group.next_param_gather_bucket_group = groups[index + 1] if index < 3 else None
            group.start_param_sync = start
        for index in (0, 2, 1):
            finish(groups[index])
    return found
