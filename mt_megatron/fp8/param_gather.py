"""The distributed optimizer's all-gather of parameters, with FP8 weights as codes: half of the bytes.

Each rank casts its shard of every FP8 weight with one scale per parameter, shared by the data-parallel
group; codes are gathered, and every rank decodes the same values, its own shard included. Parameters
without FP8 are gathered as they are. For recipes whose weights have one scale per tensor, so that the cast
of the next forward pass gives the same codes again.

Gathering what was gathered already, as before a checkpoint is written and after one is read, changes
nothing: values that come from codes keep their scale, which is kept in checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.fp8.formats import E4M3, decode, encode
from mt_megatron.fp8.linear import Fp8Linear
from mt_megatron.fp8.quantise import amax_of, scale_of
from mt_megatron.seams import collectives


@dataclass(frozen=True)
class _Segment:
    """A parameter's elements in a bucket."""

    start: int
    end: int
    linear: Fp8Linear | None


class Done:
    """The handle of a gathering that is complete."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def has_fp8(group: Any) -> bool:
    """True where a bucket group holds a weight that computes in FP8."""
    return any(
        isinstance(getattr(parameter, "gemm_recipe", None), Fp8Linear)
        for bucket in group.buckets
        for parameter in bucket.params_list
    )


def gather(group: Any) -> None:
    """All buckets of a ``_ParamAndGradBucketGroup``; collective over its data-parallel group."""
    for bucket in group.buckets:
        _gather_bucket(bucket, group.data_parallel_group)


def _segments(bucket: Any) -> list[_Segment]:
    data, found = bucket.param_data, []
    for parameter in bucket.params_list:
        start = (parameter.data_ptr() - data.data_ptr()) // data.element_size()
        recipe = getattr(parameter, "gemm_recipe", None)
        # Grouped experts have a scale each, and fp32 parameters are the optimizer's own.
        plain = parameter.dim() == 3 or data.dtype is torch.float32
        linear = None
        if isinstance(recipe, Fp8Linear) and recipe.gathers and not recipe.demoted and not plain:
            linear = recipe
            if recipe.recipe.cast("fprop", "weight").granularity != "tensor":
                raise ConfigError(
                    f"fp8_param_gather with fp8_recipe {recipe.recipe.name}; expected a recipe whose weights "
                    "have one scale per tensor (delayed, tensorwise). Leave fp8_param_gather out."
                )
        found.append(_Segment(start, start + parameter.numel(), linear))
    found.sort(key=lambda segment: segment.start)
    # What lies between parameters is padding, and gathered with what is not quantised.
    whole, at = [], 0
    for segment in [*found, _Segment(data.numel(), data.numel(), None)]:
        if segment.start > at:
            whole.append(_Segment(at, segment.start, None))
        if segment.end > segment.start:
            whole.append(segment)
        at = segment.end
    return whole


def _cut(segments: list[_Segment], start: int, end: int) -> list[_Segment]:
    return [
        _Segment(max(each.start, start), min(each.end, end), each.linear)
        for each in segments
        if each.start < end and each.end > start
    ]


def _gather_bucket(bucket: Any, group: Any) -> None:
    data: Tensor = bucket.param_data
    ranks, rank = group.size(), group.rank()
    size = data.numel() // ranks
    segments = _segments(bucket)
    shards = [_cut(segments, each * size, (each + 1) * size) for each in range(ranks)]
    scales = _scales(data, segments, shards[rank], group)
    codes = [
        encode(data[each.start : each.end].float() * scales[each.linear], E4M3).view(torch.uint8)
        for each in shards[rank]
        if each.linear is not None
    ]
    plain = [data[each.start : each.end] for each in shards[rank] if each.linear is None]
    gathered_codes = _all_gather(codes, torch.uint8, shards, True, data, group)
    gathered_plain = _all_gather(plain, data.dtype, shards, False, data, group)
    for number, shard in enumerate(shards):
        at = {True: 0, False: 0}
        for each in shard:
            quantised, length = each.linear is not None, each.end - each.start
            source = (gathered_codes if quantised else gathered_plain)[number]
            part = source[at[quantised] : at[quantised] + length]
            at[quantised] += length
            if each.linear is not None:
                values = decode(part.view(torch.float8_e4m3fn), E4M3, torch.float32)
                part = values * scales[each.linear].reciprocal()
            data[each.start : each.end] = part
    for linear, scale in scales.items():
        linear.gathered_scale = scale
        counts = linear.state.counts
    if scales:
        counts["param_gather_bytes"] += sum(each.numel() * each.element_size() for each in codes + plain)
        counts["param_gather_bf16_bytes"] += size * data.element_size()


def _scales(
    data: Tensor, segments: list[_Segment], mine: list[_Segment], group: Any
) -> dict[Fp8Linear, Tensor]:
    """The scale of every FP8 weight of the bucket, from the magnitudes in all shards."""
    linears = [each.linear for each in segments if each.linear is not None]
    if not linears:
        return {}
    # Largest magnitudes, and whether the values are no codes times the scale of the last gathering.
    largest, changed = torch.zeros(2, len(linears), device=data.device).unbind()
    cast = linears[0].recipe.cast("fprop", "weight")
    for each in mine:
        if each.linear is not None:
            part, index = data[each.start : each.end], linears.index(each.linear)
            largest[index] = amax_of(part.view(1, -1), cast, 1)
            changed[index] = _is_new(part, each.linear.gathered_scale)
    both = torch.stack([largest, changed])
    with collectives.announced("all_reduce", "dp", group):
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    found = {}
    # Of the updated weights, for delayed scaling too: the pass over the shard is made anyway.
    for linear, amax, new in zip(linears, both[0], both[1].tolist(), strict=True):
        before = linear.gathered_scale
        if new or before is None:
            before = scale_of(amax, E4M3, margin=linear.recipe.margin)
        found[linear] = before
    return found


def _is_new(values: Tensor, scale: Tensor | None) -> Tensor | bool:
    """False where ``values`` are decoded codes with ``scale``."""
    if scale is None:
        return True
    decoded = decode(encode(values.float() * scale, E4M3), E4M3, torch.float32) * scale.reciprocal()
    return (decoded.to(values.dtype) != values).any()


def _all_gather(
    parts: list[Tensor],
    dtype: torch.dtype,
    shards: list[list[_Segment]],
    quantised: bool,
    like: Tensor,
    group: Any,
) -> list[Tensor]:
    """One tensor per rank; shards that hold less are padded."""
    room = max(
        sum(each.end - each.start for each in shard if (each.linear is not None) is quantised)
        for shard in shards
    )
    if not room:
        return [like.new_empty(0, dtype=dtype)] * len(shards)
    sent = like.new_zeros(room, dtype=dtype)
    if parts:
        joined = torch.cat(parts)
        sent[: joined.numel()] = joined
    received = like.new_empty(room * len(shards), dtype=dtype)
    with collectives.announced("all_gather", "dp", group):
        dist.all_gather_into_tensor(received, sent, group=group)
    return list(received.view(len(shards), room))
