"""Perturbations from YAML and commands: read back as written, and wrong ones refused with what to change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mt_megatron.errors import ConfigError
from mt_megatron.scope.lab.specification import (
    FIGURES,
    LINKS,
    VALUES,
    Steps,
    perturbation_from,
    read_lab_file,
    starting_at,
)
from mt_megatron.scope.lab.targets import matches, module_targets

FILE = """
seed: 7
snapshot_limit_mib: 4096
perturbations:
  - name: exponent
    kind: bit_flip
    on: weight
    module: decoder.layers.3.mlp.linear_fc1.weight
    bit: 30
    index: [17, 5]
    steps: 100-109
    undo_at: 130
  - {kind: gaussian, on: activation, module: '*.mlp', sigma: 1e-3, layers: [0, 2], heads: null, steps: 5}
  - {kind: stuck, on: gradient, module: decoder.layers.0, value: .nan, microbatches: 0, steps: [7, 9]}
  - {kind: delay, ranks: [0, 1], ms: 5, group: tp}
  - {kind: fault, fault: 'slow_rank:rank=3,factor=1.5'}
"""


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(FILE)
    found = read_lab_file(tmp_path / "lab.yaml")
    first, noise, stuck, delay, fault = found.perturbations
    assert found.snapshot_limit_mib == 4096
    assert (first.name, first.index, first.steps, first.undo_at) == (
        "exponent",
        ((17, 5),),
        Steps(first=100, last=109),
        130,
    )
    assert (noise.name, noise.seed, noise.figures) == ("p1", 7, {"sigma": 1e-3, "mean": 0.0})
    assert noise.steps == Steps(first=5, last=5) and noise.layers == (0, 2) and noise.heads is None
    assert math.isnan(stuck.figures["value"]) and stuck.microbatches == (0,) and 8 in stuck.steps
    assert (delay.on, delay.ranks, delay.group) == ("communication", (0, 1), "tp")
    assert (fault.on, fault.fault) == ("host", "slow_rank:rank=3,factor=1.5")
    for one in found.perturbations:
        if one is not stuck:  # a NaN equals nothing
            assert perturbation_from(one.to_dict()) == one


def _given(kind: str) -> dict[str, Any]:
    figures = {"bit": 3, "sigma": 1, "low": 0, "high": 1, "factor": 2, "value": 1, "ms": 1}
    given: dict[str, Any] = {
        "kind": kind,
        **{name: figures[name] for name in FIGURES[kind] if name in figures},
    }  # type: ignore[index]
    if kind in VALUES:
        return {**given, "on": "weight", "module": "*"}
    return {**given, "ranks": [0, 1]} if kind in LINKS else {**given, "fault": "slow_rank:rank=0"}


@pytest.mark.parametrize("kind", FIGURES)
def test_every_kind_is_read_back_as_it_was_written(kind: str) -> None:
    one = perturbation_from(_given(kind))
    assert perturbation_from(one.to_dict()) == one and one.text()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "bitflip"}, "expected one of bit_flip.*Did you mean bit_flip"),
        ({"on": "weights"}, "expected weight or activation.*Did you mean weight"),
        ({"bit": None}, "found no bit for kind bit_flip"),
        ({"bit": 64}, "found bit: 64"),
        ({"bit": 1.5}, "found bit: 1.5"),
        ({"sigma": 1}, "found the key 'sigma'.*sigma belongs to gaussian"),
        ({"modul": "x"}, "found the key 'modul'.*Did you mean module"),
        ({"module": ""}, "found no module"),
        ({"steps": "3-2"}, "expected a first of at least 1"),
        ({"steps": 0}, "expected a first of at least 1"),
        ({"steps": "soon"}, "found steps: 'soon'"),
        ({"steps": True}, "found steps: True"),
        ({"index": [[-1]]}, "expected whole numbers from 0"),
        ({"index": [1], "fraction": 0.5}, "one way of choosing elements"),
        ({"fraction": 0}, "more than 0 and at most 1"),
        ({"fraction": "half"}, "found fraction: 'half'; expected a number"),
        ({"on": "activation", "index": [1, 2]}, "give three numbers"),
        ({"on": "gradient", "index": [1, 2]}, "give three numbers"),
        ({"microbatches": [0]}, "belong to activation and gradient"),
        ({"on": "gradient", "master": True}, "belongs to weight"),
        ({"differentiate": True}, "belongs to activation"),
        ({"relative": True}, "belongs to gaussian and uniform"),
        ({"group": "tp"}, "belongs to communication"),
        ({"ranks": [-1]}, "expected a whole number of at least 0"),
        ({"name": ""}, "expected a text of 1 to 80"),
        ({"undo_at": 5, "snapshot": False}, "nothing can be undone without"),
        ({"fault": "jitter:rank=1"}, "expected both"),
        ({"snapshot": 1}, "expected true or false"),
        ({"kind": "uniform", "bit": None, "low": 2, "high": 1}, "found the key 'bit'|above high"),
        ({"kind": "delay", "bit": None}, "found on: 'weight' for kind delay; expected communication"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        perturbation_from({**_given("bit_flip"), **changes})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ms": 0}, "more than 0"),
        ({"ms": 1e9}, "at most"),
        ({"ranks": [1, 1]}, "two ends of a link"),
        ({"ranks": [0, 1, 2]}, "two ends of a link"),
        ({"fraction": 0.5}, "found fraction for on: communication"),
    ],
)
def test_links_that_make_no_sense_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        perturbation_from({**_given("delay"), **changes})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("perturbations: [", "is no valid YAML"),
        ("[]", "expected a map with the key 'perturbations'"),
        ("perturbation: []", "Did you mean perturbations"),
        ("perturbations: []", "expected a list of 1 to 64"),
        ("perturbations: [{kind: mask, on: weight}]", r"perturbations\[0\]: found no module"),
        (
            "perturbations: [{kind: mask, on: weight, module: a, name: b}, 3]",
            r"perturbations\[1\]: found int",
        ),
        (
            "perturbations: [{kind: mask, on: weight, module: a, name: b}, "
            "{kind: mask, on: weight, module: a, name: b}]",
            "found the name 'b' twice",
        ),
        ("{perturbations: [{kind: mask, on: weight, module: a}], seed: -1}", "found seed: -1"),
        ("!!python/object/apply:os.system ['true']", "is no valid YAML"),
        (
            "perturbations:\n- kind: scale\n  factor: 2\n  factor: 3\n",
            "found factor twice in one map, at line 3 and line 4",
        ),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "lab.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"--scope-lab: .*{why}"):
        read_lab_file(tmp_path / "lab.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_lab_file(tmp_path / "nowhere.yaml")


def test_layers_are_those_of_the_decoder() -> None:
    one = perturbation_from({"kind": "mask", "on": "activation", "module": "*.mlp.linear_fc1", "layers": [0]})
    assert matches(one, "decoder.layers.0.mlp.linear_fc1")
    assert not matches(one, "decoder.layers.1.mlp.linear_fc1")
    assert not matches(one, "mtp.layers.0.transformer_layer.mlp.linear_fc1")


def test_an_output_that_sums_over_heads_has_none() -> None:
    chunk = nn.ModuleDict({"linear_proj": nn.Linear(2, 2)})
    one = perturbation_from({"kind": "mask", "on": "activation", "module": "linear_proj", "heads": [0]})
    with pytest.raises(ConfigError, match="each feature of which is a sum over all heads"):
        module_targets(one, [chunk])


def test_steps_begin_with_the_next_one() -> None:
    one = perturbation_from(_given("mask"))
    assert starting_at(one, 12).steps == Steps(first=12) and 11 not in starting_at(one, 12).steps
    with pytest.raises(ConfigError, match="expected the last to be 12, the next step, or later"):
        starting_at(perturbation_from({**_given("mask"), "steps": "3-11"}), 12)
