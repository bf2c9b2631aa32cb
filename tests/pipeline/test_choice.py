"""A user's choice of a schedule, as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.actions import Kind, Placement, Style
from mt_megatron.pipeline.choice import parse
from mt_megatron.pipeline.csv_form import to_csv
from mt_megatron.pipeline.forward_only import forward_only
from mt_megatron.pipeline.generate.catalogue import NAMES, V_SHAPED, generate
from mt_megatron.pipeline.validate import validate


def test_names_say_what_they_are() -> None:
    for name in NAMES:
        choice = parse(name)
        assert choice.is_v == (name in V_SHAPED)
        assert choice.is_upstream == (name in ("1f1b", "interleaved"))
    assert parse("Breadth-First").name == "breadth_first"
    assert parse("hybrid:3").schedule(2, 2, 6) == generate(
        "hybrid", ranks=2, chunks=2, microbatches=6, group=3
    )
    assert not parse("interleaved:4").is_upstream


@pytest.mark.parametrize(
    ("short", "name"), [("bfc", "breadth_first"), ("DFC", "depth_first"), ("dfc:3", "depth_first")]
)
def test_names_of_megadpp_are_known(short: str, name: str) -> None:
    made = parse(short).schedule(2, 2, 6)
    assert made.name == name
    assert made == parse(name + short[3:]).schedule(2, 2, 6)


def test_a_file_is_its_schedule(tmp_path: Path) -> None:
    made = generate("zbv", ranks=2, microbatches=5)
    (tmp_path / "mine.csv").write_text(to_csv(made))
    choice = parse(str(tmp_path / "mine.csv"))
    assert choice.is_v and choice.name == "mine"
    assert choice.schedule(2, 2, 5).ranks == made.ranks
    assert choice.problems(2, 2, 5) == []
    with pytest.raises(ConfigError, match="5 micro-batches; expected 2 ranks of 2"):
        choice.schedule(2, 2, 6)


def test_a_file_without_backwards_trains_nothing(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.csv"
    file.write_text(to_csv(forward_only(Placement(2), 4)))
    (problem,) = parse(str(file)).problems(2, 1, 4)
    assert "has forwards only; expected the backwards of a training step" in problem


def test_a_source_gives_the_same_object_again() -> None:
    """The executor checks a schedule once."""
    source = parse("zb_h1").source(2, 1)
    assert source is not None
    assert source(0, 4, False) is source(7, 4, False)
    evaluation = source(7, 3, True)
    assert evaluation is not None and evaluation.forward_only and evaluation.microbatches == 3
    assert parse("1f1b").source(2, 1) is None


@pytest.mark.parametrize("style", list(Style))
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_an_evaluation_is_valid_and_whole(style: Style, ranks: int, microbatches: int) -> None:
    for chunks in (2,) if style is Style.V else (1, 2, 3):
        made = forward_only(Placement(ranks, chunks, style), microbatches)
        assert validate(made) == []
        assert all(action.kind is Kind.F for _, action in made)


def test_auto_without_a_pipeline_is_refused() -> None:
    assert "expected a size above 1" in parse("auto").problems(1, 1, 4)[0]
