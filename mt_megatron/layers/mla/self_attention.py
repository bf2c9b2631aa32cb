"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) for Megatron-Core 0.9.0.

Names of modules and parameters, and what the parameters hold, are Megatron-Core 0.12's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_megatron.errors import ConfigError
from mt_megatron.layers.attention.packed_sequences import document_positions
from mt_megatron.layers.mla.spec import MLASelfAttentionSubmodules, mla_submodules, norm_is_in_linear
from mt_megatron.layers.rope.scaling import (
    inverse_frequencies,
    rope_scaling_of,
    rotary_factor,
    softmax_factor,
)
from mt_megatron.parallel.context_parallel import part_of_sequence
from mt_megatron.patching.in_force import is_in_force

_log = logging.getLogger("mt_megatron")
_Latents = tuple[Tensor, Tensor, Tensor]
_UPSTREAM_BASE = 10000.0


class MLASelfAttention(Attention):  # type: ignore[misc]
    """Self attention whose keys and values, and with ``q_lora_rank`` also queries, come from latents.

    Each head attends with ``qk_head_dim`` numbers without position and ``qk_pos_emb_head_dim`` rotated
    ones, whose key all heads share, to values of ``v_head_dim`` numbers. Latents are normalised, always
    (Megatron-Core 0.12 leaves these norms out without ``qk_layernorm``; no published model does).

    Order of what is stored, as in DeepSeek's files, so that none of it is permuted: a head's query is
    [no position, rotated] in ``linear_q_proj`` or ``linear_q_up_proj``, its key and value are
    [key, value] in ``linear_kv_up_proj``, ``linear_kv_down_proj`` is [latent, rotated key]. Rotary
    pairs are interleaved: numbers 2 i and 2 i + 1 turn together, also in what is computed.

    Scores are multiplied by ``softmax_factor / sqrt(qk_head_dim + qk_pos_emb_head_dim)`` and both rotated
    parts by ``rotary_factor`` (see ``rope_scaling``).

    Tensor parallelism splits the heads: q, kv up and output projections. The projections down are on
    every rank (``ReplicatedLinear``). With ``recompute_mla_up_proj`` queries, keys and values are not
    kept for backward but projected and rotated once more.
    """

    def __init__(
        self,
        config: Any,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
    ) -> None:
        # Attention's own __init__ would build a core attention and a projection of other sizes.
        MegatronModule.__init__(self, config)
        check_mla(config)
        check_submodules(submodules)
        submodules = mla_submodules(submodules)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.attention_type = "self"
        heads = config.num_attention_heads
        self.num_attention_heads_per_partition = (
            heads // parallel_state.get_tensor_model_parallel_world_size()
        )
        self.num_query_groups_per_partition = self.num_attention_heads_per_partition
        self.q_head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        self.query_projection_size = heads * config.v_head_dim
        self.checkpoint_core_attention = config.recompute_granularity == "selective"
        self.recompute_up_proj = bool(config.recompute_mla_up_proj)

        scaling = rope_scaling_of(config)
        self.rotary_factor = rotary_factor(scaling)
        self.softmax_scale = softmax_factor(scaling) / math.sqrt(self.q_head_dim)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=self.attention_type,
            softmax_scale=self.softmax_scale,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            self.query_projection_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
        )
        latent = config.q_lora_rank
        if latent is None:
            self.linear_q_proj = self._linear(
                submodules.linear_q_proj, config.hidden_size, heads * self.q_head_dim
            )
        else:
            self.linear_q_down_proj = self._down_projection(submodules.linear_q_down_proj, latent)
            self.linear_q_up_proj = self._linear(submodules.linear_q_up_proj, latent, heads * self.q_head_dim)
        self.linear_kv_down_proj = self._down_projection(
            submodules.linear_kv_down_proj, config.kv_lora_rank + config.qk_pos_emb_head_dim
        )
        self.linear_kv_up_proj = self._linear(
            submodules.linear_kv_up_proj,
            config.kv_lora_rank,
            heads * (config.qk_head_dim + config.v_head_dim),
        )
        if latent is not None:
            self.q_layernorm = self._norm(submodules.q_layernorm, latent)
        self.kv_layernorm = self._norm(submodules.kv_layernorm, config.kv_lora_rank)

    def _linear(self, kind: Any, input_size: int, output_size: int) -> torch.nn.Module:
        linear: torch.nn.Module = build_module(
            kind,
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
        )
        return linear

    def _down_projection(self, kind: Any, output_size: int) -> torch.nn.Module:
        linear = self._linear(kind, self.config.hidden_size, output_size)
        check_down_projection(linear, output_size)
        return linear

    def _norm(self, kind: Any, size: int) -> torch.nn.Module:
        norm: torch.nn.Module = build_module(
            kind, hidden_size=size, config=self.config, eps=self.config.layernorm_epsilon
        )
        return norm

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``hidden_states`` [s, b, h] (under sequence parallelism and context parallelism this rank's
        tokens) to the same shape, and the bias of ``linear_proj`` that was not added, or None.

        ``rotary_pos_emb`` are angles [s, b or 1, 1, r] as Megatron's RotaryEmbedding gives them (halves
        equal; only the first is read); None means positions 0, 1, 2 ... (of each document with
        ``packed_seq_params``). ``attention_mask`` may be document borders, see DotProductAttention.

        Raises ConfigError for a key-value cache (there is none for latents), for cross attention, and
        for packed sequences under context parallelism.
        """
        check_call(self.config, key_value_states, inference_params, packed_seq_params)
        angles = self._angles(hidden_states, rotary_pos_emb, packed_seq_params)
        latents = self._down(hidden_states)
        query, key, value = self._up(latents, angles)
        recomputation = None
        if self.recompute_up_proj and torch.is_grad_enabled():
            q, kv, shared = (t.detach() for t in latents)
            recomputation = Recomputation((query, key, value), lambda: self._up((q, kv, shared), angles))
        with recomputation.in_place_of_saving() if recomputation else nullcontext():
            context = self._attend(query, key, value, attention_mask, packed_seq_params)
        if recomputation and not recomputation.left_out:
            _say_not_left_out(query.device.type)
        output, bias = self.linear_proj(context)
        return output, bias

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys [s, b, heads, d + r] and values [s, b, heads, v], of this rank's heads."""
        check_call(self.config, key_value_states, None, packed_seq_params)
        angles = self._angles(hidden_states, rotary_pos_emb, packed_seq_params)
        return self._up(self._down(hidden_states), angles)

    def _down(self, hidden_states: Tensor) -> _Latents:
        """What queries are projected from, the normalised latent, and the shared key not yet rotated."""
        config, query = self.config, hidden_states
        if config.q_lora_rank is not None:
            query = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
        both, _ = self.linear_kv_down_proj(hidden_states)
        latent, shared = both.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        # Each rank has some of the heads that share this key: their gradients are added up.
        if config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, tensor_parallel_output_grad=True)
        else:
            shared = copy_to_tensor_model_parallel_region(shared)
        return query, self.kv_layernorm(latent), shared

    def _up(self, latents: _Latents, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, (query, latent, shared) = self.config, latents
        project = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        heads = self.num_attention_heads_per_partition
        query, _ = project(query)
        query = rotated_queries(query.unflatten(-1, (heads, -1)), angles, self.rotary_factor)
        both, _ = self.linear_kv_up_proj(latent)
        key, value = both.unflatten(-1, (heads, -1)).split([config.qk_head_dim, config.v_head_dim], dim=-1)
        # A copy, so that the keys beside them are not kept twice.
        return query, keys_of(key, shared, angles, self.rotary_factor), value.contiguous()

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, packed: Any
    ) -> Tensor:
        if packed is not None:
            query, key, value = (t.squeeze(1) for t in (query, key, value))
        attend = (
            self._checkpointed_attention_forward
            if self.checkpoint_core_attention and self.training
            else self.core_attention
        )
        context: Tensor = attend(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=self.attn_mask_type,
            packed_seq_params=packed,
        )
        return context if packed is None else context.unsqueeze(1)

    def _angles(self, hidden_states: Tensor, given: Any, packed: Any) -> Tensor:
        """fp32 [s, b or 1, r / 2]."""
        config, size = self.config, self.config.qk_pos_emb_head_dim
        ranks = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
        length = hidden_states.size(0) * ranks
        if given is None:
            whole = torch.arange(length * config.context_parallel_size, dtype=torch.float32)
            base = _UPSTREAM_BASE if config.rotary_base is None else config.rotary_base
            turns = torch.outer(whole, inverse_frequencies(size, base, rope_scaling_of(config)))
            if config.context_parallel_size > 1:
                rank = parallel_state.get_context_parallel_rank()
                turns = part_of_sequence(turns, 0, rank, config.context_parallel_size)
            angles = turns.unsqueeze(1).to(hidden_states.device)
        else:
            _require_fitted(config)
            angles = (given[0] if isinstance(given, tuple) else given).squeeze(2)
            check_angles(angles, length, size)
            angles = angles[:length, :, : size // 2]
        if packed is not None:
            positions = document_positions(packed.cu_seqlens_q.cpu(), 1).squeeze(0)
            angles = angles[positions.to(angles.device)]
        return angles


def mla_spec(self_attention: ModuleSpec, config: Any) -> ModuleSpec:
    """``MLASelfAttention`` in the place of a layer's ``self_attention``, with the linear and norm classes
    that the layer has. Transformer Engine's layer holds the norm of its input inside of a linear that
    MLA has not: the layer needs one of its own then.

    Raises ConfigError for a configuration that MLA cannot have.
    """
    check_mla(config)
    return ModuleSpec(
        module=MLASelfAttention,
        params=dict(self_attention.params or {}),
        submodules=mla_submodules(self_attention.submodules),
    )


@cache
def _say_not_left_out(device_type: str) -> None:
    _log.info(
        "recompute_mla_up_proj: queries, keys and values are kept all the same, since the core attention on "
        "%s keeps copies of them",
        device_type,
    )


# Queries and keys from a part without position and a rotated part. Rotated pairs are dimensions 2 i and 2 i
# + 1, DeepSeek's interleaved order, in the parameters and in the results. Angles are [s, b or 1, r / 2] in
# fp32 (or fp64); the rotation is computed in that dtype.


def rotated_queries(query: Tensor, angles: Tensor, factor: float = 1.0) -> Tensor:
    """``query`` [s, b, heads, d + r] with its last r dimensions rotated and multiplied by ``factor``."""
    rotated: Tensor = _Queries.apply(query, angles, factor)  # type: ignore[no-untyped-call]
    return rotated


def keys_of(key: Tensor, shared: Tensor, angles: Tensor, factor: float = 1.0) -> Tensor:
    """[s, b, heads, d + r]: each head's ``key`` [s, b, heads, d], and ``shared`` [s, b, r], the same for
    all heads, rotated and multiplied by ``factor``."""
    keys: Tensor = _Keys.apply(key, shared, angles, factor)  # type: ignore[no-untyped-call]
    return keys


class _Queries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, angles: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.factor = factor
        return _turned_queries(query, angles, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (angles,) = ctx.saved_tensors
        return _turned_queries(grad, -angles, ctx.factor), None, None


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, shared: Tensor, angles: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.factor = factor
        size = key.size(-1)
        keys = key.new_empty(*key.shape[:-1], size + shared.size(-1))
        keys[..., :size] = key
        keys[..., size:] = _turned(shared, angles, factor).unsqueeze(2)
        return keys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (angles,) = ctx.saved_tensors
        size = grad.size(-1) - 2 * angles.size(-1)
        # Turning is linear: once for the sum over the heads.
        shared = _turned(grad[..., size:].sum(2), -angles, ctx.factor)
        return grad[..., :size], shared, None, None


def _turned_queries(query: Tensor, angles: Tensor, factor: float) -> Tensor:
    size = query.size(-1) - 2 * angles.size(-1)
    turned = query.clone(memory_format=torch.contiguous_format)
    turned[..., size:] = _turned(query[..., size:], angles.unsqueeze(2), factor)
    return turned


def _turned(t: Tensor, angles: Tensor, factor: float) -> Tensor:
    """A copy of ``t`` [..., r] whose pairs are turned by ``angles`` [..., r / 2]."""
    wide = t.to(angles.dtype)
    if wide.device.type == "cpu" and type(wide) is Tensor:
        # One pass; numbers that stand two apart cost several times as much.
        turns = torch.polar(torch.full_like(angles, factor), angles)
        pairs = torch.view_as_complex(wide.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).to(t.dtype)
    return _turned_by_parts(wide, angles, factor).to(t.dtype)


def _turned_by_parts(t: Tensor, angles: Tensor, factor: float) -> Tensor:
    """The same for devices that may not have complex numbers."""
    first, second = t.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = factor * torch.cos(angles), factor * torch.sin(angles)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


# Recomputation of queries, keys and values in backward: many heads are projected from latents that are an
# order of magnitude smaller and are kept anyway, as DeepSeek-V3 trains (arXiv:2412.19437, section 3.2.3).
# A checkpoint of the projections would run their backward preparation too, and a checkpoint of the
# attention would attend again.


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A view of one of the tensors that are made again."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Recomputation:
    """Stands for ``tensors`` between forward and backward; ``again()`` gives equal ones in that order."""

    def __init__(self, tensors: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]) -> None:
        places = ((t.untyped_storage().data_ptr(), index) for index, t in enumerate(tensors))
        # A tensor type without memory of its own returns 0; its parts cannot be distinguished.
        self._index = {place: index for place, index in places if place}
        self._again = again
        self._found: Sequence[Tensor] | None = None
        self._asked = 0
        kind = tensors[0].device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.left_out = 0
        """How many saved tensors were not kept because of this."""

    @contextmanager
    def in_place_of_saving(self) -> Iterator[None]:
        """Within it nothing that lies in the memory of ``tensors`` is kept for backward."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        index = self._index.get(tensor.untyped_storage().data_ptr())
        if index is None:
            return tensor
        self.left_out += 1
        return _Part(
            index=index, size=tensor.size(), stride=tensor.stride(), offset=int(tensor.storage_offset())
        )

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Part):
            kept: Tensor = packed
            return kept
        if self._found is None:
            with torch.no_grad(), self._as_in_forward():
                self._found = self._again()
        part = self._found[packed.index].as_strided(packed.size, packed.stride, packed.offset)
        self._asked += 1
        if self._asked == self.left_out:
            # Everything was asked for: another backward pass makes them once more.
            self._found, self._asked = None, 0
        return part

    def _as_in_forward(self) -> AbstractContextManager[Any]:
        kind, dtype, enabled = self._autocast
        if not enabled and not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, dtype=dtype, enabled=enabled)


# Checks before anything is computed.


def check_mla(config: Any) -> None:
    """Raises ConfigError for a TransformerConfig that MLA cannot be built from, as far as the config's
    own checks (``transformer_checks``) do not."""
    if not config.multi_latent_attention:
        raise ConfigError(
            "a multi-latent attention is built from a config without multi_latent_attention; expected "
            "TransformerConfig(multi_latent_attention=True), which also says its sizes"
        )
    if config.apply_rope_fusion:
        raise ConfigError(
            "apply_rope_fusion is set with multi_latent_attention; expected it unset: Apex's fused kernel "
            "rotates halves, and MLA's pairs are interleaved"
        )
    rope_scaling_of(config)


def check_submodules(submodules: Any) -> None:
    """Raises ConfigError for Transformer Engine's parts of another attention, left as they were."""
    if norm_is_in_linear(submodules):
        raise ConfigError(
            "the spec of a multi-latent attention holds Transformer Engine's linear_qkv with the norm of the "
            "layer's input in it; expected MLASelfAttentionSubmodules and a norm of the layer. Give the "
            "model the spec of one layer instead of a list: then both are put in"
        )


def check_down_projection(linear: Any, output_size: int) -> None:
    """Raises ConfigError where a spec's projection to a latent is split over the ranks."""
    found = getattr(linear, "weight", None)
    if isinstance(found, Tensor) and found.size(0) != output_size:
        raise ConfigError(
            f"the spec's projection down to {output_size} numbers has {found.size(0)} of them on this rank; "
            "expected all. Put ReplicatedLinear of mt_megatron.layers.mla.spec into the spec"
        )


def check_call(config: Any, key_value_states: Any, inference_params: Any, packed: Any) -> None:
    """Raises ConfigError for cross attention, a key-value cache, and packed sequences under context
    parallelism."""
    if key_value_states is not None:
        raise ConfigError(
            "key_value_states reached a multi-latent attention; expected None: it is self attention"
        )
    if inference_params is not None:
        raise ConfigError(
            "a key-value cache (inference_params) reached a multi-latent attention, which has none; expected "
            "None. Compute the whole sequence for each new token, or export the model to generate"
        )
    if packed is not None and config.context_parallel_size > 1:
        raise ConfigError(
            f"context_parallel_size is {config.context_parallel_size} and packed sequences were given; "
            "expected None: a rank holds chunks of one sequence, not of several. Keep documents apart with "
            "an attention mask"
        )


def _require_fitted(config: Any) -> None:
    """Raise ConfigError where a model's rotary embedding does not know what ``config`` says of it."""
    base = _UPSTREAM_BASE if config.rotary_base is None else config.rotary_base
    if not is_in_force("rope") and (config.rope_type != "rope" or base != _UPSTREAM_BASE):
        raise ConfigError(
            f"rope_type is {config.rope_type!r} and rotary_base {base:g}, which the model's rotary embedding "
            "would ignore; expected rope among the features of patch(). Add rope, or give the model another "
            "position_embedding_type than rope: multi-latent attention then computes its own angles"
        )


def check_angles(angles: Tensor, length: int, size: int) -> None:
    """Raises ConfigError unless ``angles`` [positions, b or 1, r] suffice for ``length`` tokens and r is
    ``size``."""
    if angles.size(-1) != size or angles.size(0) < length:
        raise ConfigError(
            f"rotary angles of {angles.size(0)} positions and {angles.size(-1)} numbers reached a "
            f"multi-latent attention of {length} tokens and qk_pos_emb_head_dim {size}; expected as many. "
            "Build the model while mt_megatron's patches of feature rope are in place"
        )
