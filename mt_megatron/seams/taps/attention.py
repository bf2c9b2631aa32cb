"""Queries, keys and values as core attention gets them: after rotation, this rank's heads and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from mt_megatron.errors import ConfigError
from mt_megatron.seams.taps.modules import Call, Watch, watch
from mt_megatron.seams.taps.progress import is_recomputing

MaskKind = Literal["causal", "padding", "padding_causal", "no_mask", "arbitrary"]
"""Names of Megatron's ``AttnMaskType``."""


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Operands of one call of a core attention. Tensors are detached and share the run's memory;
    nothing was computed for this."""

    call: Call

    query: Tensor
    """[tokens, b, heads, d], this rank's heads and (context parallelism) tokens; [tokens, heads, d] with
    ``packed`` documents in Megatron's way."""

    key: Tensor
    """[tokens of keys, b, groups, d] or [tokens, groups, d]; ``heads`` is a multiple of ``groups``."""

    value: Tensor
    """Like ``key``, with the values' head size."""

    scale: float
    """Logits are ``scale * query . key``."""

    mask_kind: MaskKind

    mask: Tensor | None
    """bool, True where attending is forbidden, broadcastable to [b, heads, queries, keys of the whole
    sequence]; in addition to what ``mask_kind`` and ``window`` say."""

    cu_seqlens: Tensor | None
    """int32 [documents + 1]: where packed documents begin and end, read row by row of [b, tokens]; a
    document attends to itself alone."""

    window: tuple[int, int] | None
    """Keys visible to the left and right of a query, -1 for all."""

    heads: range
    """Numbers, in the whole layer, of this rank's query heads."""

    context_rank: int
    context_size: int
    """This rank holds chunks ``context_rank`` and ``2 * context_size - 1 - context_rank`` of the sequence cut
    into ``2 * context_size``; keys of the other ranks are not here (``key_shards``)."""


def attention_inputs(
    module: nn.Module,
    fn: Callable[[AttentionInputs], None],
    *,
    live: bool = False,
    errors: Literal["close", "raise"] = "close",
    told: Callable[[str], None] | None = None,
) -> Watch:
    """Call ``fn`` at every call of the core attention of ``module`` (a layer, its self attention or the core
    attention itself) until the returned tap is closed; not for recomputed calls. With ``live`` tensors are
    the run's own, not detached.

    Works for ours, upstream's unfused one, multi-latent attention and Transformer Engine's. Raises
    ``ConfigError`` for a module without a core attention.
    """
    core = core_attention(module)

    def before(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fn(_inputs(core, call, args, kwargs))

    return watch(core, before=before, live=live, errors=errors, told=told)


def key_shards(
    module: nn.Module,
    fn: Callable[[int, Tensor], None],
    *,
    errors: Literal["close", "raise"] = "close",
    told: Callable[[str], None] | None = None,
) -> Watch:
    """Call ``fn(source, keys)`` for the keys of every context-parallel rank, the own ones first, as they pass
    through this rank's attention of ``module`` anyway; not for recomputed calls.

    ``source`` is the rank within its context-parallel group, ``keys`` [n, b, groups, d] in the dtype and with
    the head size that the kernels get (padded with zeros to that of the values). They are overwritten later.
    Comes after ``fn`` of ``attention_inputs`` of the same call; not at all without context parallelism.
    """
    core = core_attention(module)

    @contextmanager
    def around() -> Iterator[None]:
        global _listener
        if is_recomputing():
            yield
            return
        outer = _listener

        def listen(source: int, keys: Tensor) -> None:
            if outer is not None:
                outer(source, keys)
            made.tell(fn, source, keys.detach())

        _listener = listen
        try:
            yield
        finally:
            _listener = outer

    made = watch(core, around=around, errors=errors, told=told)
    return made


_listener: Callable[[int, Tensor], None] | None = None


def keys_arrived(source: int, keys: Tensor) -> None:
    """For attention over context-parallel ranks: these are the keys of rank ``source``."""
    if _listener is not None:
        _listener(source, keys)


def core_attention(module: nn.Module) -> nn.Module:
    """The core attention of ``module``: its own or that of its self attention. Raises ``ConfigError``."""
    inner = getattr(module, "self_attention", module)
    core = getattr(inner, "core_attention", inner)
    if not isinstance(core, nn.Module) or not hasattr(core, "attn_mask_type"):
        raise ConfigError(
            f"found a {type(module).__name__}, which has no core attention; expected a transformer layer, "
            "its attention, or a core attention"
        )
    return core


_NAMES = ("query", "key", "value", "attention_mask", "attn_mask_type", "packed_seq_params")


def _inputs(core: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionInputs:
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    query, mask = given["query"], given.get("attention_mask")
    window = getattr(core.config, "window_size", None)
    packed, kind = given.get("packed_seq_params"), given.get("attn_mask_type") or core.attn_mask_type
    borders = getattr(packed, "cu_seqlens_q", None)
    if mask is not None and mask.dim() == 1 and not mask.is_floating_point() and mask.element_size() > 1:
        # Documents' borders in the mask's place.
        borders, mask = mask, None
    config = core.config
    size = getattr(config, "context_parallel_size", 1)
    heads = query.size(-2)
    first = heads * _tensor_rank() if getattr(config, "tensor_model_parallel_size", 1) > 1 else 0
    return AttentionInputs(
        call=call,
        query=query,
        key=given["key"],
        value=given["value"],
        scale=_scale(core),
        mask_kind=kind.name,
        mask=mask,
        cu_seqlens=None if borders is None else borders.detach(),
        window=None if window is None else (int(window[0]), int(window[1])),
        heads=range(first, first + heads),
        context_rank=_context_rank() if size > 1 else 0,
        context_size=size,
    )


def _scale(core: Any) -> float:
    scale = getattr(core, "softmax_scale", None)
    if scale is not None:
        return float(scale)
    factor = getattr(core, "norm_factor", None)
    if factor is not None:
        # Upstream divides by the layer's number before the softmax and multiplies by it within.
        within = getattr(getattr(core, "scale_mask_softmax", None), "scale", None)
        return (1.0 if within is None else float(within)) / float(factor)
    return 1.0 / math.sqrt(core.config.kv_channels)


def _tensor_rank() -> int:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0
    return int(parallel_state.get_tensor_model_parallel_rank())


def _context_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_context_parallel_rank())
