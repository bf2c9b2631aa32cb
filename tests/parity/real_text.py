"""The small Llama on real text by this trainer, and the same shape by Hugging Face and a plain loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import mt_megatron
from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.convert.tensors.table import Sizes, from_megatron
from mt_megatron.data.loader.batches import train_batches, valid_batches
from mt_megatron.data.loader.datasets import build_datasets
from mt_megatron.data.loader.tokenizer import load_tokenizer
from mt_megatron.models.families import family_of
from mt_megatron.training.distributed import joined
from mt_megatron.training.loop import train
from tests.parity.huggingface import learning_rate

BATCH = 8


def configuration(folder: str, steps: int) -> TrainingConfig:
    """The CPU default of the Llama 3 example, for ``steps`` steps."""
    data = Path(folder) / "data"
    flags = (
        "--model llama3_tiny --use-distributed-optimizer --bf16 --micro-batch-size 4 --global-batch-size "
        f"{BATCH} --train-iters {steps} --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 50 "
        "--adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --eval-iters 172 --num-workers 0 "
        f"--train-data-path {data}/train --valid-data-path {data}/valid --tokenizer-model "
        f"{data}/tokenizer.json --log-interval 10 --metrics-path {folder}/ours.jsonl"
    )
    return load_config(flags.split())


def ours(folder: str, steps: int) -> dict[str, float]:
    """Validation loss of this trainer, two data-parallel processes in bf16."""
    mt_megatron.patch("cpu")
    outcome = train(configuration(folder, steps))
    assert outcome.validation is not None
    return {"loss": outcome.validation.loss, "tokens": outcome.validation.tokens}


def theirs(folder: str, steps: int, our_weights: bool) -> dict[str, float]:
    """Validation loss of ``LlamaForCausalLM`` under bf16 autocast, with torch's fused AdamW and the same
    settings, on the same batches in the same order; from our initial weights, or as it initialises itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1234)
    config = configuration(folder, steps)
    tokenizer = load_tokenizer(config.data)
    config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
    shape, length = config.model, int(config.train.seq_length or 0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.ffn_hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_query_groups,
            max_position_embeddings=length,
            rms_norm_eps=shape.layernorm_epsilon,
            rope_theta=shape.rotary_base,
            tie_word_embeddings=False,
        )
    )
    if our_weights:
        model.load_state_dict(_initial_weights(config))
    datasets = build_datasets(
        config.data,
        tokenizer=tokenizer,
        sequence_length=length,
        train_samples=steps * BATCH,
        seed=config.train.seed,
        cache_dir=Path(folder) / "data" / "index_cache",
    )
    options, parameters = config.optimizer, list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (options.adam_beta1, options.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.adam_eps, fused=True)
    sizes: dict[str, Any] = {"micro_batch_size": BATCH, "data_parallel_rank": 0, "data_parallel_size": 1}
    batches = train_batches(datasets.train, consumed_samples=0, **sizes)
    for step in range(steps):
        loss, tokens = _cross_entropy(model, next(batches))
        optimizer.zero_grad()
        (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(parameters, options.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
    assert datasets.valid is not None
    total, counted = 0.0, 0.0
    with torch.no_grad():
        for batch in valid_batches(datasets.valid, max_samples=config.train.eval_iters * BATCH, **sizes):
            loss, tokens = _cross_entropy(model, batch)
            total, counted = total + loss.item(), counted + tokens.item()
    return {"loss": total / counted, "tokens": counted}


def _initial_weights(config: TrainingConfig) -> dict[str, torch.Tensor]:
    mt_megatron.patch("cpu")
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        [model] = family.build_model(config, job.layout)
        sizes = Sizes.of(config, model.vocab_size)
        published = from_megatron(model.state_dict(), family.convert_table(config), sizes)
        return {name: value.float() for name, value in published.items()}


def _cross_entropy(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch["tokens"]).logits
    each = functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten()
    return (each * mask).sum(), mask.sum()
