"""The parity suite on the emulated musa device: every layout equals one process there, and the cpu.

The emulator runs CPU kernels behind another device type, other streams of random numbers, other
process groups and other optimizer classes. So this proves the redirection, not the hardware.
"""

from __future__ import annotations

import pytest

from tests.emulators import needs_emulated_musa
from tests.parity.case import DROPOUT, LAYOUTS, REFERENCES, SABOTAGED, Layout
from tests.parity.compare import FP32, Bounds, Record, check
from tests.parity.conftest import Figures, Runs

pytestmark = needs_emulated_musa()

CPU = Bounds(gradient=2e-6, loss=1e-6, norm=1e-6, weight=1e-5)
"""The two take different kernels for attention (the cpu's is blocked) and norms. Single elements of a
gradient have been seen to differ by 1.08e-6 of its largest."""

DAILY = ("one", "tp2_sp", "recompute", "dropout", "dropout_recompute")
SABOTAGED_DAILY = ("no_norm_all_reduce",)
BF16 = Bounds(gradient=0.04, loss=0.003, norm=0.03, weight=0.05)


def _marked(layouts: tuple[Layout, ...]) -> list[object]:
    lanes = dict.fromkeys((*DAILY, *SABOTAGED_DAILY), pytest.mark.daily)
    return [pytest.param(each.name, marks=lanes.get(each.name, pytest.mark.soak)) for each in layouts]


def _run(runs: Runs, name: str, seed: int, bf16: bool = False) -> Record:
    # What runs in one lane shares launches; the rest is started when it is asked for.
    daily = (*DAILY, *SABOTAGED_DAILY)
    every = tuple(each.name for each in (*REFERENCES, *LAYOUTS, *DROPOUT))
    peers = daily if name in daily else every
    return runs(name, seed=seed, bf16=bf16, backend="musa", peers=peers)


@pytest.mark.parametrize("name", _marked((*REFERENCES, *LAYOUTS, *DROPOUT)))
def test_layout_equals_the_cpu(runs: Runs, seed: int, name: str, figures: Figures) -> None:
    figures(check(runs(name, seed=seed), _run(runs, name, seed), CPU))


@pytest.mark.daily
@pytest.mark.parametrize("name", _marked(LAYOUTS))
def test_layout_equals_one_process(runs: Runs, seed: int, name: str, figures: Figures) -> None:
    reference = next(each.reference for each in LAYOUTS if each.name == name)
    figures(check(_run(runs, reference, seed), _run(runs, name, seed), FP32))


@pytest.mark.parametrize("name", _marked(SABOTAGED))
def test_a_deliberate_mistake_is_noticed(runs: Runs, seed: int, name: str) -> None:
    with pytest.raises(AssertionError, match="deviates by|different copies"):
        check(runs("one", seed=seed), _run(runs, name, seed), FP32)


@pytest.mark.backend("musa")
@pytest.mark.parametrize("name", ["one", *(each.name for each in LAYOUTS if each.bf16_always)])
def test_layout_stays_close_to_the_cpu_in_bf16(runs: Runs, seed: int, name: str, figures: Figures) -> None:
    figures(check(runs(name, seed=seed, bf16=True), _run(runs, name, seed, bf16=True), BF16))


@pytest.mark.daily
def test_a_repeated_forward_pass_draws_the_same_masks(runs: Runs, seed: int, figures: Figures) -> None:
    figures(check(_run(runs, "dropout", seed), _run(runs, "dropout_recompute", seed), FP32))


@pytest.mark.daily
def test_dropout_drops_something(runs: Runs, seed: int) -> None:
    with pytest.raises(AssertionError, match="deviates by"):
        check(_run(runs, "one", seed), _run(runs, "dropout", seed), FP32)
