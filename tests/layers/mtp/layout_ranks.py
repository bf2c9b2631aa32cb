"""What the ranks of ``test_mtp.py`` run under different layouts; each function returns JSON-able results."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.layers.mtp import small_model as mtp_model
from tests.patches import small_gpt

MICROBATCHES = 4

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "per token": {"calculate_per_token_loss": True},
    "biased": {"add_bias_linear": True, "bias_activation_fusion": False, "normalization": "LayerNorm"},
    "five layers": {"num_layers": 5},
    "latent experts": {
        "multi_latent_attention": True,
        "num_query_groups": None,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    },
}
"""Overrides of the configuration; ``tied`` is an argument of the model."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2 uneven": {"pp": 2, "pipeline_model_parallel_layout": [3, 1]},
    "pp2 empty first": {"pp": 2, "pipeline_model_parallel_layout": [0, 4]},
    "pp2 empty last": {"pp": 2, "pipeline_model_parallel_layout": "Et*4|mmL"},
    "vpp2": {"pp": 2, "virtual_pipeline_model_parallel_size": 2},
    "vpp2 uneven": {
        "pp": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": [2, 1, 1, 0],
    },
    "vpp2 of five": {
        "pp": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": "Ett|t|t|tmmL",
    },
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
}
"""Sizes, and more overrides of the configuration."""

RECOMPUTE = {
    "uniform": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective"},
}


def reference(folder: str) -> dict[str, Any]:
    """Gradients of every model of ``MODELS`` in one process, written to ``folder``."""
    small_gpt.start()
    found = {}
    for name, model in MODELS.items():
        options = dict(model)
        tied = options.pop("tied", False)
        transformer = mtp_model.config(**options)
        chunks = mtp_model.build(transformer, tied=tied)
        mtp_model.set_weights(chunks)
        reports = mtp_model.train(chunks, transformer, mtp_model.batches(MICROBATCHES))
        gradients = {
            each: parameter.main_grad.double().clone()
            for each, parameter in mtp_model.whole_names(chunks).items()
        }
        torch.save(gradients, Path(folder) / f"{name}.pt")
        found[name] = {"depths": mtp_model.depths(chunks), "reports": reports}
    return found


def compare(folder: str, cases: list[list[str]]) -> dict[str, Any]:
    """For each case (a model, a layout, then recomputations, ``fused`` or ``not summed``) the largest error
    of this rank's gradients against the reference's, relative to their norm, with what was reported."""
    found = {}
    for model, layout, *how in cases:
        found[", ".join((model, layout, *how))] = _case(folder, model, layout, how)
    return found


def _case(folder: str, model: str, layout: str, how: list[str]) -> dict[str, Any]:
    import torch.distributed as dist

    options = {**MODELS[model], **LAYOUTS[layout]}
    tied = options.pop("tied", False)
    tp, pp = options.pop("tp", 1), options.pop("pp", 1)
    for each in how:
        options.update(RECOMPUTE.get(each, {}))
    options["cross_entropy_loss_fusion"] = "fused" in how
    options["gradient_accumulation_fusion"] = "fused" in how
    chunks_per_stage = options.get("virtual_pipeline_model_parallel_size")
    if chunks_per_stage:
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    _start(tp, pp, chunks_per_stage)
    transformer = mtp_model.config(**options)
    chunks = mtp_model.build(transformer, tied=tied)
    equal = _copies_are_equal(chunks)
    mtp_model.set_weights(chunks)
    data = mtp_model.batches(MICROBATCHES)
    if tp * pp == 1:
        rank, share = dist.get_rank(), MICROBATCHES // dist.get_world_size()
        data = data[rank * share : (rank + 1) * share]
    with _not_summed() if "not summed" in how else nullcontext():
        reports = mtp_model.train(chunks, transformer, data)
    expected = torch.load(Path(folder) / f"{model}.pt")
    errors = {}
    for name, parameter in mtp_model.whole_names(chunks).items():
        whole = small_gpt.gather(name, parameter.main_grad.double())
        errors[name] = float((whole - expected[name]).norm() / expected[name].norm().clamp(min=1e-12))
    worst = max(errors, key=errors.__getitem__)
    return {
        "error": errors[worst],
        "worst": worst,
        "parameters": len(errors),
        "depths": mtp_model.depths(chunks),
        "reports": reports,
        "copies": equal,
    }


def _start(tp: int, pp: int, chunks: int | None) -> None:
    import torch.distributed as dist

    import mt_megatron
    from mt_megatron.parallel import rank_layout as layout

    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    elif parallel_state.model_parallel_is_initialized():
        layout.destroy()
    sizes = layout.RankLayout(world_size=dist.get_world_size(), tp=tp, pp=pp, vpp=chunks)
    layout.initialize(sizes, mt_megatron.backend())
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _copies_are_equal(chunks: list[Any]) -> bool | None:
    """Whether the last stage's embedding is the first one's before anything is trained; None without."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return None
    weights = [chunk.embedding.word_embeddings.weight for chunk in chunks if hasattr(chunk, "embedding")]
    assert len(weights) == 1
    every = [torch.empty_like(weights[0]) for _ in range(2)]
    dist.all_gather(every, weights[0].detach(), group=parallel_state.get_embedding_group())
    return bool(torch.equal(every[0], every[1])) and float(every[0].std()) > 0


@contextmanager
def _not_summed() -> Iterator[None]:
    from mt_megatron.layers.mtp import model as under_test

    with mock.patch.object(under_test, "sum_embedding_gradients", lambda *ignored: None):
        yield
