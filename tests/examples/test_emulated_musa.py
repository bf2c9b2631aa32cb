"""Every example's model on the emulated musa device: nothing that cards are reported to refuse.

The emulator raises at a float64 tensor, at MCCL with unequal sizes, at a sort of bool and at compiled code,
and counts it (``tests/backends/test_musa_refusals.py`` shows that it does).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulators import environment, needs_emulated_musa
from tests.launch import run_ranks

pytestmark = needs_emulated_musa()

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*/*.yaml") if path.parent.name != "layouts")
ALWAYS = [path for path in EXAMPLES if path.stem == "deepseek_v3"]
"""The one that has everything."""
DAILY = [path for path in EXAMPLES if path.stem in ("llama3_70b", "mixtral_8x7b")]
"""A dense model with a distributed optimizer, and a mixture."""


def _check(examples: list[Path], folder: Path) -> None:
    names = [str(path) for path in examples]
    emulated, host = (
        run_ranks(
            2,
            "tests.examples.emulated_ranks:steps",
            names,
            str(folder),
            timeout=120 + 30 * len(names),
            env={**variables, "MT_MEGATRON_TEST_BACKEND": backend},
        )
        for backend, variables in (("musa", environment()), ("cpu", {}))
    )
    for ours, theirs in zip(emulated, host, strict=True):
        assert ours["refused"] == {}
        for path in examples:
            # bf16, and other streams of random numbers would show at once.
            assert ours["losses"][path.stem] == pytest.approx(theirs["losses"][path.stem], rel=2e-3)


def test_a_step_has_nothing_that_cards_refuse(tmp_path: Path) -> None:
    _check(ALWAYS, tmp_path)


@pytest.mark.daily
def test_steps_of_each_kind_have_nothing_that_cards_refuse(tmp_path: Path) -> None:
    _check(DAILY, tmp_path)


@pytest.mark.soak
def test_a_step_of_every_example_has_nothing_that_cards_refuse(tmp_path: Path) -> None:
    assert len(EXAMPLES) >= 20
    _check(EXAMPLES, tmp_path)
