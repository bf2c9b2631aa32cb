"""Every layout trains the same model as one process does, from one checkpoint, on the same tokens."""

from __future__ import annotations

import pytest

from tests.parity.case import LAYOUTS, LEARNS, MIXTURES, REFERENCES, SABOTAGED, STEPS, Layout
from tests.parity.compare import FP32, Bounds, check
from tests.parity.conftest import Figures, Runs

BF16 = Bounds(gradient=0.04, loss=0.003, norm=0.03, weight=0.05)
"""About 2.5 times the largest deviations seen over all layouts and three seeds."""


@pytest.mark.parametrize("name", [each.name for each in REFERENCES])
def test_the_reference_learns_and_is_clipped(runs: Runs, seed: int, name: str, figures: Figures) -> None:
    record = runs(name, seed=seed)
    figures({"first_loss": record.losses[0], "last_loss": record.losses[-1], "clipped_steps": record.clipped})
    assert record.losses[0] - record.losses[-1] >= LEARNS, record.losses
    assert record.clipped >= STEPS // 4, (
        f"clipping acted in {record.clipped} of {STEPS} steps: {record.norms}"
    )


@pytest.mark.parametrize("layout", (*LAYOUTS, *MIXTURES), ids=lambda layout: layout.name)
def test_layout_equals_one_process(runs: Runs, seed: int, layout: Layout, figures: Figures) -> None:
    reference = runs(layout.reference, seed=seed)
    figures(check(reference, runs(layout.name, seed=seed), FP32))


@pytest.mark.parametrize("layout", SABOTAGED, ids=lambda layout: layout.name)
def test_a_deliberate_mistake_is_noticed(runs: Runs, seed: int, layout: Layout) -> None:
    with pytest.raises(AssertionError, match="deviates by|different copies"):
        check(runs(layout.reference, seed=seed), runs(layout.name, seed=seed), FP32)


@pytest.mark.daily
def test_weighing_by_token_is_another_training(runs: Runs, seed: int) -> None:
    with pytest.raises(AssertionError, match="deviates by"):
        check(runs("one", seed=seed), runs("one_per_token", seed=seed), FP32)


@pytest.mark.daily
def test_a_repeated_forward_pass_draws_the_same_masks(runs: Runs, seed: int, figures: Figures) -> None:
    figures(check(runs("dropout", seed=seed), runs("dropout_recompute", seed=seed), FP32))


@pytest.mark.daily
def test_recomputation_happens(runs: Runs, seed: int) -> None:
    plain, full = runs("one", seed=seed), runs("recompute", seed=seed)
    selective = runs("recompute_selective", seed=seed)
    assert full.layer_forwards == 2 * plain.layer_forwards > 0
    assert selective.layer_forwards == plain.layer_forwards
    assert selective.attention_forwards == 2 * plain.attention_forwards > 0


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=() if each.bf16_always else pytest.mark.soak) for each in LAYOUTS],
    ids=lambda layout: layout.name,
)
def test_layout_stays_close_in_bf16(runs: Runs, seed: int, layout: Layout, figures: Figures) -> None:
    reference = runs(layout.reference, seed=seed, bf16=True)
    figures(check(reference, runs(layout.name, seed=seed, bf16=True), BF16))


def test_bf16_learns_like_fp32(runs: Runs, seed: int) -> None:
    pairs = zip(runs("one", seed=seed).losses, runs("one", seed=seed, bf16=True).losses, strict=True)
    assert max(abs(a - b) / a for a, b in pairs) <= 0.005
