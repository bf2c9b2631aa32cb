"""Live models of two ranks hold what was published: started from the folder, or loaded from what it was
converted to; and their own checkpoints convert back to the bit."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.convert.run import configuration_file
from tests.convert import published
from tests.convert.published import FAMILIES, differing, read
from tests.convert.recorded_run import converted
from tests.launch import run_ranks

SOAK = bool(os.environ.get("MT_MEGATRON_SOAK"))
TP2, PP2, EP2 = (
    ["--tensor-model-parallel-size", "2"],
    ["--pipeline-model-parallel-size", "2"],
    ["--expert-model-parallel-size", "2"],
)
VPP2 = [*PP2, "--virtual-pipeline-model-parallel-size", "2"]
UNEVEN = [*PP2, "--pipeline-model-parallel-layout", "3", "1"]
BF16 = ["--bf16"]
SEQUENTIAL = ["--no-moe-grouped-gemm"]
LAYOUTS: dict[str, list[list[str]]] = {
    "llama": [[*TP2, "--use-distributed-optimizer"], [*VPP2, *BF16]],
    "mixtral": [[*EP2, *BF16]],
    "deepseek_v2": [TP2],
    "deepseek_v3": [[*UNEVEN, *BF16]],
    "qwen2": [[*PP2, *BF16]],
    "qwen3": [],
    "qwen3_moe": [EP2],
}
if SOAK:
    LAYOUTS["mixtral"] += [[*TP2, *SEQUENTIAL]]
    LAYOUTS["deepseek_v2"] += [[*EP2, *SEQUENTIAL]]
    LAYOUTS["deepseek_v3"] += [EP2, TP2]
    LAYOUTS["qwen3"] += [TP2]
    LAYOUTS["qwen3_moe"] += [[*PP2, "--moe-grouped-gemm"]]


WRONG = {
    "right": [],
    "several": ["--rotary-base", "123", "--layernorm-epsilon", "0.1", "--qk-layernorm"],
    "layers": ["--num-layers", "3"],
    "window": ["--window-size", "4", "0"],
}
"""Options that do not fit the published Llama, by the name of the case."""


def cases(folder: Path) -> list[dict[str, Any]]:
    """Each family's folder and its conversion, once for every layout."""
    found = []
    for family in FAMILIES:
        rng = random.Random(family)
        shape = published.draw(family, rng) | {"num_hidden_layers": 4}
        shape = _fixed(family, shape)
        published.write(folder / family, family, shape, seed=1)
        # Written at one layout, loaded at others.
        written = ["--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2"]
        converted(folder / family, folder / f"{family}_converted", "torch_dist", *written)
        (folder / f"{family}.yaml").write_text(configuration_file(folder / family))
        for index, layout in enumerate(LAYOUTS[family]):
            found.append(
                {
                    "published": family,
                    "config": f"{family}.yaml",
                    "converted": f"{family}_converted",
                    "saved": f"{family}_saved_{index}",
                    "layout": layout,
                    "name": f"{family} {' '.join(layout)}",
                }
            )
            if family in BY_RANK:
                found[-1] |= {
                    "by_rank": f"{family}_by_rank_{index}",
                    "as_saved": f"{family}_as_saved_{index}",
                }
                options = [each for each in layout if each not in ("--bf16", "--use-distributed-optimizer")]
                converted(folder / family, folder / found[-1]["by_rank"], "torch", *options)
    return found


BY_RANK = ("llama", "mixtral", "deepseek_v3")
"""Families whose layouts are also saved and loaded as Megatron-LM does, rank by rank."""


def _fixed(family: str, shape: dict[str, Any]) -> dict[str, Any]:
    if family == "deepseek_v3":
        shape |= {"num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "q_lora_rank": 24}
        shape |= {"tie_word_embeddings": False}
    if family == "deepseek_v2":
        shape |= {"first_k_dense_replace": 1, "q_lora_rank": None}
    if family == "qwen2":
        shape |= {"tie_word_embeddings": True}
    if family == "qwen3_moe":
        shape |= {"mlp_only_layers": [1]}
    return shape


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    work = cases(folder)
    done = run_ranks(2, "tests.convert.ranks:everything", str(folder), work, WRONG, timeout=280)
    found: dict[str, Any] = {"folder": folder, "cases": work}
    for name in ("refusals", "one_rank"):
        found[name] = [rank[name] for rank in done]
    for index, case in enumerate(work):
        found[case["name"]] = [rank["cases"][index] for rank in done]
    return found


NAMES = [f"{family} {' '.join(layout)}" for family in FAMILIES for layout in LAYOUTS[family]]


@pytest.mark.parametrize("name", NAMES)
def test_starts_from_the_published_folder(results: dict[str, Any], name: str) -> None:
    for rank in results[name]:
        assert rank["started"] == []
        assert rank["masters"] == 0
        assert "starting from the published weights" in rank["said"]


@pytest.mark.parametrize("name", NAMES)
def test_loads_what_was_converted(results: dict[str, Any], name: str) -> None:
    for rank in results[name]:
        assert rank["spoiled"] > 10, "the comparison notices other weights"
        assert rank["loaded"] == []


@pytest.mark.parametrize("name", NAMES)
def test_its_own_checkpoint_converts_back(results: dict[str, Any], name: str, tmp_path: Path) -> None:
    case = next(each for each in results["cases"] if each["name"] == name)
    folder = results["folder"]
    original = read(folder / case["published"])
    if "--bf16" in case["layout"]:
        converted(folder / case["saved"], tmp_path / "back", "huggingface")
        back = read(tmp_path / "back")
        # The bias of experts is fp32 on both sides.
        assert differing(back, original) == []
    else:
        converted(folder / case["saved"], tmp_path / "back", "huggingface", dtype="bf16")
        assert differing(read(tmp_path / "back"), original) == []


@pytest.mark.parametrize("name", [each for each in NAMES if each.split()[0] in BY_RANK])
def test_files_by_rank_are_megatrons_own(results: dict[str, Any], name: str, tmp_path: Path) -> None:
    """What we write loads strictly into the ranks' models; what they write converts back."""
    assert all(rank["by_rank"] == [] for rank in results[name])
    case = next(each for each in results["cases"] if each["name"] == name)
    folder = results["folder"]
    converted(folder / case["as_saved"], tmp_path / "back", "huggingface", dtype="bf16")
    assert differing(read(tmp_path / "back"), read(folder / case["published"])) == []


def test_what_does_not_fit_is_named_on_every_rank(results: dict[str, Any]) -> None:
    for found in results["refusals"]:
        assert found["right"] == ""
        for option in ("rotary_base is 123", "layernorm_epsilon is 0.1"):
            assert option in found["several"]
        assert "num_layers is 3; config.json has 4" in found["layers"]
        assert "window_size is [4, 0]; config.json has None" in found["window"]


def test_an_error_of_one_rank_ends_all(results: dict[str, Any]) -> None:
    assert all("(ranks [1])" in each and "config.json" in each for each in results["one_rank"])
