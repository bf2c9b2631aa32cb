"""What the state of delayed scaling, copies and odd uses do to numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mt_megatron.fp8.linear import Fp8Linear
from mt_megatron.fp8.recipe import PRESETS, recipe_of
from mt_megatron.fp8.state import Fp8State, Options
from mt_megatron.fp8.telemetry import Telemetry
from tests.launch import run_ranks


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return dict(run_ranks(1, "tests.fp8.odd_uses:observed", timeout=120)[0])


def test_without_history_the_tensors_own_scale_is_taken(found: dict[str, Any]) -> None:
    """A direct call outside of any schedule, with gradients that scale 1 would lose."""
    assert found["tiny gradient"] > 0.9


def test_infinity_shows_under_delayed_scaling(found: dict[str, Any]) -> None:
    assert found["infinite input is seen"] and found["infinite gradient is seen"]


def test_a_second_model_of_one_configuration_has_a_state_of_its_own(found: dict[str, Any]) -> None:
    assert found["linears of each"] == [16, 16]
    assert found["steps of each"] == [1, 0] and found["kept"]
    assert found["demoted output layers"] == [0.0, 1.0]


def test_layers_may_be_built_when_others_have_computed(found: dict[str, Any]) -> None:
    assert found["states of layers"] == [1, 1, 2]


def test_layers_may_be_taken_out_or_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8State, "reduce_max", lambda *unused: None)
    state = Fp8State(PRESETS["delayed"], Options())
    modules = {name: torch.nn.Linear(16, 16) for name in "ab"}
    for name, module in modules.items():
        state.add(Fp8Linear(state, name, module.weight))
    state.row("b")  # of weights on the host
    del modules["a"], module
    with state.stepping(forward_only=False):
        assert state.delayed_scale("b", "input", torch.tensor(2.0)) == 224
    assert state.step == 1 and state.row("b")[4] == 2
    assert state.delayed_scale("b", "input", torch.ones((), device="meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"format": "e4m3"}),
        ({"format": "e4m3"}, {}),
        ({}, {"margin": 2}),
        ({"algorithm": "max"}, {"algorithm": "most_recent"}),
    ],
)
def test_a_loaded_scale_is_of_this_runs_format_and_margin(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, Any], now: dict[str, Any]
) -> None:
    monkeypatch.setattr(Fp8State, "reduce_max", lambda *unused: None)
    module, states = torch.nn.Linear(16, 16), []
    for given in (before, now, now):
        state = Fp8State(recipe_of("delayed", **{"history": 4, **given}), Options())
        state.add(Fp8Linear(state, "a", module.weight))
        states.append(state)
    saved, loaded, always = states
    for state in (saved, always):
        for amax in (3.0, 0.5):
            with state.stepping(forward_only=False):
                for kind in ("input", "weight", "grad"):
                    state.delayed_scale("a", kind, torch.tensor(amax))
    loaded.load_row("a", saved.row("a"))
    assert torch.equal(loaded.row("a"), always.row("a"))
    assert not torch.equal(saved.row("a"), loaded.row("a")), "the control: both runs' scales are the same"


@pytest.mark.parametrize("history", [1, 4])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_steps_of_zeros_keep_the_scale(monkeypatch: pytest.MonkeyPatch, algorithm: str, history: int) -> None:
    """Transformer Engine's rule: a largest magnitude of 0 leaves the scale as it was. It used to be forgotten
    with the last magnitude in the history, and the next tensor's own was taken."""
    monkeypatch.setattr(Fp8State, "reduce_max", lambda *unused: None)
    state = Fp8State(recipe_of("delayed", algorithm=algorithm, history=history), Options())
    module = torch.nn.Linear(16, 16)
    state.add(Fp8Linear(state, "a", module.weight))
    for amax in (2.0, *[0.0] * (history + 2)):
        with state.stepping(forward_only=False):
            state.delayed_scale("a", "input", torch.tensor(amax))
    loaded = Fp8State(state.recipe, Options())
    loaded.add(Fp8Linear(loaded, "a", module.weight))
    loaded.load_row("a", state.row("a"))
    for each in (state, loaded):
        assert each.has_scale("a", "input") and not each.has_scale("a", "grad")
        assert each.delayed_scale("a", "input", torch.tensor(100.0)) == 224  # 448 / 2
        assert each.delayed_scale("a", "grad", torch.tensor(7.0)) == 57344 / 7


def test_a_checkpoint_of_an_earlier_version_has_no_scale_where_it_saw_nothing() -> None:
    state = Fp8State(PRESETS["delayed"], Options())
    module = torch.nn.Linear(16, 16)
    state.add(Fp8Linear(state, "a", module.weight))
    row = state.row("a")
    row[1:4] = 1.0
    state.load_row("a", row)
    assert state.delayed_scale("a", "input", torch.tensor(2.0)) == 224


def test_a_step_that_failed_leaves_no_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may catch its error and go on."""
    monkeypatch.setattr(Fp8State, "reduce_max", lambda *unused: None)
    state = Fp8State(PRESETS["delayed"], Options(telemetry_interval=1))
    module = torch.nn.Linear(16, 16)
    linear = Fp8Linear(state, "a", module.weight)
    state.add(linear)
    telemetry = state.telemetry = Telemetry()
    records: list[dict[str, Any]] = []
    telemetry.write = records.append
    with pytest.raises(MemoryError), state.stepping(forward_only=False):
        linear.cast("fprop", "input", torch.full((4, 16), 1000.0), 1)
        raise MemoryError
    with state.stepping(forward_only=False):
        linear.cast("fprop", "input", torch.ones(4, 16), 1)
    assert state.row("a")[4] == 1.0
    assert [record["scale"] for record in records] == [pytest.approx(math.log2(448), abs=1e-4)]


def test_the_format_survives_a_copied_configuration(found: dict[str, Any]) -> None:
    assert found["format"] == ["e4m3", "e4m3"]


def test_a_module_can_be_stored(found: dict[str, Any]) -> None:
    assert found["stored"] and found["recipe of the stored"] is None


@pytest.mark.parametrize("fused", [True, False])
def test_deferred_weight_gradients_are_the_same(fused: bool) -> None:
    [found] = run_ranks(1, "tests.fp8.odd_uses:deferred", list(PRESETS), fused, timeout=120)
    assert found == dict.fromkeys(PRESETS, True)


def test_a_copied_model_computes_in_fp8_with_a_state_of_its_own() -> None:
    [found] = run_ranks(1, "tests.fp8.odd_uses:copied", ["delayed", "blockwise"], timeout=120)
    for name, each in found.items():
        assert each["same"] == [True] * 3 and each["is FP8"] and each["apart"], (name, each)
        assert each["linears"] == [17, 17, 1] and each["step"] == [1, 1]
        assert each["state"] and each["untouched"] and each["of the copy"], (name, each)
        assert each["stored"] is None and each["of a configuration alone"] == []


def test_weights_that_are_gathered_in_fp8_can_grow() -> None:
    """Magnitudes are of the updated weights, not of those that were clamped to the old scale."""
    found = run_ranks(2, "tests.fp8.odd_uses:gathered_growth", timeout=120)
    for each in found:
        assert each["amax"] == pytest.approx(each["wanted"], rel=0.07), each


def test_operands_from_gathered_codes_are_casts_of_all_rows() -> None:
    """Codes and scales to the bit, in the first step too, when delayed scaling has no history."""
    first, second = run_ranks(2, "tests.fp8.odd_uses:gathered_operands", list(PRESETS), timeout=150)
    assert first == second, "scales that ranks share are equal to the bit"
    for name, found in first.items():
        assert not [each for each in found if "different" in each], (name, found)
        assert found["step 0: the same"] == found["step 1: the same"] > 0, (name, found)
