"""Modules that readers of an FP8 export take for FP8 ones: those whose weights are, and no others."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

from tests.convert import published
from tests.convert.recorded_run import converted

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [2]},
    "deepseek_v2": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
}
"""``model_type`` -> entries beside those drawn."""

SCALE = ".weight_scale_inv"


@pytest.fixture(scope="module", params=MIXTURES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of four layers whose first and last are mixtures or not."""
    family: str = request.param
    shape = published.draw(family, random.Random(5)) | MIXTURES[family]
    shape |= {"num_hidden_layers": 4, "tie_word_embeddings": False}
    folder = tmp_path_factory.mktemp(family)
    published.write(folder, family, shape, seed=5)
    return folder


def exported(source: Path, folder: Path, recipe: str | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``quantization_config`` and tensors of an export."""
    converted(source, folder, "huggingface", fp8=True, fp8_recipe=recipe)
    document = json.loads((folder / "config.json").read_text())
    return document["quantization_config"], load_file(folder / "model.safetensors")


def is_fp8(module: str, tensors: dict[str, Tensor]) -> bool:
    """True where the file holds FP8 weights for a module of transformers."""
    for name in (module, module.replace(".mlp.", ".block_sparse_moe.")):
        if name + SCALE in tensors:
            return True
        if any(each.startswith(f"{name}.0.") and each.endswith(SCALE) for each in tensors):
            return True
    return False


@pytest.mark.parametrize("reader", ["quantizer", "list"])
@pytest.mark.parametrize("recipe", [None, "blockwise"])
def test_transformers_makes_fp8_modules_of_fp8_weights(
    source: Path, tmp_path: Path, recipe: str | None, reader: str
) -> None:
    """``list``: by the names as they are, without the quantizer's renaming of them."""
    settings, tensors = exported(source, tmp_path / "eight", recipe)
    shape = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)  # type: ignore[no-untyped-call]
    config = FineGrainedFP8Config.from_dict(settings)  # type: ignore[no-untyped-call]
    if reader == "quantizer":
        quantizer = FineGrainedFP8HfQuantizer(config, pre_quantized=True)
        quantizer._process_model_before_weight_loading(model)
    else:
        replace_with_fp8_linear(model, config.modules_to_not_convert, config, pre_quantized=True)
    made = {name: module for name, module in model.named_modules() if name}
    experts = {name: isinstance(made[name], FP8Experts) for name in made if name.endswith(".experts")}
    assert experts == {name: is_fp8(name, tensors) for name in experts}
    assert set(experts.values()) == ({True} if recipe is None else {True, False})
    linears = {
        name: isinstance(each, FP8Linear)
        for name, each in made.items()
        if isinstance(each, FP8Linear | torch.nn.Linear)
    }
    assert linears == {name: is_fp8(name, tensors) for name in linears}


@pytest.mark.parametrize("recipe", [None, "blockwise"])
def test_plain_linears_without_scales_are_listed(source: Path, tmp_path: Path, recipe: str | None) -> None:
    """Each by its published name, which vLLM and transformers 4 compare; no name is part of an FP8 one's."""
    settings, tensors = exported(source, tmp_path / "eight", recipe)
    listed = settings["modules_to_not_convert"]
    assert len(listed) == len(set(listed))
    plain = {
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.dim() == 2 and not name.endswith(SCALE) and name + "_scale_inv" not in tensors
    }
    # Tables, copies of them, and a projection that readers build as no linear of theirs.
    plain = {name for name in plain if not name.endswith(("embed_tokens", "shared_head.head", "eh_proj"))}
    assert plain and plain <= set(listed)
    eight = [name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)]
    assert eight and [name for name in eight if any(each in name for each in listed)] == []
