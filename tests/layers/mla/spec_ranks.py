"""What one process finds out about MLA's specs."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import torch

from tests.layers.mla.ranks import start

STUB = "stub_of_transformer_engine"


def engine_stub() -> Any:
    """A stub: a module with Transformer Engine's class names, none of which can do anything."""
    module = types.ModuleType(STUB)
    names = (
        "TELayerNormColumnParallelLinear",
        "TEColumnParallelLinear",
        "TERowParallelLinear",
        "TEDotProductAttention",
        "TENorm",
    )
    for name in names:
        setattr(module, name, type(name, (), {"__module__": STUB}))
    sys.modules[STUB] = module
    return module


def engine_spec() -> Any:
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec

    engine = engine_stub()
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=engine.TELayerNormColumnParallelLinear,
            core_attention=engine.TEDotProductAttention,
            linear_proj=engine.TERowParallelLinear,
        ),
    )


def names(spec: Any) -> dict[str, str]:
    return {name: part.__name__ for name, part in vars(spec.submodules).items()}


def attention_config(hidden: int, heads: int, rank: int | None, **more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=heads,
        multi_latent_attention=True,
        q_lora_rank=rank,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_cpu_initialization=True,
        **more,
    )


def parameters(hidden: int, heads: int, rank: int | None) -> tuple[int, int]:
    """Of our attention and of transformers', neither of which takes any memory."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    from mt_megatron.layers.mla.self_attention import mla_spec

    theirs = DeepseekV3Config(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=rank
    )
    config = attention_config(hidden, heads, rank, perform_initialization=False)
    with torch.device("meta"):
        spec = mla_spec(get_gpt_layer_local_spec().submodules.self_attention, config)
        built = build_module(spec, config=config, layer_number=1), DeepseekV3Attention(theirs, 0)
    ours, others = (sum(p.numel() for p in module.parameters()) for module in built)
    assert all(p.is_meta for module in built for p in module.parameters())
    return ours, others


def everything(published: dict[str, list[Any]]) -> dict[str, Any]:
    start()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mt_megatron.errors import ConfigError
    from mt_megatron.layers.mla.self_attention import MLASelfAttention, mla_spec

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mt_megatron").addHandler(handler)
    logging.getLogger("mt_megatron").setLevel(logging.INFO)

    counts = {name: parameters(*row) for name, row in published.items()}
    config = attention_config(32, 4, 12, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)
    local = mla_spec(get_gpt_layer_local_spec().submodules.self_attention, config)
    engine = mla_spec(engine_spec(), config)

    asked = get_gpt_layer_local_spec(multi_latent_attention=True)
    module = asked.submodules.self_attention.module.__name__
    model = GPTModel(config, asked, 32, 16, position_embedding_type="rope")
    # A script's own list of layers, which is taken as it is.
    block = TransformerBlockSubmodules(
        layer_specs=[get_gpt_layer_local_spec(multi_latent_attention=True)],
        layer_norm=asked.submodules.input_layernorm,
    )
    listed = GPTModel(config, block, 32, 16, position_embedding_type="rope")
    given = engine_spec()
    try:
        build_module(
            ModuleSpec(MLASelfAttention, given.params, given.submodules), config=config, layer_number=1
        )
        refused = ""
    except ConfigError as error:
        refused = str(error)

    attention = model.decoder.layers[0].self_attention
    hidden = torch.randn(16, 2, 32)
    of_model = attention._angles(hidden, model.rotary_pos_emb(16), None)
    of_layer = attention._angles(hidden, None, None)
    return {
        "ours": {name: ours for name, (ours, _) in counts.items()},
        "transformers": {name: theirs for name, (_, theirs) in counts.items()},
        "local": names(local),
        "engine": names(engine),
        "kept": {"mask": local.params["attn_mask_type"].name, "engine in a list": refused},
        "said": {"log": "\n".join(said)},
        "argument": {
            "module": module,
            "built": type(attention).__name__,
            "list": isinstance(listed.decoder.layers[0].self_attention, MLASelfAttention),
        },
        "angles": {
            "equal": bool(
                torch.allclose(of_model, of_layer, rtol=0, atol=1e-6 * of_model.abs().max().item())
            ),
            "bit for bit": bool(torch.equal(of_model, of_layer)),
        },
    }
