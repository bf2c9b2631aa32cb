"""An oracle that shares no line with Megatron: Hugging Face's Llama, torch's AdamW, a loop of its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from tests.parity.case import CLIP, GLOBAL_BATCH, MICRO_BATCH, SEQUENCE, STEPS, Chain


def hugging_face_model(config: Any, weights: dict[str, torch.Tensor] | None) -> Any:
    """``LlamaForCausalLM`` of the same shape with ``weights``; None leaves it as it initialises itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = config.model
    shape = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        max_position_embeddings=SEQUENCE,
        rms_norm_eps=model.layernorm_epsilon,
        rope_theta=model.rotary_base,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    built = LlamaForCausalLM(shape).float()
    if weights is None:
        return built
    missing, unexpected = built.load_state_dict(weights, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    return built


def learning_rate(config: Any, step: int) -> float:
    """Linear warm-up from 0, then cosine to ``min_lr``; ``step`` counts updates that are done."""
    peak, least = config.optimizer.lr, config.optimizer.min_lr
    warmup, total = config.train.lr_warmup_iters, config.train.train_iters
    if step <= warmup:
        return float(peak * step / warmup)
    share = (step - warmup) / (total - warmup)
    return float(least + (peak - least) * 0.5 * (1 + math.cos(math.pi * share)))


def train_hugging_face(
    model: Any, config: Any, data: Chain
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and norms of every step, and the gradients of the first."""
    options = config.optimizer
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=options.lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
        fused=False,
    )
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        total, counted = 0.0, 0.0
        for start in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH, MICRO_BATCH):
            samples = [data[index] for index in range(start, start + MICRO_BATCH)]
            tokens = torch.stack([sample["tokens"] for sample in samples])
            labels = torch.stack([sample["labels"] for sample in samples])
            mask = torch.stack([sample["loss_mask"] for sample in samples])
            logits = model(tokens).logits
            each = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            ((each * mask).sum() / mask.sum() / (GLOBAL_BATCH // MICRO_BATCH)).backward()
            total += (each * mask).sum().item()
            counted += mask.sum().item()
        if not gradients:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, CLIP)))
        losses.append(total / counted)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
    return losses, norms, gradients
