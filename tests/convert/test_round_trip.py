"""Every tensor of every family comes back to the bit, through either form at layouts drawn at random."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert import published
from tests.convert.published import FAMILIES, differing, read
from tests.convert.recorded_run import converted

SOAK_CASES = 12
CASES = SOAK_CASES if os.environ.get("MT_MEGATRON_SOAK") else 1
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
BY_TENSOR = (
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
)
"""What tensor parallelism divides."""


def layout(rng: random.Random, shape: dict[str, Any]) -> list[str]:
    """Options of a layout that divides ``shape``, over sizes 1 to 4."""
    layers = shape["num_hidden_layers"]
    stages = rng.randint(1, 4)
    found = ["--tensor-model-parallel-size", str(rng.choice(_dividing(shape, BY_TENSOR)))]
    found += ["--pipeline-model-parallel-size", str(stages)]
    if any(name in shape for name in EXPERTS):
        found += ["--expert-model-parallel-size", str(rng.choice(_dividing(shape, EXPERTS)))]
        found += [rng.choice(["--moe-grouped-gemm", "--no-moe-grouped-gemm"])]
    if layers % stages:
        # Uneven: one more for the first stages.
        counts = [layers // stages + (index < layers % stages) for index in range(stages)]
        found += ["--pipeline-model-parallel-layout", *map(str, counts)]
    elif stages > 1 and layers == 2 * stages:
        found += ["--virtual-pipeline-model-parallel-size", "2"]
    found += ["--transformer-impl", rng.choice(["local", "transformer_engine"])]
    return found + ["--make-vocab-size-divisible-by", str(rng.choice([1, 8, 128]))]


def _dividing(shape: dict[str, Any], names: tuple[str, ...]) -> list[int]:
    """The sizes up to 4 that divide all of ``names`` that ``shape`` has."""
    given = [shape[name] for name in names if name in shape]
    return [size for size in range(1, 5) if all(each % size == 0 for each in given)]


def test_every_size_is_drawn() -> None:
    drawn = []
    for family in FAMILIES:
        for case in range(SOAK_CASES):
            rng = random.Random(f"{family}{case}")
            shape = published.draw(family, rng)
            drawn += [layout(rng, shape) for _ in range(3)]
    for parallel in ("tensor", "pipeline", "expert"):
        option = f"--{parallel}-model-parallel-size"
        sizes = {each[each.index(option) + 1] for each in drawn if option in each}
        assert sizes == {"1", "2", "3", "4"}, parallel


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("family", FAMILIES)
def test_comes_back_to_the_bit(family: str, case: int, tmp_path: Path) -> None:
    rng = random.Random(f"{family}{case}")
    shape = published.draw(family, rng)
    source = tmp_path / "source"
    published.write(source, family, shape, seed=case)
    original = read(source)

    first, second, third = (layout(rng, shape) for _ in range(3))
    forms = ["torch_dist", "torch"]
    rng.shuffle(forms)
    converted(source, tmp_path / "one", forms[0], *first)
    back = tmp_path / "back"
    converted(tmp_path / "one", back, "huggingface", *_vocabulary(shape), max_shard_size=20_000)
    assert differing(read(back), original) == [], first

    # Resharded from one layout to another, into the other form and once more.
    converted(tmp_path / "one", tmp_path / "two", forms[1], *second, *_vocabulary(shape))
    converted(tmp_path / "two", tmp_path / "three", rng.choice(forms), *third, *_vocabulary(shape))
    converted(tmp_path / "three", tmp_path / "again", "huggingface", *_vocabulary(shape))
    assert differing(read(tmp_path / "again"), original) == [], (second, third)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_kept_or_changed(dtype: torch.dtype, tmp_path: Path) -> None:
    rng = random.Random(3)
    published.write(tmp_path / "source", "llama", published.draw("llama", rng), seed=0, dtype=dtype)
    original = read(tmp_path / "source")
    converted(tmp_path / "source", tmp_path / "kept", "torch_dist")
    converted(tmp_path / "kept", tmp_path / "back", "huggingface")
    assert differing(read(tmp_path / "back"), original) == []
    converted(tmp_path / "kept", tmp_path / "changed", "huggingface", dtype="bf16")
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in original.items()}
    assert differing(read(tmp_path / "changed"), expected) == []


def _vocabulary(shape: dict[str, Any]) -> list[str]:
    """What the torch form does not know: Megatron-LM writes the padded size alone."""
    return ["--vocab-size", str(shape["vocab_size"])]
