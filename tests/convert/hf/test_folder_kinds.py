"""Folders whose files say one fact differently: right or refused, and alike by every command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mt_megatron.checkpoint.files import read_manifest, resolve_checkpoint
from mt_megatron.cli.main import main
from mt_megatron.config.parse import load_config
from mt_megatron.convert.hf.weights import INDEX, SINGLE
from mt_megatron.convert.inputs import open_published
from mt_megatron.data.loader.tokenizer import END_OF_DOCUMENT, Tokenizer, train_tokenizer
from mt_megatron.data.prepare.sidecar import recorded_ends
from mt_megatron.errors import CheckpointError, MtMegatronError
from mt_megatron.training.init_from_hf import check_published, load_run
from tests.convert import published
from tests.convert.recorded_run import converted
from tests.launch import ROOT, run_command

VOCABULARY = 264
END = 0
TURN = VOCABULARY - 1
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = "model.layers.1.mlp.up_proj.weight"
_QUERY = "model.layers.0.self_attn.q_proj.weight"

Change = Callable[[Path], Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One way in which a folder may be."""

    change: Change
    said: str | None = None
    """Part of every command's error; None: every command takes it."""

    family: str = "llama"


def entry(**values: Any) -> Change:
    """Entries of ``config.json``; ``...`` removes one."""
    return lambda folder: edit(folder / "config.json", **values)


def edit(path: Path, **values: Any) -> None:
    document = json.loads(path.read_text()) if path.exists() else {}
    document |= values
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not ...}))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any], name: str = SINGLE) -> Change:
    def apply(folder: Path) -> None:
        found = load_file(folder / SINGLE)
        change(found)
        save_file(found, folder / name, metadata={"format": "pt"})

    return apply


def both(*changes: Change) -> Change:
    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply


def side(name: str, **values: Any) -> Change:
    return lambda folder: edit(folder / name, **values)


def sharded(folder: Path) -> None:
    """Two files and their index in the place of the single one."""
    found = load_file(folder / SINGLE)
    names = sorted(found)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: found[name] for name in part}, folder / file, metadata={"format": "pt"})
    places = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / SINGLE).unlink()


def moved_in_the_index(folder: Path) -> None:
    sharded(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][_NORM] = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}[
        index["weight_map"][_NORM]
    ]
    (folder / INDEX).write_text(json.dumps(index))


def other_index(folder: Path) -> None:
    """The single file stays beside an index of other shards, of other weights."""
    single = (folder / SINGLE).read_bytes()
    tensors(lambda found: found[_NORM].mul_(2))(folder)
    sharded(folder)
    (folder / SINGLE).write_bytes(single)


def one_more_layer(found: dict[str, torch.Tensor]) -> None:
    last = max(int(name.split(".")[2]) for name in found if name.startswith("model.layers."))
    for name in [each for each in found if each.startswith(f"model.layers.{last}.")]:
        found[name.replace(f".{last}.", f".{last + 1}.")] = found[name].clone()


def without_prediction(found: dict[str, torch.Tensor]) -> None:
    last = max(int(name.split(".")[2]) for name in found if name.startswith("model.layers."))
    for name in [each for each in found if each.startswith(f"model.layers.{last}.")]:
        del found[name]


def as_e8m0(folder: Path) -> None:
    """A power of two for every block, as one byte each."""
    from mt_megatron.convert.hf.fp8_blocks import quantise

    found = load_file(folder / SINGLE)
    for name in [each for each in found if each.endswith("_proj.weight")]:
        found[name], scale = quantise(found[name], power_of_2=True)
        found[name + "_scale_inv"] = scale.to(torch.float8_e8m0fnu)
    save_file(found, folder / SINGLE, metadata={"format": "pt"})
    block = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    edit(folder / "config.json", quantization_config=block)


def of_another_dtype(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header[_NORM]["dtype"] = "F4"
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def as_gpt2(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))
    as_pickle(folder)


def as_pickle(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def chat(folder: Path) -> None:
    """A turn's end of its own, beside the end of a document, which ``tokenizer.json`` alone knows as such."""
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"].append({**document["added_tokens"][0], "id": TURN, "content": "<|im_end|>"})
    document["model"]["merges"].pop()
    document["model"]["vocab"] = {
        token: index for token, index in document["model"]["vocab"].items() if index != TURN
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    side("tokenizer_config.json", eos_token="<|im_end|>")(folder)
    entry(eos_token_id=TURN)(folder)
    side("generation_config.json", eos_token_id=[TURN, END])(folder)


KINDS: dict[str, Kind] = {
    "plain": Kind(change=lambda folder: None),
    "sharded": Kind(change=sharded),
    "not causal": Kind(change=entry(is_causal=False), said="is_causal = false; expected true"),
    "not causal, null": Kind(change=entry(is_causal=None), said="is_causal = null; expected true"),
    "causal, said": Kind(change=entry(is_causal=True)),
    "field of the class": Kind(change=entry(sliding_window=4), said="sliding_window = 4; expected null"),
    "field of the class, default": Kind(change=entry(sliding_window=None, attention_chunk_size=None)),
    "layers apart": Kind(change=entry(per_layer_config={"0": {"head_dim": 4}}), said="per_layer_config"),
    "field of no class": Kind(change=entry(trained_by="me", unsloth_fixed=True)),
    "noise of the router": Kind(
        change=entry(router_jitter_noise=0.1), said="router_jitter_noise = 0.1", family="mixtral"
    ),
    "two counts of experts": Kind(
        change=entry(num_experts=5), said="num_experts = 5, two names", family="mixtral"
    ),
    "single file and index of others": Kind(
        change=other_index, said=f"has {SINGLE}, which transformers reads"
    ),
    "single file and its own index": Kind(
        change=lambda folder: (folder / INDEX).write_text(
            json.dumps({"weight_map": dict.fromkeys(load_file(folder / SINGLE), SINGLE)})
        )
    ),
    "named file": Kind(change=entry(transformers_weights="other.safetensors"), said="transformers_weights"),
    "named file, the same": Kind(change=entry(transformers_weights=SINGLE)),
    "missing shard": Kind(
        change=both(sharded, lambda folder: (folder / "b.safetensors").unlink()),
        said="lacks 1 files that its index names: ['b.safetensors']",
    ),
    "tensor in another shard": Kind(change=moved_in_the_index, said="in another file"),
    "adapter": Kind(change=side("adapter_config.json", r=8), said="adapter_config.json"),
    "one more layer": Kind(change=tensors(one_more_layer), said="9 unknown"),
    "fewer layers": Kind(change=entry(num_hidden_layers=3), said="9 unknown"),
    "missing layer": Kind(change=entry(num_hidden_layers=5), said="9 missing"),
    "without prediction layers": Kind(
        change=tensors(without_prediction), said="--no-mtp", family="deepseek_v3"
    ),
    "prediction layers unsaid": Kind(
        change=entry(num_nextn_predict_layers=0), said="--no-mtp", family="deepseek_v3"
    ),
    "prediction layers": Kind(change=lambda folder: None, family="deepseek_v3"),
    "ends without the tokenizer's": Kind(
        change=entry(eos_token_id=[1, 2]), said="config.json has [1, 2]; generation"
    ),
    "ends with the tokenizer's": Kind(
        change=both(entry(eos_token_id=[1, END]), side("generation_config.json", eos_token_id=[1, END]))
    ),
    "ends of config.json alone": Kind(
        change=entry(eos_token_id=[1, END]), said="config.json has [1, 0]; generation"
    ),
    "end beyond the vocabulary": Kind(change=entry(eos_token_id=[END, 999]), said="999"),
    "end of the wrong type": Kind(change=entry(eos_token_id="</s>"), said="eos_token_id = '</s>'"),
    "other end in the generation settings": Kind(
        change=side("generation_config.json", eos_token_id=5),
        said="generation_config.json has [5]",
    ),
    "more ends in the generation settings": Kind(
        change=side("generation_config.json", eos_token_id=[5, END])
    ),
    "end that the tokenizer lacks": Kind(
        change=side("tokenizer_config.json", eos_token="<|im_end|>"),
        said="tokenizer_config.json has ['<|im_end|>']",
    ),
    "two ends of the tokenizer": Kind(
        change=side("special_tokens_map.json", eos_token={"content": "a"}), said="special_tokens_map.json has"
    ),
    "two ids of a token": Kind(
        change=side("tokenizer_config.json", added_tokens_decoder={"7": {"content": END_OF_DOCUMENT}}),
        said="other ids than tokenizer.json",
    ),
    "larger tokenizer": Kind(
        change=both(
            entry(vocab_size=200),
            tensors(lambda found: found.update({n: found[n][:200].clone() for n in (_EMBEDDING, _HEAD)})),
        ),
        said="ids up to 263, and config.json has vocab_size = 200",
    ),
    "other vocabulary than the embedding": Kind(change=entry(vocab_size=300), said="expected (300, "),
    "chat": Kind(change=chat),
    "other first tokens": Kind(change=side("generation_config.json", bos_token_id=7)),
    "GPT-2": Kind(change=as_gpt2, said="model_type 'gpt2'"),
    "pickle": Kind(change=as_pickle, said="pytorch_model.bin are pickles"),
    "scales of one byte": Kind(change=as_e8m0),
    "unknown dtype": Kind(change=of_another_dtype, said=f"holds {_NORM} as F4"),
    "cut short": Kind(
        change=lambda folder: (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-10]),
        said="is not a whole safetensors file",
    ),
    "own width of heads": Kind(change=lambda folder: None, family="qwen2"),
    "tied, the same": Kind(
        change=both(
            entry(tie_word_embeddings=True),
            tensors(lambda found: found.update({_HEAD: found[_EMBEDDING].clone()})),
        )
    ),
    "tied, another": Kind(
        change=entry(tie_word_embeddings=True), said=f"{_HEAD} is not equal to {_EMBEDDING}"
    ),
    "dtypes of one product": Kind(
        change=tensors(lambda found: found.update({_QUERY: found[_QUERY].float()})), said="dtypes differ"
    ),
    "FP8 unsaid": Kind(change=both(as_e8m0, entry(quantization_config=...)), said="no quantization_config"),
    "FP8 said, bfloat16 there": Kind(
        change=entry(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        said="no FP8 weights",
    ),
    "quantised otherwise": Kind(
        change=entry(quantization_config={"quant_method": "gptq", "bits": 4}), said="'gptq'"
    ),
    "groups that cannot be": Kind(change=entry(n_group=3), said="cannot be built", family="deepseek_v3"),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each family, with a tokenizer that its settings agree with; ``text`` is a corpus."""
    place = tmp_path_factory.mktemp("kinds")
    (place / "text").mkdir()
    for index in range(40):
        (place / "text" / f"{index}.txt").write_text(f"the cat number {index} sat on the mat of another cat")
    for family in ("llama", "mixtral", "deepseek_v3", "qwen2"):
        shape = published.draw(family, random.Random(3)) | {"vocab_size": VOCABULARY, "num_hidden_layers": 4}
        shape |= {"tie_word_embeddings": False, "bos_token_id": END, "eos_token_id": END}
        if family == "deepseek_v3":
            shape |= {"num_nextn_predict_layers": 1}
        if family == "qwen2":
            shape |= {"head_dim": 16}
        published.write(place / family, family, shape, seed=1)
        words = ["the cat sat on the mat and looked at another cat " * 20]
        train_tokenizer(words, vocab_size=VOCABULARY, output=place / family / "tokenizer.json")
        edit(place / family / "tokenizer_config.json", eos_token=END_OF_DOCUMENT)
    return place


def outcomes(folder: Path, text: Path, scratch: Path) -> dict[str, str]:
    """What each command says of a folder; nothing where it takes it."""
    commands = {
        "convert": ["convert", "--from-hf", str(folder), "--to-megatron", str(scratch / "megatron")],
        "to-config": ["convert", "--from-hf", str(folder), "--to-config", str(scratch / "model.yaml")],
        "plan": ["plan", "--init-from-hf", str(folder), "--json"],
        "prepare": [
            "prepare",
            "--tokenizer",
            str(folder),
            "--corpus",
            str(text),
            "--output",
            str(scratch / "d"),
        ],
    }
    found = {}
    for name, command in commands.items():
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = main(command)
            except MtMegatronError as error:
                code = 1
                said.write(str(error))
        found[name] = said.getvalue() if code else ""
    try:
        check_published(load_run(["--init-from-hf", str(folder), "--seq-length", "16"]))
        found["init"] = ""
    except MtMegatronError as error:
        found["init"] = str(error)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_every_command_takes_or_refuses_a_folder_alike(name: str, sources: Path, tmp_path: Path) -> None:
    kind = KINDS[name]
    shutil.copytree(sources / kind.family, tmp_path / "folder")
    kind.change(tmp_path / "folder")
    found = outcomes(tmp_path / "folder", sources / "text", tmp_path)
    if kind.said is None:
        assert set(found.values()) == {""}, found
    else:
        assert all(kind.said in text for text in found.values()), found


def test_a_model_without_prediction_layers_is_taken_when_asked(sources: Path, tmp_path: Path) -> None:
    """A DeepSeek-V3 as transformers saves it: config.json names a layer that no file has."""
    shutil.copytree(sources / "deepseek_v3", tmp_path / "folder")
    tensors(without_prediction)(tmp_path / "folder")
    folder, out = str(tmp_path / "folder"), str(tmp_path / "out")
    found = outcomes(tmp_path / "folder", sources / "text", tmp_path)
    assert "lacks 4" in found["convert"] and found["convert"].count("model.layers.4.") == 5
    assert main(["convert", "--from-hf", folder, "--to-megatron", out, "--no-mtp"]) == 0
    run = load_run(["--init-from-hf", folder, "--seq-length", "16", "--mtp-num-layers", "none"])
    assert check_published(run) == [] and run.model.mtp_num_layers is None
    assert main(["plan", "--init-from-hf", folder, "--mtp-num-layers", "none"]) == 0


def test_a_tokenizers_folder_needs_no_weights(sources: Path, tmp_path: Path) -> None:
    """Of a model that is known, whose files agree."""
    shutil.copytree(sources / "llama", tmp_path / "folder")
    (tmp_path / "folder" / SINGLE).unlink()
    found = outcomes(tmp_path / "folder", sources / "text", tmp_path)
    assert found["prepare"] == "" and "has no safetensors files" in found["plan"]
    entry(eos_token_id=5)(tmp_path / "folder")
    found = outcomes(tmp_path / "folder", sources / "text", tmp_path)
    assert "the files disagree" in found["prepare"] and f"give --tokenizer {tmp_path}" in found["prepare"]


def test_the_model_is_the_folders_where_none_is_named(sources: Path) -> None:
    folder = sources / "qwen2"
    run = load_run(["--init-from-hf", str(folder), "--attention-dropout", "0.1"])
    document = json.loads((folder / "config.json").read_text())
    assert run.model.num_layers == document["num_hidden_layers"] and run.model.kv_channels == 16
    assert run.model.vocab_size == VOCABULARY and run.model.attention_dropout == 0.1
    other = load_run(["--init-from-hf", str(folder), "--num-layers", "3"])
    with pytest.raises(CheckpointError, match="num_layers is 3; config.json has 4"):
        check_published(other)
    named = load_run(["--init-from-hf", str(folder), "--model", "llama3_8b"])
    assert named.model.hidden_size == 4096
    with pytest.raises(CheckpointError, match="is no folder here"):
        load_run(["--init-from-hf", str(folder / "nowhere")])


def test_a_pretrained_model_trains_without_a_preset(sources: Path, tmp_path: Path) -> None:
    command = ["pretrain", "--init-from-hf", str(sources / "llama"), "--seq-length", "16", "--lr", "1e-3"]
    command += ["--train-iters", "1", "--backend", "cpu", "--tokenizer-model", str(sources / "llama")]
    data = ["prepare", "--tokenizer", str(sources / "llama"), "--corpus", str(sources / "text")]
    assert main([*data, "--output", str(tmp_path / "data")]) == 0
    command += ["--train-data-path", str(tmp_path / "data" / "train"), "--save", str(tmp_path / "run")]
    done = run_command(
        [sys.executable, "-m", "mt_megatron.cli", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0 and "starting from the published weights" in done.stdout + done.stderr
    said = read_manifest(resolve_checkpoint(tmp_path / "run"))["tokenizer"]
    assert said == {"eod": END, "eod_token": END_OF_DOCUMENT, "data_ends": [END]}


def test_a_chat_folder_and_data_of_its_tokenizer_alone(sources: Path, tmp_path: Path) -> None:
    """The trained model stops at the end of a document, and at the end of a turn."""
    shutil.copytree(sources / "llama", tmp_path / "folder")
    chat(tmp_path / "folder")
    file = tmp_path / "folder" / "tokenizer.json"
    data = ["prepare", "--tokenizer", str(file), "--corpus", str(sources / "text")]
    assert main([*data, "--output", str(tmp_path / "data")]) == 0
    options = ["--train-data-path", str(tmp_path / "data" / "train"), "--tokenizer-model"]
    assert recorded_ends(load_config([*options, str(tmp_path / "folder")])) == [END]
    assert Tokenizer(tmp_path / "folder").eod == TURN


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v3"])
def test_the_written_configuration_is_taken(family: str, sources: Path, tmp_path: Path) -> None:
    folder, file = str(sources / family), str(tmp_path / "model.yaml")
    assert main(["convert", "--from-hf", folder, "--to-config", file]) == 0
    again = ["convert", "--from-hf", folder, "--to-megatron", str(tmp_path / "out"), "--config", file]
    assert main(again) == 0
    run = load_run(["--config", file, "--init-from-hf", folder, "--seq-length", "16"])
    assert check_published(run) == []


def test_scales_of_one_byte_are_powers_of_two(sources: Path, tmp_path: Path) -> None:
    shutil.copytree(sources / "llama", tmp_path / "folder")
    before = published.read(tmp_path / "folder")[_QUERY].float()
    as_e8m0(tmp_path / "folder")
    assert published.read(tmp_path / "folder")[_QUERY + "_scale_inv"].dtype == torch.float8_e8m0fnu
    found = open_published(tmp_path / "folder", prediction=True).published
    assert found is not None
    # e4m3 has three bits of mantissa, so a value moves by 2**-4 of itself; a wrong scale doubles it.
    assert torch.allclose(found.read(_QUERY).float(), before, rtol=2**-3, atol=2**-8)


def test_heads_of_another_width_come_back(sources: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = sources / "qwen2"
    converted(source, tmp_path / "megatron", "torch_dist")
    converted(tmp_path / "megatron", tmp_path / "back", "huggingface")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["head_dim"] == 16
    assert published.differing(published.read(tmp_path / "back"), published.read(source)) == []
    logits = [
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)(torch.arange(12)[None]).logits
        for each in (source, tmp_path / "back")
    ]
    assert torch.equal(*logits)
