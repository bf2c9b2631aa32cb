"""An exported model knows the token that ends a document, so that generation stops there."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mt_megatron.checkpoint.files import read_manifest, write_manifest
from mt_megatron.data.loader.tokenizer import END_OF_DOCUMENT, Tokenizer, train_tokenizer
from mt_megatron.errors import CheckpointError
from tests.convert import published
from tests.convert.published import read
from tests.convert.recorded_run import Quiet, converted


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words = ["the cat sat on the mat and looked at another cat " * 20]
    return train_tokenizer(words, vocab_size=264, output=path)


def run_of(folder: Path, tokenizer: Tokenizer, said: dict[str, Any] | None = None) -> Path:
    """A checkpoint of a run with ``tokenizer``, whose model says the end of a document whatever it reads."""
    shape = published.draw("llama", random.Random(3))
    shape |= {"vocab_size": tokenizer.vocab_size, "tie_word_embeddings": False}
    published.write(folder / "source", "llama", shape, seed=1, dtype=torch.float32)
    tensors = read(folder / "source")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name or "lm_head" in name:
            tensor.zero_()
        elif "embed" in name or name == "model.norm.weight":
            tensor.fill_(1.0)
    tensors["lm_head.weight"][tokenizer.eod] = 1.0
    save_file(tensors, folder / "source" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "source" / "config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config.pop(name, None)
    (folder / "source" / "config.json").write_text(json.dumps(config))
    (folder / "source" / "generation_config.json").unlink(missing_ok=True)
    converted(folder / "source", folder / "run", "torch_dist")
    checkpoint = folder / "run" / "iter_0000001"
    for path in (checkpoint / "huggingface").glob("*"):
        path.unlink()
    document = read_manifest(checkpoint)
    document["files"] = {name: each for name, each in document["files"].items() if "huggingface" not in name}
    document["config"]["data"] |= {"tokenizer_model": str(tokenizer.path)}
    write_manifest(checkpoint, {**document, **(said or {})})
    return folder / "run"


def generated(folder: Path) -> int:
    """How many tokens follow a prompt of three, of at most 20."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    return int(found.shape[1]) - 3


@pytest.mark.parametrize("stored", [True, False], ids=["in the manifest", "of the tokenizer's file"])
def test_generation_stops(stored: bool, tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    said = {"tokenizer": {"eod": tokenizer.eod, "eod_token": tokenizer.eod_token}}
    # By another checkpoint: it is handed on.
    converted(run_of(tmp_path, tokenizer, said if stored else None), tmp_path / "again", "torch_dist")
    converted(tmp_path / "again", tmp_path / "out", "huggingface")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token == END_OF_DOCUMENT and theirs.eos_token_id == tokenizer.eod
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == tokenizer.eod
    assert generated(tmp_path / "out") == 1
    # A negative control: without the settings it goes on.
    for name in ("config.json", "generation_config.json"):
        document = json.loads((tmp_path / "out" / name).read_text())
        del document["eos_token_id"]
        (tmp_path / "out" / name).write_text(json.dumps(document))
    assert generated(tmp_path / "out") == 20


def test_generated_samples_have_no_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = run_of(tmp_path, tokenizer)
    document = read_manifest(folder / "iter_0000001")
    document["config"]["data"] |= {"mock_data": True, "tokenizer_model": None}
    write_manifest(folder / "iter_0000001", document)
    converted(folder, tmp_path / "out", "huggingface")
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("eos_token_id") is None


def beside(folder: Path, tokenizer: Tokenizer, **settings: Any) -> Path:
    """A folder for ``--hf-files`` with ``tokenizer``, whose settings name another end."""
    (folder / "files").mkdir()
    (folder / "files" / "tokenizer.json").write_bytes(tokenizer.path.read_bytes())
    for name in ("config.json", "generation_config.json"):
        document = {"model_type": "llama", "eos_token_id": 2, **settings}
        (folder / "files" / name).write_text(json.dumps(document))
    return folder / "files"


@pytest.mark.parametrize("ends", [2, [2, 3]])
def test_generation_stops_with_another_end_in_the_files(
    ends: int | list[int], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    run, progress = run_of(tmp_path, tokenizer), Quiet()
    files = beside(tmp_path, tokenizer, eos_token_id=ends)
    converted(run, tmp_path / "out", "huggingface", side_files=files, progress=progress)
    assert generated(tmp_path / "out") == 1
    said = [line for line in progress.lines if "--hf-files" in line]
    assert len(said) == 2 and all(f"without {tokenizer.eod}" in line for line in said)
    for name in ("config.json", "generation_config.json"):
        found = json.loads((tmp_path / "out" / name).read_text())["eos_token_id"]
        assert found == [*(ends if isinstance(ends, list) else [ends]), tokenizer.eod]


def test_an_end_that_is_named_stays_as_it_is(tokenizer: Tokenizer, tmp_path: Path) -> None:
    run, progress = run_of(tmp_path, tokenizer), Quiet()
    files = beside(tmp_path, tokenizer, eos_token_id=[2, tokenizer.eod])
    converted(run, tmp_path / "out", "huggingface", side_files=files, progress=progress)
    assert progress.lines == []
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [2, tokenizer.eod]


def test_another_tokenizer_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of the same size: its tokens have other ids, the end of a document the same."""
    run = run_of(tmp_path, tokenizer)
    (tmp_path / "other").mkdir()
    other = train_tokenizer(
        ["another text of other words, longer than theirs " * 20],
        vocab_size=tokenizer.vocab_size,
        output=tmp_path / "other" / "tokenizer.json",
    )
    assert (other.eod, other.eod_token) == (tokenizer.eod, tokenizer.eod_token)
    files = beside(tmp_path, other)
    with pytest.raises(CheckpointError, match="--hf-files is not that of the weights: .* tokens have other"):
        converted(run, tmp_path / "out", "huggingface", side_files=files)


def test_an_end_with_another_id_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The run's own tokenizer is gone: its checkpoint says which token ended documents."""
    said = {"tokenizer": {"eod": 5, "eod_token": tokenizer.eod_token}}
    run = run_of(tmp_path, tokenizer, said)
    document = read_manifest(run / "iter_0000001")
    document["config"]["data"]["tokenizer_model"] = None
    write_manifest(run / "iter_0000001", document)
    with pytest.raises(CheckpointError, match="as token 5, and the tokenizer for the result has it as 0"):
        converted(run, tmp_path / "out", "huggingface", side_files=beside(tmp_path, tokenizer))


def test_data_of_a_chat_folders_tokenizer_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Its settings end a turn with another token, which stays beside the trained one."""
    run = run_of(tmp_path, tokenizer)
    files = beside(tmp_path, tokenizer, eos_token_id=7)
    token = next(text for text, index in tokenizer.vocabulary().items() if index == 7)
    (files / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    converted(run, tmp_path / "out", "huggingface", side_files=files)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [7, 0]
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"] == token
    assert generated(tmp_path / "out") == 1


def test_ends_of_the_data_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Data of the file alone, a run with its folder: documents ended with another token than the run's."""
    said = {"tokenizer": {"eod": 7, "eod_token": None, "data_ends": [tokenizer.eod]}}
    converted(run_of(tmp_path, tokenizer, said), tmp_path / "again", "torch_dist")
    converted(tmp_path / "again", tmp_path / "out", "huggingface")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == [7, tokenizer.eod]
    assert generated(tmp_path / "out") == 1
