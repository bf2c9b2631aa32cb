"""Multi-latent attention against transformers' DeepSeek attention, forward and backward, on a CPU.

Both have the same weights and the same causal input, and take turns; a figure is the median of the
ratios of neighbours, with the ratio of ours to itself as a control, in wall time and in processor time
(which a busy machine changes less; with one thread it is the time of the step). transformers uses torch's
``scaled_dot_product_attention`` (its fastest on a CPU). The core attention alone is measured too: torch's
kernel with values as they are, padded to the size of the keys, and ours, which needs no padding.

    python benchmarks/mla_attention.py --dtype bf16 --record results/
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import mt_megatron

CLOCKS = ("wall", "processor")
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


def _ours(options: argparse.Namespace, dtype: torch.dtype) -> Any:
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    from mt_megatron.layers.mla.self_attention import mla_spec

    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        multi_latent_attention=True,
        q_lora_rank=options.q_lora_rank,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
    )
    spec = mla_spec(get_gpt_layer_local_spec().submodules.self_attention, config)
    return build_module(spec, config=config, layer_number=1)


def _theirs(options: argparse.Namespace, dtype: torch.dtype, ours: Any) -> Callable[[Any], Any]:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Attention,
        DeepseekV3RotaryEmbedding,
    )

    config = DeepseekV3Config(
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        q_lora_rank=options.q_lora_rank,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config._attn_implementation = "sdpa"
    attention = DeepseekV3Attention(config, 0).to(dtype)
    for name, theirs in NAMES.items():
        if hasattr(ours, name):
            getattr(attention, theirs).weight.data.copy_(getattr(ours, name).weight.data)
    positions = torch.arange(options.seq_length).expand(options.batch, -1)
    angles = DeepseekV3RotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions)

    def forward(hidden: Any) -> Any:
        return attention(
            hidden_states=hidden.transpose(0, 1), position_embeddings=angles, attention_mask=None
        )[0].transpose(0, 1)

    return forward


def attention(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    ours = _ours(options, dtype)
    theirs = _theirs(options, dtype, ours)
    hidden = torch.randn(options.seq_length, options.batch, options.hidden).to(dtype)
    probe = torch.randn_like(hidden)
    outputs: dict[str, Any] = {}

    def side(name: str, forward: Callable[[Any], Any]) -> Callable[[], None]:
        def run() -> None:
            own = hidden.clone().requires_grad_()
            outputs[name] = forward(own)
            outputs[name].backward(probe)

        return run

    sides = {
        "ours": side("ours", lambda own: ours(own, None)[0]),
        "transformers": side("transformers", theirs),
        "ours again": side("ours again", lambda own: ours(own, None)[0]),
    }
    found = _measured(sides, options.rounds)
    difference = (outputs["ours"] - outputs["transformers"]).abs().max() / outputs["ours"].abs().max()
    assert difference < (1e-5 if dtype is torch.float32 else 3e-2), float(difference)
    return {**found, "difference": float(difference)}


def core(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    from mt_megatron.layers.attention.core import causal_attention

    sizes = (192, 192, 128)
    given = [torch.randn(options.batch, options.heads, options.seq_length, d).to(dtype) for d in sizes]
    probe = torch.randn(options.seq_length, options.batch, options.heads * 128).to(dtype)

    def kernel(query: Any, key: Any, value: Any, padding: int) -> Any:
        padded = F.pad(value, (0, padding)) if padding else value
        found = F.scaled_dot_product_attention(query, key, padded, is_causal=True, scale=192**-0.5)
        return found[..., :128].permute(2, 0, 1, 3).flatten(2).contiguous()

    def side(forward: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            forward(*(t.clone().requires_grad_() for t in given)).backward(probe)

        return run

    sides = {
        "ours": side(lambda q, k, v: causal_attention(q, k, v, 192**-0.5)),
        "torch": side(lambda q, k, v: kernel(q, k, v, 0)),
        "torch padded": side(lambda q, k, v: kernel(q, k, v, 64)),
        "ours again": side(lambda q, k, v: causal_attention(q, k, v, 192**-0.5)),
    }
    return _measured(sides, options.rounds)


def _measured(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, Any]:
    for run in sides.values():
        run()
    runs: list[dict[str, tuple[float, float]]] = []
    for turn in range(rounds):
        order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
        times = {}
        for name in order:
            start, spent = time.perf_counter(), time.process_time()
            sides[name]()
            times[name] = time.perf_counter() - start, time.process_time() - spent
        runs.append(times)
    return {
        "seconds": {name: statistics.median(run[name][0] for run in runs) for name in sides},
        "over_ours": {
            name: {
                clock: _spread([run[name][i] / run["ours"][i] for run in runs])
                for i, clock in enumerate(CLOCKS)
            }
            for name in sides
            if name != "ours"
        },
    }


def _spread(found: list[float]) -> dict[str, float]:
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048, help="DeepSeek-V2-Lite's")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--q-lora-rank", type=int)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--record", type=Path, help="folder that also gets the figures as JSON")
    options = parser.parse_args()
    mt_megatron.patch("cpu")
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
    found = {
        "date": datetime.date.today().isoformat(),
        **{name: value for name, value in vars(options).items() if name != "record"},
        "attention": attention(options, dtype),
        "core": core(options, dtype),
        "load_at_the_end": os.getloadavg()[0],
    }
    text = json.dumps(found, indent=1) + "\n"
    sys.stdout.write(text)
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        (options.record / f"mla-{options.dtype}-{found['date']}.json").write_text(text)


if __name__ == "__main__":
    main()
