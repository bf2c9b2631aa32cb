"""Collectives of one buffer follow NCCL's rule, the number of elements, also over Gloo and MCCL."""

from __future__ import annotations

from tests.emulators import environment, needs_emulated_musa
from tests.launch import run_ranks


def _check(env: dict[str, str]) -> None:
    for found in run_ranks(2, "tests.backends.refusal_ranks:flat", env=env):
        assert found["wrong"] == []
        assert found["counts"] == {}


def test_any_two_shapes_whose_elements_fit_over_gloo() -> None:
    _check({})


@needs_emulated_musa()
def test_any_two_shapes_whose_elements_fit_over_emulated_mccl() -> None:
    _check(environment())


def test_unequal_sizes_over_gloo() -> None:
    for found in run_ranks(2, "tests.backends.refusal_ranks:mended"):
        assert found["wrong"] == []
