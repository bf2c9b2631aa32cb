"""Values that contradict each other."""

from __future__ import annotations

from random import Random
from typing import Any

from mt_megatron.config.types import options
from mt_megatron.planning.validate.supported import UNSUPPORTED
from tests.bad_input.cases import Case, Promise
from tests.bad_input.rules import alone, promise, rule


@rule
def unsupported_options(case: Case, rng: Random) -> Promise:
    name = rng.choice(list(UNSUPPORTED))
    option = options()[name]
    other: Any = not option.default if option.is_bool else {"fp8": "e4m3"}.get(name, 2)
    case[name] = other
    return promise(name, other)


@rule
def two_precisions(case: Case, rng: Random) -> Promise:
    alone(case)
    case["bf16"] = case["fp16"] = True
    case["loss_scale"] = 2.0
    return Promise(option="bf16 and fp16", found="both on", change="--no-bf16")


@rule
def scaled_without_fp16(case: Case, rng: Random) -> Promise:
    alone(case)
    case["loss_scale"] = rng.choice([1.0, 1024.0])
    return promise("loss_scale", case["loss_scale"])


@rule
def warmup_longer_than_the_schedule(case: Case, rng: Random) -> Promise:
    case["lr_warmup_iters"] = case["train_iters"] + rng.randrange(0, 9)
    return promise("lr_warmup_iters", case["lr_warmup_iters"])


@rule
def warmup_said_twice(case: Case, rng: Random) -> Promise:
    # Both typed: a share that is typed replaces the steps of a file.
    steps = rng.randrange(1, 4)
    case.extra_flags += ["--lr-warmup-fraction", "0.1", "--lr-warmup-iters", str(steps)]
    return promise("lr_warmup_fraction", steps, "--lr-warmup-iters")


@rule
def wsd_without_its_length(case: Case, rng: Random) -> Promise:
    case["lr_decay_style"] = "WSD"
    return promise("lr_wsd_decay_iters", "not set")


@rule
def required_options(case: Case, rng: Random) -> Promise:
    name = rng.choice(["lr", "train_iters", "seq_length", "vocab_size"])
    case[name] = None
    return promise(name, "None" if name == "lr" else "not set")


@rule
def overlap_without_what_it_needs(case: Case, rng: Random) -> Promise:
    alone(case)
    name = rng.choice(["overlap_param_gather", "align_param_gather"])
    case[name] = True
    return promise(
        name, "is on without", "--overlap-param-gather" if "align" in name else "--overlap-grad-reduce"
    )


@rule
def packed_without_borders(case: Case, rng: Random) -> Promise:
    alone(case)
    case["packed_sequences"] = True
    return promise("packed_sequences", "without reset_attention_mask", "--reset-attention-mask")


@rule
def packed_over_context(case: Case, rng: Random) -> Promise:
    alone(case)
    case["packed_sequences"] = case["reset_attention_mask"] = True
    case["context_parallel_size"] = case.world = 2
    return promise("packed_sequences", "context_parallel_size 2", "--packed-sequences")


@rule
def full_recompute_without_its_method(case: Case, rng: Random) -> Promise:
    alone(case)
    case["recompute_granularity"], case["recompute_num_layers"] = "full", 1
    return promise("recompute_method", "not set")


@rule
def learned_positions_without_their_number(case: Case, rng: Random) -> Promise:
    case["position_embedding_type"] = "learned_absolute"
    return promise("max_position_embeddings", "not set")


@rule
def gated_units_without_a_width(case: Case, rng: Random) -> Promise:
    case["gated_linear_unit"], case["ffn_hidden_size"] = True, None
    return promise("ffn_hidden_size", "not set")
