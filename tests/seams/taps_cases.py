"""The process of ``test_taps.py``: attention's inputs and routers' decisions."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.patches import small_gpt
from tests.pipeline.execute import small_models

LENGTH, ROWS, HEADS, GROUPS, SIZE = 8, 2, 4, 2, 8


def attention() -> dict[str, Any]:
    """By case: the largest error of what core attention returned against what its inputs make."""
    small_models.start(1)
    found: dict[str, Any] = {}
    for name, (core, call) in _cores().items():
        found[name] = _checked(core, core, call)
    found.update(_in_models())
    return found


def _cores() -> dict[str, tuple[Any, Any]]:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention as Upstreams
    from megatron.core.transformer.enums import AttnMaskType

    from mt_megatron.layers.attention.core import DotProductAttention as Ours

    torch.manual_seed(3)
    query = torch.randn(LENGTH, ROWS, HEADS, SIZE)
    key, value = (torch.randn(LENGTH, ROWS, GROUPS, SIZE) for _ in range(2))
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    holes = (causal | (torch.rand(LENGTH, LENGTH) > 0.7).triu(1).mT).expand(ROWS, 1, -1, -1)
    borders = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=8, max_seqlen_kv=8
    )
    flat = [each.transpose(0, 1).reshape(LENGTH * ROWS, -1, SIZE) for each in (query, key, value)]

    def made(kind: Any, mask_type: str = "causal", **overrides: Any) -> Any:
        config = small_gpt.transformer_config(**overrides)
        return kind(config, 3, AttnMaskType[mask_type], "self")

    return {
        "ours": (made(Ours), lambda core: core(query, key, value, None)),
        "ours with a mask": (
            made(Ours, "padding"),
            lambda core: core(query, key, value, attention_mask=holes, attn_mask_type=AttnMaskType.padding),
        ),
        "ours with a window": (
            made(Ours, window_size=(2, 0)),
            lambda core: core(query, key, value, None),
        ),
        "ours, borders": (made(Ours), lambda core: core(query, key, value, borders)),
        "ours, packed": (made(Ours), lambda core: core(*flat, None, packed_seq_params=packed)),
        "upstream's": (
            made(Upstreams, apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True),
            lambda core: core(query, key, value, causal[None, None]),
        ),
    }


def _checked(module: Any, core: Any, call: Any) -> dict[str, Any]:
    from mt_megatron.seams import taps

    seen: list[Any] = []
    outputs: list[Tensor] = []
    with (
        taps.attention_inputs(module, seen.append),
        taps.watch(core, after=lambda _, output: outputs.append(output)),
    ):
        call(module)
    inputs, output = seen[0], outputs[0]
    expected = _dense(inputs)
    wrong = _dense(SimpleNamespace(**{**vars(inputs), "scale": 1.1 * inputs.scale}))
    return {
        "calls": len(seen),
        "error": float((expected - output.double()).abs().max()),
        "control": float((wrong - output.double()).abs().max()),
        "kind": inputs.mask_kind,
        "grad": inputs.query.requires_grad,
        "heads": [inputs.heads.start, inputs.heads.stop],
    }


def _dense(inputs: Any) -> Tensor:
    """The context, float64, shaped as core attention returns it."""
    q, k, v = (each.double() for each in (inputs.query, inputs.key, inputs.value))
    packed = q.dim() == 3
    if packed:
        q, k, v = (each.unsqueeze(1) for each in (q, k, v))
    length, rows = q.shape[:2]
    if inputs.cu_seqlens is not None and not packed:
        q, k, v = (each.transpose(0, 1).reshape(length * rows, 1, *each.shape[2:]) for each in (q, k, v))
    repeats = q.shape[2] // k.shape[2]
    k, v = (each.repeat_interleave(repeats, dim=2) for each in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * inputs.scale
    tokens = q.shape[0]
    distance = torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None]
    forbidden = torch.zeros(tokens, tokens, dtype=torch.bool)
    if "causal" in inputs.mask_kind:
        forbidden |= distance > 0
    if inputs.window is not None:
        forbidden |= distance < -inputs.window[0]
    if inputs.cu_seqlens is not None:
        document = torch.bucketize(torch.arange(tokens), inputs.cu_seqlens[1:].long(), right=True)
        forbidden |= document[None, :] != document[:, None]
    if inputs.mask is not None:
        forbidden = forbidden | inputs.mask
    weights = scores.masked_fill(forbidden, -math.inf).softmax(-1)
    context = torch.einsum("bhqk,kbhd->qbhd", weights, v)
    if packed:
        return context.squeeze(1).flatten(1)
    if inputs.cu_seqlens is not None:
        context = context.view(rows, length, *context.shape[2:]).transpose(0, 1)
    return context.flatten(2)


def _in_models() -> dict[str, Any]:
    """The same in a model, recomputed and with multi-latent attention."""
    found = {}
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 5,
        "num_query_groups": 4,
    }
    selective = {"recompute_granularity": "selective"}
    for name, options in (
        ("a model, recomputed", selective),
        ("multi-latent", latent),
        ("multi-latent, recomputed", {**latent, **selective}),
    ):
        pipeline = small_models.Pipeline("dense", layers=2, **options)
        layer = pipeline.bare[0].decoder.layers[1]
        core = layer.self_attention.core_attention
        found[name] = _checked(layer, core, lambda _, pipeline=pipeline: pipeline.step(1))
    return found


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "before the choice": {"moe_router_pre_softmax": True},
    "bf16, chosen in fp32": {"moe_router_dtype": "fp32", "bf16": True, "params_dtype": torch.bfloat16},
    "deepseek": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "capacity": {"moe_expert_capacity_factor": 0.5},
    "padded": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "per sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
}


def routers() -> dict[str, Any]:
    """By case: errors of what a router said against its weight, its input and what it returned."""
    small_models.start(1)
    return {name: _router(options) for name, options in ROUTERS.items()}


def _router(options: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    from mt_megatron.seams import taps

    values = {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        **options,
    }
    config = small_gpt.transformer_config(**values)
    torch.manual_seed(5)
    router = TopKRouter(config)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape))
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.randn(8) * 0.1)
    hidden = torch.randn(LENGTH, ROWS, config.hidden_size, dtype=router.weight.dtype)
    unwatched = router(hidden)
    seen: list[Any] = []
    with taps.router_scores(router, seen.append):
        weights, experts = router(hidden)
    scores = seen[0]
    logits = (hidden.double() @ router.weight.double().t()).view(-1, 8)
    if scores.score_function == "sigmoid":
        chances = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    else:
        chances = logits.softmax(-1)
    routed = torch.zeros(LENGTH * ROWS, 8, dtype=torch.bool)
    for row in range(experts.shape[0]):
        for column in range(experts.shape[1]):
            other = int(experts[row, column])
            if scores.padded:
                routed[other, row] |= bool(weights[row, column] != 0)
            elif other < 8:
                routed[row, other] = True
    return {
        "calls": len(seen),
        "same": all(torch.equal(a, b) for a, b in zip(unwatched, (weights, experts), strict=True)),
        "logits": float((scores.logits.double() - logits).abs().max()),
        "chances": float((scores.probabilities().double() - chances).abs().max()),
        "map": bool(torch.equal(scores.routing_map(), routed)),
        "counts": scores.tokens_per_expert().tolist() == routed.sum(0).tolist(),
        "assigned": int(routed.sum()),
        "bias": scores.bias is not None,
        "given": torch.equal(scores.weights, weights.detach()) and torch.equal(scores.experts, experts),
        "left": "routing" in vars(router),
    }


GATHERED: dict[str, dict[str, Any]] = {
    "by token": {},
    "padded": {"moe_expert_capacity_factor": 4.0, "moe_pad_expert_input_to_capacity": True},
}
"""Nothing is dropped, so that a token's experts are those of its largest logits."""


def gathered_routers() -> dict[str, Any]:
    """By case: of a router that decides about the tokens of both tensor parallel ranks, whether what it says
    is of this rank's, which alone are the oracle's."""
    from megatron.core.transformer.moe.router import TopKRouter

    from mt_megatron.seams import taps

    small_models.start(1, tp=2)
    found = {}
    for name, options in GATHERED.items():
        config = small_gpt.transformer_config(
            num_moe_experts=8,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall_seq",
            sequence_parallel=True,
            **options,
        )
        router = TopKRouter(config)
        torch.manual_seed(5)
        with torch.no_grad():
            router.weight.copy_(torch.randn(router.weight.shape))
        tokens = torch.randn(2, LENGTH, ROWS, config.hidden_size)
        seen: list[Any] = []
        own = torch.distributed.get_rank()
        with taps.router_scores(router, seen.append):
            _, experts = router(tokens[own])
        scores = seen[0]
        logits = (tokens.double() @ router.weight.double().t()).flatten(1, 2)
        routed = torch.zeros(logits.shape, dtype=torch.bool).scatter_(2, logits.topk(2).indices, True)
        found[name] = {
            "logits": float((scores.logits.double() - logits[own]).abs().max()),
            "map": bool(torch.equal(scores.routing_map(), routed[own])),
            "other rank's": bool(torch.equal(scores.routing_map(), routed[1 - own])),
            "counts": scores.tokens_per_expert().tolist() == routed[own].sum(0).tolist(),
            "decided": experts.numel(),
        }
    return found
