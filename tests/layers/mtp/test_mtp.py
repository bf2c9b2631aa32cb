"""Multi-token prediction equals plain loops, whatever the layout, and is not there when it is off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mt_megatron.errors import ConfigError
from mt_megatron.layers.mtp.model import (
    _require_tokens,
    counted_positions,
    document_numbers,
    forward,
    shifted,
)
from tests.launch import run_ranks
from tests.second_lane import DAILY

HERE = "tests.layers.mtp.ranks"
LAYOUTS = "tests.layers.mtp.layout_ranks"

CASES = [
    ["untied", "pp2"],
    ["tied", "pp2", "fused"],
    ["untied", "pp2 uneven", "uniform", "fused"],
    ["untied", "pp2 empty last", "block"],
    ["untied", "pp2 empty first"],
    ["tied", "vpp2 uneven", "uniform"],
    ["five layers", "vpp2 of five", "selective"],
    ["per token", "pp2", "fused"],
    ["per token", "dp2"],
    ["untied", "tp2", "fused"],
    ["tied", "tp2 sp", "uniform", "fused"],
    ["biased", "pp2 uneven"],
    ["latent experts", "pp2 uneven", "uniform"],
    ["untied", "pp2", "not summed"],
    *(
        [
            ["untied", "vpp2"],
            ["untied", "tp2 sp"],
            ["latent experts", "pp2"],
            ["untied", "dp2"],
        ]
        if DAILY
        else []
    ),
]
"""In the first lane every model, every layout but the even virtual one, and every way to recompute."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def alone(folder: str) -> Any:
    """Everything that one process finds out."""
    return run_ranks(1, f"{HERE}:alone", folder, timeout=200)[0]


@pytest.fixture(scope="module")
def oracle(alone: dict[str, Any]) -> Any:
    return alone["oracle"]


def test_losses_and_gradients_are_the_oracles(oracle: dict[str, Any]) -> None:
    positive = {name: case for name, case in oracle.items() if not name.startswith("negative")}
    assert len(positive) == 12
    for name, case in positive.items():
        assert case["reported"] == pytest.approx(case["expected"], rel=1e-6), name
        assert case["gradients"] < 1e-5, (name, case["gradients"])
        assert all(0 < count < 16 for count in case["counted"]), name


def test_a_mask_that_is_not_shifted_would_be_seen(oracle: dict[str, Any]) -> None:
    wrong = oracle["negative: mask not shifted"]
    assert wrong["reported"][0] == pytest.approx(wrong["expected"][0], rel=1e-6)
    assert abs(wrong["reported"][2] / wrong["expected"][2] - 1) > 1e-2
    assert wrong["gradients"] > 1e-3


def test_documents_change_what_counts(oracle: dict[str, Any]) -> None:
    counted = {name: oracle[f"{name}, untied, masked"]["counted"] for name in ("one", "mask", "borders")}
    assert counted["mask"] == counted["borders"]
    assert all(a < b for a, b in zip(counted["mask"], counted["one"], strict=True))


def test_a_steps_gradients_weigh_micro_batches_as_the_main_loss_does(alone: dict[str, Any]) -> None:
    found = alone["over_microbatches"]
    assert set(found) == {"untied", "per token"}
    assert max(found.values()) < 1e-5, found


@pytest.fixture(scope="module")
def layouts(alone: dict[str, Any], folder: str) -> Any:
    return alone["reference"], run_ranks(2, f"{LAYOUTS}:compare", folder, CASES, timeout=240)


@pytest.mark.parametrize("case", [case for case in CASES if case[-1] != "not summed"], ids=", ".join)
def test_every_layout_has_one_processs_gradients(layouts: Any, case: list[str]) -> None:
    reference, ranks = layouts
    for rank in ranks:
        found = rank[", ".join(case)]
        assert found["error"] < 1e-5, (case, found)
        assert found["copies"] in (None, True), case
    depths = [rank[", ".join(case)]["depths"] for rank in ranks]
    expected = reference[case[0]]["depths"]
    if case[1].startswith("dp2"):
        assert [a + b for a, b in zip(*depths, strict=True)] == pytest.approx(expected, rel=1e-6)
    else:
        assert depths[-1] == pytest.approx(expected, rel=1e-6), case
        assert (depths[0] is None) == ("pp2" in case[1])


def test_an_embedding_gradient_that_is_not_summed_would_be_seen(layouts: Any) -> None:
    for rank in layouts[1]:
        found = rank["untied, pp2, not summed"]
        assert found["error"] > 1e-2
        assert found["worst"] == "embedding.word_embeddings.weight"


def test_off_is_off_to_the_bit(alone: dict[str, Any]) -> None:
    on, without = alone["off"], alone["without"]
    assert on.pop("patched") and not without.pop("patched")
    assert on == without


def test_tokens_move_to_the_front() -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert shifted(tokens, 2).tolist() == [[3, 0, 0], [6, 0, 0]]
    assert shifted(tokens, 3).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 6, 9])
def test_what_counts_is_what_a_loop_counts(depth: int) -> None:
    generator = torch.Generator().manual_seed(depth)
    mask = (torch.rand(4, 6, generator=generator) > 0.2).float()
    documents = (torch.rand(4, 6, generator=generator) > 0.7).long().cumsum(1)
    for numbers in (documents, None):
        found = counted_positions(mask, numbers, depth)
        for row in range(4):
            for at in range(6):
                expected = float(mask[row, at + depth]) if at + depth < 6 else 0.0
                if numbers is not None:
                    seen = numbers[row, at : min(at + depth + 2, 6)]
                    expected *= float(len(seen.unique()) == 1)
                assert found[row, at] == expected


def test_documents_are_told_by_positions_masks_and_borders() -> None:
    labels = torch.zeros(2, 5, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])
    expected = [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert document_numbers(labels, None, None, None) is None
    found = document_numbers(labels, positions, None, None)
    assert found is not None and found.tolist() == expected
    borders = torch.tensor([0, 2, 5, 10, 10], dtype=torch.int32)
    found = document_numbers(labels, None, borders, None)
    assert found is not None and (found - found[:, :1]).tolist() == expected
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).triu(1)
    mask[0, 0, 2:, :2] = True
    found = document_numbers(labels, None, mask, None)
    assert found is not None and found.tolist() == expected
    # Scripts whose model looks at no positions pass zeros: these say nothing.
    found = document_numbers(labels, torch.zeros_like(positions), None, None)
    assert found is not None and not found.any()


def test_what_it_does_not_go_with_is_refused_before_anything_is_built() -> None:
    from types import SimpleNamespace

    from mt_megatron.errors import ConfigError
    from mt_megatron.layers.mtp.checks import check_prediction

    plain = {"mtp_num_layers": 1, "context_parallel_size": 1, "fp8": None}
    check_prediction(SimpleNamespace(**plain))
    for name, value in (
        ("context_parallel_size", 2),
        ("fp8", "hybrid"),
        ("enable_cuda_graph", True),
        ("defer_embedding_wgrad_compute", True),
    ):
        with pytest.raises(ConfigError, match=f"mtp_num_layers is 1 with {name}"):
            check_prediction(SimpleNamespace(**plain | {name: value}))
        check_prediction(SimpleNamespace(**plain | {name: value, "mtp_num_layers": None}))


def test_an_unmodified_script_asks_as_later_versions_do(alone: dict[str, Any]) -> None:
    found = alone["by_later_names"]
    assert found["equal"]
    assert found["none_elsewhere"]
    assert found["empty"].startswith("the block spec of the last pipeline stage has no layer")
    assert "an mtp_block_spec of 2 layers; expected the same" in found["depths"]
    assert found["no depths"].startswith("found an mtp_block_spec and no mtp_num_layers")


def test_a_mask_of_padding_shows_no_documents() -> None:
    labels = torch.arange(12).view(2, 6)
    padding = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    padding[1, ..., 4:] = True
    assert document_numbers(labels, None, padding, None) is None


@pytest.mark.parametrize(
    ("labels", "message"), [([[1, -100, 3]], "from -100 to 3"), ([[1, 8, 3]], "from 1 to 8")]
)
def test_labels_that_are_no_tokens_do_not_stand_for_them(labels: list[list[int]], message: str) -> None:
    model = SimpleNamespace(vocab_size=8, mtp=SimpleNamespace(has_seen_labels=False))
    with pytest.raises(ConfigError, match=f"found labels {message} and no input_ids.*expected 0 to 7"):
        forward(lambda: None, model, None, None, None, torch.tensor(labels), None)
    _require_tokens(model, torch.tensor([[0, 7]]))


def test_losses_that_nobody_reads_take_no_more_room(alone: dict[str, Any]) -> None:
    found = alone["never_taken"]
    assert found["kept"] <= 1024
    assert found["equal"] and found["again"] is None
