"""A T5 whose encoder and decoder are pipeline stages of their own is the T5 of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import run_ranks

RANKS = "tests.patches.errata.encoder_decoder_ranks:everything"
WORD, POSITION = "word_embeddings.weight", "position_embeddings.weight"


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.daily)])
def test_stages_start_step_save_and_load_as_one_process(tied: bool, tmp_path: Path) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    for folder in (whole, parts):
        Path(folder).mkdir()
    [one] = run_ranks(1, RANKS, tied, [], whole, "")
    stages = run_ranks(2, RANKS, tied, [], parts, whole)
    assert stages[0]["drawn"] == stages[1]["drawn"], "one draw"
    assert np.std(stages[1]["drawn"][WORD]) == pytest.approx(np.std(one["drawn"][WORD]), rel=0.1)
    assert stages[1]["losses"] == pytest.approx(one["losses"], rel=1e-6)
    [again] = run_ranks(1, RANKS, tied, [], "", parts)
    for stage in stages:
        assert stage["norm"] == pytest.approx(one["norm"], rel=1e-5)
        word = f"embedding.{WORD}"
        assert stage["gradients"][word] == pytest.approx(one["gradients"][word], rel=1e-5)
        _same(stage["loaded"], one["weights"])
    # The encoder's last stage has a head that no loss reaches.
    kept = {name: each for name, each in stages[0]["weights"].items() if "lm_head" not in name}
    _same(kept, one["weights"])
    _same(stages[1]["weights"], one["weights"])
    _same(again["loaded"], one["weights"])


def _same(found: dict[str, float], wanted: dict[str, float]) -> None:
    """``found`` is the part of ``wanted`` that a stage has."""
    assert len(found) > 20
    assert found == pytest.approx({name: wanted[name] for name in found}, rel=1e-5)


@pytest.mark.daily
@pytest.mark.parametrize("tied", [True, False])
def test_upstream_has_these_faults(tied: bool) -> None:
    [one] = run_ranks(1, RANKS, tied, [], "", "")
    stages: list[Any] = run_ranks(2, RANKS, tied, ["errata"], "", "")
    assert stages[0]["drawn"][POSITION] != stages[1]["drawn"][POSITION], "two draws"
    word = f"embedding.{WORD}"
    if tied:
        sum_of_two = np.std(stages[1]["drawn"][WORD]) / np.std(one["drawn"][WORD])
        assert sum_of_two == pytest.approx(2**0.5, rel=0.1)
        assert stages[0]["norm"] > 1.01 * one["norm"], "counted twice"
        lost = abs(stages[1]["gradients"][word] / one["gradients"][word] - 1)
        assert lost > 1e-3, "gradients of the decoder's inputs"
    else:
        assert stages[0]["weights"][word] != stages[1]["weights"][word], "drifted apart"
