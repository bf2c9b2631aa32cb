"""Published folders of random shapes with random weights, as transformers itself writes them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FAMILIES = ("llama", "mixtral", "deepseek_v2", "deepseek_v3", "qwen2", "qwen3", "qwen3_moe")

Drawn = dict[str, Any]


def draw(family: str, rng: random.Random) -> Drawn:
    """The entries of a ``config.json`` for a small model whose parts divide by 2 and 4, or also by 3, where
    Megatron divides them, and whose vocabulary never does."""
    unit = rng.choice([4, 12])
    groups = 8 if unit == 4 and rng.random() < 0.3 else unit
    heads = groups * rng.choice([1, 2])
    layers = rng.randint(4, 6)
    shape: Drawn = {
        "vocab_size": 128 * rng.randint(0, 1) + 2 * rng.randint(10, 60) + 1,
        # Some models want whole heads in it, whatever their own width is.
        "hidden_size": heads * rng.randint(-(-24 // heads), 48 // heads),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": unit * rng.randint(16 // unit, 48 // unit),
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6 if family.startswith("deepseek") else rng.choice([1e-5, 1e-6]),
        "rope_theta": rng.choice([10000.0, 500000.0]),
        "tie_word_embeddings": rng.random() < 0.3,
    }
    width = unit * rng.randint(8 // unit or 1, 24 // unit)
    if family == "qwen2":
        shape["hidden_size"] = 8 * shape["num_attention_heads"]
    elif not family.startswith("deepseek"):
        shape["head_dim"] = rng.choice([8, 16])
    if family == "llama" and rng.random() < 0.5:
        shape["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    if family == "mixtral":
        shape |= {"num_local_experts": unit * rng.randint(1, 8 // unit or 1), "num_experts_per_tok": 2}
        shape |= {"sliding_window": None}
    if family == "qwen3_moe":
        shape |= {"num_experts": unit * rng.randint(1, 8 // unit or 1), "num_experts_per_tok": 2}
        shape |= {"moe_intermediate_size": width, "norm_topk_prob": rng.random() < 0.5}
        shape |= {"mlp_only_layers": rng.choice([[], [1], [0, layers - 1]])}
    if family.startswith("deepseek"):
        shape |= {
            "num_key_value_heads": shape["num_attention_heads"],
            "moe_intermediate_size": width,
            "n_routed_experts": max(8, unit),
            "n_shared_experts": rng.choice([1, 2]),
            "num_experts_per_tok": 4,
            "first_k_dense_replace": rng.randint(0, 2),
            "n_group": 4,
            "topk_group": 2,
            "kv_lora_rank": 8 * rng.randint(2, 4),
            "q_lora_rank": rng.choice([None, 24]),
            "qk_nope_head_dim": 8 * rng.randint(1, 2),
            "qk_rope_head_dim": 8,
            "v_head_dim": 8 * rng.randint(1, 3),
            "routed_scaling_factor": rng.choice([1.0, 2.5]),
            "rope_scaling": rng.choice([None, _YARN]),
        }
    if family == "deepseek_v2":
        shape |= {"topk_method": rng.choice(["greedy", "group_limited_greedy"]), "norm_topk_prob": False}
    if family == "deepseek_v3":
        shape |= {"num_nextn_predict_layers": rng.choice([0, 1])}
    return shape


_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def model_of(family: str, shape: Drawn) -> Any:
    """The class in transformers with ``shape``, in fp32, as it initialises itself."""
    import transformers

    stem = {
        "llama": "Llama",
        "mixtral": "Mixtral",
        "deepseek_v2": "DeepseekV2",
        "deepseek_v3": "DeepseekV3",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "qwen3_moe": "Qwen3Moe",
    }[family]
    given = {name: value for name, value in shape.items() if name != "num_nextn_predict_layers"}
    if family == "deepseek_v3":
        given["num_nextn_predict_layers"] = 0
    config = getattr(transformers, f"{stem}Config")(**given)
    return getattr(transformers, f"{stem}ForCausalLM")(config).float()


def write(folder: Path, family: str, shape: Drawn, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """A folder of a model of ``shape`` whose every number is drawn; norms lie about 1."""
    generator = torch.Generator().manual_seed(seed)
    model = model_of(family, shape)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.dtype.is_floating_point and tensor.requires_grad:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + 0.2 * noise if tensor.dim() == 1 else 0.3 * noise)
    model.to(dtype).save_pretrained(folder)
    tensors = read(folder)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.randn(tensors[name].shape, generator=generator)
    if shape.get("num_nextn_predict_layers"):
        tensors |= _prediction_layer(tensors, shape["num_hidden_layers"], generator)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if "num_nextn_predict_layers" in shape:
        # transformers writes the newer name as well.
        config.pop("num_mtp_layers", None)
        config["num_nextn_predict_layers"] = shape["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a published folder, by the safetensors library."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names that only one side has, or whose tensors are not equal to the bit."""
    names = set(ours) ^ set(theirs)
    for name in set(ours) & set(theirs):
        a, b = ours[name], theirs[name]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(_bits(a), _bits(b)):
            names.add(name)
    return sorted(names)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _prediction_layer(
    tensors: dict[str, Tensor], layers: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """DeepSeek-V3's layer behind the last, with the last one's shapes and numbers of its own."""
    last, behind = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    hidden = tensors["model.norm.weight"].shape[0]
    dtype = tensors["model.norm.weight"].dtype
    found = {
        behind + name.removeprefix(last): torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        found[f"{behind}{name}.weight"] = torch.randn(hidden, generator=generator).to(dtype)
    found[behind + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator).to(dtype)
    found[behind + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    if "lm_head.weight" in tensors:
        found[behind + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return found
