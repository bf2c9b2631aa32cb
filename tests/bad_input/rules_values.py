"""Single values: ranges, types, sizes that are a slip of the finger."""

from __future__ import annotations

from random import Random

from mt_megatron.config.types import options
from mt_megatron.planning.validate.supported import LIMITS
from tests.bad_input.cases import Case, Promise
from tests.bad_input.rules import alone, flag, promise, rule

POSITIVE = (
    "num_layers", "num_attention_heads", "vocab_size", "ffn_hidden_size", "kv_channels", "num_query_groups",
    "make_vocab_size_divisible_by", "seq_length", "train_iters", "micro_batch_size", "global_batch_size",
    "eval_interval", "exit_interval", "lr_decay_iters", "log_interval", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "bucket_size",
)  # fmt: skip


@rule
def counts_below_one(case: Case, rng: Random) -> Promise:
    alone(case)
    name = rng.choice(POSITIVE)
    case[name] = rng.choice([0, -1, -(10**6), -(2**63)])
    return promise(name, case[name])


@rule
def negative_counts(case: Case, rng: Random) -> Promise:
    alone(case)
    name = rng.choice(["eval_iters", "lr_warmup_iters", "num_workers", "seed", "wgrad_deferral_limit"])
    case[name] = rng.choice([-1, -1000])
    return promise(name, case[name])


@rule
def counts_beyond_reason(case: Case, rng: Random) -> Promise:
    alone(case)
    name = rng.choice(list(LIMITS))
    case[name] = LIMITS[name] + rng.choice([1, 10**9, 10**30])
    return promise(name, case[name])


RANGES: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("hidden_dropout", (-0.1, 1.0, 7.0)),
    ("attention_dropout", (-1e-9, 1.5)),
    ("layernorm_epsilon", (0.0, -1e-5)),
    ("init_method_std", (0.0, -2.0)),
    ("rotary_percent", (0.0, 1.5, -1.0)),
    ("rotary_base", (0.0, -10000.0)),
    ("lr", (0.0, -1e-3)),
    ("min_lr", (-1.0, 0.5)),
    ("lr_warmup_init", (-1.0, 0.5)),
    ("lr_warmup_fraction", (-0.5, 1.0)),
    ("adam_beta1", (-0.1, 1.0)),
    ("adam_beta2", (-0.1, 1.0)),
    ("adam_eps", (0.0, -1e-8)),
    ("clip_grad", (-1.0,)),
    ("weight_decay", (-0.1,)),
    ("exit_duration_in_mins", (0.0, -5.0)),
    ("save_interval_in_mins", (-1.0, -0.5)),
    ("distributed_timeout_minutes", (0.0, -5.0, 1e12)),
    ("peak_tflops", (0.0, -100.0)),
    ("initial_loss_scale", (0.0, -1.0)),
    ("min_loss_scale", (0.0, -2.0)),
)


@rule
def numbers_out_of_range(case: Case, rng: Random) -> Promise:
    alone(case)
    name, bad = rng.choice(RANGES)
    if name == "lr_warmup_fraction":
        case["lr_warmup_iters"] = 0
    case[name] = rng.choice(bad)
    return promise(name, case[name])


@rule
def not_numbers(case: Case, rng: Random) -> Promise:
    name = rng.choice([each.name for each in options().values() if "float" in str(each.type)])
    text = rng.choice(["nan", "inf", "-inf", "NaN", ".inf"])
    case.extra_flags = [f"{flag(name)}={text}"]
    return promise(name, text, "expected")


WRONG_TEXTS = {"int": ("abc", "1.5", "", "1e3x", "0x10", "1,5"), "float": ("abc", "", "1,5", "1.2.3")}


@rule
def wrong_types(case: Case, rng: Random) -> Promise:
    kind = rng.choice(list(WRONG_TEXTS))
    plain = {f"<class '{kind}'>", f"{kind} | None"}
    name = rng.choice([each.name for each in options().values() if str(each.type) in plain])
    text = rng.choice(WRONG_TEXTS[kind])
    case.extra_flags = [f"{flag(name)}={text}"]
    return promise(name, repr(text), "expected")


@rule
def wrong_switches(case: Case, rng: Random) -> Promise:
    name = rng.choice([each.name for each in options().values() if str(each.type) == "<class 'bool'>"])
    text = rng.choice(["maybe", "2", "", "treu"])
    case.extra_flags = [f"{flag(name)}={text}"]
    return promise(name, repr(text), "expected true or false")


@rule
def switches_with_values(case: Case, rng: Random) -> Promise:
    name = rng.choice([each.name for each in options().values() if each.is_bool])
    case.extra_flags = [flag(name), "true"]
    return promise(flag(name), "'true'", f"{flag(name)}=true")


@rule
def wrong_choices(case: Case, rng: Random) -> Promise:
    name = rng.choice([each.name for each in options().values() if "Literal" in str(each.type)])
    text = rng.choice(["other-thing", "AUTO!", ""])
    case.extra_flags = [f"{flag(name)}={text}"]
    return promise(name, repr(text), "expected one of")


@rule
def values_that_are_missing(case: Case, rng: Random) -> Promise:
    takers = [each.name for each in options().values() if not each.is_bool and not each.is_list]
    name = rng.choice(takers)
    case.extra_flags = [flag(name)]
    return promise(flag(name), "none", "takes one value")


@rule
def increments_that_are_none(case: Case, rng: Random) -> Promise:
    alone(case)
    case["rampup_batch_size"] = rng.choice([(0, 1, 100), (1, 0, 100), (1, 1, -1)])
    return promise("rampup_batch_size", " ".join(map(str, case["rampup_batch_size"])))


@rule
def increments_towards_nothing(case: Case, rng: Random) -> Promise:
    alone(case)
    case["global_batch_size"], case["rampup_batch_size"] = None, (1, 1, 100)
    return promise("rampup_batch_size", "without global_batch_size", "--global-batch-size")


@rule
def more_increments_than_anybody_means(case: Case, rng: Random) -> Promise:
    alone(case)
    case["global_batch_size"], case["rampup_batch_size"] = 2**31 - 1, (1, rng.choice([1, 2]), 100)
    return promise("rampup_batch_size", "increments up to 2147483647")


@rule
def loss_scales_upside_down(case: Case, rng: Random) -> Promise:
    case["initial_loss_scale"], case["min_loss_scale"] = 8.0, rng.choice([16.0, 1024.0])
    return promise("min_loss_scale", case["min_loss_scale"])
