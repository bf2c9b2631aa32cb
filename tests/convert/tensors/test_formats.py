"""The small parts: checksums, safetensors headers, names, shards, mapped files."""

from __future__ import annotations

import io
import random
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from mt_megatron.convert.checksums import combined
from mt_megatron.convert.hf.safetensors_format import DTYPES, header_bytes, read_header
from mt_megatron.convert.tensors.mapped_file import MappedFile
from mt_megatron.convert.tensors.megatron_names import KeyStyle, names_of
from mt_megatron.convert.tensors.shards import shards_of, take
from mt_megatron.convert.tensors.table import pack, rows_in_parts, unpack
from mt_megatron.convert.torch_dist.reader import locate
from mt_megatron.errors import CheckpointError
from mt_megatron.models.tables.fused import fused_name, local_name
from mt_megatron.models.weights import RotaryRows, TensorRow
from tests.convert.tensors.test_table import SIZES


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_combine(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_headers_are_the_librarys(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t.{name}": (torch.rand(3, 5, generator=generator) * 3).to(dtype) for name, dtype in DTYPES.items()
    }
    tensors["empty"] = torch.empty(0, 4)
    tensors["scalar"] = torch.tensor(2.5)
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as stream:
        stream.write(header_bytes([(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]))
        for tensor in tensors.values():
            stream.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    with safe_open(path, framework="pt") as theirs:
        assert set(theirs.keys()) == set(tensors)
        assert theirs.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert torch.equal(theirs.get_tensor(name).float(), tensor.float())
    mapped = MappedFile(path)
    for name, stored in read_header(path).items():
        ours = mapped.tensor(stored.offset, stored.dtype, stored.shape)
        assert ours.dtype == tensors[name].dtype and torch.equal(ours.float(), tensors[name].float())
        mapped.release(stored.offset, stored.length)
        assert torch.equal(ours.float(), tensors[name].float()), "pages that went come back"


def test_a_mapped_file_ends_where_it_ends(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345678")
    mapped = MappedFile(tmp_path / "x")
    assert mapped.tensor(2, torch.uint8, (6,)).tolist() == list(b"345678")
    with pytest.raises(CheckpointError, match="cut short"):
        mapped.tensor(2, torch.float32, (2,))


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("latent", [True, False])
def test_names_go_into_keys_and_back(uniform: bool, fused: bool, latent: bool) -> None:
    moe_layers = (0, 1, 2) if uniform else (1, 2)
    style = KeyStyle(
        num_layers=3,
        moe_layers=moe_layers,
        num_experts=4,
        latent=latent,
        uniform=uniform,
        transformer_engine=fused,
    )
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
    names += ["mtp.layers.0.eh_proj.weight", "mtp.layers.0.transformer_layer.input_layernorm.weight"]
    names += [
        f"mtp.layers.0.transformer_layer.mlp.experts.local_experts.{n}.linear_fc1.weight" for n in (0, 3)
    ]
    attention = (
        ("q_layernorm", "kv_layernorm", "linear_q_up_proj") if latent else ("linear_qkv", "q_layernorm")
    )
    for layer in range(3):
        prefix = f"decoder.layers.{layer}."
        names += [prefix + "input_layernorm.weight", prefix + "pre_mlp_layernorm.weight"]
        names += [f"{prefix}self_attention.{each}.weight" for each in attention]
        if layer in moe_layers:
            names += [f"{prefix}mlp.experts.local_experts.{n}.linear_fc2.weight" for n in range(4)]
            names += [prefix + "mlp.router.weight", prefix + "mlp.shared_experts.linear_fc1.weight"]
        else:
            names += [prefix + "mlp.linear_fc1.weight"]
    places = {name: style.place(name) for name in names}
    assert len({(place.key, place.index) for place in places.values()}) == len(names)
    for name, place in places.items():
        lead, found = names_of(place.key, (*place.axes, 5, 7))
        assert lead == len(place.axes) and dict(found)[place.index] == name


def test_fused_names_are_those_of_transformer_engine() -> None:
    layer = "decoder.layers.0."
    norm = layer + "pre_mlp_layernorm.weight"
    assert fused_name(norm, is_moe=False, latent=False) == layer + "mlp.linear_fc1.layer_norm_weight"
    assert fused_name(norm, is_moe=True, latent=False) == norm
    assert local_name(layer + "self_attention.linear_kv_up_proj.layer_norm_weight") == (
        layer + "self_attention.kv_layernorm.weight"
    )


def test_pieces_cover_a_tensor_once_and_come_back() -> None:
    rng = random.Random(0)
    for _ in range(200):
        tensor_parallel = rng.choice([1, 2, 4])
        packing = rng.choice(["same", "stacked"])
        axis = rng.choice([0, 1, None]) if packing == "same" else 0
        row = TensorRow(sources=("a", "b") if packing == "stacked" else ("a",), packing=packing)
        shape = (8 * rng.randint(1, 3), 4 * rng.randint(1, 3))
        padding = rng.choice([0, 1, 3]) if packing == "same" else 0
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        expected = torch.cat([whole[: shape[0] - padding], torch.zeros(padding, shape[1])]).long()
        parts = list(whole.chunk(2)) if packing == "stacked" else [whole[: shape[0] - padding]]
        found = torch.full(shape, -1)
        for shard in shards_of("x", row, shape, axis, tensor_parallel):
            region = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True))
            assert bool((found[region] == -1).all())
            found[region] = take(parts, shard)
        assert torch.equal(found, expected)


def test_interleaved_rows_are_pairs() -> None:
    """Megatron's ``rotary_interleaved`` rotates neighbours, published weights halves: row i of the first half
    and row i of the second become neighbours, head by head; what is not rotated stays."""
    rows = RotaryRows(block=6, size=4)
    row = TensorRow(sources=("q",), rotary=(rows,))
    tensor = torch.arange(12).view(12, 1)
    packed = pack(row, [tensor], SIZES)
    assert packed.flatten().tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert torch.equal(unpack(row, packed, SIZES)[0], tensor)


def test_a_part_of_the_query_groups_packs_alike() -> None:
    row = TensorRow(sources=("q", "k", "v"), packing="query_groups")
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(rows, 8, generator=generator) for rows in (24, 8, 8)]
    whole = pack(row, parts, SIZES)
    half = whole.shape[0] // 2
    ranges, smaller = rows_in_parts(row, SIZES, half, 2 * half)
    ours = pack(row, [part[slice(*each)] for part, each in zip(parts, ranges, strict=True)], smaller)
    assert torch.equal(ours, whole[half:])
    with pytest.raises(CheckpointError, match="no whole query groups"):
        rows_in_parts(row, SIZES, 1, half)


def test_tensors_are_found_in_archives_and_nothing_else_is(tmp_path: Path) -> None:
    path, offset = tmp_path / "archives", 0
    tensors = [
        torch.randn(3, 5),
        torch.randn(4, 2).to(torch.bfloat16),
        torch.tensor(3, dtype=torch.int64),
        torch.randn(1, 1, 6),
        torch.randn(4, 3).t(),  # not contiguous
        torch.randn(8)[2:5],  # in the middle of its storage
        {"a": torch.randn(2)},  # no tensor
        torch.randn(3).to(torch.float8_e4m3fn),  # no storage of its own
    ]
    places = []
    with open(path, "wb") as stream:
        for tensor in tensors:
            content = io.BytesIO()
            torch.save(tensor, content)
            stream.write(content.getvalue())
            places.append((offset, len(content.getvalue())))
            offset += places[-1][1]
        stream.write(b"no archive at all")
    mapped = MappedFile(path)
    for tensor, (start, length) in zip(tensors[:4], places[:4], strict=True):
        found = locate(mapped, start, length)
        assert found is not None
        assert torch.equal(mapped.tensor(found.offset, found.dtype, found.shape), tensor)
    assert all(locate(mapped, *place) is None for place in places[4:])
    assert locate(mapped, offset, 17) is None and locate(mapped, places[0][0], places[0][1] - 9) is None
