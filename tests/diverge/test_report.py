"""The verdict, the documents and the picture."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from xml.etree import ElementTree

from mt_megatron.diverge.compare import Comparison, Entry
from mt_megatron.diverge.picture import draw
from mt_megatron.diverge.pieces import RankFacts
from mt_megatron.diverge.report import as_json, as_markdown, jump, verdict
from mt_megatron.diverge.side import Side

A, B = (Side(name=name, backend="cpu", arguments=("--lr", "1"), processes=1) for name in "ab")
FACTS = RankFacts(
    loss=4.25, learning_rate=1e-3, dtype="float32", device="a <processor>", layout={}, not_placed=[]
)


def entry(phase: str, name: str, error: float, note: str = "") -> Entry:
    same = "0" * 64 if error == 0 else None
    return Entry(
        phase=phase,
        name=name,
        error=error,
        tolerance=1e-4,
        relative=error,
        largest=error,
        norm_a=1.0,
        norm_b=1.0,
        digest_a=same,
        digest_b=same,
        where="sample 1, position 2",
        shape=(4, 4),
        note=note,
    )


def comparison(*entries: Entry) -> Comparison:
    return Comparison(
        entries=list(entries),
        only_a=["decoder.layers.0.extra"],
        only_b=[],
        not_placed=[],
        facts_a=FACTS,
        facts_b=FACTS,
        notes=["a note"],
    )


NETWORK = [
    "embedding",
    "decoder.layers.0.mlp.linear_fc1",
    "decoder.layers.0.mlp.linear_fc2",
    "decoder.layers.0",
]


def test_no_difference_is_said_with_how_much_is_equal() -> None:
    found = comparison(entry("forward", "embedding", 0.0), entry("forward", "loss", 1e-6))
    assert found.first is None and found.suspect() is None
    assert verdict(found) == "no difference beyond rounding in 2 tensors; 1 are equal to the bit"
    assert as_json(found, A, B)["equal"] is True


def test_the_first_difference_is_named_and_placed() -> None:
    found = comparison(*(entry("forward", name, 1e-2 if "mlp" in name else 0.0) for name in NETWORK))
    assert found.suspect() == "decoder.layers.0.mlp.linear_fc1"
    assert "error 0.01 where 0.0001 is rounding (sample 1, position 2)" in verdict(found)


def test_a_wrong_gradient_is_put_down_to_who_computed_it() -> None:
    """It arrives at fc1's output, so what follows fc1 computed it; a container that ends there did not."""
    forward = [entry("forward", name, 0.0) for name in NETWORK]
    backward = [entry("backward", name, 1.0 if name == NETWORK[1] else 0.0) for name in NETWORK[::-1]]
    found = comparison(*forward, *backward)
    assert found.suspect() == NETWORK[2] and f"computed by {NETWORK[2]}" in verdict(found)
    backward = [entry("backward", name, 1.0 if name == NETWORK[2] else 0.0) for name in NETWORK[::-1]]
    last = comparison(*forward, entry("forward", "output_layer", 0.0), *backward)
    assert last.suspect() == "output_layer"


def test_a_rise_within_rounding_is_worth_a_note() -> None:
    errors = [0.0, 3e-7, 6e-5, 5e-5]
    found = comparison(*(entry("forward", *pair) for pair in zip(NETWORK, errors, strict=True)))
    said = jump(found)
    assert found.first is None and said is not None
    assert f"rises 30-fold at {NETWORK[2]}, from at most 2e-06 to 6e-05" in said
    assert said in as_markdown(found, A, B, "picture.svg") and as_json(found, A, B)["jump"] == said
    quiet = comparison(*(entry("forward", name, 1e-6) for name in NETWORK))
    assert jump(quiet) is None


def test_an_infinite_error_is_valid_json_and_is_drawn() -> None:
    found = comparison(entry("forward", "embedding", 0.0), entry("forward", "loss", math.inf))
    found = replace(found, facts_b=replace(FACTS, loss=math.nan))
    document = json.loads(json.dumps(as_json(found, A, B), allow_nan=False))
    assert document["first"]["error"] == "inf" and document["suspect"] == "loss"
    assert document["ranks"]["b"]["loss"] == "nan" and document["ranks"]["a"]["loss"] == 4.25
    assert "first: loss" in draw(found, "a < b")


def test_a_nan_error_is_a_difference() -> None:
    assert entry("forward", "loss", math.nan).differs


def test_the_document_shows_the_neighbours_and_what_was_left_out() -> None:
    found = comparison(*(entry("forward", name, 0.0 if "embed" in name else 1.0, "why") for name in NETWORK))
    text = as_markdown(found, A, B, "picture.svg")
    assert "| **first** | forward | decoder.layers.0.mlp.linear_fc1 |" in text
    assert "| a | cpu | 1 | float32 | 4.250000 |" in text
    assert "## Only on side a\n\n- decoder.layers.0.extra" in text and "- a note" in text
    assert "![error per module](picture.svg)" in text


def test_the_picture_is_xml_with_a_mark_for_every_tensor() -> None:
    entries = [entry(phase, name, 1e-7) for phase in ("forward", "backward") for name in NETWORK]
    root = ElementTree.fromstring(draw(comparison(*entries), "a <&> b"))
    marks = [each for each in root.iter() if each.tag.endswith("circle")]
    assert len(marks) == 8
    words = "".join(each.text or "" for each in root.iter() if each.tag.endswith("text"))
    assert "a <&> b" in words and "layer 0" in words and "nothing recorded" in words
