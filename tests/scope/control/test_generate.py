"""Generation equals an independent computation in every layout, and training afterwards is as without it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mt_megatron.scope.control.generate import _Texts
from tests.launch import run_ranks
from tests.scope.control.generate_cases import Characters

CASES = "tests.scope.control.generate_cases"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
LAYOUTS = {
    "tp": f"--tensor-model-parallel-size 2 --sequence-parallel {DROPOUT}",
    "pp": f"--pipeline-model-parallel-size 2 {DROPOUT}",
    "cp": f"--context-parallel-size 2 {DROPOUT}",
    "dp": f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {DROPOUT}",
    "vpp": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4",
}


def _expected(tmp_path: Path) -> list[dict[str, Any]]:
    # Two ranks, as the layouts have: weights are drawn alike.
    found: list[dict[str, Any]] = run_ranks(2, f"{CASES}:oracle", str(tmp_path), timeout=240)
    tokens: list[dict[str, Any]] = found[0]["tokens"]
    return tokens


def _equal(made: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(made) == len(expected) == 4
    for ours, theirs in zip(made, expected, strict=True):
        assert ours["id"] == theirs["id"] and ours["top_ids"] == theirs["top_ids"]
        assert np.allclose(ours["top_probabilities"], theirs["top_probabilities"], rtol=1e-4)
        assert np.isclose(ours["entropy"], theirs["entropy"], rtol=1e-4)
        attention = ours["attention"]["1"]
        assert sorted(attention) == ["0", "1", "2", "3"]
        for head, weights in attention.items():
            assert np.allclose(weights, theirs["attention"][int(head)], rtol=1e-3, atol=1e-6)


def _layouts(tmp_path: Path, names: list[str]) -> None:
    expected = _expected(tmp_path / "oracle")
    flags = {name: LAYOUTS[name] for name in names}
    found = run_ranks(2, f"{CASES}:layouts", str(tmp_path / "made"), "small", flags, timeout=400)
    drawn = {str(each["drawn"]) for rank in found for each in rank.values()}
    assert len(drawn) == 1, "the same draws in every layout and on every rank"
    for rank in found:
        for name, each in rank.items():
            assert each["untouched"] and all(each["same"]), name
            _equal(each["made"]["tokens"], expected)
            assert each["told"] == [token["id"] for token in each["made"]["tokens"]]
            assert each["text"] == " ".join(map(str, each["drawn"]))


def test_equals_the_oracle_and_leaves_no_trace(tmp_path: Path) -> None:
    _layouts(tmp_path, ["tp"])


@pytest.mark.daily
def test_in_every_layout(tmp_path: Path) -> None:
    _layouts(tmp_path, ["tp", "pp", "cp", "dp"])


@pytest.mark.daily
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("small", {"vpp": LAYOUTS["vpp"]}),
        (
            "small",
            {"fp8": "--bf16 --fp8-recipe delayed --fp8-amax-history-len 4 --no-first-last-layers-bf16"},
        ),
        (
            "mixture",
            {"dp": "", "ep": "--expert-model-parallel-size 2", "pp": "--pipeline-model-parallel-size 2"},
        ),
    ],
    ids=["vpp", "fp8", "experts"],
)
def test_other_models_leave_no_trace(tmp_path: Path, model: str, flags: dict[str, str]) -> None:
    case = f"{CASES}:layouts" if "vpp" not in flags else f"{CASES}:deep_layouts"
    found = run_ranks(2, case, str(tmp_path), model, flags, timeout=400)
    made = {
        str([token["id"] for token in each["made"]["tokens"]]) for rank in found for each in rank.values()
    }
    assert len(made) == 1
    for rank in found:
        for name, each in rank.items():
            assert each["untouched"] and all(each["same"]), name


def test_a_signal_or_a_command_ends_it_and_all_ranks_agree() -> None:
    found = run_ranks(2, f"{CASES}:ends_early", timeout=240)
    whole = [token["id"] for token in found[0]["whole"]["tokens"]]
    assert len(whole) == 6 and found[0]["whole"]["ended"] is None
    for each in found:
        ids = [token["id"] for token in each["stopped"]["tokens"]]
        assert ids == whole[:3], "the token after the signal is the last"
        assert each["stopped"]["ended"] == "the run is to end"
    assert len(found[0]["together"]["tokens"]) == 6
    resumed = found[0]["resumed"]
    assert [token["id"] for token in resumed["tokens"]] == whole[:3] and resumed["ended"] == "by command"


def test_texts_of_tokens_follow_one_another() -> None:
    trainer: Any = SimpleNamespace(tokenizer=Characters())
    texts = _Texts(trainer, 300)
    ids = [301, 302, *"词".encode(), 33, 303]
    assert texts.instead(301) == " w301" and texts.instead(65) == "A"
    assert [texts.next(each) for each in ids] == [" w301", " w302", "", "", "词", "!", " w303"]
    assert texts.instead(301) == " w301"
    nothing: Any = SimpleNamespace(tokenizer=None)
    assert _Texts(nothing, 1).next(2) is None and _Texts(nothing, 1).instead(2) is None


def test_requests_that_make_no_sense_are_refused() -> None:
    (found,) = run_ranks(1, f"{CASES}:refused", timeout=240)
    parts = [
        "both or neither",
        "both or neither",
        "at least one token id",
        "below 128",
        "expected at most 32 together",
        "found n: 0",
        "found temperature: -1",
        "found top_k: 'all'",
        "expected a map with layers",
        "found layers: [2]; expected a list of numbers from 0 to 1",
        "found heads: [4]; expected a list of numbers from 0 to 3",
        "found 'beam' for generate",
        "found attention of some 120 weights; expected at most 100",
    ]
    assert len(found) == len(parts)
    for said, part in zip(found, parts, strict=True):
        assert part in said, (said, part)
