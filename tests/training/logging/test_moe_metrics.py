"""What a run says of its experts: figures by layer, one line, TensorBoard, and no collective in between."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_megatron.layers.moe.router_telemetry import LayerLoad, RouterLoad
from mt_megatron.training.logging.display import format_step
from mt_megatron.training.logging.moe_metrics import histograms, record_of, scalars
from tests.launch import run_ranks
from tests.training.architectures.moe_cases import TENSORBOARD
from tests.training.logging.test_display import VALUES

Found = dict[str, Any]
TOKENS = 8 * 32
"""Of one step: 8 sequences."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Found], Path]:
    folder = tmp_path_factory.mktemp("moe")
    return run_ranks(2, "tests.training.architectures.moe_cases:runs", str(folder), timeout=240), folder


def load_of(*passes: tuple[list[int], list[list[float]]], dropped: int = 0) -> LayerLoad:
    """Of one rank that routed ``passes``: tokens per expert, and scores of each token."""
    load = RouterLoad(2, torch.device("cpu"))
    for counts, scores in passes:
        load.add_tokens(torch.tensor(counts), torch.tensor(dropped), torch.tensor(scores))
    return LayerLoad.of(load.take())


def test_figures_of_a_layer_by_hand() -> None:
    load = load_of(([3, 1], [[0.5, 0.5]] * 4), ([3, 1], [[1.0, 0.0]] * 4), dropped=1)
    assert load.tokens_per_expert == (6, 2) and load.imbalance == 1.5
    assert load.dropped == 2 and load.dropped_share == 0.25
    assert load.entropy == pytest.approx(math.log(2) / 2)
    assert load.balancing_loss is None and load.z_loss is None


def test_losses_that_are_sums_of_parts_are_averaged_over_micro_batches() -> None:
    load = RouterLoad(2, torch.device("cpu"))
    for part in (0.2, 0.8, 0.5, 0.7):  # Two micro-batches of two ranks each.
        load.add_balancing_loss(torch.tensor(part), 2)
        load.add_z_loss(torch.tensor(part))
    found = LayerLoad.of(load.take())
    assert found.balancing_loss == pytest.approx(1.1) and found.z_loss == pytest.approx(0.55)
    assert LayerLoad.of(load.take()).imbalance is None, "taken once"


def test_a_record_and_its_line() -> None:
    record = record_of(
        {1: load_of(([3, 1], [[0.5, 0.5]] * 4), dropped=1), 3: load_of(([2, 2], [[1.0, 0.0]] * 4))}
    )
    assert (record["moe_imbalance"], record["moe_imbalance_max"], record["moe_dropped"]) == (1.25, 1.5, 0.125)
    assert record["moe_balancing_loss"] is None
    assert [layer["layer"] for layer in record["moe_layers"]] == [1, 3]
    assert scalars(record)["moe/layer_3/imbalance"] == 1.0
    assert histograms(record) == {
        "moe/layer_1/tokens_per_expert": [3, 1],
        "moe/layer_3/tokens_per_expert": [2, 2],
    }
    line = format_step(1, 2, {**VALUES, **record})
    assert "busiest expert 1.25x  dropped 12.5 %" in line
    assert record_of({}) == {} and "expert" not in format_step(1, 2, VALUES)


def test_layers_of_every_stage_are_in_the_records(found: tuple[list[Found], Path]) -> None:
    first, second = found[0][0]["pp2"]["records"]
    assert [first["iteration"], second["iteration"]] == [2, 3]
    for record, steps in ((first, 2), (second, 1)):
        layers = record["moe_layers"]
        assert [layer["layer"] for layer in layers] == [2, 3, 4], "the last is of multi-token prediction"
        for layer in layers:
            assert sum(layer["tokens_per_expert"]) == steps * TOKENS * 2
            assert layer["imbalance"] == max(layer["tokens_per_expert"]) * 8 / (steps * TOKENS * 2)
            assert 0 < layer["entropy"] <= math.log(8) + 1e-6
            assert layer["balancing_loss"] > 0.5 and layer["z_loss"] > 0 and layer["dropped"] == 0
        assert record["moe_imbalance_max"] == max(layer["imbalance"] for layer in layers)


def test_the_trainer_moves_biases_once_per_step(found: tuple[list[Found], Path]) -> None:
    for name, layers in (("pp2", ([], ["3", "4", "5"])), ("ep2", (["2", "3", "4"],) * 2)):
        for rank, expected in enumerate(layers):
            biases = found[0][rank][name]["biases"]
            assert sorted(biases) == expected
            for bias in biases.values():
                steps = [round(each / 0.01, 4) for each in bias]
                # One of -1, 0 and 1 a step, and not all the same.
                assert all(step in range(-3, 4) for step in steps) and any(steps), steps
    ep2 = [found[0][rank]["ep2"]["biases"] for rank in range(2)]
    assert ep2[0] == ep2[1]


def test_a_skipped_step_moves_no_bias(found: tuple[list[Found], Path]) -> None:
    for rank in found[0]:
        updates = {name: counts["updates"] for name, counts in rank["counts"].items()}
        assert updates == {"each": 3, "last": 3, "skipped": 2}


def test_dropped_tokens_are_counted(found: tuple[list[Found], Path]) -> None:
    for record in found[0][0]["capacity"]["records"]:
        assert 0.4 < record["moe_dropped"] < 1
    assert any("dropped" in line for line in found[0][0]["capacity"]["lines"])


def test_a_dense_model_says_nothing_of_experts(found: tuple[list[Found], Path]) -> None:
    record = found[0][0]["dense"]["records"][0]
    assert not [name for name in record if "moe" in name]
    assert not [line for line in found[0][0]["dense"]["lines"] if "expert" in line]
    assert found[0][0]["dense"]["biases"] == {}


def test_only_reports_communicate(found: tuple[list[Found], Path]) -> None:
    """Three steps: one report costs one all-reduce; two more reports, two more."""
    for rank in found[0]:
        counts = rank["counts"]
        assert counts["each"]["reductions"] - counts["last"]["reductions"] == 2


@pytest.mark.skipif(not TENSORBOARD, reason="tensorboard is not installed")
def test_tensorboard_has_every_layer(found: tuple[list[Found], Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(found[1] / "tb"), size_guidance={"histograms": 0}).Reload()
    tags = board.Tags()
    assert {"train/moe_imbalance", "train/moe/layer_2/imbalance", "train/moe/layer_4/entropy"} <= set(
        tags["scalars"]
    )
    assert "train/moe/layer_3/tokens_per_expert" in tags["histograms"]
    assert [event.step for event in board.Scalars("train/moe/layer_2/imbalance")] == [2, 3]
