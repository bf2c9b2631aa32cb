"""Every argument of Megatron-LM 0.9 is understood or refused with a reason; none is ignored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mt_megatron.config.megatron_lm_arguments import _LATER, ALIASES, REFUSED, RENAMED
from mt_megatron.config.parse import load_config
from mt_megatron.config.types import NOT_SETTABLE, options
from mt_megatron.errors import ConfigError

_LINES = (Path(__file__).parent / "megatron_lm_0_9_arguments.txt").read_text().splitlines()
ARGUMENTS = dict(line.split() for line in _LINES if not line.startswith("#"))


def flags() -> dict[str, str]:
    """Every flag of ours, without dashes, and what follows it."""
    found = {}
    for option in options().values():
        name = option.flag[2:]
        if option.is_bool:
            found[name] = found["no-" + name] = "switch"
        else:
            found[name] = "values" if option.is_list else "value"
    return found


def test_the_list_is_whole() -> None:
    assert len(ARGUMENTS) == 347


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_argument_is_understood_or_refused_and_takes_what_it_took(name: str) -> None:
    kind, ours = ARGUMENTS[name], flags()
    assert [name in ours, name in ALIASES, name in REFUSED].count(True) == 1
    if name in ours:
        # Several values where Megatron-LM took one are the same for one value.
        assert ours[name] == kind
    elif name in ALIASES:
        alias = ALIASES[name]
        assert kind == ("value" if alias.to or alias.takes_value else "switch")
        assert alias.to or alias.sets or alias.note or alias.needs
    else:
        with pytest.raises(ConfigError) as caught:
            load_config([f"--{name}"] if kind == "switch" else [f"--{name}", "1"])
        assert f"--{name} is an argument of Megatron-LM 0.9 that is refused: {REFUSED[name]}." in str(
            caught.value
        )


@pytest.mark.parametrize("name", RENAMED)
def test_what_another_layer_calls_otherwise_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name} is an argument of MT-MegatronLM: ") as caught:
        load_config([f"--{name}"])
    named = re.findall(r"--([a-z-]+)", RENAMED[name])
    assert RENAMED[name] in str(caught.value) and set(named) <= set(flags()) and named


def test_tables_name_real_options_and_no_others() -> None:
    known = options()
    for alias in ALIASES.values():
        assert alias.to is None or alias.to in known
        assert {*alias.sets, *alias.presumes} <= set(known)
        assert alias.needs is None or alias.needs[0] in known
    ours = {"model", "fp32", *(alias.name for alias in _LATER)}
    assert set(ALIASES) - ours <= set(ARGUMENTS)
    assert set(REFUSED) <= set(ARGUMENTS)


def test_reasons_say_what_to_do() -> None:
    for name, reason in REFUSED.items():
        does = ("leave it out", "use ", "--", "set ", "no family here", "convert", "run the process")
        assert any(each in reason for each in does), (name, reason)
    assert all(NOT_SETTABLE.values())


@pytest.mark.parametrize("name", sorted(name for name, alias in ALIASES.items() if alias.sets))
def test_switch_sets_what_the_table_says(name: str) -> None:
    config = load_config([f"--{name}"]).to_dict()
    found = {key: value for section in config.values() for key, value in section.items()}
    for key, value in ALIASES[name].sets.items():
        assert found[key] == value


@pytest.mark.parametrize(
    ("argv", "section", "name", "expected"),
    [
        (["--norm-epsilon", "1e-6"], "model", "layernorm_epsilon", 1e-6),
        (["--num-experts", "8"], "model", "num_moe_experts", 8),
        (["--num-experts", "0"], "model", "num_moe_experts", None),
        (["--fp8-format", "hybrid"], "model", "fp8", "hybrid"),
        (["--ddp-bucket-size", "1000"], "ddp", "bucket_size", 1000),
        (["--decoder-first-pipeline-num-layers", "3"], "model", "first_pipeline_num_layers", 3),
        (["--decoder-last-pipeline-num-layers", "3"], "model", "last_pipeline_num_layers", 3),
        (["--encoder-num-layers", "3"], "model", "num_layers", 3),
        (["--encoder-seq-length", "3"], "train", "seq_length", 3),
        (["--persistent-save-interval", "3"], "checkpoint", "save_interval", 3),
        (["--model", "llama3_tiny"], "model", "preset", "llama3_tiny"),
        (["--rope-scaling-factor", "4"], "model", "rotary_scaling_factor", 4.0),
        (["--use-rope-scaling"], "model", "rotary_scaling_factor", 8.0),
        (["--use-rope-scaling"], "model", "original_max_position_embeddings", 8192),
        (["--use-rope-scaling", "--rope-scaling-factor", "4"], "model", "rotary_scaling_factor", 4.0),
        (["--rope-scaling-factor", "4", "--use-rope-scaling"], "model", "rotary_scaling_factor", 4.0),
        (
            ["--num-virtual-stages-per-pipeline-rank", "2"],
            "parallel",
            "virtual_pipeline_model_parallel_size",
            2,
        ),
        (["--moe-layer-freq", "([0]*1+[1]*2)"], "model", "moe_layer_freq", (0, 1, 1)),
    ],
)
def test_renamed_arguments(argv: list[str], section: str, name: str, expected: object) -> None:
    assert getattr(getattr(load_config(argv), section), name) == expected


@pytest.mark.parametrize("name", sorted(name for name, alias in ALIASES.items() if alias.note))
def test_arguments_that_change_nothing_leave_a_note(name: str) -> None:
    alias = ALIASES[name]
    values = list(alias.values[:1])
    config = load_config([f"--{name}", *values])
    assert config.notes == (f"--{name}: {alias.note}",)
    assert config.to_dict() == load_config([]).to_dict()


@pytest.mark.parametrize("name", sorted(name for name, alias in ALIASES.items() if alias.values))
def test_arguments_with_one_true_value_refuse_the_others(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([f"--{name}", "other"])
    assert ALIASES[name].otherwise in str(caught.value)


def test_a_llama_command_line_of_megatron_lm_is_understood_as_it_is() -> None:
    argv = """
    --use-mcore-models --num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8
    --group-query-attention --num-query-groups 4 --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --rotary-base 500000 --no-position-embedding --swiglu
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
    --init-method-std 0.02 --use-flash-attn --no-masked-softmax-fusion --no-rope-fusion
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-bias-swiglu-fusion
    --transformer-impl local --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 3e-4 --min-lr 3e-5
    --lr-decay-style cosine --lr-warmup-iters 10 --lr-decay-iters 100 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16 --recompute-activations
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model t.json --data-path d --split 98,2,0
    --save out --load out --save-interval 50 --eval-interval 50 --eval-iters 2 --log-interval 1
    --distributed-backend nccl --distributed-timeout-minutes 20 --ckpt-format torch_dist --seed 1
    --num-workers 1 --dataloader-type single --accumulate-allreduce-grads-in-fp32
    """
    config = load_config(argv.split())
    assert config.model.activation_func == "silu" and config.model.gated_linear_unit
    assert config.model.add_bias_linear is False and config.model.num_query_groups == 4
    assert config.model.recompute_granularity == "selective"
    assert config.optimizer.adam_beta2 == 0.95 and config.optimizer.lr == 3e-4
    assert config.parallel.overlap_param_gather and config.train.bf16
    assert config.model.transformer_impl == "local"
    assert len(config.notes) == 5
