"""What is exported is a folder that stock transformers loads: the same logits, and all that stands beside
the weights; and the command that makes it."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch

from mt_megatron.cli.main import main
from mt_megatron.config.model_change import changes_from
from mt_megatron.config.parse import load_config
from mt_megatron.convert.hf.config import options_of
from tests.convert import published
from tests.convert.published import FAMILIES, differing, read
from tests.convert.recorded_run import Quiet, converted
from tests.launch import ROOT, run_command

SIDE_FILES = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
    "special_tokens_map.json": "{}",
    "generation_config.json": '{"eos_token_id": 3}',
    "chat_template.jinja": "{{ messages }}",
}


def logits(folder: Path) -> torch.Tensor:
    """Of a fixed sequence, by the class that ``config.json`` names."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12)[None]).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_originals(family: str, tmp_path: Path) -> None:
    rng = random.Random(f"logits {family}")
    shape = published.draw(family, rng)
    if family == "deepseek_v3":
        shape |= {"num_nextn_predict_layers": 0, "q_lora_rank": 24}
    published.write(tmp_path / "source", family, shape, seed=2)
    converted(tmp_path / "source", tmp_path / "megatron", "torch_dist", "--tensor-model-parallel-size", "2")
    converted(tmp_path / "megatron", tmp_path / "back", "huggingface", max_shard_size=30_000)
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()
    ours, theirs = logits(tmp_path / "back"), logits(tmp_path / "source")
    assert torch.equal(ours, theirs)
    assert theirs.std() > 0.1, "the comparison is of numbers that differ"


def test_logits_of_moved_heads_are_others(tmp_path: Path) -> None:
    """A negative control of the one above."""
    from safetensors.torch import save_file

    published.write(tmp_path / "source", "qwen3", published.draw("qwen3", random.Random(1)), seed=2)
    expected = logits(tmp_path / "source")
    tensors = read(tmp_path / "source")
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    assert not torch.allclose(logits(tmp_path / "source"), expected, atol=1e-3)


def test_what_stands_beside_the_weights_comes_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    published.write(source, "llama", published.draw("llama", random.Random(4)), seed=0)
    for name, text in SIDE_FILES.items():
        (source / name).write_text(text)
    document = json.loads((source / "config.json").read_text()) | {"eos_token_id": 3}
    (source / "config.json").write_text(json.dumps(document))
    converted(source, tmp_path / "megatron", "torch_dist")
    converted(tmp_path / "megatron", tmp_path / "back", "huggingface")
    for name, text in SIDE_FILES.items():
        assert (tmp_path / "back" / name).read_text() == text
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 3
    # A checkpoint of rank files has no place for them: they can be named.
    converted(source, tmp_path / "ranks", "torch")
    bare, named = Quiet(), Quiet()
    converted(tmp_path / "ranks", tmp_path / "bare", "huggingface", progress=bare)
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    assert any("has no tokenizer" in line for line in bare.lines)
    converted(tmp_path / "ranks", tmp_path / "named", "huggingface", side_files=source, progress=named)
    assert (tmp_path / "named" / "tokenizer.json").exists() and named.lines == []


def test_the_command_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    published.write(source, "mixtral", published.draw("mixtral", random.Random(6)), seed=0)
    assert main(["convert", "--from-hf", str(source), "--to-config", str(tmp_path / "m.yaml")]) == 0
    config = load_config([], tmp_path / "m.yaml")
    assert changes_from(options_of(json.loads((source / "config.json").read_text())), config) == []
    there = ["convert", "--from-hf", str(source), "--to-megatron", str(tmp_path / "megatron")]
    there += ["--tensor-model-parallel-size", "2", "--config", str(tmp_path / "m.yaml"), "--json"]
    assert main(there) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["folder"].endswith("iter_0000001") and result["bytes"] > 0
    back = ["convert", "--from-megatron", str(tmp_path / "megatron"), "--to-hf", str(tmp_path / "back")]
    assert main([*back, "--max-shard-size", "30KB", "--workers", "2"]) == 0
    assert "MB/s" in capsys.readouterr().out
    assert main([*back, "--max-shard-size", "30KB", "--workers", "2"]) == 0
    again = capsys.readouterr().out
    assert "tensors" in again and "MB/s" not in again
    assert differing(read(tmp_path / "back"), read(source)) == []


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ([], 2, "required"),
        (["--from-hf", "a", "--from-megatron", "b", "--to-hf", "c"], 2, "not allowed"),
        (["--from-hf", "nowhere", "--to-megatron", "out"], 2, "nowhere is no folder"),
        (["--from-megatron", "nowhere", "--to-hf", "out"], 2, "nowhere is no folder"),
        (["--from-hf", "Qwen/Qwen3-0.6B", "--to-hf", "o"], 2, "hf download Qwen/Qwen3-0.6B --local-dir"),
        (["--from-hf", "Qwen/Qwen3-0.6B", "--to-config", "o"], 2, "hf download Qwen/Qwen3-0.6B"),
        (["--from-megatron", ".", "--to-config", "out"], 2, "--from-hf"),
        (["--from-hf", "a", "--to-config", "o", "--dtype", "bf16"], 2, "--to-config is given with --dtype;"),
        (
            ["--from-hf", "a", "--to-config", "o", "--fp8", "--json", "--num-layers", "2"],
            2,
            "with --fp8, --json, --num-layers;",
        ),
        (["--from-hf", "a", "--to-config", "o", "--seq-lenght=64"], 2, "--seq-lenght"),
        (["--from-hf", "a", "--to-hf", "c", "--max-shard-size", "5parsec"], 2, "5GB"),
        (["--from-hf", "a", "--to-hf", "c", "--workers", "0"], 2, "at least 1"),
    ],
)
def test_wrong_use_is_told(
    given: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        assert main(["convert", *given]) == code
    except SystemExit as end:
        assert end.code == code
    assert said in capsys.readouterr().err


def test_no_model_is_built_and_no_process_group_made(tmp_path: Path) -> None:
    """In a process of its own: what is imported, and that nothing asks for a device."""
    published.write(tmp_path / "source", "llama", published.draw("llama", random.Random(7)), seed=0)
    code = (
        "import sys\nfrom mt_megatron.cli.main import main\n"
        f"main(['convert', '--from-hf', {str(tmp_path / 'source')!r}, '--to-megatron', "
        f"{str(tmp_path / 'out')!r}])\n"
        "import torch\n"
        "assert not torch.distributed.is_initialized()\n"
        "assert not [n for n in sys.modules if n.split('.')[0] in ('transformers', 'transformer_engine')]\n"
        "assert 'megatron.core.models.gpt.gpt_model' not in sys.modules, 'a model is at hand'\n"
    )
    done = run_command(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
