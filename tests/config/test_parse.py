"""Presets, YAML and flags: who wins, what is refused, and what the messages say."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path

import pytest

from mt_megatron.config import presets
from mt_megatron.config.parse import load_config, option_help
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.config.types import options
from mt_megatron.errors import ConfigError
from mt_megatron.training.validate import problems


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_yaml_and_yaml_over_the_preset(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "model:\n  preset: llama3_8b\n  num_layers: 8\n  hidden_size: 512\n")
    config = load_config(["--num-layers", "4"], path)
    assert (config.model.num_layers, config.model.hidden_size) == (4, 512)
    assert config.model.num_query_groups == 8
    assert config.model.preset == "llama3_8b"


def test_a_preset_flag_replaces_the_preset_of_the_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "model:\n  preset: llama3_8b\n")
    assert load_config(["--model", "llama3_70b"], path).model.num_layers == 80


def test_config_flag_names_the_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "train: {seq_length: 64}\n")
    assert load_config(["--config", str(path)]).train.seq_length == 64
    assert load_config([f"--config={path}"]).train.seq_length == 64
    with pytest.raises(ConfigError, match="Keep one"):
        load_config(["--config", str(path)], path)
    with pytest.raises(ConfigError, match=r"--config is given 2 times \(.*conf.*\); expected one file"):
        load_config(["--config", str(path), "--lr", "1e-3", f"--config={path}"])


def test_the_last_of_a_repeated_flag_counts() -> None:
    assert load_config(["--seed", "1", "--seed=2"]).train.seed == 2


@pytest.mark.parametrize(
    ("argv", "section", "name", "expected"),
    [
        (["--bf16"], "train", "bf16", True),
        (["--bf16", "--no-bf16"], "train", "bf16", False),
        (["--bf16=false"], "train", "bf16", False),
        (["--lr", "3e-4"], "optimizer", "lr", 3e-4),
        (["--lr_decay_style", "cosine"], "train", "lr_decay_style", "cosine"),
        (["--moe-router-load-balancing-type", "none"], "model", "moe_router_load_balancing_type", "none"),
        (["--eval-interval", "none"], "train", "eval_interval", None),
        (["--data-path", "0.3", "a", "0.7", "b"], "data", "data_path", ("0.3", "a", "0.7", "b")),
        (["--data-path=a"], "data", "data_path", ("a",)),
        (["--window-size", "16", "0"], "model", "window_size", (16, 0)),
        (["--window-size", "16", "0", "--window-size", "none"], "model", "window_size", None),
        (["--rotary-percent", "-0.5"], "model", "rotary_percent", -0.5),
        (["--autocast-dtype", "bfloat16"], "model", "autocast_dtype", "bfloat16"),
    ],
)
def test_flag_spellings(argv: list[str], section: str, name: str, expected: object) -> None:
    assert getattr(getattr(load_config(argv), section), name) == expected


@pytest.mark.parametrize(
    ("text", "section", "name", "expected"),
    [
        ("optimizer: {lr: 3e-4}", "optimizer", "lr", 3e-4),
        ("data: {split: 98}", "data", "split", "98"),
        ("data: {data_path: one}", "data", "data_path", ("one",)),
        ("data:\n  data_path: [0.5, a, 0.5, b]", "data", "data_path", ("0.5", "a", "0.5", "b")),
        ("parallel:\n  tensor-model-parallel-size: 2", "parallel", "tensor_model_parallel_size", 2),
        ("train:\n", "train", "seed", 1234),
        ("", "train", "seed", 1234),
        ("model: {swiglu: true}", "model", "activation_func", "silu"),
        ("model: {norm_epsilon: 1e-6}", "model", "layernorm_epsilon", 1e-6),
        ("logging: {wandb_exp_name: 1.10}", "logging", "wandb_exp_name", "1.10"),
        ("logging: {wandb_exp_name: 0100}", "logging", "wandb_exp_name", "0100"),
        ("logging:\n  wandb_exp_name: 1:30", "logging", "wandb_exp_name", "1:30"),
        ("logging: {wandb_exp_name: 2024-01-02}", "logging", "wandb_exp_name", "2024-01-02"),
        ("data:\n  data_path: [0.50, 007, 1_0, b]", "data", "data_path", ("0.50", "007", "1_0", "b")),
        ("train: {seed: 007}", "train", "seed", 7),
        ("train: {seed: 1_000}", "train", "seed", 1000),
        ("train: {seed: 0x10}", "train", "seed", 16),
    ],
)
def test_yaml_spellings(tmp_path: Path, text: str, section: str, name: str, expected: object) -> None:
    assert getattr(getattr(load_config([], yaml_file(tmp_path, text)), section), name) == expected


def test_what_a_switch_presumes_gives_way_to_the_file_and_the_preset(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "model: {rotary_scaling_factor: 4.0}")
    model = load_config(["--use-rope-scaling"], path).model
    assert (model.rotary_scaling_factor, model.original_max_position_embeddings) == (4.0, 8192)
    path = yaml_file(tmp_path, "model: {use_rope_scaling: true, original_max_position_embeddings: 4096}")
    model = load_config(["--rotary-scaling-factor", "2"], path).model
    assert (model.rotary_scaling_factor, model.original_max_position_embeddings) == (2.0, 4096)
    model = load_config(["--rope-type", "rope"], yaml_file(tmp_path, "model: {use_rope_scaling: true}")).model
    assert model.rotary_scaling_factor == load_config([]).model.rotary_scaling_factor
    model = load_config(["--model", "deepseek_v3", "--use-rope-scaling"]).model
    assert (model.rotary_scaling_factor, model.original_max_position_embeddings) == (40.0, 4096)


def test_yaml_merge_keys_are_understood(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "train:\n  <<: {seed: 5, bf16: true}\n  seed: 6\n")
    assert (load_config([], path).train.seed, load_config([], path).train.bf16) == (6, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layer", "4"], "no option --num-layer. Did you mean --num-layers"),
        (["--swigu"], "Did you mean --swiglu"),
        (["--no-bf61"], "Did you mean --no-bf16"),
        (["--xyzzy"], "there is no option --xyzzy."),
        (["--num-layers", "four"], "--num-layers: num_layers is 'four'; expected integer."),
        (["--num-layers", "4.5"], "num_layers is '4.5'; expected integer."),
        (["--lr", "nan"], "lr is 'nan'; expected number or none."),
        (["--lr", "inf"], "lr is 'inf'; expected number or none."),
        (["--normalization", "rms"], "expected one of LayerNorm, RMSNorm."),
        (["--p2p-transport", "smh"], "rdma, nixl, collective. Did you mean shm?"),
        (["--activation-func", "__import__('os')"], "expected one of gelu, silu, relu, squared_relu."),
        (["--window-size", "1"], "expected 2 x integer or none."),
        (["--bf16", "true"], "Write --bf16, --no-bf16 or --bf16=true."),
        (["--no-bf16", "1"], "--no-bf16 takes no value; found '1'"),
        (["--no-bf16=1"], "--no-bf16 takes no value; found '1'"),
        (["--bf16=maybe"], "expected true or false."),
        (["--num-layers"], "--num-layers takes one value; found none."),
        (["--num-layers", "1", "2"], "--num-layers takes one value; found 1 2."),
        (["--swiglu=1"], "--swiglu takes no value"),
        (["--config"], "--config takes one value"),
        (["--config", "/nonexistent/x.yaml"], "cannot be read"),
        (["--params-dtype", "float16"], "cannot be set: it follows from train.bf16 and train.fp16"),
        (
            ["--model", "llama3_7b"],
            "there is no model preset 'llama3_7b'. mt-megatron pretrain --list-models",
        ),
        (["--model", "lama3_8b"], "Did you mean llama3_8b?"),
        (["--model", "llama3.2_1b"], "'llama3.2_1b'. mt-megatron pretrain --list-models names all"),
        (["--model", "llama3.2_1b"], "convert --from-hf FOLDER --to-config model.yaml"),
        (["--model", "../secrets"], "there is no model preset"),
        (["--group-query-attention"], "--group-query-attention is given without --num-query-groups"),
        (["--no-position-embedding"], "only true with position_embedding_type = rope"),
        (["--transformer-impl", "te"], "expected one of auto, local, transformer_engine."),
        (["--ckpt-format", "zarr"], "expected torch_dist"),
        (["--num-query-groups", "--swiglu"], "--num-query-groups takes one value; found none"),
    ],
)
def test_wrong_flags_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert message in str(caught.value)


@pytest.mark.parametrize("argv", [["num-layers"], ["-n", "4"], ["4", "--bf16"], ["--"]])
def test_a_value_without_an_option_is_named(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        load_config(argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  num_layer: 4", ":2: num_layer is unknown. Did you mean num_layers"),
        ("train:\n\n  lr: 1", ":3: lr belongs to the section 'optimizer'; found it in 'train'."),
        ("modle: {num_layers: 4}", ":1: there is no section 'modle'"),
        ("modle: {num_layers: 4}", "Did you mean model?"),
        ("model: {num_layers: four}", "num_layers is 'four'; expected integer."),
        ("model: {num_layers: true}", "num_layers is True; expected integer."),
        ("model: {num_layers: null}", "num_layers is None; expected integer."),
        ("model: {num_layers: [1]}", "num_layers is [1]; expected integer."),
        (
            "train:\n  seed: 0100",
            ":2: seed is 0100, which YAML reads as 64, in base 8; expected integer in base 10. Write 64 if",
        ),
        ("train:\n  eval_interval: 1:30", "eval_interval is 1:30, which YAML reads as 90, in base 60;"),
        ("optimizer:\n  lr: 1:30.5", "lr is 1:30.5, which YAML reads as 90.5, in base 60; expected number"),
        ("model: {window_size: [020, 0]}", "window_size is 020, which YAML reads as 16, in base 8;"),
        ("train: {train_samples: 0100}", "is 0100, which YAML reads as 64, in base 8;"),
        ("logging: {wandb_exp_name: on}", "expected text. YAML reads on so: put it in quotes"),
        ("data: {data_path: [a, no]}", "is False; expected text. YAML reads no so: put it in quotes"),
        ("train: {bf16: 3}", "expected true or false."),
        ("model: 4", "expected `name: value` lines under `model:`"),
        ("- model", "expected sections such as `model:`"),
        ("model: {num_layers: 1}\nmodel: {num_layers: 2}", ":2: model is written twice"),
        ("model:\n  num_layers: 1\n  num_layers: 2", ":3: num_layers is written twice"),
        ("model: {swiglu: false}", "set the field itself: activation_func, gated_linear_unit."),
        ("model: [", "is no valid YAML"),
        ("? [a, b]\n: 1", "expected"),
        ("model: {? [a] : 1}", "is unknown"),
        ("train: {lr_wsd_decay_samples: 3}", "refused: runs are measured in steps"),
        (
            "train: {train_samples: 3, global_batch_size: 4}",
            "expected at least one global batch of 4 samples",
        ),
        ("train: {train_samples: 8, rampup_batch_size: [1, 1, 4]}", "--rampup-batch-size takes in steps"),
        ("train: {override_opt_param_scheduler: true}", "refused: the schedule always comes"),
        ("model: !!python/object/apply:os.getcwd []", "is no valid YAML"),
    ],
)
def test_wrong_yaml_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], yaml_file(tmp_path, text))
    assert message in str(caught.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "model: {num_layer: 4}\ntrain: {lr: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(["--bogus", "--seed", "x"], path)
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize("name", presets.names())
def test_presets_load_and_state_their_source(name: str) -> None:
    config = load_config(["--model", name])
    assert config.model.preset == name
    assert config.model.rotary_base == 5e5 or config.model.family != "llama"
    comment = presets.path(name).read_text().split("model:")[0]
    assert comment.startswith("# ") and re.search(r"\b202[3-6]\b", comment)


def test_llama3_405b_has_two_names() -> None:
    assert presets.path("llama3_405b") == presets.path("llama3.1_405b")


def test_defaults_that_follow_from_other_values() -> None:
    config = load_config(
        ["--hidden-size", "64", "--num-attention-heads", "4", "--bf16", "--seq-length", "32"]
    )
    assert config.model.kv_channels == 16
    assert config.model.num_query_groups == 4
    assert config.model.ffn_hidden_size == 256
    assert config.ddp.grad_reduce_in_fp32 is True
    assert config.params_dtype == "bfloat16"
    assert config.model.max_position_embeddings is None
    assert (
        load_config(["--seq-length=8", "--position-embedding-type=rope"]).model.max_position_embeddings == 8
    )
    assert load_config(["--swiglu", "--hidden-size=64"]).model.ffn_hidden_size is None
    assert load_config(["--bf16", "--no-grad-reduce-in-fp32"]).ddp.grad_reduce_in_fp32 is False
    assert load_config([]).model.overlap_p2p_comm is False
    assert load_config(["--virtual-pipeline-model-parallel-size=2"]).model.overlap_p2p_comm is True
    stages = ["--num-layers=4", "--pipeline-model-parallel-size=2"]
    for per_chunk, overlaps in ((1, True), (2, False)):
        argv = [*stages, f"--num-layers-per-virtual-pipeline-stage={per_chunk}"]
        assert load_config(argv).model.overlap_p2p_comm is overlaps


def test_virtual_size_from_layers_per_chunk() -> None:
    argv = ["--num-layers=8", "--pipeline-model-parallel-size=2", "--num-layers-per-virtual-pipeline-stage=1"]
    assert load_config(argv).virtual_pipeline_model_parallel_size == 4
    assert load_config(argv[:2]).virtual_pipeline_model_parallel_size is None


def test_batch_arithmetic() -> None:
    config = load_config(["--tensor-model-parallel-size=2", "--micro-batch-size=4", "--global-batch-size=48"])
    assert config.data_parallel_size(8) == 4
    assert config.num_microbatches(8) == 3
    assert load_config(["--micro-batch-size=4"]).global_batch_size(8) == 32
    with pytest.raises(ConfigError, match="world size is 3"):
        config.data_parallel_size(3)
    with pytest.raises(ConfigError, match="global_batch_size is 48"):
        config.num_microbatches(20)


def test_unknown_attributes_are_errors() -> None:
    config = load_config([])
    for section in (config.model, config.optimizer, config.ddp):
        with pytest.raises(AttributeError, match="nonesuch"):
            section.nonesuch  # noqa: B018 - reading it is the test.


def test_configuration_survives_pickling_and_is_frozen() -> None:
    config = load_config(["--model", "llama3_tiny"])
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.seed = 3  # type: ignore[misc]


def test_help_names_every_option() -> None:
    text = option_help()
    for option in options().values():
        assert option.flag in text


def test_print_config_is_asked_for_and_not_printed() -> None:
    config: TrainingConfig = load_config(["--print-config"])
    assert config.launch.print_config
    assert "print_config" not in config.to_yaml()


def test_what_is_shown_of_it_holds_no_secret() -> None:
    config = load_config(["--scan-webhook", "https://host/secret", "--scan", "full"])
    assert "secret" in config.to_yaml() and "secret" not in config.to_show().to_yaml()
    assert config.to_show().to_dict()["scan"] == {**config.to_dict()["scan"], "scan_webhook": None}


def test_samples_are_divided_by_the_global_batch(tmp_path: Path) -> None:
    """Steps are rounded down and the schedule is not, as in Megatron-LM; the batch may be given before,
    after or in the file."""
    path = tmp_path / "run.yaml"
    path.write_text("train: {global_batch_size: 8, train_iters: 3}\n")
    words = ["--train-samples", "1007", "--lr-decay-samples", "800", "--lr-warmup-samples", "4"]
    config = load_config(words, yaml_path=path)
    train = config.train
    assert (train.train_iters, train.lr_decay_iters, train.lr_warmup_iters) == (125, 100, 0.5)
    assert load_config(words[:2], yaml_path=path).train.lr_decay_iters == 1007 / 8
    assert any("--train-samples 1007: --train-iters 125" in note for note in config.notes)
    assert load_config([*words, "--global-batch-size", "100"], yaml_path=path).train.train_iters == 10
    assert load_config([*words, "--train-iters", "7"], yaml_path=path).train.train_iters == 7


def test_throughput_is_logged_anyway() -> None:
    config = load_config(["--log-throughput"])
    assert any(note.startswith("--log-throughput: every report has the throughput") for note in config.notes)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"model:\n  num_layers: [1\ntrain: {}\n",
            "run.yaml:3 is no valid YAML at column 6: expected ',' or ']'",
        ),
        (b"model: {\n", "Correct the line 'model: {'"),
        (b"\x80\x00\x01binary", "run.yaml cannot be read: not UTF-8 (byte 0)"),
        (b"model: \x01\n", "run.yaml is no valid YAML: character 7"),
    ],
)
def test_what_is_no_yaml_is_said_on_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config([], yaml_path=path)
    assert says in str(caught.value) and "<unicode string>" not in str(caught.value)
    assert "\n" not in str(caught.value) and "Check its path" not in str(caught.value)


def test_a_warm_up_that_was_not_typed_fits_the_steps_that_were(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("train: {train_iters: 640, lr_warmup_iters: 50}\noptimizer: {lr: 1.0e-3}\n")

    def warmup(*flags: str, path: Path = file) -> tuple[int | None, bool]:
        config = load_config(flags, path)
        return config.train.lr_warmup_iters, any("lr_warmup_iters" in note for note in config.notes)

    assert warmup() == (50, False)
    assert warmup("--train-iters", "51") == (50, False)
    assert warmup("--train-iters", "50") == (50 * 50 // 640, True)
    assert warmup("--train-iters", "30") == (2, True)
    assert warmup("--train-iters", "1") == (0, True)
    assert warmup("--train-iters", "30", "--lr-decay-iters", "100") == (50, False)
    assert warmup("--train-iters", "30", "--lr-warmup-iters", "50") == (50, False), "typed: the check says it"
    assert warmup("--train-samples", "120", "--global-batch-size", "4") == (2, True)
    assert warmup("--lr-warmup-fraction", "0.1") == (None, True)
    alone = tmp_path / "b.yaml"
    alone.write_text("train: {train_iters: 30, lr_warmup_iters: 50}\n")
    assert warmup(path=alone) == (50, False), "a file that contradicts itself is refused"


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("examples/*/*_tiny.yaml")), ids=str)
def test_the_examples_take_any_number_of_steps(path: Path) -> None:
    for steps in (1, 30, 50, 5000):
        config = load_config(["--train-iters", str(steps)], path)
        assert not any("warmup" in line for line in problems(config, world_size=2, check_files=False))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--learning-rate", "use --lr"),
        ("--epochs", "use --train-iters N"),
        ("--dryrun", "--print-config"),
        ("--finetune", "--load DIR alone takes the weights"),
        ("--no-load-optim", "--load DIR alone takes the weights"),
    ],
)
def test_names_of_other_trainers_are_answered(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config([word, "3"])


def test_upstreams_texts_do_not_contradict_what_is_printed_beside_them() -> None:
    for option in options().values():
        if option.core:
            assert not re.search(r"(?i)defaults? (to|is) ", option.doc), option.name
            assert not re.search(r"(?i)must install|pip install|Requires the custom CUDA", option.doc), (
                option.name
            )
