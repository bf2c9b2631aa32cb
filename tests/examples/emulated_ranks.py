"""The ranks' side of ``test_emulated_musa``: one step of each example, made small, in one process a rank."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
}
"""What a model's sizes become where its preset gives them."""

TRAIN = {
    "seq_length": 32,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "train_iters": 2,
    "eval_iters": 1,
    "eval_interval": 1,
    "lr_warmup_iters": 0,
}


def small(example: Path) -> dict[str, Any]:
    """The settings of ``example`` with a model of two layers, for two processes: as many experts or tensor
    shards as there are processes, all else as it stands there."""
    import yaml

    from mt_megatron.config import presets

    settings: dict[str, Any] = yaml.safe_load(example.read_text())
    preset = yaml.safe_load(
        (Path(presets.__file__).parent / f"{settings['model']['preset']}.yaml").read_text()
    )
    model = {**preset["model"], **settings["model"]}
    model = {name: SIZES.get(name, value) for name, value in model.items() if value is not None}
    for name in ("preset", "pipeline_model_parallel_layout", "first_pipeline_num_layers"):
        model.pop(name, None)
    model |= {"num_layers": 2, "vocab_size": 4352, "make_vocab_size_divisible_by": 64}
    if "moe_layer_freq" in model:
        model["moe_layer_freq"] = [model["moe_layer_freq"][0], 1]
    parallel = {
        name: value
        for name, value in settings.get("parallel", {}).items()
        if not name.endswith("_parallel_size")
    }
    mixture = "num_moe_experts" in model
    parallel |= {"sequence_parallel": not mixture}
    parallel["expert_model_parallel_size" if mixture else "tensor_model_parallel_size"] = 2
    train = {**preset.get("train", {}), **settings.get("train", {}), **TRAIN}
    optimizer = {"lr": 1e-3, **preset.get("optimizer", {}), **settings.get("optimizer", {})}
    data = {"mock_data": True, "tokenizer_type": "NullTokenizer", "num_workers": 0}
    return {
        "model": model,
        "parallel": parallel,
        "train": train,
        "optimizer": optimizer,
        "data": data,
        "scan": {"scan": "off"},
    }


def steps(examples: list[str], folder: str) -> dict[str, Any]:
    """Two steps and validations of each of ``examples``: the losses, and what the device refused."""
    import yaml

    import mt_megatron

    mt_megatron.patch(os.environ["MT_MEGATRON_TEST_BACKEND"])
    gc.freeze()  # else every collection at the end of a run visits the modules
    from mt_megatron.config.parse import load_config
    from mt_megatron.training.loop import train
    from mt_megatron.training.validate import validate

    backend = mt_megatron.backend()
    backend.set_device(0)
    dist.init_process_group(backend.collective)
    losses = {}
    for example in examples:
        path = Path(folder) / f"{Path(example).stem}.{dist.get_rank()}.yaml"
        path.write_text(yaml.safe_dump(small(Path(example))))
        config = load_config([], path)
        validate(config, world_size=2)
        outcome = train(config)
        assert outcome.loss is not None and outcome.validation is not None
        losses[Path(example).stem] = [outcome.loss, outcome.validation.loss]
    refused: dict[str, int] = {}
    if backend.name == "musa":
        from torch_musa import refusals  # type: ignore[import-not-found]

        refused = dict(refusals.counts)
    return {"losses": losses, "refused": refused}
