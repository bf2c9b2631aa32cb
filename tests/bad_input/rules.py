"""Every way to break a valid configuration that the pre-flight promises to name, one function each.

A rule changes the drawn case in one place (and what else must change so that nothing besides is
wrong) and returns what the error has to say.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from mt_megatron.training.arguments_megatron import ALIASES
from mt_megatron.training.arguments_refused import REFUSED
from mt_megatron.training.config_types import NOT_SETTABLE, SECTIONS, options
from mt_megatron.training.validate_sizes import LIMITS
from mt_megatron.training.validate_supported import UNSUPPORTED
from tests.bad_input.cases import Case, Promise, as_yaml

Rule = Callable[[Case, Random], Promise]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def promise(name: str, found: Any, change: str | None = None) -> Promise:
    return Promise(option=name, found=str(found), change=flag(name) if change is None else change)


def alone(case: Case) -> None:
    """One process, no division at all; a rule builds on it what it needs."""
    for name in (
        "virtual_pipeline_model_parallel_size",
        "sequence_parallel",
        "use_distributed_optimizer",
        "bf16",
    ):
        case.values.pop(name, None)
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        case[name] = 1
    case["global_batch_size"] = case["micro_batch_size"] * 4
    case.world = 1


# What divides what.


@rule
def heads_over_tensor(case: Case, rng: Random) -> Promise:
    alone(case)
    tensor = rng.choice([2, 3, 4, 8])
    heads = tensor * rng.randrange(1, 5) + rng.randrange(1, tensor)
    # One group would be wrong as well: this many groups are as wrong as the heads, and named too.
    case["num_attention_heads"], case["num_query_groups"] = heads, heads
    case["tensor_model_parallel_size"], case["ffn_hidden_size"] = tensor, 8 * tensor
    case.world = tensor
    return promise("num_attention_heads", heads)


@rule
def query_groups_over_tensor(case: Case, rng: Random) -> Promise:
    alone(case)
    tensor = rng.choice([4, 8])
    groups = rng.choice([1, 2])
    case["num_attention_heads"], case["num_query_groups"] = 8 * groups, groups
    case["tensor_model_parallel_size"], case["ffn_hidden_size"], case.world = tensor, 8 * tensor, tensor
    return promise("num_query_groups", groups)


@rule
def ffn_over_tensor(case: Case, rng: Random) -> Promise:
    alone(case)
    tensor = rng.choice([2, 4])
    case["num_attention_heads"] = case["num_query_groups"] = 8
    case["ffn_hidden_size"] = tensor * rng.randrange(4, 40) + rng.randrange(1, tensor)
    case["tensor_model_parallel_size"] = case.world = tensor
    return promise("ffn_hidden_size", case["ffn_hidden_size"])


@rule
def groups_over_heads(case: Case, rng: Random) -> Promise:
    alone(case)
    heads = rng.randrange(4, 32)
    groups = rng.choice([each for each in range(2, 40) if heads % each])
    case["num_attention_heads"], case["num_query_groups"] = heads, groups
    return promise("num_query_groups", groups)


@rule
def hidden_over_heads(case: Case, rng: Random) -> Promise:
    alone(case)
    heads = rng.choice([3, 5, 7])
    case["num_attention_heads"] = case["num_query_groups"] = heads
    case["hidden_size"] = 64
    case["kv_channels"] = None
    return promise("hidden_size", 64)


@rule
def layers_over_stages(case: Case, rng: Random) -> Promise:
    alone(case)
    stages = rng.choice([2, 3, 4, 5])
    case["num_layers"] = stages * rng.randrange(1, 9) + rng.randrange(1, stages)
    case["pipeline_model_parallel_size"] = case.world = stages
    return promise("num_layers", case["num_layers"])


@rule
def layers_over_stages_and_chunks(case: Case, rng: Random) -> Promise:
    alone(case)
    stages, chunks = rng.choice([2, 4]), rng.choice([2, 3])
    case["num_layers"] = stages * (chunks * rng.randrange(1, 4) + 1)
    case["pipeline_model_parallel_size"], case["virtual_pipeline_model_parallel_size"] = stages, chunks
    case["global_batch_size"] = case["micro_batch_size"] * stages
    case.world = stages
    return promise("num_layers", case["num_layers"])


@rule
def uneven_stages(case: Case, rng: Random) -> Promise:
    alone(case)
    stages = rng.choice([3, 4])
    first = rng.randrange(1, 5)
    case["num_layers"] = first + (stages - 1) * rng.randrange(1, 4) + 1
    case["first_pipeline_num_layers"] = first
    case["pipeline_model_parallel_size"] = case.world = stages
    return promise("first_pipeline_num_layers", first, "--pipeline-model-parallel-size")


@rule
def sequence_over_context(case: Case, rng: Random) -> Promise:
    alone(case)
    context = rng.choice([2, 4])
    case["seq_length"] = 2 * context * rng.randrange(2, 9) + rng.randrange(1, 2 * context)
    case["context_parallel_size"] = case.world = context
    return promise("seq_length", case["seq_length"])


@rule
def sequence_over_tensor(case: Case, rng: Random) -> Promise:
    alone(case)
    tensor = rng.choice([2, 4])
    case["num_attention_heads"] = case["num_query_groups"] = case["ffn_hidden_size"] = 8
    case["seq_length"] = tensor * rng.randrange(2, 9) + rng.randrange(1, tensor)
    case["tensor_model_parallel_size"] = case.world = tensor
    case["sequence_parallel"] = True
    return promise("seq_length", case["seq_length"])


@rule
def sequence_parallel_alone(case: Case, rng: Random) -> Promise:
    alone(case)
    case["sequence_parallel"] = True
    return promise("sequence_parallel", "1")


@rule
def batch_over_micro_and_data(case: Case, rng: Random) -> Promise:
    alone(case)
    micro, data = rng.choice([1, 2, 4]), rng.choice([2, 3, 4])
    case["micro_batch_size"], case.world = micro, data
    case["global_batch_size"] = micro * data * rng.randrange(1, 6) + rng.randrange(1, micro * data)
    return promise("global_batch_size", case["global_batch_size"])


@rule
def microbatches_over_stages(case: Case, rng: Random) -> Promise:
    alone(case)
    stages = rng.choice([2, 4])
    count = stages * rng.randrange(1, 4) + rng.randrange(1, stages)
    case["num_layers"] = stages * 2
    case["pipeline_model_parallel_size"] = case.world = stages
    case["virtual_pipeline_model_parallel_size"] = 2
    case["global_batch_size"] = case["micro_batch_size"] * count
    return promise("micro-batches", count, "--global-batch-size")


@rule
def world_over_parallel_sizes(case: Case, rng: Random) -> Promise:
    share = (
        case["tensor_model_parallel_size"]
        * case["pipeline_model_parallel_size"]
        * case["context_parallel_size"]
    )
    if share == 1:
        alone(case)
        case["pipeline_model_parallel_size"], case["num_layers"], share = 2, 2, 2
    case.world = share * rng.randrange(1, 4) + rng.randrange(1, share)
    return Promise(option="world size", found=str(case.world), change="Start another number of processes")


@rule
def experts_over_expert_parallel(case: Case, rng: Random) -> Promise:
    alone(case)
    size = rng.choice([2, 4])
    case["family"], case["num_moe_experts"] = "other", size * rng.randrange(1, 5) + rng.randrange(1, size)
    case["moe_router_topk"] = 1
    case["expert_model_parallel_size"] = case.world = size
    return promise("num_moe_experts", case["num_moe_experts"])


@rule
def expert_parallel_without_experts(case: Case, rng: Random) -> Promise:
    alone(case)
    case["expert_model_parallel_size"] = case.world = 2
    return promise("expert_model_parallel_size", 2)


@rule
def positions_over_the_limit(case: Case, rng: Random) -> Promise:
    alone(case)
    case["max_position_embeddings"] = rng.randrange(1, case["seq_length"])
    return promise("seq_length", case["seq_length"])


# Single values out of their range.

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
    ("distributed_timeout_minutes", (0.0, -5.0, 1e12)),
    ("peak_tflops", (0.0, -100.0)),
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


# Names.


def typo(name: str, rng: Random) -> str:
    """``name`` with two letters swapped, one left out or one doubled, inside."""
    while True:
        at = rng.randrange(1, len(name) - 1)
        kind = rng.randrange(3)
        if kind == 0:
            wrong = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
        elif kind == 1:
            wrong = name[:at] + name[at + 1 :]
        else:
            wrong = name[:at] + name[at] + name[at:]
        known = {*options(), *(each.replace("-", "_") for each in ALIASES), *NOT_SETTABLE}
        known |= {each.replace("-", "_") for each in REFUSED}
        known |= {"no_" + each for each in options()}
        if wrong not in known and wrong.replace("-", "_") not in known:
            return wrong


@rule
def flags_with_a_typo(case: Case, rng: Random) -> Promise:
    name = rng.choice([each for each in options() if len(each) > 6])
    wrong = flag(typo(name, rng))
    case.extra_flags = [wrong, "1"]
    return Promise(option=wrong, found="there is no option", change="Did you mean")


@rule
def flags_in_another_case(case: Case, rng: Random) -> Promise:
    name = rng.choice([each for each in options() if len(each) > 6])
    wrong = rng.choice([flag(name).upper(), flag(name).title(), "--" + name.title().replace("_", "")])
    if wrong.lower().replace("-", "") != wrong.replace("-", ""):
        case.extra_flags = [wrong, "1"]
    return Promise(option=wrong, found="there is no option", change=flag(name))


@rule
def keys_with_a_typo(case: Case, rng: Random) -> Promise:
    name = rng.choice([each for each in options() if len(each) > 6])
    wrong = typo(name, rng)
    case.yaml_text = f"{options()[name].section}:\n  {wrong}: 1\n"
    return Promise(option=wrong, found="run.yaml:2", change="Did you mean")


@rule
def sections_with_a_typo(case: Case, rng: Random) -> Promise:
    section = rng.choice(list(SECTIONS))
    wrong = rng.choice([section[:-1], section + "s", section.upper(), section.title(), section[1:]])
    if wrong in SECTIONS:
        wrong = section + "x"
    case.yaml_text = f"{wrong}:\n  num_layers: 2\n"
    return Promise(option=repr(wrong), found="run.yaml:2", change="expected one of model, parallel")


@rule
def keys_in_the_wrong_section(case: Case, rng: Random) -> Promise:
    option = options()[rng.choice(list(options()))]
    section = rng.choice([each for each in SECTIONS if each != option.section])
    case.yaml_text = f"{section}:\n  {option.name}: 1\n"
    return Promise(option=option.name, found=repr(section), change="Move it there")


@rule
def keys_without_a_section(case: Case, rng: Random) -> Promise:
    option = options()[rng.choice(list(options()))]
    case.yaml_text = f"{option.name}: 1\n"
    return Promise(option=option.name, found="run.yaml:1", change=f"{option.section}:")


@rule
def sections_within_sections(case: Case, rng: Random) -> Promise:
    case.yaml_text = "train:\n  parallel:\n    tensor_model_parallel_size: 2\n"
    return Promise(option="parallel", found="run.yaml:2", change="is unknown")


@rule
def keys_written_twice(case: Case, rng: Random) -> Promise:
    name = rng.choice(list(case.values))
    text = as_yaml({name: case.values[name]})
    case.yaml_text = text + text.split("\n", 1)[1]
    return Promise(option=name, found="written twice", change="Keep one of them")


@rule
def sections_written_twice(case: Case, rng: Random) -> Promise:
    name = rng.choice(list(case.values))
    case.yaml_text = 2 * as_yaml({name: case.values[name]})
    return Promise(option=options()[name].section, found="written twice", change="Keep one of them")


@rule
def lists_where_values_belong(case: Case, rng: Random) -> Promise:
    name = rng.choice([each.name for each in options().values() if not each.is_list])
    value = rng.choice([[1, 2], {"a": 1}, [[]]])
    case.yaml_text = as_yaml({name: value})
    return promise(name, str(value), "expected")


@rule
def words_that_are_no_options(case: Case, rng: Random) -> Promise:
    word = rng.choice(["num-layers=4", "-n4", "pretrain", "4"])
    case.extra_flags = ["--bf16", "--", word] if word != "-n4" else ["--", word]
    return Promise(option="'--'", found="--", change="Options start with --")


@rule
def refused_arguments(case: Case, rng: Random) -> Promise:
    name = rng.choice(list(REFUSED))
    case.extra_flags = [f"--{name}"]
    return Promise(option=f"--{name}", found="Megatron-LM 0.9 that is refused", change=REFUSED[name])


@rule
def fields_that_cannot_be_set(case: Case, rng: Random) -> Promise:
    elsewhere = {each.replace("-", "_") for each in (*REFUSED, *ALIASES)}
    name = rng.choice([each for each in NOT_SETTABLE if each not in elsewhere])
    case.extra_flags = [flag(name), "1"]
    return Promise(option=flag(name), found="cannot be set", change=NOT_SETTABLE[name])


@rule
def presets_with_a_typo(case: Case, rng: Random) -> Promise:
    wrong = rng.choice(["lama3_tiny", "llama3-tiny", "llama3_8B", "llama_8b", "gpt2"])
    case.extra_flags = ["--model", wrong]
    return Promise(option="preset", found=repr(wrong), change="expected one of")


# Values that contradict each other.


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
    case["lr_warmup_fraction"], case["lr_warmup_iters"] = 0.1, rng.randrange(1, 4)
    return promise("lr_warmup_fraction", case["lr_warmup_iters"], "--lr-warmup-iters")


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


# Data and places.


@rule
def two_sources(case: Case, rng: Random) -> Promise:
    case["data_path"], case["split"] = ("/nonexistent/a",), "98,2,0"
    return Promise(option="sources of data", found="2", change="--mock-data")


@rule
def no_source(case: Case, rng: Random) -> Promise:
    case["mock_data"] = False
    return Promise(option="sources of data", found="0", change="--data-path")


@rule
def shares_that_are_none(case: Case, rng: Random) -> Promise:
    case["mock_data"], case["data_path"] = False, ("/nonexistent/a",)
    case["split"] = rng.choice(["98,x,0", "0,0,0", "-1,2,3", "1,2,3,4", "nan,1,1", ","])
    return promise("split", repr(case["split"]))


@rule
def generated_tokens_beyond_the_vocabulary(case: Case, rng: Random) -> Promise:
    case["vocab_size"] = rng.randrange(1, 4095)
    return promise("vocab_size", case["vocab_size"])


@rule
def weights_that_are_none(case: Case, rng: Random) -> Promise:
    case["mock_data"] = False
    case["train_data_path"] = rng.choice([("1", "a", "0", "b"), ("0.5", "a", "-1", "b"), ("1", "a", "2")])
    return promise("train_data_path", " ".join(case["train_data_path"]))


@rule
def prefixes_that_are_not_there(case: Case, rng: Random) -> Promise:
    case["mock_data"] = False
    case["train_data_path"] = (f"/nonexistent/{rng.randrange(10**6)}",)
    return promise("train_data_path", case["train_data_path"][0])


@rule
def tokenizers_that_are_not_there(case: Case, rng: Random) -> Promise:
    case["tokenizer_type"], case["tokenizer_model"] = "HuggingFaceTokenizer", "/nonexistent/tokenizer.json"
    return promise("tokenizer_model", "/nonexistent/tokenizer.json")


@rule
def checkpoints_that_are_not_there(case: Case, rng: Random) -> Promise:
    name = rng.choice(["load", "resume"])
    case[name] = "/nonexistent/run"
    return promise(name, "/nonexistent/run")


@rule
def intervals_without_a_folder(case: Case, rng: Random) -> Promise:
    case["save_interval"] = 10
    return promise("save_interval", "without save", "--save")


@rule
def places_below_a_file(case: Case, rng: Random) -> Promise:
    name = rng.choice(["save", "metrics_path", "tensorboard_dir", "wandb_save_dir"])
    case[name] = "/etc/hostname/below"
    return promise(name, "/etc/hostname")


@rule
def places_without_a_name(case: Case, rng: Random) -> Promise:
    name = rng.choice(["save", "metrics_path", "tensorboard_dir", "wandb_save_dir", "data_cache_path"])
    case[name] = ""
    return promise(name, "empty")


@rule
def names_that_no_file_can_have(case: Case, rng: Random) -> Promise:
    name = rng.choice(
        ["save", "metrics_path", "tensorboard_dir", "load", "resume", "tokenizer_model", "train_data_path"]
    )
    case[name] = rng.choice(["/tmp/" + "x" * 300, "/tmp/\0"])
    if name == "tokenizer_model":
        case["tokenizer_type"] = "HuggingFaceTokenizer"
    if name == "train_data_path":
        case["mock_data"], case[name] = False, (case[name],)
    return promise(name, "/tmp/")
