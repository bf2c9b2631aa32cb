"""Llamas of shapes drawn at random, with random published weights, in our trainer and in Hugging Face."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import mt_megatron
from mt_megatron.config.parse import load_config
from mt_megatron.convert.rank_shards import parts, place
from mt_megatron.convert.tensors.table import Sizes, to_megatron
from mt_megatron.models.families import family_of
from mt_megatron.planning.parameters import padded_vocab_size
from mt_megatron.training.distributed import joined
from mt_megatron.training.model import build
from mt_megatron.training.step import Shape, forward_backward, make_forward_step
from tests.parity.exact import in_fp64
from tests.second_lane import DAILY

BATCH = 2
Drawn = dict[str, Any]


def draw(seed: int, count: int = 3 if DAILY else 1) -> list[Drawn]:
    """``count`` shapes that two tensor-parallel ranks can share."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        groups = rng.choice([2, 4])
        heads = groups * rng.choice([1, 2, 3])
        head = rng.choice([8, 16, 24])
        found.append(
            {
                "num_layers": rng.randint(1, 4),
                "num_attention_heads": heads,
                "num_query_groups": groups,
                "kv_channels": head,
                # Not always the heads' own width.
                "hidden_size": heads * head * rng.choice([1, 2]),
                "ffn_hidden_size": 2 * rng.randint(20, 120),
                # Never a multiple of what it is padded to.
                "vocab_size": 64 * rng.randint(1, 6) + rng.randint(1, 63),
                "seq_length": 4 * rng.randint(4, 20),
                "rotary_base": rng.choice([10000.0, 500000.0, 1e6]),
                "layernorm_epsilon": rng.choice([1e-5, 1e-6]),
                "tied": rng.random() < 0.3,
                "seed": rng.randrange(2**31),
            }
        )
    return found


def configuration(drawn: Drawn, tensor_parallel: int, *, sequence_parallel: bool) -> Any:
    """The trainer's configuration of one shape."""
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in drawn.items() if name not in ("tied", "seed")
    ]
    tied = (
        "--no-untie-embeddings-and-output-weights"
        if drawn["tied"]
        else "--untie-embeddings-and-output-weights"
    )
    fixed = (
        "--make-vocab-size-divisible-by 64 --position-embedding-type rope --normalization RMSNorm "
        "--activation-func silu --gated-linear-unit --no-add-bias-linear --hidden-dropout 0 "
        f"--attention-dropout 0 --mock-data --train-iters 1 --lr 1e-3 --micro-batch-size {BATCH} "
        f"--tensor-model-parallel-size {tensor_parallel}"
    )
    return load_config(
        [*flags, tied, *fixed.split(), *(["--sequence-parallel"] if sequence_parallel else [])]
    )


def published_model(drawn: Drawn) -> Any:
    """``LlamaForCausalLM`` in fp32 with weights of its own seed; norms differ from 1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=drawn["vocab_size"],
            hidden_size=drawn["hidden_size"],
            intermediate_size=drawn["ffn_hidden_size"],
            num_hidden_layers=drawn["num_layers"],
            num_attention_heads=drawn["num_attention_heads"],
            num_key_value_heads=drawn["num_query_groups"],
            head_dim=drawn["kv_channels"],
            max_position_embeddings=drawn["seq_length"],
            rms_norm_eps=drawn["layernorm_epsilon"],
            rope_theta=drawn["rotary_base"],
            tie_word_embeddings=drawn["tied"],
            attention_dropout=0.0,
            attn_implementation="eager",
        )
    ).float()
    generator = torch.Generator().manual_seed(drawn["seed"])
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.08 * noise)
    return model


def sample(drawn: Drawn) -> dict[str, torch.Tensor]:
    """One micro-batch; every fifth token does not count."""
    generator = torch.Generator().manual_seed(drawn["seed"] + 1)
    shape = (BATCH, drawn["seq_length"] + 1)
    tokens = torch.randint(drawn["vocab_size"], shape, generator=generator)
    positions = torch.arange(drawn["seq_length"]).expand(BATCH, -1)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": (positions % 5 != 0).float().contiguous(),
        "position_ids": positions.contiguous(),
    }


def beside_hugging_face(
    shapes: list[Drawn], tensor_parallel: int, sequence_parallel: bool, mistake: str | None = None
) -> list[dict[str, float]]:
    """For every shape the largest differences from fp64, relative to the largest element: of the logits, the
    loss, and the gradient of every parameter; and ``rounding``, Hugging Face's own in fp32. ``mistake``
    plants one, for a test of this test."""
    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    dist.init_process_group("gloo")
    return [_compare(drawn, tensor_parallel, sequence_parallel, mistake) for drawn in shapes]


def _compare(
    drawn: Drawn, tensor_parallel: int, sequence_parallel: bool, mistake: str | None
) -> dict[str, float]:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    config = configuration(drawn, tensor_parallel, sequence_parallel=sequence_parallel)
    theirs, batch = published_model(drawn), sample(drawn)
    narrow = _forward_backward(theirs, batch)
    # What is compared with is exact: in fp32 its own rounding reaches the bound for the odd shape.
    theirs = theirs.double()
    with in_fp64():
        exact = _forward_backward(theirs, batch)
    their_logits, their_loss = exact["logits"], exact["loss"]

    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        padded = padded_vocab_size(drawn["vocab_size"], divisible_by=64, tensor_parallel=tensor_parallel)
        table, sizes = family.convert_table(config), Sizes.of(config, padded)
        tensors = {
            k: v.float()
            for k, v in theirs.state_dict().items()
            if not (drawn["tied"] and k == "lm_head.weight")
        }
        weights = to_megatron(tensors, table, sizes)
        if mistake == "swapped_keys":
            name = "decoder.layers.0.self_attention.linear_qkv.weight"
            weights[name] = weights[name].roll(drawn["kv_channels"], dims=0)
        place(weights, trainable.bare_chunks())
        trainable.optimizer.reload_model_params()

        with torch.no_grad():
            model = trainable.bare_chunks()[0].eval()
            partial = model(batch["tokens"], batch["position_ids"], None)
            our_logits = gather_from_tensor_model_parallel_region(partial)[..., : drawn["vocab_size"]]
            model.train()
        shape = Shape(num_microbatches=1, micro_batch_size=BATCH, seq_length=drawn["seq_length"])
        step = make_forward_step(family, job.backend.device(job.backend.current_device()))
        [report] = forward_backward(trainable, step, [iter([batch])], shape)
        gradients = to_megatron(
            {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, table, sizes
        )
        return {
            "logits": _largest(our_logits, their_logits),
            "loss": abs((report["loss"] / report["tokens"]).item() / their_loss.item() - 1),
            "gradient": _largest_gradient(trainable, gradients),
            "rounding": max(_largest(narrow[name], value) for name, value in exact.items()),
        }


def _forward_backward(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Logits, loss and the gradient of every parameter, which also stays with the parameter."""
    model.zero_grad()
    logits = model(batch["tokens"]).logits
    each = functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    loss = (each * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}


def _largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _largest_gradient(
    trainable: Any, expected: dict[str, torch.Tensor], among: Callable[[str], bool] = lambda name: True
) -> float:
    """Over all parameters of all ranks with names ``among``; every element of ``expected`` must be on some
    rank."""
    worst, covered = 0.0, {name: torch.zeros_like(value) for name, value in expected.items()}
    chunks = trainable.bare_chunks()
    gradients = {id(p): p.main_grad for chunk in chunks for p in chunk.parameters()}
    for part in parts(chunks):
        whole = expected[part.name]
        covered[part.name][part.region] = 1
        if not isinstance(part.source, torch.nn.Parameter) or not among(part.name):
            continue  # Buffers have no gradient.
        # The same view of the gradient as ``tensor`` is of the parameter.
        ours = gradients[id(part.source)].as_strided(
            part.tensor.shape,
            part.tensor.stride(),
            gradients[id(part.source)].storage_offset()
            + part.tensor.storage_offset()
            - part.source.storage_offset(),
        )
        worst = max(worst, ((ours - whole[part.region]).abs().max() / whole.abs().max()).item())
    together = torch.cat([each.flatten() for each in covered.values()])
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    assert bool((together == 1).all()), "an element of the model is on no rank"
    largest = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def round_trip(shapes: list[Drawn]) -> list[bool]:
    """Whether the published weights come back from a model equal to the bit."""
    from mt_megatron.convert.tensors.table import from_megatron

    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    results = []
    for drawn in shapes:
        config = configuration(drawn, 1, sequence_parallel=False)
        theirs = published_model(drawn)
        tensors = {
            k: v for k, v in theirs.state_dict().items() if not (drawn["tied"] and k == "lm_head.weight")
        }
        with joined(config, mt_megatron.backend()) as job:
            family = family_of(config)
            [model] = family.build_model(config, job.layout)
            padded = padded_vocab_size(drawn["vocab_size"], divisible_by=64, tensor_parallel=1)
            table, sizes = family.convert_table(config), Sizes.of(config, padded)
            place(to_megatron(tensors, table, sizes), [model])
            back = from_megatron(model.state_dict(), table, sizes)
            results.append(all(torch.equal(back[name], value) for name, value in tensors.items()))
    return results
