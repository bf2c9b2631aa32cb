"""The list of added fields, the pattern of layers, and what the fields have to fulfil."""

from __future__ import annotations

from typing import Any

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.layers.transformer_checks import check_fields, field_problems
from mt_megatron.layers.transformer_fields import FIELDS, dataclass_fields, moe_pattern

MIXTURE: dict[str, Any] = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "num_moe_experts": 8,
    "moe_router_topk": 4,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "expert_model_parallel_size": 2,
    "tensor_model_parallel_size": 2,
}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn"}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}

# Megatron-Core 0.12.3's names and defaults; mtp_loss_scaling_factor is the paper's, 0.12 has None and
# takes 0.1 from its command line. q_lora_rank and rope_type are those of attention without latents.
LATER = {
    "moe_ffn_hidden_size": None,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_overlap": False,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_dtype": None,
    "multi_latent_attention": False,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mtp_num_layers": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
}


def test_names_and_defaults_are_those_of_the_later_version() -> None:
    defaults = {one.name: one.default for one in FIELDS}
    assert {name: defaults[name] for name in LATER} == LATER
    assert len(defaults) == len(FIELDS) == len(dataclass_fields())
    assert all(one.kw_only and one.default == defaults[one.name] for one in dataclass_fields())


def test_every_field_says_what_it_means() -> None:
    assert all(one.doc.endswith(".") and len(one.doc) > 20 for one in FIELDS)


@pytest.mark.parametrize(
    ("freq", "layers", "expected"),
    [
        (1, 3, (1, 1, 1)),
        (2, 5, (1, 0, 1, 0, 1)),
        (7, 3, (1, 0, 0)),
        ([0, 1, 1], 3, (0, 1, 1)),
        ((0, 0), 2, (0, 0)),
        (1, 0, ()),
    ],
)
def test_pattern(freq: Any, layers: int, expected: tuple[int, ...]) -> None:
    assert moe_pattern(freq, layers) == expected


@pytest.mark.parametrize(
    ("freq", "message"),
    [
        (0, "expected at least 1"),
        (-1, "expected at least 1"),
        (True, "expected a whole number"),
        ("[0,1]", "expected a whole number"),
        (None, "expected a whole number"),
        ([1], "has 1 entries; expected one per layer = 2"),
        ([0, 2], "holds 2; expected 0"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(freq: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        moe_pattern(freq, 2)


GOOD: tuple[dict[str, Any], ...] = (
    {},
    MIXTURE,
    MIXTURE | GROUPS,
    MIXTURE | GROUPS | {"moe_router_topk": 3, "moe_router_group_score_topk": 1},
    MIXTURE | SINKHORN,
    MIXTURE | {"moe_layer_freq": [0, 1, 1, 1], "moe_ffn_hidden_size": 6},
    MIXTURE | {"moe_shared_expert_intermediate_size": 2, "moe_shared_expert_overlap": True},
    MIXTURE | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    {"multi_latent_attention": True, "num_attention_heads": 4, "num_query_groups": 4},
    {"rope_type": "llama3", "rotary_scaling_factor": 8.0},
    {"rope_type": "rope", "rotary_scaling_factor": 1, "original_max_position_embeddings": 4096},
    {"num_layers_in_first_pipeline_stage": 2, "first_pipeline_num_layers": 2},
    {"moe_router_dtype": "fp64"},
)


@pytest.mark.parametrize("values", GOOD, ids=lambda values: " ".join(values) or "nothing")
def test_what_fits_is_accepted(values: dict[str, Any]) -> None:
    assert field_problems(values) == []
    check_fields(values)


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    (MIXTURE | {"moe_ffn_hidden_size": 0}, "moe_ffn_hidden_size is 0; expected more than 0"),
    (MIXTURE | {"moe_ffn_hidden_size": 7}, "moe_ffn_hidden_size is 7; expected a multiple of tensor"),
    (MIXTURE | {"num_moe_experts": 7}, "num_moe_experts is 7; expected a multiple of expert"),
    (MIXTURE | {"moe_layer_freq": [1]}, "moe_layer_freq has 1 entries"),
    (MIXTURE | {"moe_layer_freq": [0, 0, 0, 0]}, "leaves no layer for the 8 experts"),
    ({"moe_ffn_hidden_size": 8}, "moe_ffn_hidden_size is 8 without experts"),
    ({"moe_router_num_groups": 2}, "moe_router_num_groups is 2 without experts"),
    (MIXTURE | {"moe_shared_expert_intermediate_size": -1}, "expected more than 0"),
    (MIXTURE | {"moe_shared_expert_intermediate_size": 5}, "is 5; expected a multiple of tensor"),
    (MIXTURE | {"moe_shared_expert_overlap": True}, "on without a shared expert"),
    (
        MIXTURE
        | {
            "moe_shared_expert_intermediate_size": 8,
            "moe_shared_expert_overlap": True,
            "moe_token_dispatcher_type": "allgather",
        },
        "with the allgather dispatcher; expected alltoall",
    ),
    (MIXTURE | {"moe_ffn_hidden_size": 8, "moe_extended_tp": True}, "moe_extended_tp is on with"),
    (MIXTURE | {"moe_router_score_function": "tanh"}, "is 'tanh'; expected one of softmax, sigmoid"),
    (MIXTURE | {"moe_router_dtype": "bf16"}, "is 'bf16'; expected one of"),
    (MIXTURE | {"moe_router_load_balancing_type": "loss"}, "is 'loss'; expected one of aux_loss"),
    (MIXTURE | {"moe_router_enable_expert_bias": True}, "on with softmax scores; expected sigmoid"),
    (MIXTURE | {"moe_router_bias_update_rate": -1.0}, "is -1.0; expected at least 0"),
    (
        MIXTURE | {"moe_router_score_function": "sigmoid", "moe_router_load_balancing_type": "sinkhorn"},
        "sinkhorn with sigmoid scores",
    ),
    (MIXTURE | {"moe_router_num_groups": 4}, "moe_router_num_groups is set without moe_router_group_topk"),
    (MIXTURE | {"moe_router_group_topk": 4}, "moe_router_group_topk is set without moe_router_num_groups"),
    (MIXTURE | GROUPS | {"moe_router_num_groups": 3}, "is 3; expected a divisor of num_moe_experts"),
    (MIXTURE | GROUPS | {"moe_router_group_topk": 5}, "is 5; expected 1 to moe_router_num_groups = 4"),
    (MIXTURE | GROUPS | {"moe_router_topk": 3}, "moe_router_topk is 3; expected a multiple of"),
    (MIXTURE | GROUPS | {"moe_router_topk": 6}, "hold fewer; expected"),
    (MIXTURE | GROUPS | {"moe_router_group_score_topk": 3}, "expected 1 to the 2 experts"),
    (MIXTURE | {"moe_router_group_score_topk": 1}, "moe_router_group_score_topk is 1 without groups"),
    *(
        (MIXTURE | SINKHORN | values, f"found {said} with sinkhorn balancing, which does not read it")
        for values, said in (
            (GROUPS, "moe_router_num_groups 4, moe_router_group_topk 2"),
            ({"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor 2.5"),
            ({"moe_router_group_score_topk": 1}, "moe_router_group_score_topk 1"),
        )
    ),
    (
        {"multi_latent_attention": True, "num_attention_heads": 4, "num_query_groups": 2},
        "num_query_groups is 2 with multi-latent attention",
    ),
    ({"multi_latent_attention": True, "qk_pos_emb_head_dim": 3}, "is 3; expected an even number"),
    ({"multi_latent_attention": True, "kv_lora_rank": 0}, "kv_lora_rank is 0; expected more than 0"),
    ({"multi_latent_attention": True, "rotary_interleaved": True}, "rotary_interleaved is on"),
    ({"recompute_mla_up_proj": True}, "on without multi-latent attention"),
    ({"rope_type": "ntk"}, "is 'ntk'; expected one of rope, linear, llama3, yarn"),
    ({"rope_type": "llama3", "rope_low_freq_factor": 4.0}, "expected the first below the second"),
    (
        {"rotary_scaling_factor": 40.0},
        "rotary_scaling_factor is 40.0 with rope_type rope, which does not read it; expected 1.0",
    ),
    ({"rope_type": "linear", "beta_fast": 16.0}, "beta_fast is 16.0 with rope_type linear"),
    ({"rope_type": "llama3", "mscale": 0.707}, "mscale is 0.707 with rope_type llama3"),
    ({"rope_type": "yarn", "rope_high_freq_factor": 8.0}, "rope_high_freq_factor is 8.0 with rope_type yarn"),
    ({"rope_type": "linear", "original_max_position_embeddings": 8192}, "is 8192 with rope_type linear"),
    ({"mtp_num_layers": 0}, "mtp_num_layers is 0; expected more than 0"),
    (
        {"num_layers_in_first_pipeline_stage": 2, "first_pipeline_num_layers": 3},
        "expected one number, since both mean the same",
    ),
    (
        {"pipeline_model_parallel_layout": [1, 3], "num_layers_in_last_pipeline_stage": 1},
        "beside pipeline_model_parallel_layout",
    ),
)


@pytest.mark.parametrize(("values", "message"), BAD, ids=[message for _, message in BAD])
def test_what_does_not_fit_is_named(values: dict[str, Any], message: str) -> None:
    problems = field_problems(values)
    assert len(problems) == 1 and message in problems[0], problems
    assert any(f". {verb} " in problems[0] for verb in ("Change", "Set", "Leave", "Raise")), problems
    with pytest.raises(ConfigError, match="TransformerConfig: "):
        check_fields(values)
