"""Block-scaled FP8 weights beside a plain loop over blocks, and through whole folders."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mt_megatron.convert.hf.fp8_blocks import dequantise, quantise
from mt_megatron.errors import CheckpointError
from mt_megatron.fp8.quantise import quantise as quantised
from mt_megatron.fp8.recipe import PRESETS
from tests.convert import published
from tests.convert.published import differing, read
from tests.convert.recorded_run import Quiet, converted

FP8 = torch.float8_e4m3fn


def by_loops(weight: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """The definition, one number at a time by its block."""
    result = torch.empty(weight.shape, dtype=torch.float32)
    for row in range(0, weight.shape[0], block):
        for column in range(0, weight.shape[1], block):
            part = weight[row : row + block, column : column + block].float()
            result[row : row + block, column : column + block] = part * scale[row // block, column // block]
    return result


@pytest.mark.parametrize("shape", [(128, 128), (576, 256), (130, 129), (1, 300), (127, 1)])
def test_reads_as_a_plain_loop_does(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator).to(FP8)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator)
    expected = by_loops(weight, scale)
    assert torch.equal(dequantise(weight, scale, torch.float32), expected)
    assert torch.equal(dequantise(weight, scale, torch.bfloat16), expected.to(torch.bfloat16))


@pytest.mark.parametrize("shape", [(128, 256), (576, 130)])
def test_what_is_written_is_near_and_reads_back_to_the_same(shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    tensor[:128, :128] = 0
    weight, scale = quantise(tensor)
    assert weight.dtype == FP8 and scale[0, 0] == 1 and not weight.isnan().any()
    near = dequantise(weight, scale, torch.float32)
    # Three bits of mantissa: half a step of an eighth; below the smallest normal number, a fixed step.
    bound = tensor.abs() / 16 + scale.max() * 2**-10
    assert bool(((near - tensor).abs() <= bound).all())
    # A second time loses nothing: the largest of each block is one of FP8's own numbers by then.
    again, scale_again = quantise(near)
    assert torch.equal(dequantise(again, scale_again, torch.float32), near)


def test_a_wrong_scale_is_noticed_by_this_test() -> None:
    weight, scale = quantise(torch.randn(256, 256, generator=torch.Generator().manual_seed(1)))
    swapped = scale.flip(0)
    assert not torch.equal(dequantise(weight, swapped, torch.float32), by_loops(weight, scale))


def test_refuses_what_has_no_scale(tmp_path: Path) -> None:
    weight, scale = quantise(torch.ones(256, 256))
    with pytest.raises(CheckpointError, match=r"expected \(2, 2\)"):
        dequantise(weight, scale[:1], torch.float32)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        quantise(torch.tensor([[1.0, float("inf")]]))
    published.write(tmp_path / "a", "llama", published.draw("llama", random.Random(0)), seed=0)
    tensors = read(tmp_path / "a")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(FP8)
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"without _scale_inv.*layers\.0\.mlp\.up_proj"):
        converted(tmp_path / "a", tmp_path / "b", "torch_dist")


def test_through_whole_folders(tmp_path: Path) -> None:
    """bf16 -> FP8 files; those -> Megatron -> bf16 equals the plain loop; FP8 files again are the same."""
    shape = published.draw("deepseek_v3", random.Random(5)) | {"q_lora_rank": 136, "kv_lora_rank": 200}
    published.write(tmp_path / "source", "deepseek_v3", shape, seed=5)
    converted(tmp_path / "source", tmp_path / "eight", "huggingface", fp8=True)
    eight = load_file(tmp_path / "eight" / "model.safetensors")
    config = json.loads((tmp_path / "eight" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    scaled = {name.removesuffix("_scale_inv") for name in eight if name.endswith("_scale_inv")}
    assert all(eight[name].dtype == FP8 for name in scaled)
    kept = [name for name in eight if name not in scaled and not name.endswith("_scale_inv")]
    assert all("norm" in n or "gate." in n or "embed" in n or "head" in n or "eh_proj" in n for n in kept), (
        kept
    )
    assert any("experts.3.up_proj" in name for name in scaled)
    assert any("kv_a_proj_with_mqa" in name for name in scaled)

    expected = {
        name: by_loops(tensor, eight[name + "_scale_inv"]).to(torch.bfloat16) if name in scaled else tensor
        for name, tensor in eight.items()
        if not name.endswith("_scale_inv")
    }
    converted(tmp_path / "eight", tmp_path / "megatron", "torch_dist", "--tensor-model-parallel-size", "2")
    converted(tmp_path / "megatron", tmp_path / "back", "huggingface")
    assert differing(read(tmp_path / "back"), expected) == []
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())

    # What has been FP8 once becomes the same FP8 numbers again when no bits were lost in between.
    converted(tmp_path / "eight", tmp_path / "wide", "huggingface", dtype="fp32")
    converted(tmp_path / "wide", tmp_path / "eight_again", "huggingface", fp8=True, dtype="bf16")
    again = load_file(tmp_path / "eight_again" / "model.safetensors")
    for name in scaled:
        ours = by_loops(again[name], again[name + "_scale_inv"])
        theirs = by_loops(eight[name], eight[name + "_scale_inv"])
        assert torch.allclose(ours, theirs, rtol=2**-7, atol=0), name


def test_blockwise_writes_what_its_training_computes_with(tmp_path: Path) -> None:
    """The linears between the first and the last layer, and their codes and scales."""
    shape = published.draw("llama", random.Random(5)) | {"num_hidden_layers": 4}
    published.write(tmp_path / "source", "llama", shape, seed=5)
    converted(tmp_path / "source", tmp_path / "eight", "huggingface", fp8=True, fp8_recipe="blockwise")
    source, eight = read(tmp_path / "source"), load_file(tmp_path / "eight" / "model.safetensors")
    scaled = {name.removesuffix("_scale_inv") for name in eight if name.endswith("_scale_inv")}
    assert {name.split(".")[2] for name in scaled} == {"1", "2"} and len(scaled) == 2 * 7
    left = json.loads((tmp_path / "eight" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.up_proj" in left["modules_to_not_convert"]
    assert len(left["modules_to_not_convert"]) == 2 * 7 + 1
    for name in scaled:
        trained = quantised(source[name], PRESETS["blockwise"].fprop.b, 1)
        assert torch.equal(eight[name].view(torch.uint8), trained.codes.view(torch.uint8))
        assert torch.equal(eight[name + "_scale_inv"], trained.inverse)
    converted(tmp_path / "eight", tmp_path / "back", "huggingface")
    back = read(tmp_path / "back")
    for name, tensor in source.items():
        if name in scaled:
            # Powers of two times e4m3 are exact in bf16: nothing is lost on the way back.
            expected = dequantise(eight[name], eight[name + "_scale_inv"], torch.float32)
            assert torch.equal(back[name].float(), expected)
        else:
            assert torch.equal(back[name], tensor)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--fp8-recipe tensorwise", "the run trained with fp8_recipe tensorwise"),
        ("--fp8-format hybrid", "the run trained with fp8_recipe delayed"),
        ("", "the run trained in bf16, without fp8_recipe"),
        ("--fp8-recipe blockwise", None),
    ],
)
def test_a_run_with_another_recipe_is_said(tmp_path: Path, flags: str, says: str | None) -> None:
    shape = published.draw("llama", random.Random(5)) | {"num_hidden_layers": 4}
    published.write(tmp_path / "source", "llama", shape, seed=5)
    converted(tmp_path / "source", tmp_path / "run", "torch_dist", *flags.split())
    told = Quiet()
    converted(
        tmp_path / "run", tmp_path / "eight", "huggingface", fp8=True, fp8_recipe="blockwise", progress=told
    )
    lines = [line for line in told.lines if "--fp8 blockwise" in line]
    assert [says in line for line in lines] == ([True] if says else [])
    told.lines.clear()
    converted(tmp_path / "run", tmp_path / "plain", "huggingface", fp8=True, progress=told)
    assert not any("recipe" in line for line in told.lines), "--fp8 alone names none"
