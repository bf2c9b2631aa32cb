"""Perturbations inside of training steps: equal to the oracle, where and when they are asked for, gone
afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.scope.lab.acting_cases import KINDS


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ("", KINDS),
        pytest.param("--bf16", KINDS, marks=pytest.mark.daily),
        pytest.param("--fp16 --initial-loss-scale 256", KINDS, marks=pytest.mark.daily),
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_every_kind_everywhere_equals_the_oracle(flags: str, kinds: list[dict[str, Any]]) -> None:
    (found,) = run_ranks(1, "tests.scope.lab.acting_cases:equal_to_oracle", flags, kinds, timeout=300)
    assert len(found) == 4 * len(kinds)
    assert [each for each in found if each[2]] == []


def test_acts_when_and_where_it_is_asked_to() -> None:
    (found,) = run_ranks(1, "tests.scope.lab.acting_cases:scopes", timeout=300)
    assert found["states"] == ["waiting", "over"] and found["perturbed"] == "p"
    assert found["nothing left"] and found["gradients left"]
    assert any("acts from step 2" in line for line in found["told"])
    losses = found["losses"]
    clean = losses["none"]
    assert found["perturbed losses"][0] == clean[0] and found["perturbed losses"][1] != clean[1]
    assert found["again"][:2] == clean[1:3], "as without it"
    assert losses["none of these"] == clean
    assert len({str(losses[name]) for name in ("none", "all", "first", "differentiated", "passed on")}) == 5
    assert losses["recomputed"] == losses["all"], "recomputation meets the same change"
    assert losses["gradient recomputed"] == losses["gradient"] != clean, "and backward changes it once"
    assert losses["differentiated"][0] == losses["passed on"][0], "the same forward"
    # The learning rate of the first step is 0.
    assert losses["differentiated"][2] != losses["passed on"][2], "another backward"


def test_heads_are_those_of_the_layer() -> None:
    (found,) = run_ranks(1, "tests.scope.lab.acting_cases:masked_heads", timeout=300)
    # Four heads of eight; two groups of keys and values: rows q0 q1 k0 v0 q2 q3 k1 v1.
    assert found["columns"]["elements"] == 32 * 8 and found["rows"]["elements"] == 8 * 32
    assert found["columns"]["proj"] == list(range(16, 24)) and found["columns"]["qkv"] == []
    assert found["rows"]["qkv"] == list(range(32, 40)) and found["rows"]["proj"] == []
    assert found["context"]["losses"][0] == found["columns"]["losses"][0], (
        "a masked head gives the layer nothing"
    )
    assert found["context"]["losses"][0] != found["rows"]["losses"][0]


def test_what_the_model_cannot_have_is_refused() -> None:
    (found,) = run_ranks(1, "tests.scope.lab.acting_cases:refused", timeout=300)
    expected = [
        "found no module 'decoder.layers.7.mlp' on any rank",
        "Did you mean decoder.layers.1.mlp",
        "found no parameter 'decoder.layers.1.mlp.linear_fc1.wieght' on any rank",
        "in layers 9 on any rank",
        r"found index [96, 0] of decoder.layers.1.mlp.linear_fc1.weight; expected one within shape [96, 32]",
        "expected 2 numbers, shape [96, 32]",
        "found index [9999, sample, 5] of decoder.layers.1.mlp; expected positions below ",
        "expected a module whose rows or features are heads'",
        "found head 4 of decoder.layers.0.self_attention.core_attention; expected 0 to 3",
        "found bit: 32 for decoder.layers.0.mlp.linear_fc1.weight of float32",
        "computed in blocks",
        "found rank 1; expected 0 to 0",
        "found rank 1; expected 0 to 0",
        "expected the two ends of a link",
        "found rank 3",
        "expected the last to be 3, the next step, or later",
        "found undo_at: 2; expected at least the first of steps",
        "or arm it with snapshot: false",
        "Raise snapshot_limit_mib",
    ]
    assert len(found) == len(expected)
    for said, part in zip(found, expected, strict=True):
        assert part in said, (said, part)


def test_a_preview_says_what_it_would_be() -> None:
    (found,) = run_ranks(1, "tests.scope.lab.acting_cases:previewed", timeout=300)
    weights = found["weights"]
    assert [each["path"] for each in weights["targets"]] == [
        f"decoder.layers.{layer}.mlp.{name}.weight"
        for layer in (0, 1)
        for name in ("linear_fc1", "linear_fc2")
    ]
    first = weights["targets"][0]
    assert (first["shape"], first["elements"], first["dtype"], first["ranks"]) == (
        [96, 32],
        1536,
        "float32",
        [0],
    )
    # Weights and two moments of Adam; what counts steps is little.
    assert weights["snapshot_mib"] == pytest.approx(12 * found["parameters"] / 2**20, rel=0.01)
    assert [each["shape"] for each in found["modules"]["targets"]] == [["tokens", "samples", 64]] * 2


def test_a_pair_is_the_step_without_and_with() -> None:
    (found,) = run_ranks(1, "tests.scope.lab.acting_cases:paired", timeout=300)
    told = found["told"]
    assert told["baseline"]["loss"] == found["clean"] and told["perturbed"]["loss"] == found["perturbed"]
    assert found["untouched"] and found["closed"]
    modules = {each["path"]: each for each in told["modules"]}
    assert list(modules) == ["decoder.layers.0", "decoder.layers.1.mlp", "decoder.layers.1"]
    assert told["first_difference"] == "decoder.layers.1.mlp"
    assert modules["decoder.layers.0"]["changed_share"] == 0
    assert modules["decoder.layers.1.mlp"]["changed_share"] > 0.99
    inner, layer = (
        modules[name]["relative_difference"] for name in ("decoder.layers.1.mlp", "decoder.layers.1")
    )
    assert 0 < layer < inner
    nothing = found["nothing"]
    assert nothing["baseline"] == nothing["perturbed"] and nothing["first_difference"] is None


@pytest.mark.daily
def test_a_pair_of_a_mixture_follows_its_step() -> None:
    (found,) = run_ranks(1, "tests.scope.lab.acting_cases:paired_mixture", timeout=300)
    told = found["told"]
    paths = [each["path"] for each in told["modules"]]
    assert paths == [path for path in found["called"] if path in paths] and len(paths) > 100
    assert told["first_difference"] == "decoder.layers.1"
    shares = {each["path"]: each["changed_share"] for each in told["modules"]}
    assert shares["decoder.layers.2.mlp.experts"] is None, "its rows are of other tokens"
    assert shares["decoder.layers.1.mlp"] == 0 and shares["mtp.layers.0"] > 0.9
    experts = [path for path in paths if path.endswith("mlp.experts")]
    assert [path for path in paths if shares[path] is None] == experts
    assert told["outputs_not_comparable"] == len(experts)


def test_weights_that_change_in_one_step_leave_each_other_alone() -> None:
    first, second = run_ranks(2, "tests.scope.lab.acting_cases:on_some_ranks", timeout=300)
    assert len(first) == 4 and all(elements == masked for elements, masked in first), first
    assert all(masked == 0 for _, masked in second), second


def test_what_changes_nothing_says_so_once() -> None:
    said = run_ranks(2, "tests.scope.lab.acting_cases:in_vain", timeout=300)[0]
    nothing = [line.split(" has changed nothing in step 1")[0] for line in said if "changed nothing" in line]
    assert nothing == [f"scope: {name}" for name in ("micro-batch", "sample", "no tensor", "rate")]


@pytest.mark.daily
def test_what_is_kept_of_experts_does_not_pile_up() -> None:
    (found,) = run_ranks(1, "tests.scope.lab.acting_cases:of_experts", timeout=300)
    assert found[0] > 1000 and found[1] == 0


def test_an_undo_concerns_what_came_since_alone() -> None:
    (found,) = run_ranks(1, "tests.scope.lab.acting_cases:together", timeout=300)
    for snapshot in (False, True):
        assert found[f"snapshot {snapshot}"] == {
            "undone": ["late"],
            "step": 2,
            "marked": "early",
            "back": True,
            "as alone": True,
            "differ": True,
        }
    assert found["disarmed"] == "then; first" and found["clean again"] == [None, True]
    needed = found["needed"]
    assert needed["a"] == pytest.approx(1) and needed["c"] == pytest.approx(1), "those of one step share"
    assert "Raise snapshot_limit_mib" in needed["b"] and "Raise snapshot_limit_mib" in needed["d"]
    assert needed["e"] == pytest.approx(2) and found["limit stays"]
    assert found["of a file"] == ["new"] and found["gradients left"]
    assert any("old is left out: its steps are over at step 2" in line for line in found["said"])
    assert any("undone is left out" in line for line in found["said"])
    assert any("new is armed for step 3" in line for line in found["said"])


@pytest.mark.daily
def test_every_part_of_the_snapshot_is_needed() -> None:
    (found,) = run_ranks(1, "tests.scope.lab.acting_cases:forgetful", timeout=300)
    assert found == {"_keep_modules": True, "_keep_optimizer": True, "_keep_rest": True, "none": False}


def _promptly(count: int, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(2, "tests.scope.lab.acting_cases:promptly", count, seed, timeout=400)[0]
    assert len(found["in forward"]) == len(found["at random"]) == count
    assert set(found["in forward"]) == {1}, (
        "what is asked for before the reduction acts from the next step on"
    )
    assert set(found["at random"]) <= {1, 2}, "what comes in the update waits for one more"
    return found


def test_acts_from_the_next_step_on() -> None:
    _promptly(3, 1)


@pytest.mark.soak
def test_two_hundred_commands_act_promptly(record_property: Any) -> None:
    # Samples of a run last for so many.
    found = [_promptly(20, seed) for seed in range(2, 7)]
    record_property(
        "steps later than the next, of 100 at random", sum(each["at random"].count(2) for each in found)
    )
    record_property("most seconds", round(max(second for each in found for second in each["seconds"]), 2))


def test_a_pair_that_fails_while_gradients_are_reduced_leaves_training_as_it_was() -> None:
    for found in run_ranks(2, "tests.scope.lab.undo_cases:failing_pair", timeout=300):
        assert found["error"] == "no room" and found["losses"] == found["clean"]


def test_a_file_that_ranks_have_otherwise_is_refused_on_all(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.scope.lab.undo_cases:files_that_differ", str(tmp_path), timeout=120)
    for other, missing, alike in found:
        assert other.startswith("rank 1: found another file than rank 0's")
        assert missing.startswith("rank 1: ") and "-(1, None).yaml" in missing
        assert alike == "3"
