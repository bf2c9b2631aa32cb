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
from tests.convert import published
from tests.convert.published import read
from tests.convert.recorded_run import converted


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
