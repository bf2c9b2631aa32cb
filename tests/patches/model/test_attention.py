"""The layer spec carries our core attention, which agrees with upstream's."""

from __future__ import annotations

from typing import Any

import torch

from tests.launch import run_ranks

HERE = "tests.patches.model.test_attention"


def against_upstream() -> dict[str, Any]:
    """Largest differences of outputs and gradients, by case."""
    from tests.patches import small_gpt

    small_gpt.start()
    from megatron.core.transformer.dot_product_attention import DotProductAttention as Upstream
    from megatron.core.transformer.enums import AttnMaskType

    from mt_megatron.layers.attention.core import DotProductAttention as Ours

    sq, b, d = 12, 2, 8
    generator = torch.Generator().manual_seed(0)
    padding = torch.zeros(b, 1, sq, sq, dtype=torch.bool)
    padding[0, ..., 9:] = True
    documents = torch.ones(sq, sq, dtype=torch.bool).triu(1)
    documents[7:, :7] = True
    documents = documents.expand(b, 1, sq, sq).contiguous()
    cases = {
        "causal": ("causal", None, {}),
        "causal, mask given": ("causal", torch.ones(1, 1, sq, sq, dtype=torch.bool).triu(1), {}),
        "causal, documents": ("causal", documents, {}),
        "padding": ("padding", padding, {}),
        "no mask": ("padding", None, {}),
        "layer scaling": ("causal", None, {"apply_query_key_layer_scaling": True}),
        "all heads": ("causal", None, {"num_query_groups": 4}),
        "shifted by one": ("causal", torch.ones(1, 1, sq, sq, dtype=torch.bool).triu(2), {}),
    }
    found = {}
    for name, (kind, mask, overrides) in cases.items():
        config = small_gpt.transformer_config(kv_channels=d, **overrides)
        groups = config.num_query_groups
        shapes = [(sq, b, heads, d) for heads in (4, groups, groups)]
        qkv = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
        results = []
        for cls in (Ours, Upstream):
            layer = cls(config, 3, AttnMaskType[kind], "self")
            given = None if name == "shifted by one" and cls is Ours else mask
            output = layer(*qkv, given)
            results.append([output, *torch.autograd.grad(output.square().sum(), qkv)])
        found[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))
    return found


def test_agrees_with_upstreams():
    (found,) = run_ranks(1, f"{HERE}:against_upstream")
    control = found.pop("shifted by one")
    assert control > 1e-2, "a mask shifted by one passes unnoticed"
    assert found and all(difference < 1e-5 for difference in found.values()), found


def specs() -> dict[str, Any]:
    import mt_megatron

    def core() -> str:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        spec = get_gpt_layer_local_spec(num_experts=2, qk_layernorm=True)
        return str(spec.submodules.self_attention.submodules.core_attention.__module__)

    mt_megatron.patch("cpu")
    found = [core()]
    mt_megatron.unpatch()
    return {"found": [*found, core()]}


def test_local_spec_carries_ours_until_unpatched():
    (result,) = run_ranks(1, f"{HERE}:specs")
    assert result["found"] == [
        "mt_megatron.layers.attention.core",
        "megatron.core.transformer.dot_product_attention",
    ]


def logits_of(tokens: torch.Tensor, model: Any, **kwargs: Any) -> torch.Tensor:
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    output: torch.Tensor = model(tokens, positions, None, **kwargs)
    return output


def causality_and_cache() -> dict[str, Any]:
    from megatron.core import InferenceParams

    from tests.patches import small_gpt

    small_gpt.start()
    model = small_gpt.build(small_gpt.transformer_config(qk_layernorm=True)).eval()
    tokens = small_gpt.batch()["tokens"]
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % small_gpt.VOCABULARY
    with torch.no_grad():
        whole, other = logits_of(tokens, model), logits_of(changed, model)
        pieces = []
        cache = InferenceParams(tokens.size(0), tokens.size(1))
        # A prompt, one token, then several at once over the cache.
        for start, stop in ((0, 4), (4, 5), (5, 8)):
            pieces.append(logits_of(tokens[:, start:stop], model, inference_params=cache))
            cache.sequence_len_offset = stop
    return {
        "before": float((whole[:, :5] - other[:, :5]).abs().max()),
        "after": float((whole[:, 5:] - other[:, 5:]).abs().max()),
        "cache": float((torch.cat(pieces, 1) - whole).abs().max()),
    }


def test_later_tokens_and_the_cache_change_no_earlier_logit():
    (found,) = run_ranks(1, f"{HERE}:causality_and_cache")
    assert found["before"] == 0.0 and found["after"] > 1e-3
    assert found["cache"] < 1e-5


def dropped(rates: list[float]) -> dict[str, Any]:
    """Where dropout's random numbers come from: the tracker's state moves, the default one does not."""
    from tests.patches import small_gpt

    small_gpt.start(tp=2)
    from megatron.core import parallel_state, tensor_parallel

    found = {}
    for parallel in (False, True):
        config = small_gpt.transformer_config(attention_dropout=0.5, sequence_parallel=parallel)
        model = small_gpt.build(config).train()
        attention = model.decoder.layers[0].self_attention.core_attention
        q = torch.randn(8, 2, 2, 8, generator=torch.Generator().manual_seed(0))
        tracker = tensor_parallel.get_cuda_rng_tracker()
        torch.manual_seed(0)
        before = torch.get_rng_state(), tracker.get_states()["model-parallel-rng"].clone()
        output = attention(q, q[:, :, :1], q[:, :, :1], None)
        after = torch.get_rng_state(), tracker.get_states()["model-parallel-rng"]
        found[str(parallel)] = {
            "default moved": not torch.equal(before[0], after[0]),
            "tracker moved": not torch.equal(before[1], after[1]),
            "sum": float(output.double().sum()),
        }
    found["rank"] = parallel_state.get_tensor_model_parallel_rank()
    return found


def test_dropout_draws_from_the_tracker():
    """Ranks of a tensor-parallel group hold other heads, with sequence parallelism and without it."""
    first, second = run_ranks(2, f"{HERE}:dropped", [0.5])
    for rank in (first, second):
        for parallel in ("False", "True"):
            assert (rank[parallel]["default moved"], rank[parallel]["tracker moved"]) == (False, True)
    assert first["False"]["sum"] != second["False"]["sum"]
    assert first["True"]["sum"] != second["True"]["sum"]
