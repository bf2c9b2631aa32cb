"""A watched training is the unwatched one to the bit, without a further collective, and nothing is left."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mt_megatron.scope.watch.requests import is_sampled
from tests.launch import run_ranks
from tests.parity.case import MODEL, OPTIMIZER
from tests.scope.watch.identity_ranks import INTERVAL, REQUESTS
from tests.scope.watch.layouts import CP, EP, EXPERTS, PP, RECOMPUTE, SP, TP, ZERO1

DAILY = os.environ.get("MT_MEGATRON_DAILY") == "1"
STEPS = 50 if DAILY else 5
_FEW = "" if DAILY else "--global-batch-size 4"
"""Two micro-batches a step for ranks that share their samples, in the first lane."""

_DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
_FLAGS = f"{MODEL} {OPTIMIZER} {_DROPOUT} --train-iters 60 --untie-embeddings-and-output-weights"
_FP8 = "--bf16 --fp8-recipe delayed --fp8-amax-history-len 4 --no-first-last-layers-bf16"
LAYOUTS = {
    "tp2": f"{_FLAGS} {TP} {_FEW}",
    "ep2": f"{_FLAGS} {EXPERTS} {EP}",
    **(
        {
            "pp2": f"{_FLAGS} {PP}",
            "cp2": f"{_FLAGS} {CP} --attention-dropout 0",
            "tp2_sp_recompute": f"{_FLAGS} {TP} {SP} {RECOMPUTE}",
            "ep2_zero1": f"{_FLAGS} {EXPERTS} {EP} {ZERO1}",
            "tp2_sp_alltoall_seq": f"{_FLAGS} {EXPERTS} {TP} {SP} --moe-token-dispatcher-type alltoall_seq",
            "fp8_dp2": f"{_FLAGS} {_FP8}",
        }
        if DAILY
        else {}
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("identity")
    target = "tests.scope.watch.identity_ranks:compare"
    found: list[dict[str, Any]] = run_ranks(
        2, target, str(folder), LAYOUTS, STEPS, timeout=1800 if DAILY else 300
    )
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_bits_are_the_same(runs: list[dict[str, Any]], name: str) -> None:
    for rank, each in enumerate(runs):
        on, off = each[name]["on"]["steps"], each[name]["off"]["steps"]
        assert len(on) == len(off) == STEPS
        parted = [step for step, (a, b) in enumerate(zip(on, off, strict=True), 1) if a != b]
        assert not parted, f"rank {rank}: loss, norm, gradients, weights or random numbers part at {parted}"
        assert len({step[3] for step in on}) == STEPS, "the weights did not move"
        assert len({step[4] for step in on}) > 1, "no random numbers were drawn"


@pytest.mark.parametrize("name", LAYOUTS)
def test_watching_adds_no_collective(runs: list[dict[str, Any]], name: str) -> None:
    for each in runs:
        on, off = each[name]["on"]["calls"], each[name]["off"]["calls"]
        assert on == off
        assert off[0]["numbered by the groups"] >= 3, "no collective was counted"
        assert sum(off[0].values()) - off[0]["numbered by the groups"] >= 3, "no call was counted"


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_callable_is_the_original_after_each_step(runs: list[dict[str, Any]], name: str) -> None:
    # The ranks look after each step; the control is that they see a tap that is open.
    for each in runs:
        for way in ("on", "off"):
            assert each[name][way]["open_tap_is_seen"] and each[name][way]["closed_tap_is_not"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_modules_are_tapped_in_watched_steps_alone(runs: list[dict[str, Any]], name: str) -> None:
    every = {int(text.rpartition("=")[2]) for text in REQUESTS}
    for each in runs:
        for step, count in enumerate(each[name]["on"]["tapped"], 1):
            due = is_sampled(step, INTERVAL) or any(step % number == 0 for number in every)
            assert (count > 0) == due, f"step {step}: {count} taps"
        assert each[name]["off"]["tapped"] == [0] * STEPS


@pytest.mark.parametrize("name", LAYOUTS)
def test_something_was_watched(runs: list[dict[str, Any]], name: str) -> None:
    on = runs[0][name]["on"]
    assert {"hello", "schema", "stats", "step", "tensor", "tokens", "bye"} <= set(on["frames"])
    assert on["frames"]["step"] == 2 * STEPS
    allowed = ("router@" if "ep2" not in name else "-", "decoder.layers.3", "moments@")
    assert all(any(word in line for word in allowed) for line in on["lines"]), on["lines"]
