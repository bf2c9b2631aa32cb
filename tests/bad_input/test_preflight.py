"""Memory of the device and checkpoints of another model, before the process joins any other."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import tokenizers

from mt_megatron.backends.cpu import CpuBackend
from mt_megatron.checkpoint.files import write_manifest
from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.data.loader.tokenizer import load_tokenizer
from mt_megatron.data.prepare.indexed_files import IndexedWriter
from mt_megatron.errors import CheckpointError, ConfigError
from mt_megatron.planning.memory_estimate import memory_of
from mt_megatron.training.preflight import (
    check_batch_size,
    check_checkpoint,
    check_document_end,
    device_memory,
    memory_notes,
    origin,
    router_notes,
)
from mt_megatron.training.validate import problems

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 4352 --seq-length 128 "
    "--position-embedding-type rope --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer --mock-data"
)


def config(*flags: str) -> TrainingConfig:
    found = load_config([*FLAGS.split(), *flags])
    assert problems(found, world_size=1) == []
    return found


class Device(CpuBackend):
    """A device of a given size."""

    device_type = "musa"

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.size = size

    def device_name(self, index: int | None = None) -> str:
        return "card"

    def total_memory(self) -> int | None:
        return self.size


EXPERTS = (
    *("--family", "deepseek", "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--moe-layer-freq", "[0,1]", "--disable-bias-linear", "--bf16"),
)


def test_experts_that_do_not_fit_are_to_be_spread() -> None:
    worst = memory_of(config(*EXPERTS), 1).worst
    assert memory_notes(config(*EXPERTS), Device(worst.total), 1) == []
    with pytest.raises(ConfigError, match="Raise --expert-model-parallel-size, --tensor-model"):
        memory_notes(config(*EXPERTS), Device(worst.weights), 1)


def test_state_beyond_the_device_is_an_error_and_activations_a_warning() -> None:
    worst = memory_of(config(), 1).worst
    state = worst.weights + worst.gradients + worst.optimizer
    assert memory_notes(config(), Device(worst.total), 1) == []
    (warning,) = memory_notes(config(), Device(worst.total - 1), 1)
    assert warning.startswith("WARNING: the estimated peak is") and "--micro-batch-size" in warning
    assert memory_notes(config(), Device(state), 1), "state alone fits to the byte"
    with pytest.raises(ConfigError) as caught:
        memory_notes(config(), Device(state - 1), 1)
    text = str(caught.value)
    assert "weights, gradients and optimizer state need" in text and "GiB of card" in text
    assert "--tensor-model-parallel-size" in text and "--no-check-memory" in text
    with pytest.raises(
        ConfigError, match=r"plan --config FILE --suggest --world-size 1 --device-memory \d+GiB"
    ):
        memory_notes(config(), Device(state - 1), 1)
    (going_on,) = memory_notes(config("--no-check-memory"), Device(state - 1), 1)
    assert going_on.startswith("WARNING: weights, gradients and optimizer state need")


def test_a_published_model_does_not_fit_one_card_and_does_spread_over_many() -> None:
    big = "--model llama3_70b --bf16 --tokenizer-type NullTokenizer --mock-data --train-iters 10 --lr 1e-4"
    card = Device(80 * 2**30)
    with pytest.raises(ConfigError, match="need 1,18. GiB"):
        memory_notes(load_config(big.split()), card, 1)
    spread = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --use-distributed-optimizer"
    for line in memory_notes(load_config([*big.split(), *spread.split()]), card, 128):
        assert line.startswith("WARNING: the estimated peak")


@pytest.mark.parametrize(
    ("flag", "package"), [("--tensorboard-dir", "tensorboard"), ("--wandb-project", "wandb")]
)
def test_a_missing_package_is_named_with_its_extra(
    flag: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    (line,) = problems(load_config([*FLAGS.split(), flag, "x"]), world_size=1)
    assert f"the package {package} is not installed" in line
    assert f'pip install "mt_megatron[{package}]"' in line and f"leave {flag} out" in line


def test_a_device_of_unknown_size_is_not_judged() -> None:
    assert memory_notes(config(), Device(None), 1) == []


def test_local_processes_share_the_hosts_memory() -> None:
    whole = device_memory(CpuBackend(), {})
    assert whole is not None
    assert device_memory(CpuBackend(), {"LOCAL_WORLD_SIZE": "4"}) == whole // 4
    assert device_memory(Device(7), {"LOCAL_WORLD_SIZE": "4"}) == 7, "a device is one process's own"


def saved(folder: Path, **changed: object) -> Path:
    """A checkpoint as far as its manifest, of the model of ``config()``."""
    document = {
        "format": 1,
        "config": config().to_dict(),
        "layout": {},
        "progress": {"iteration": 5},
        "patches": {},
    }
    document["config"]["model"].update(changed)  # type: ignore[index]
    iteration = folder / "iter_0000005"
    iteration.mkdir(parents=True)
    (iteration / "mt_megatron.json").write_text(json.dumps(document))
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


def test_a_mixture_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    document = config(*EXPERTS).to_dict()["model"]
    check_checkpoint(config(*EXPERTS, "--save", str(saved(tmp_path / "run", **document))))


@pytest.mark.parametrize("option", ["--save", "--load", "--resume"])
def test_the_same_model_goes_on(option: str, tmp_path: Path) -> None:
    check_checkpoint(config(option, str(saved(tmp_path / "run"))))
    # A size that is padded alike is no other model.
    check_checkpoint(config(option, str(saved(tmp_path / "padded", vocab_size=4300))))


@pytest.mark.parametrize("option", ["--save", "--load", "--resume"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 4),
        ("hidden_size", 32),
        ("ffn_hidden_size", 100),
        ("num_attention_heads", 8),
        ("num_query_groups", 2),
        ("kv_channels", 8),
        ("vocab_size", 50_000),
        ("gated_linear_unit", True),
        ("add_bias_linear", False),
        ("normalization", "RMSNorm"),
        ("untie_embeddings_and_output_weights", True),
        ("position_embedding_type", "learned_absolute"),
        ("num_moe_experts", 4),
        ("multi_latent_attention", True),
        ("mtp_num_layers", 1),
    ],
)
def test_another_model_is_named_by_what_differs(
    option: str, name: str, value: object, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "run", **{name: value})
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(config(option, str(folder)))
    text = str(caught.value)
    assert re.search(rf"- {name} is \w+; the checkpoint has {value}, and weights of other", text)
    assert f"{name.replace('_', '-')} {value}." in text or f"{name.replace('_', '-')}." in text
    assert str(folder) in text and "name another --save" in text
    assert text.count("the checkpoint has") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_ffn_hidden_size", 48),
        ("moe_layer_freq", [1, 1]),
        ("moe_shared_expert_intermediate_size", 64),
        ("moe_router_topk", 1),
    ],
)
def test_sizes_of_experts_count_where_there_are_experts(name: str, value: object, tmp_path: Path) -> None:
    mixture = {**config(*EXPERTS).to_dict()["model"], name: value}
    with pytest.raises(CheckpointError, match=f"- {name} is"):
        check_checkpoint(config(*EXPERTS, "--save", str(saved(tmp_path / "run", **mixture))))
    check_checkpoint(config("--save", str(saved(tmp_path / "dense", **{name: value}))))


@pytest.mark.parametrize("option", ["--save", "--load", "--resume"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rotary_base", 20000.0),
        ("rope_type", "llama3"),
        ("layernorm_epsilon", 1e-6),
        ("layernorm_zero_centered_gamma", True),
        ("activation_func", "silu"),
        ("window_size", [4, 0]),
    ],
)
def test_another_function_of_the_same_shapes_is_refused_unless_allowed(
    option: str, name: str, value: object, tmp_path: Path
) -> None:
    start = [option, str(saved(tmp_path / "run", **{name: value}))]
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(config(*start))
    text = str(caught.value)
    assert f"- {name} is" in text and f"give --allow-function-change {name}" in text
    assert text.count("the checkpoint has") == 1
    [note] = check_checkpoint(config(*start, "--allow-function-change", name))
    assert note.startswith("WARNING: the model computes something else") and name in note


def test_what_training_does_differently_is_a_note_and_layout_is_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", attention_dropout=0.3, recompute_granularity="selective", preset="x")
    [note] = check_checkpoint(config("--save", str(folder), "--micro-batch-size", "4"))
    assert note.endswith("attention_dropout 0.3 -> 0.1") and str(folder) in note
    # What a conversion wrote has defaults there, which are nobody's choice.
    manifest = folder / "iter_0000005" / "mt_megatron.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "weights_only": True}))
    assert check_checkpoint(config("--load", str(folder))) == []


def test_options_that_an_older_checkpoint_does_not_name_had_their_defaults(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run")
    manifest = folder / "iter_0000005" / "mt_megatron.json"
    document = json.loads(manifest.read_text())
    del document["config"]["model"]["window_size"], document["config"]["model"]["rotary_base"]
    manifest.write_text(json.dumps(document))
    assert check_checkpoint(config("--save", str(folder))) == []
    with pytest.raises(CheckpointError, match=r"window_size is \[4, 0\]; the checkpoint has None"):
        check_checkpoint(config("--save", str(folder), "--window-size", "4", "0"))


def test_the_override_names_options_of_the_function_alone() -> None:
    given = load_config([*FLAGS.split(), "--allow-function-change", "rotary_base", "hidden_size", "rotary"])
    found = [line for line in problems(given, world_size=1) if "allow_function_change" in line]
    assert len(found) == 2
    assert (
        "hidden_size, which is an option of the kind shape" in found[0]
        and "rotary, which is no option" in found[1]
    )


def test_a_name_of_the_hub_is_told_from_a_folder() -> None:
    def said(folder: str) -> str:
        [line] = problems(load_config([*FLAGS.split(), "--init-from-hf", folder]), world_size=1)
        return line

    assert "`hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`" in said("Qwen/Qwen3-0.6B")
    for folder in ("nowhere", "/models/x", "./a/b", "models/a/b", "tests/nowhere"):
        assert said(folder).endswith("Correct --init-from-hf.")


def test_a_router_without_a_gradient_is_warned_of() -> None:
    [warning] = router_notes(config(*EXPERTS, "--moe-router-topk", "1"))
    assert "--moe-router-pre-softmax" in warning
    assert router_notes(config(*EXPERTS, "--moe-router-topk", "1", "--moe-router-pre-softmax")) == []
    assert router_notes(config(*EXPERTS)) == [] == router_notes(config())


def test_resume_never_looks_at_nothing(tmp_path: Path) -> None:
    check_checkpoint(config("--save", str(saved(tmp_path / "run", num_layers=4)), "--resume", "never"))


def test_a_manifest_without_a_configuration_is_left_to_the_loader(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run")
    manifest = folder / "iter_0000005" / "mt_megatron.json"
    document = json.loads(manifest.read_text())
    document["config"] = None
    manifest.write_text(json.dumps(document))
    check_checkpoint(config("--save", str(folder)))


def test_another_tokenizer_or_other_data_than_the_checkpoints_is_refused_unless_allowed(
    tmp_path: Path,
) -> None:
    """Vocabularies of equal size fit the weights, whose rows then mean other tokens."""
    flags, made = {}, {}
    for name, text in (("first", "a b c"), ("second", "x y z")):
        folder = tmp_path / name
        folder.mkdir()
        words = {word: index for index, word in enumerate(["<|endoftext|>", *text.split()])}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(words)).save(str(folder / "tokenizer.json"))
        writer = IndexedWriter(folder / "train", 4)
        writer.add([1, 2, 3, 0] * (100 if name == "first" else 101))
        writer.finish()
        flags[name] = [*("--tokenizer-type", "HuggingFaceTokenizer", "--no-mock-data")]
        flags[name] += [*("--tokenizer-model", str(folder / "tokenizer.json"))]
        flags[name] += [*("--train-data-path", str(folder / "train"))]
        made[name] = origin(config(*flags[name]), load_tokenizer(config(*flags[name]).data))
    run = saved(tmp_path / "run")
    manifest = run / "iter_0000005" / "mt_megatron.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "origin": made["first"]}))
    assert not any("digest" in line for line in check_checkpoint(config("--save", str(run), *flags["first"])))
    for start, wanted in (("--save", ["tokenizer", "data"]), ("--load", ["tokenizer"])):
        other = [start, str(run), *flags["second"]]
        with pytest.raises(CheckpointError) as caught:
            check_checkpoint(config(*other))
        text = str(caught.value)
        assert f"trained with other {' and '.join(wanted)}:" in text
        for name in wanted:
            assert all(made[each][name][:16] in text for each in made)
        allowed = ["--allow-function-change", "tokenizer_model", "train_data_path"]
        assert text.endswith(f"{' '.join(allowed[: 1 + len(wanted)])}.")
        warned = [line for line in check_checkpoint(config(*other, *allowed)) if "digest" in line]
        assert [line.startswith(f"WARNING: the {name} of") for line, name in zip(warned, wanted, strict=True)]
    # Files that were moved are the same data; a checkpoint of an earlier version has no digests.
    (tmp_path / "first").rename(tmp_path / "moved")
    moved = [each.replace(str(tmp_path / "first"), str(tmp_path / "moved")) for each in flags["first"]]
    assert not any("digest" in line for line in check_checkpoint(config("--save", str(run), *moved)))
    old = saved(tmp_path / "old")
    assert not any(
        "digest" in line for line in check_checkpoint(config("--save", str(old), *flags["second"]))
    )


def test_another_end_of_documents_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"tokenizer": {"eod": 7, "eod_token": None}})
    check_document_end(tmp_path, config(), 8)
    looking = config("--reset-position-ids", "--eod-mask-loss")
    check_document_end(tmp_path, looking, 7)
    with pytest.raises(CheckpointError, match="token 7, .* with 8; .* --reset-position-ids and --eod-mask"):
        check_document_end(tmp_path, looking, 8)
    write_manifest(tmp_path, {"iteration": 1})
    check_document_end(tmp_path, looking, 8)


def test_another_number_of_processes_changes_no_batch_size_in_silence(tmp_path: Path) -> None:
    """By default the batch grows with the processes, and the schedule counts its samples."""
    layout = {"world_size": 8, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "vpp": None, "v": False}

    def manifest(name: str, **given: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write_manifest(folder, {"config": config().to_dict(), "layout": layout, **given})
        return folder

    folder = manifest("default")
    check_batch_size(folder, config(), 8)
    message = (
        "trained with 8 sequences per step, and this run takes 4 by default.*--global-batch-size 8 to go"
    )
    with pytest.raises(CheckpointError, match=message):
        check_batch_size(folder, config(), 4)
    for size in ("8", "4"):
        check_batch_size(folder, config("--global-batch-size", size), 4)
    check_batch_size(manifest("given", config=config("--global-batch-size", "4").to_dict()), config(), 4)
    check_batch_size(manifest("converted", weights_only=True), config(), 4)
