"""The ranks' side of ``test_bert.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import mt_megatron
from mt_megatron.config.parse import load_config
from mt_megatron.models.families import family_of
from mt_megatron.training.distributed import joined
from mt_megatron.training.model import build
from tests.training.loop_cases import run, start

STEPS, HALF = 4, 2
SIZES = "--family bert --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64"
MODEL = f"{SIZES} --seq-length 64 --max-position-embeddings 64 --make-vocab-size-divisible-by 4"
TRAINING = (
    f"--lr 1e-2 --train-iters {STEPS} --micro-batch-size 2 --global-batch-size 8 --eval-iters 1 "
    "--log-interval 1 --num-workers 0"
)
PLAIN = "--hidden-dropout 0 --attention-dropout 0"
TOLERANCE_FP64 = 1e-5
"""Of logits beside Hugging Face's, as a part of the largest logit: the aim. What is left in fp64 is 1e-14."""


def data_flags(data: str) -> str:
    paths = f"--train-data-path {data}/train --valid-data-path {data}/valid"
    return f"{paths} --tokenizer-model {data}/tokenizer.json"


def trained(flags: str, folder: str, name: str, data: str) -> dict[str, Any]:
    return run(f"{flags} {data_flags(data)}", folder, name, model=MODEL, training=TRAINING)


def moved(folder: str, data: str, before: str, after: dict[str, str]) -> dict[str, Any]:
    """A whole run, one that stops half way, and what follows when that goes on under each of ``after``; the
    first of them is the layout it had."""
    start()
    found = {"whole": trained(f"{before} --save {folder}/whole", folder, "whole", data)}
    trained(f"{before} --save {folder}/source --exit-interval {HALF}", folder, "source", data)
    for name, flags in after.items():
        to = f"--resume {folder}/source --save {folder}/{name}"
        found[name] = trained(f"{flags} {to}", folder, name, data)
    return found


def interrupted(folder: str, data: str, layouts: dict[str, str]) -> dict[str, Any]:
    """For each layout a whole run, and one that stops half way and goes on."""
    start()
    found = {}
    for name, flags in layouts.items():
        found[name] = {
            "whole": trained(f"{flags} --save {folder}/{name}_whole", folder, f"{name}_whole", data),
            "first": trained(
                f"{flags} --save {folder}/{name} --exit-interval {HALF}", folder, f"{name}_1", data
            ),
            "second": trained(f"{flags} --save {folder}/{name}", folder, f"{name}_2", data),
        }
    return found


def beside_hugging_face(seed: int, layers: int, hidden: int, heads: int, binary: bool) -> dict[str, float]:
    """Largest differences of logits in fp64 from ``MegatronBertForPreTraining`` with the same weights, the
    largest logits, and the differences when one thing is done otherwise."""
    from transformers import MegatronBertConfig, MegatronBertForPreTraining

    start()
    torch.manual_seed(seed)
    words, length, batch = 96, 24, 3
    theirs = MegatronBertForPreTraining(
        MegatronBertConfig(
            vocab_size=words,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=3 * hidden,
            max_position_embeddings=length,
            layer_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    theirs = theirs.double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    tokens = torch.randint(5, words, (batch, length))
    types = (torch.arange(length) >= length // 2).long().repeat(batch, 1)
    lengths = torch.tensor([length, length - 7, 5])
    mask = (torch.arange(length) < lengths[:, None]).long()
    config = load_config(
        f"--family bert --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--ffn-hidden-size {3 * hidden} --seq-length {length} --max-position-embeddings {length} "
        f"--vocab-size {words} --make-vocab-size-divisible-by 8 --train-iters 1 --lr 1e-3 {PLAIN} "
        f"--no-bias-activation-fusion {'' if binary else '--bert-no-binary-head'}".split()
    )
    with joined(config, mt_megatron.backend()) as job, torch.no_grad():
        (ours,) = family_of(config).build_model(config, job.layout)
        ours = ours.double().eval()
        state = ours.state_dict()
        weights = {
            name: value for name, value in _renamed(theirs.state_dict(), heads).items() if name in state
        }
        left = [name for name in state if name not in weights and not name.endswith("_extra_state")]
        assert not left, left
        for name, value in weights.items():
            state[name].copy_(value)

        def difference(types: torch.Tensor, mask: torch.Tensor) -> list[float]:
            logits, order = ours(tokens, mask, types if binary else None)
            wanted = theirs(tokens, attention_mask=mask_of_theirs, token_type_ids=types_of_theirs)
            real = mask_of_theirs.bool()
            found = [(logits - wanted.prediction_logits)[real].abs().max().item()]
            scale = [wanted.prediction_logits[real].abs().max().item()]
            if binary:
                found.append((order - wanted.seq_relationship_logits).abs().max().item())
                scale.append(wanted.seq_relationship_logits.abs().max().item())
            return [one / largest for one, largest in zip(found, scale, strict=True)]

        mask_of_theirs, types_of_theirs = mask, types if binary else torch.zeros_like(types)
        if not binary:
            # Theirs has token types in any case: of one kind, part of the positions.
            kind = theirs.bert.embeddings.token_type_embeddings.weight[0]
            state["embedding.position_embeddings.weight"].add_(kind)
        result = {"difference": max(difference(types, mask))}
        result["without_mask"] = difference(types, torch.ones_like(mask))[0]
        if binary:
            result["other_types"] = difference(1 - types, mask)[0]
        state["lm_head.dense.bias"].add_(1e-3)
        result["another_bias"] = difference(types, mask)[0]
    return result


def _renamed(theirs: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """Weights of ``MegatronBertForPreTraining`` under Megatron-Core's names: written out here by hand, since
    the family has no conversion."""
    plain = {
        "embedding.word_embeddings.weight": "bert.embeddings.word_embeddings.weight",
        "embedding.position_embeddings.weight": "bert.embeddings.position_embeddings.weight",
        "embedding.tokentype_embeddings.weight": "bert.embeddings.token_type_embeddings.weight",
        "output_layer.bias": "cls.predictions.bias",
    }
    linears = {
        "encoder.final_layernorm": "bert.encoder.ln",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
        "pooler.dense": "bert.pooler.dense",
        "binary_head": "cls.seq_relationship",
    }
    layers = {
        "input_layernorm": "attention.ln",
        "self_attention.linear_proj": "attention.output.dense",
        "pre_mlp_layernorm": "ln",
        "mlp.linear_fc1": "intermediate.dense",
        "mlp.linear_fc2": "output.dense",
    }
    count = 1 + max(int(name.split(".")[3]) for name in theirs if name.startswith("bert.encoder.layer."))
    found = {ours: theirs[name] for ours, name in plain.items()}
    for layer in range(count):
        there, here = f"bert.encoder.layer.{layer}.", f"encoder.layers.{layer}."
        linears |= {here + ours: there + name for ours, name in layers.items()}
        for kind in ("weight", "bias"):
            parts = [theirs[f"{there}attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            # The heads one after another, each with its query, key and value.
            packed = torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1)
            found[f"{here}self_attention.linear_qkv.{kind}"] = packed.flatten(0, 2)
    for ours, name in linears.items():
        found |= {f"{ours}.{kind}": theirs[f"{name}.{kind}"] for kind in ("weight", "bias")}
    return found


def parameters(flags: str) -> list[int]:
    """Sizes of this rank's parameters, in the order in which they are registered."""
    start()
    config = load_config(f"{MODEL} {TRAINING} --mock-data --vocab-size 96 {flags}".split())
    with joined(config, mt_megatron.backend()) as job:
        chunks = build(config, job, family_of(config)).bare_chunks()
        return [parameter.numel() for chunk in chunks for parameter in chunk.parameters()]


def losses_by_hand(folder: str, data: str) -> dict[str, Any]:
    """The first step's losses as the trainer records them, and as they follow from Hugging Face's formula on
    the same samples: one process, no dropout, initial weights."""
    import torch.nn.functional as F

    start()
    flags = f"{PLAIN} --train-iters 1 --eval-iters 0"
    recorded = trained(f"{flags} --save {folder}/run", folder, "by_hand", data)
    config = load_config(f"{MODEL} {TRAINING} {flags} {data_flags(data)} --vocab-size 600".split())
    from mt_megatron.data.loader.batches import train_batches
    from mt_megatron.data.loader.datasets import build_datasets
    from mt_megatron.data.loader.tokenizer import load_tokenizer

    with joined(config, mt_megatron.backend()) as job, torch.no_grad():
        dataset = build_datasets(
            config.data,
            tokenizer=load_tokenizer(config.data),
            sequence_length=64,
            train_samples=8,
            valid_samples=0,
            test_samples=0,
            seed=config.train.seed,
            cache_dir=Path(folder) / "cache",
            masked_words=True,
            sentence_order=True,
        ).train
        (model,) = family_of(config).build_model(config, job.layout)
        batch = next(
            train_batches(
                dataset, consumed_samples=0, micro_batch_size=8, data_parallel_rank=0, data_parallel_size=1
            )
        )
        logits, order = model(batch["text"], batch["padding_mask"], batch["types"])
        masked = F.cross_entropy(logits[..., :600].flatten(0, 1), batch["labels"].flatten(), ignore_index=-1)
        swapped = F.cross_entropy(order, batch["is_random"])
    return {
        "recorded": [recorded["records"][1]["loss"], recorded["records"][1]["sentence_order_loss"]],
        "by_hand": [masked.item(), swapped.item()],
        "masked": int(batch["loss_mask"].sum()),
    }
