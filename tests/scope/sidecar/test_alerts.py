"""Alerts: planted spikes, drifts, NaNs and dead experts are told once; ordinary training is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from mt_megatron.scope.recording.data import Value
from mt_megatron.scope.recording.writer import Alert
from mt_megatron.scope.sidecar.alerts import ACCEPT, CALM, DEAD_SAMPLES, FEWEST, AlertModel, Band, as_map

LAYERS = 6
STATISTICS = ("activation_rms", "gradient_norm", "attention_entropy", "weight_norm")


def a_value(path: str, statistic: str, value: float, vector: Sequence[float] | None = None) -> Value:
    return Value(
        path=path,
        statistic=statistic,
        value=value,
        parts=1,
        of=1,
        partial=False,
        vector=None if vector is None else np.asarray(vector, np.float64),
    )


def samples(seed: int, count: int) -> list[list[Value]]:
    """Statistics that grow or fall slowly, with log-normal noise, in the scale of each layer."""
    draw = np.random.default_rng(seed)
    found = []
    for step in range(count):
        values = []
        for layer in range(LAYERS):
            for place, name in enumerate(STATISTICS):
                trend = math.exp((place - 1) * 0.3 * step / count) * (1 + layer) * 10.0 ** (2 * place - 4)
                value = trend * math.exp(0.04 * draw.standard_t(5))
                values.append(a_value(f"decoder.layers.{layer}", name, value))
        found.append(values)
    return found


def judged(steps: Sequence[Sequence[Value]], model: AlertModel | None = None) -> list[Alert]:
    model = model or AlertModel()
    return [alert for step, values in enumerate(steps) for alert in model.statistics(step, values)]


def spiked(steps: list[list[Value]], step: int, path: str, name: str, factor: float) -> list[list[Value]]:
    found = [list(values) for values in steps]
    found[step] = [
        a_value(path, name, factor * each.value) if (each.path, each.statistic) == (path, name) else each
        for each in steps[step]
    ]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_ordinary_training_raises_nothing(seed: int) -> None:
    """The negative control: 24 series of 150 samples with heavy-tailed noise and trends."""
    assert judged(samples(seed, 150)) == []


@pytest.mark.parametrize("factor", [4.0, 0.2, 0.0])
def test_a_planted_spike_is_told_once_with_its_place(factor: float) -> None:
    steps = spiked(samples(1, 100), 60, "decoder.layers.3", "activation_rms", factor)
    (alert,) = judged(steps)
    assert (alert.step, alert.path, alert.statistic) == (60, "decoder.layers.3", "activation_rms")
    assert not alert.low <= alert.value <= alert.high
    assert "activation_rms of decoder.layers.3" in alert.text


def test_of_several_modules_the_furthest_is_named() -> None:
    steps = samples(2, 80)
    for layer, factor in ((1, 3.0), (4, 9.0), (5, 4.0)):
        steps = spiked(steps, 50, f"decoder.layers.{layer}", "gradient_norm", factor)
    (alert,) = judged(steps)
    assert alert.path == "decoder.layers.4" and "2 more modules" in alert.text


def test_no_share_of_weights_that_were_zero_is_no_alarm() -> None:
    nan = float("nan")
    assert judged([[a_value("output_layer", "update_ratio", nan)]]) == []
    (alert,) = judged([[a_value("output_layer", name, nan) for name in ("update_ratio", "weight_norm")]])
    assert alert.statistic == "weight_norm"


def test_a_spike_before_there_is_a_band_is_not_judged() -> None:
    assert judged(spiked(samples(3, 40), FEWEST - 2, "decoder.layers.0", "weight_norm", 50.0)) == []


def test_a_new_level_is_told_once_and_accepted() -> None:
    band = Band()
    draw = np.random.default_rng(5)
    noise = np.exp(0.02 * draw.standard_normal(200))
    told = [index for index in range(200) if band.take((1.0 if index < 60 else 3.0) * noise[index])]
    assert told == [60]
    # The way back is as far as the way there was.
    assert [index for index in range(30) if band.take(noise[index])] == [0]


def test_a_series_that_calmed_down_alerts_again() -> None:
    band = Band()
    values = [1.0 + 0.01 * (index % 3) for index in range(60)]
    for place in (30, 32, 32 + CALM + 2):
        values[place] = 10.0
    told = [index for index, value in enumerate(values) if band.take(value) is not None]
    assert told == [30, 32 + CALM + 2] and ACCEPT > CALM


def test_values_that_are_no_numbers_do_not_move_a_band() -> None:
    band = Band()
    for value in [1.0, 1.01, 0.99] * 10:
        assert band.take(value) is None
    assert [band.take(value) for value in (math.nan, math.inf, -1.0)] == [None] * 3
    assert band.take(1.0) is None and band.take(5.0) is not None


def test_the_first_value_that_is_not_finite_names_the_first_module() -> None:
    model = AlertModel()
    order = [f"decoder.layers.{layer}" for layer in range(LAYERS)]
    model.modules(order)
    values = [a_value(path, "not_finite", 4.0) for path in reversed(order[2:])]
    (alert,) = model.statistics(7, [*values, a_value(order[0], "not_finite", 0.0)])
    assert (alert.kind, alert.path, alert.step) == ("not finite", order[2], 7) and "3 more" in alert.text
    assert model.statistics(8, values) == []
    model.restart()
    assert len(model.statistics(9, values)) == 1


def test_a_loss_that_is_not_finite_is_told_and_then_the_module() -> None:
    model = AlertModel()
    assert model.step(3, loss=math.nan, grad_norm=math.nan, skipped=False, known=False) == []
    (loss,) = model.step(4, loss=math.nan, grad_norm=math.nan, skipped=False, known=True)
    assert (loss.path, loss.statistic) == ("", "loss")
    (module,) = model.statistics(4, [a_value("decoder.layers.1", "not_finite", 1.0)])
    assert module.path == "decoder.layers.1"


@pytest.mark.parametrize("skipped", [False, True])
def test_a_gradient_that_is_not_finite_is_told_of_a_step_that_diverged(skipped: bool) -> None:
    """A diverged step is skipped. Where fp16 gradients overflow there is no norm at all."""
    values = [a_value("decoder.layers.1", "gradient_norm", math.nan)]
    (alert,) = AlertModel().statistics(1, values, skipped=skipped)
    assert (alert.path, alert.statistic) == ("decoder.layers.1", "gradient_norm")
    assert len(AlertModel().step(1, loss=2.0, grad_norm=math.inf, skipped=skipped, known=True)) == 1
    assert AlertModel().step(1, loss=2.0, grad_norm=math.nan, skipped=skipped, known=True) == []


def test_updates_of_skipped_steps_move_no_band() -> None:
    model = AlertModel()
    for step in range(40):
        values = [a_value("decoder.layers.1", "update_ratio", 1e-3 * (1 + step % 3 / 100))]
        assert model.statistics(step, values) == []
    zero = [a_value("decoder.layers.1", "update_ratio", 0.0)]
    assert model.statistics(40, zero, skipped=True) == [] and len(model.statistics(41, zero)) == 1


def test_experts_without_tokens_are_told_after_several_samples() -> None:
    model = AlertModel()
    path = "decoder.layers.1.mlp.router"

    def look(step: int, *tokens: float) -> list[Alert]:
        return model.statistics(step, [a_value(path, "expert_load", 1.2, tokens)])

    assert look(0, 5, 0, 5, 5) == [] and look(1, 5, 5, 5, 5) == []  # once is no death
    told = [step for step in range(2, 12) if look(step, 5, 0, 6, 5)]
    assert told == [1 + DEAD_SAMPLES]
    assert look(12, 0, 0, 0, 0) == []  # no token at all says nothing of an expert


def test_the_loss_has_a_band() -> None:
    model = AlertModel()
    draw = np.random.default_rng(0)
    told = []
    for step in range(120):
        loss = (9.0 if step == 90 else 3.0) * math.exp(-step / 400 + 0.02 * draw.standard_normal())
        for alert in model.step(step, loss=loss, grad_norm=1.0, skipped=False, known=True):
            told.append(as_map(alert, 2))
    (found,) = told
    assert (found["step"], found["statistic"], found["session"]) == (90, "loss", 2)


def test_what_is_no_number_is_null_in_json() -> None:
    (alert,) = AlertModel().step(1, loss=math.nan, grad_norm=1.0, skipped=False, known=True)
    found = as_map(alert, 0)
    assert found["value"] is None and found["low"] is None
