"""Random shapes of multi-latent attention, and transformers' DeepSeek attention of the same weights."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAMES = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
"""Ours -> transformers'."""

SPLIT = {"linear_q_proj": 0, "linear_q_up_proj": 0, "linear_kv_up_proj": 0, "linear_proj": 1}
"""Dimension that tensor parallelism splits; the others are whole on every rank."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention and its input."""

    version: int
    """2 or 3: whose attention of transformers is the oracle."""

    seed: int
    heads: int
    hidden: int
    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    value: int
    tokens: int
    batch: int
    theta: float
    yarn: dict[str, float] | None
    """Fields of transformers' ``rope_parameters``; None: plain positions."""

    def config(self, **more: Any) -> Any:
        from megatron.core.transformer import TransformerConfig

        yarn = self.yarn or {}
        return TransformerConfig(
            **{
                "num_layers": 1,
                "hidden_size": self.hidden,
                "num_attention_heads": self.heads,
                "multi_latent_attention": True,
                "q_lora_rank": self.q_lora,
                "kv_lora_rank": self.kv_lora,
                "qk_head_dim": self.nope,
                "qk_pos_emb_head_dim": self.rope,
                "v_head_dim": self.value,
                "rope_type": "yarn" if self.yarn else "rope",
                "rotary_base": self.theta,
                "rotary_scaling_factor": yarn.get("factor", 1.0),
                "original_max_position_embeddings": int(yarn.get("original_max_position_embeddings", 4096)),
                "mscale": yarn.get("mscale", 1.0),
                "mscale_all_dim": yarn.get("mscale_all_dim", 0.0),
                "normalization": "RMSNorm",
                "layernorm_epsilon": 1e-6,
                "add_bias_linear": False,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "use_cpu_initialization": True,
                **more,
            }
        )

    def input(self) -> Tensor:
        """[tokens, batch, hidden]."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.tokens, self.batch, self.hidden, generator=generator)

    def probe(self) -> Tensor:
        """What the output is multiplied by to have something to differentiate."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.tokens, self.batch, self.hidden, generator=generator)


def random_shapes(count: int, seed: int) -> list[Shape]:
    """DeepSeek-V2's and V3's attention in turn; every fifth has plain positions.

    Sizes beside rotated parts are even, since transformers' V2 views those as complex numbers.
    """
    draw = random.Random(seed)
    found = []
    for index in range(count):
        heads = draw.choice([2, 4, 6])
        mscale = draw.choice([0.707, 1.0, draw.uniform(0.2, 1.5)])
        yarn = {
            "factor": draw.choice([2.5, 8.0, 40.0]),
            "mscale": mscale,
            "mscale_all_dim": draw.choice([mscale, mscale, draw.uniform(0.2, 1.5)]),
            "original_max_position_embeddings": draw.choice([64, 512, 4096]),
        }
        found.append(
            Shape(
                version=2 + index % 2,
                seed=draw.randrange(1 << 30),
                heads=heads,
                hidden=heads * draw.randrange(6, 16),
                q_lora=draw.choice([None, draw.randrange(9, 40)]),
                kv_lora=2 * draw.randrange(5, 20),
                nope=2 * draw.randrange(2, 10),
                rope=draw.choice([4, 8, 16]),
                value=draw.randrange(5, 30),
                tokens=2 * draw.choice([13, 40, 67]),
                batch=draw.choice([1, 2]),
                theta=draw.choice([1000.0, 10000.0, 5e5]),
                yarn=None if index % 5 == 4 else yarn,
            )
        )
    return found


def transformers_attention(shape: Shape) -> tuple[Any, Any]:
    """Its attention with random weights, and the rotary module that feeds it."""
    from transformers.models.deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    positions = {"rope_type": "default", "rope_theta": shape.theta}
    if shape.yarn:
        positions = {**positions, "rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, **shape.yarn}
    config = (DeepseekV2Config if shape.version == 2 else DeepseekV3Config)(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        q_lora_rank=shape.q_lora,
        kv_lora_rank=shape.kv_lora,
        qk_nope_head_dim=shape.nope,
        qk_rope_head_dim=shape.rope,
        v_head_dim=shape.value,
        rope_parameters=positions,
        max_position_embeddings=4096,
    )
    config._attn_implementation = "eager"
    of_two, of_three = (
        (v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding),
        (v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding),
    )
    attention_class, rotary_class = of_two if shape.version == 2 else of_three
    attention = attention_class(config, layer_idx=0)
    generator = torch.Generator().manual_seed(shape.seed + 2)
    for parameter in attention.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        # Latents' gains about one, projections that keep the size of what they get.
        parameter.data = 1 + 0.2 * drawn if drawn.dim() == 1 else drawn * drawn.size(1) ** -0.5
    return attention, rotary_class(config)


def reference(shape: Shape) -> dict[str, Tensor]:
    """transformers' output [s, b, h] and, by our names, gradients of it times the probe."""
    attention, rotary = transformers_attention(shape)
    hidden = shape.input().transpose(0, 1).clone().requires_grad_()
    positions = torch.arange(shape.tokens).expand(shape.batch, -1)
    future = torch.full((shape.tokens, shape.tokens), float("-inf")).triu(1)
    output, _ = attention(
        hidden_states=hidden,
        position_embeddings=rotary(hidden, positions),
        attention_mask=future[None, None],
    )
    output = output.transpose(0, 1)
    (output * shape.probe()).sum().backward()
    assert hidden.grad is not None
    found = {"output": output.detach(), "input": hidden.grad.transpose(0, 1)}
    for ours, theirs in NAMES.items():
        module = getattr(attention, theirs, None)
        if module is not None:
            found[ours] = module.weight.grad
    return found


def build(shape: Shape, **more: Any) -> Any:
    """Our attention as Megatron's local layer spec names it, with transformers' weights of this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    from mt_megatron.layers.mla.self_attention import mla_spec

    config = shape.config(**more)
    spec = mla_spec(get_gpt_layer_local_spec().submodules.self_attention, config)
    module = build_module(spec, config=config, layer_number=1)
    attention, _ = transformers_attention(shape)
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in module.named_parameters():
        ours = name.removesuffix(".weight")
        whole = getattr(attention, NAMES[ours]).weight.data
        part = whole.chunk(size, SPLIT[ours])[rank] if ours in SPLIT else whole
        assert parameter.shape == part.shape, (name, parameter.shape, part.shape)
        parameter.data.copy_(part)
    return module


def relative(found: Tensor, wanted: Tensor) -> float:
    """Largest difference against the largest value."""
    return float((found.float() - wanted).abs().max() / wanted.abs().max())
