"""Mixtures of experts of shapes drawn at random: our flags for them, and Hugging Face's model of each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.parity.random_shapes import BATCH

Drawn = dict[str, Any]


def draw(family: str, seed: int, count: int = 3) -> list[Drawn]:
    """``count`` shapes of ``family`` (mixtral, deepseek_v2, deepseek_v3, qwen3_moe) that every layout of
    two processes can share."""
    rng = random.Random(f"{family} {seed}")
    return [{"family": family, "seed": rng.randrange(2**31), **_DRAWS[family](rng)} for _ in range(count)]


def _common(rng: random.Random) -> Drawn:
    heads = rng.choice([2, 4, 6])
    return {
        "num_layers": 2,
        "num_attention_heads": heads,
        "hidden_size": heads * 8 * rng.choice([2, 3]),
        "ffn_hidden_size": 2 * rng.randint(20, 60),
        # Never a multiple of what it is padded to.
        "vocab_size": 64 * rng.randint(1, 4) + rng.randint(1, 63),
        "seq_length": 8 * rng.randint(2, 8),
        "layernorm_epsilon": rng.choice([1e-5, 1e-6]),
    }


def _experts(rng: random.Random, topk: int) -> Drawn:
    return {"num_moe_experts": 2 * rng.randint(topk, topk + 2), "moe_router_topk": topk}


def _grouped_queries(rng: random.Random, heads: int) -> Drawn:
    return {
        "num_query_groups": 2 if heads % 2 == 0 else 1,
        "kv_channels": rng.choice([8, 16]),
        "rotary_base": rng.choice([10000.0, 500000.0, 1e6]),
    }


def _mixtral(rng: random.Random) -> Drawn:
    common = _common(rng)
    return {
        **common,
        **_grouped_queries(rng, common["num_attention_heads"]),
        **_experts(rng, rng.choice([2, 3])),
    }


def _qwen3_moe(rng: random.Random) -> Drawn:
    return {**_mixtral(rng), "moe_ffn_hidden_size": 2 * rng.randint(8, 24)}


def _deepseek(rng: random.Random) -> Drawn:
    common = _common(rng)
    groups = rng.choice([2, 4])
    yarn = rng.random() < 0.5
    chosen: Drawn = {
        **common,
        # Hugging Face's norms within latent attention know no other.
        "layernorm_epsilon": 1e-6,
        "moe_ffn_hidden_size": 2 * rng.randint(8, 24),
        "num_moe_experts": groups * rng.choice([2, 4]),
        "moe_router_topk": rng.choice([2, 3]),
        "moe_router_num_groups": groups,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": rng.choice([1.0, 2.5, 16.0]),
        "q_lora_rank": rng.choice([None, 12, 20]),
        "kv_lora_rank": rng.choice([8, 24]),
        "qk_head_dim": rng.choice([8, 16]),
        "qk_pos_emb_head_dim": rng.choice([4, 8]),
        "v_head_dim": rng.choice([8, 12, 16]),
        "rotary_base": rng.choice([10000.0, 50000.0]),
        "moe_layer_freq": rng.choice(["[0,1]", "[1,1]"]),
    }
    chosen["moe_shared_expert_intermediate_size"] = chosen["moe_ffn_hidden_size"] * rng.choice([1, 2])
    if yarn:
        mscale = rng.choice([0.707, 1.0])
        chosen |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rng.choice([4.0, 40.0]),
            "original_max_position_embeddings": 16,
            "mscale": mscale,
            "mscale_all_dim": mscale,
        }
    return chosen


_DRAWS: dict[str, Callable[[random.Random], Drawn]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": lambda rng: {**_deepseek(rng), "moe_router_group_score_topk": 1},
    "deepseek_v3": lambda rng: {
        **_deepseek(rng),
        "moe_router_group_score_topk": 2,
        "mtp_num_layers": rng.choice([None, 1, 2]),
    },
}

_FLAGS = {
    "mixtral": "--family mixtral",
    "qwen3_moe": "--family qwen --qk-layernorm",
    "deepseek_v2": "--family deepseek --multi-latent-attention --qk-layernorm --moe-router-pre-softmax",
    "deepseek_v3": "--family deepseek --multi-latent-attention --qk-layernorm "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
}


def flags(drawn: Drawn) -> list[str]:
    """The trainer's flags of one shape, dropless and without auxiliary losses, which Hugging Face's logits
    do not know."""
    given = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in drawn.items()
        if name not in ("family", "seed") and value is not None
    ]
    return [
        *given,
        *_FLAGS[drawn["family"]].split(),
        *(
            "--make-vocab-size-divisible-by 64 --position-embedding-type rope --normalization RMSNorm "
            "--activation-func silu --gated-linear-unit --no-add-bias-linear --hidden-dropout 0 "
            "--attention-dropout 0 --untie-embeddings-and-output-weights --mock-data --train-iters 1 "
            f"--lr 1e-3 --micro-batch-size {BATCH} --moe-router-load-balancing-type none "
            "--moe-token-dispatcher-type alltoall --moe-router-dtype fp32 "
            f"--mtp-loss-scaling-factor {MTP_WEIGHT}"
        ).split(),
    ]


MTP_WEIGHT = 0.3
"""Of the mean of the losses of multi-token prediction."""


def published_model(drawn: Drawn) -> tuple[Any, Any]:
    """Hugging Face's model in fp32 with weights of its own seed, norms other than 1 and biases other than 0,
    and its layers of multi-token prediction, or None where there are none."""
    import transformers
    from transformers.modeling_layers import MtpModel

    config = _CONFIGS[drawn["family"]](drawn)
    # The plain loops over experts: its fused ones want sizes that suit them.
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).float()
    depths = drawn.get("mtp_num_layers")
    further = MtpModel(model, depths).float() if depths else None
    generator = torch.Generator().manual_seed(drawn["seed"])
    _randomise(model, generator)
    if further is not None:
        _randomise(further.layers, generator)
    return model, further


def _randomise(module: torch.nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * noise)
            elif "gate.weight" in name or "router.weight" in name:
                # Scores far enough apart that rounding does not choose other experts.
                tensor.copy_(0.5 * noise)
            else:
                tensor.copy_(1 + 0.2 * noise if tensor.dim() == 1 else 0.08 * noise)


def _base(drawn: Drawn) -> dict[str, Any]:
    return {
        "vocab_size": drawn["vocab_size"],
        "hidden_size": drawn["hidden_size"],
        "intermediate_size": drawn["ffn_hidden_size"],
        "num_hidden_layers": drawn["num_layers"],
        "num_attention_heads": drawn["num_attention_heads"],
        "rms_norm_eps": drawn["layernorm_epsilon"],
        "max_position_embeddings": drawn["seq_length"],
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    }


def _mixtral_config(drawn: Drawn) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        **_base(drawn),
        num_key_value_heads=drawn["num_query_groups"],
        head_dim=drawn["kv_channels"],
        rope_parameters={"rope_type": "default", "rope_theta": drawn["rotary_base"]},
        num_local_experts=drawn["num_moe_experts"],
        num_experts_per_tok=drawn["moe_router_topk"],
        sliding_window=None,
    )


def _qwen3_moe_config(drawn: Drawn) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_base(drawn),
        num_key_value_heads=drawn["num_query_groups"],
        head_dim=drawn["kv_channels"],
        rope_parameters={"rope_type": "default", "rope_theta": drawn["rotary_base"]},
        num_experts=drawn["num_moe_experts"],
        num_experts_per_tok=drawn["moe_router_topk"],
        moe_intermediate_size=drawn["moe_ffn_hidden_size"],
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _deepseek_options(drawn: Drawn) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": drawn["rotary_base"]}
    if "rope_type" in drawn:
        rope |= {
            "rope_type": "yarn",
            "factor": drawn["rotary_scaling_factor"],
            "original_max_position_embeddings": drawn["original_max_position_embeddings"],
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": drawn["mscale"],
            "mscale_all_dim": drawn["mscale_all_dim"],
        }
    width = drawn["moe_ffn_hidden_size"]
    return {
        **_base(drawn),
        "num_key_value_heads": drawn["num_attention_heads"],
        "rope_parameters": rope,
        "moe_intermediate_size": width,
        "n_routed_experts": drawn["num_moe_experts"],
        "num_experts_per_tok": drawn["moe_router_topk"],
        "n_shared_experts": drawn["moe_shared_expert_intermediate_size"] // width,
        "n_group": drawn["moe_router_num_groups"],
        "topk_group": drawn["moe_router_group_topk"],
        "routed_scaling_factor": drawn["moe_router_topk_scaling_factor"],
        "first_k_dense_replace": drawn["moe_layer_freq"].count("0"),
        "q_lora_rank": drawn["q_lora_rank"],
        "kv_lora_rank": drawn["kv_lora_rank"],
        "qk_nope_head_dim": drawn["qk_head_dim"],
        "qk_rope_head_dim": drawn["qk_pos_emb_head_dim"],
        "v_head_dim": drawn["v_head_dim"],
    }


def _deepseek_v2_config(drawn: Drawn) -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_deepseek_options(drawn), topk_method="group_limited_greedy", norm_topk_prob=False
    )


def _deepseek_v3_config(drawn: Drawn) -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_deepseek_options(drawn), norm_topk_prob=True, rope_interleave=True, num_nextn_predict_layers=0
    )


_CONFIGS: dict[str, Callable[[Drawn], Any]] = {
    "mixtral": _mixtral_config,
    "qwen3_moe": _qwen3_moe_config,
    "deepseek_v2": _deepseek_v2_config,
    "deepseek_v3": _deepseek_v3_config,
}
