"""The blocked loss has upstream's losses and gradients, whatever is announced and however it is spread."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks

HERE = "tests.layers.loss.cross_entropy_ranks"


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_losses_and_gradients_are_the_plain_paths(tp, sequence_parallel):
    for found in run_ranks(tp, f"{HERE}:compare", tp, sequence_parallel):
        assert len(found) == 50
        for name, errors in found.items():
            plain = found["-".join([*name.split("-")[:2], "plain"])]
            for what, error in errors.items():
                # In bf16 no farther from the fp32 result than the plain path is. Logits of hundreds are
                # rounded by 1e-5, and so is every probability, on either path.
                exact = 5e-6 if "rising" in name else 1e-6
                bound = exact if name.startswith("float32") else 1.5 * max(plain[what], 1e-6)
                assert error < bound, (name, what, error, plain)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)])
def test_padding_of_the_vocabulary_has_no_share(tp, sequence_parallel):
    for found in run_ranks(tp, f"{HERE}:padded", tp, sequence_parallel):
        for name, errors in found.items():
            if name.endswith("left_in"):
                assert errors["losses"] > 1e-3, (name, errors)
            else:
                assert max(errors.values()) < 1e-6, (name, errors)


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, f"{HERE}:alone")[0]


def test_large_logits_are_no_trouble(alone):
    found = alone["extremes"]
    assert found["losses"] == [0.0, 10000.0, 0.0]
    assert found["one"] == [[0.0]]


def test_many_blocks_round_a_narrow_gradient_once(alone):
    for how, distance in alone["narrow"].items():
        assert distance <= 0.5, how


def test_memory_beside_weights_and_gradients_is_a_few_percent_of_the_logits():
    (found,) = run_ranks(1, f"{HERE}:memory")
    assert found["announced"] < 0.05, found
    assert found["recomputed"] < 0.05, found
    # The measure is able to see it: one block of all tokens.
    assert found["whole"] > 0.9, found
