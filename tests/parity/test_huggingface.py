"""One process against Hugging Face's Llama: logits, gradients, training; and causality."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.parity.conftest import Figures
from tests.parity.single import floating_point_operations


def test_logits_equal_hugging_face(seed: int, figures: Figures) -> None:
    [found] = run_ranks(1, "tests.parity.single:logits_beside_hugging_face", seed)
    figures(found)
    assert found["difference"] <= 1e-5 * found["scale"], found
    assert found["round_trip"] == 1.0


def test_training_equals_hugging_face(tmp_path: Path, seed: int, figures: Figures) -> None:
    [found] = run_ranks(1, "tests.parity.single:training_beside_hugging_face", str(tmp_path), seed)
    figures({"gradient": found["gradient"], "ours": found["ours"][-1], "theirs": found["theirs"][-1]})
    assert found["gradient"] <= 1e-5, found
    for ours, theirs in zip(found["ours"], found["theirs"], strict=True):
        assert abs(ours - theirs) <= 1e-6 * theirs, found
    for ours, theirs in zip(*found["norms"], strict=True):
        assert abs(ours - theirs) <= 1e-6 * theirs, found
    assert found["theirs"][0] - found["theirs"][-1] >= 1.0


def test_floating_point_operations_are_those_that_torch_counts(seed: int) -> None:
    found = floating_point_operations(seed)
    # The other model computes its rotary angles by a product, too.
    assert found["ours"] == pytest.approx(found["counted"], rel=1e-3)
    assert found["ours"] <= found["counted"]


def test_a_token_changes_no_earlier_logit(seed: int) -> None:
    [found] = run_ranks(1, "tests.parity.single:causality", seed)
    assert found["earlier"] == 0.0, found
    assert found["later"] > 1e-6, found
