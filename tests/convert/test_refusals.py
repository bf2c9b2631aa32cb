"""What is missing, unknown, damaged, of another model or unsafe is named, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import pickle
import random
import struct
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mt_megatron.convert.rank_files import writer as torch_writer
from mt_megatron.convert.torch_dist.metadata import read_metadata
from mt_megatron.errors import CheckpointError, ConfigError
from tests.convert import published
from tests.convert.published import differing, read
from tests.convert.recorded_run import Quiet, converted

EXPERT = "model.layers.2.block_sparse_moe.experts.1.w2.weight"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "mixtral"
    shape = published.draw("mixtral", random.Random(0))
    shape |= {"tie_word_embeddings": False, "num_hidden_layers": 4}
    published.write(folder, "mixtral", shape, seed=0)
    return folder


def changed(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A copy of a published folder with other tensors."""
    tensors = read(source)
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def test_a_missing_expert_is_named(mixtral: Path, tmp_path: Path) -> None:
    source = changed(mixtral, tmp_path / "less", lambda tensors: tensors.pop(EXPERT))
    with pytest.raises(CheckpointError, match=f"1 missing \\['{EXPERT}'\\], 0 unknown"):
        converted(source, tmp_path / "out", "torch_dist")
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".out*"))


def test_a_layout_that_does_not_divide_leaves_nothing(mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for place in ("out", "there"):
        with pytest.raises(ConfigError):
            converted(mixtral, tmp_path / place, "torch", "--tensor-model-parallel-size", "7")
    assert [each.name for each in tmp_path.rglob("*")] == ["there"]


def test_an_error_before_the_first_whole_file_leaves_nothing(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(temporary: Path, final: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        for form in ("torch_dist", "huggingface"):
            with pytest.raises(CheckpointError, match="No space left on device"):
                converted(mixtral, tmp_path / "out", form)
            assert list(tmp_path.iterdir()) == []


def test_unknown_tensors_are_all_named(mixtral: Path, tmp_path: Path) -> None:
    extra = {f"model.layers.{n}.self_attn.q_proj.lora_A": torch.zeros(1) for n in range(30)}
    source = changed(mixtral, tmp_path / "more", lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match="0 missing.*30 unknown") as raised:
        converted(source, tmp_path / "out", "torch_dist")
    assert all(name in str(raised.value) for name in extra)


def test_rotary_frequencies_of_old_files_are_left_out(mixtral: Path, tmp_path: Path) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    source = changed(mixtral, tmp_path / "old", lambda tensors: tensors.update(old))
    progress = Quiet()
    converted(source, tmp_path / "out", "torch_dist", progress=progress)
    assert any("1 tensors are left out" in line for line in progress.lines)
    converted(tmp_path / "out", tmp_path / "back", "huggingface")
    assert differing(read(tmp_path / "back"), read(mixtral)) == []


def test_another_shape_is_named(mixtral: Path, tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT] = tensors[EXPERT][:, 1:].contiguous()

    source = changed(mixtral, tmp_path / "cut", cut)
    with pytest.raises(CheckpointError, match="experts.1.w2.weight.*expected"):
        converted(source, tmp_path / "out", "torch_dist")


def test_types_that_one_tensor_cannot_hold_are_refused_or_made_one(mixtral: Path, tmp_path: Path) -> None:
    def one_expert(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT] = tensors[EXPERT].float()

    def one_layer(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.input_layernorm.weight"
        tensors[name] = tensors[name].float()

    expert = changed(mixtral, tmp_path / "expert", one_expert)
    layer = changed(mixtral, tmp_path / "layer", one_layer)
    for source, form in ((expert, "torch_dist"), (layer, "torch_dist"), (expert, "torch")):
        with pytest.raises(CheckpointError, match="bfloat16.*float32.*in one tensor.*--dtype"):
            converted(source, tmp_path / "out", form)
        converted(source, tmp_path / f"{source.name}_{form}", form, dtype="bf16")
        converted(tmp_path / f"{source.name}_{form}", tmp_path / f"{source.name}_{form}_back", "huggingface")
        # A number of bfloat16 is the same in float32, so nothing is lost.
        back = read(tmp_path / f"{source.name}_{form}_back")
        assert differing(back, read(mixtral)) == []
    # Layers are tensors of their own in rank files, and everything is in Hugging Face's form.
    converted(layer, tmp_path / "ranks", "torch")
    converted(tmp_path / "ranks", tmp_path / "ranks_back", "huggingface")
    assert differing(read(tmp_path / "ranks_back"), read(layer)) == []
    converted(expert, tmp_path / "again", "huggingface")
    assert differing(read(tmp_path / "again"), read(expert)) == []


def test_space_for_rank_files_is_taken_before_it_is_written_to(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of a file without space ends a process by a signal."""
    reserve, reserved = torch_writer._reserve, []

    def measured(path: Path, size: int) -> None:
        reserve(path, size)
        reserved.append((size, 512 * path.stat().st_blocks))

    monkeypatch.setattr(torch_writer, "_reserve", measured)
    converted(mixtral, tmp_path / "out", "torch")
    assert reserved and all(blocks >= size > 0 for size, blocks in reserved)

    def full(stream: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch_writer.os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="No space left on device.*lower --workers"):
        converted(mixtral, tmp_path / "full", "torch")


def test_a_tensor_in_two_files_and_bytes_behind_the_last_are_refused(mixtral: Path, tmp_path: Path) -> None:
    tensors = read(mixtral)
    name = "model.norm.weight"
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors")}
    for folder in ("twice", "longer"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_bytes((mixtral / "config.json").read_bytes())
    save_file(tensors, tmp_path / "twice" / "a.safetensors")
    save_file({name: tensors[name] + 1, "b": torch.zeros(1)}, tmp_path / "twice" / "b.safetensors")
    index["weight_map"]["b"] = "b.safetensors"
    (tmp_path / "twice" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{name} in b.safetensors and a.safetensors"):
        converted(tmp_path / "twice", tmp_path / "out", "torch_dist")
    save_file(tensors, tmp_path / "longer" / "model.safetensors", metadata={"format": "pt"})
    with open(tmp_path / "longer" / "model.safetensors", "ab") as stream:
        stream.write(bytes(8))
    with pytest.raises(CheckpointError, match="its tensors end at"):
        converted(tmp_path / "longer", tmp_path / "out", "torch_dist")


def test_swapped_heads_and_experts_are_noticed(mixtral: Path, tmp_path: Path) -> None:
    """A negative control of every comparison in this folder: what has moved is not equal."""
    other = EXPERT.replace("experts.1", "experts.0")

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT], tensors[other] = tensors[other].clone(), tensors[EXPERT].clone()
        query = tensors["model.layers.0.self_attn.q_proj.weight"]
        head = query.shape[0] // 4
        query[: 2 * head] = torch.cat([query[head : 2 * head], query[:head]])

    source = changed(mixtral, tmp_path / "swapped", swap)
    converted(source, tmp_path / "out", "torch_dist", "--tensor-model-parallel-size", "2")
    converted(tmp_path / "out", tmp_path / "back", "huggingface")
    assert differing(read(tmp_path / "back"), read(mixtral)) == sorted(
        [EXPERT, other, "model.layers.0.self_attn.q_proj.weight"]
    )


def test_a_copy_that_differs_is_refused(tmp_path: Path) -> None:
    shape = published.draw("deepseek_v3", random.Random(2)) | {"num_nextn_predict_layers": 1}
    shape |= {"tie_word_embeddings": False, "num_hidden_layers": 4}
    published.write(tmp_path / "source", "deepseek_v3", shape, seed=0)
    copy = "model.layers.4.shared_head.head.weight"
    assert copy in read(tmp_path / "source")

    def another(tensors: dict[str, torch.Tensor]) -> None:
        tensors[copy][3, 3] += 1

    source = changed(tmp_path / "source", tmp_path / "other", another)
    with pytest.raises(CheckpointError, match=f"{copy} is not equal to lm_head.weight"):
        converted(source, tmp_path / "out", "torch_dist")
    # Files without the repetitions are complete all the same.
    absent = changed(tmp_path / "source", tmp_path / "absent", lambda tensors: tensors.pop(copy))
    converted(absent, tmp_path / "fine", "torch_dist")
    converted(tmp_path / "fine", tmp_path / "back", "huggingface")
    assert differing(read(tmp_path / "back"), read(tmp_path / "source")) == []
    # And without the prediction layers, when that is asked for.
    converted(tmp_path / "source", tmp_path / "plain", "torch_dist", prediction=False)
    converted(tmp_path / "plain", tmp_path / "plain_back", "huggingface")
    left = {name for name in read(tmp_path / "source") if not name.startswith("model.layers.4.")}
    assert set(read(tmp_path / "plain_back")) == left


def test_a_configuration_of_another_model_is_compared(mixtral: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "model:\n  family: mixtral\n  num_layers: 3\n  hidden_size: 16\n  num_attention_heads: 4\n"
    )
    with pytest.raises(ConfigError, match="num_layers is 3; the source has"):
        converted(mixtral, tmp_path / "out", "torch_dist", "--config", str(config))


@pytest.mark.parametrize(
    "flags", ["--moe-router-pre-softmax", "--moe-router-topk-scaling-factor 2.0", "--window-size 4 0"]
)
def test_an_option_of_the_function_is_refused_and_has_no_published_form(
    flags: str, mixtral: Path, tmp_path: Path
) -> None:
    """``config.json`` of a Mixtral has no word for any of them."""
    name = flags.split()[0].removeprefix("--").replace("-", "_")
    for form in ("torch_dist", "torch"):
        with pytest.raises(ConfigError, match=f"- {name} is .*--allow-function-change {name}"):
            converted(mixtral, tmp_path / form, form, *flags.split())
    progress = Quiet()
    allowed = [*flags.split(), "--allow-function-change", name]
    converted(mixtral, tmp_path / "out", "torch_dist", *allowed, progress=progress)
    assert any(line.startswith("WARNING") and name in line for line in progress.lines)
    with pytest.raises(ConfigError, match=name):
        converted(tmp_path / "out", tmp_path / "back", "huggingface")


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("model_type", "gpt2", "model_type 'gpt2'"),
        ("hidden_act", "gelu", "hidden_act = 'gelu'"),
        ("sliding_window", 4096, "sliding_window = 4096"),
        ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}, "'longrope'"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "odd": 1}, "with odd"),
        ("num_hidden_layers", None, "num_hidden_layers"),
    ],
)
def test_what_a_model_here_cannot_do_is_named(
    mixtral: Path, tmp_path: Path, entry: str, value: Any, said: str
) -> None:
    source = changed(mixtral, tmp_path / "source", lambda tensors: None)
    document = json.loads((source / "config.json").read_text())
    document.pop("rope_parameters", None)
    if value is None:
        document.pop(entry)
    else:
        document[entry] = value
    (source / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=said):
        converted(source, tmp_path / "out", "torch_dist")


def test_damaged_files_are_named(mixtral: Path, tmp_path: Path) -> None:
    for index, content in enumerate(
        [b"", b"\x00" * 8, struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 4) + b"nope", b"short"]
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "config.json").write_bytes((mixtral / "config.json").read_bytes())
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            converted(folder, tmp_path / "out", "torch_dist")
    whole = (mixtral / "model.safetensors").read_bytes()
    (tmp_path / "0" / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match="would end at"):
        converted(tmp_path / "0", tmp_path / "out", "torch_dist")


def test_an_index_that_names_other_folders_is_refused(mixtral: Path, tmp_path: Path) -> None:
    source = changed(mixtral, tmp_path / "source", lambda tensors: None)
    index = {"weight_map": dict.fromkeys(read(source), "../mixtral/model.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="expected one beside it"):
        converted(source, tmp_path / "out", "torch_dist")
    index["weight_map"] = dict.fromkeys(read(source), "model-00001-of-00002.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lacks 1 files"):
        converted(source, tmp_path / "out", "torch_dist")


class Unsafe:
    """What unpickles to a call."""

    def __reduce__(self) -> Any:
        return print, ("a file ran code",)


def test_pickles_run_no_code(mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converted(mixtral, tmp_path / "out", "torch_dist")
    folder = next((tmp_path / "out").glob("iter_*"))
    original = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Unsafe()}))
    with pytest.raises(CheckpointError, match="asks for builtins.print"):
        read_metadata(folder)
    (folder / ".metadata").write_bytes(original)
    (folder / "mt_megatron.json").unlink()
    torch.save({"args": Unsafe()}, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"builtins.print|not read"):
        converted(folder, tmp_path / "back", "huggingface")

    converted(mixtral, tmp_path / "ranks", "torch")
    state = next((tmp_path / "ranks").rglob("model_optim_rng.pt"))
    torch.save({"args": Unsafe(), "model": {}}, state)
    with pytest.raises(CheckpointError, match=r"builtins.print|not read"):
        converted(tmp_path / "ranks", tmp_path / "back", "huggingface")
    assert "ran code" not in capsys.readouterr().out


class Member:
    """What pickles as an attribute of something, as members of enumerations do in Python 3.11.0 to 3.11.3."""

    def __init__(self, kind: Any, name: str) -> None:
        self.reduced = getattr, (kind, name)

    def __reduce__(self) -> Any:
        return self.reduced


def test_members_of_enumerations_may_be_named_and_nothing_else(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

    formats = next(
        type(one)
        for one in TensorProperties.__getstate__(TensorProperties())  # type: ignore[no-untyped-call]
        if isinstance(one, Enum)
    )
    monkeypatch.setattr(formats, "__reduce_ex__", lambda self, protocol: (getattr, (formats, self.name)))
    converted(mixtral, tmp_path / "out", "torch_dist")
    folder = next((tmp_path / "out").glob("iter_*"))
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert read_metadata(folder).tensors
    for kind, name in ((Metadata, "__init__"), (formats, "__init__"), (formats, "mro")):
        (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Member(kind, name)}))
        with pytest.raises(CheckpointError, match=f"asks for '{name}' of"):
            read_metadata(folder)


def test_ranks_that_are_missing_or_disagree_are_named(mixtral: Path, tmp_path: Path) -> None:
    sizes = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    converted(mixtral, tmp_path / "ranks", "torch", *sizes)
    vocabulary = json.loads((mixtral / "config.json").read_text())["vocab_size"]
    states = sorted((tmp_path / "ranks").rglob("model_optim_rng.pt"))
    assert [each.parent.name for each in states] == [
        "mp_rank_00_000",
        "mp_rank_00_001",
        "mp_rank_01_000",
        "mp_rank_01_001",
    ]
    with pytest.raises(ConfigError, match="--vocab-size"):
        converted(tmp_path / "ranks", tmp_path / "back", "huggingface", "--vocab-size", "none")
    held = torch.load(states[2], weights_only=False)
    held["model"]["decoder.layers.0.input_layernorm.weight"][0] += 1
    torch.save(held, states[2])
    with pytest.raises(CheckpointError, match="layers.0.input_layernorm.weight differs between"):
        converted(tmp_path / "ranks", tmp_path / "back", "huggingface", "--vocab-size", str(vocabulary))
    states[3].unlink()
    with pytest.raises(CheckpointError, match=r"found 3, missing .*\(1, 1, 0\)"):
        converted(tmp_path / "ranks", tmp_path / "back", "huggingface", "--vocab-size", str(vocabulary))


def test_a_layout_that_does_not_divide_is_refused(mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 5"):
        converted(mixtral, tmp_path / "out", "torch", "--tensor-model-parallel-size", "5")
    with pytest.raises(ConfigError):
        converted(mixtral, tmp_path / "out", "torch", "--pipeline-model-parallel-size", "64")


def test_a_destination_that_holds_something_is_left_alone(mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    for form in ("huggingface", "torch_dist", "torch"):
        with pytest.raises(ConfigError, match="not empty"):
            converted(mixtral, tmp_path / "out", form)
    with pytest.raises(ConfigError, match="source as well"):
        converted(mixtral, mixtral, "huggingface")
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["mine"]
