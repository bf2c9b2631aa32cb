"""Every layer is on one virtual stage, in order, or there is an error that says what to change."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.parallel.stage_layers import (
    chunks_of_layout,
    counts_of_text,
    divide_layers,
    end_counts,
    spread,
    stage_layers,
)


def counts(num_layers: int, **how: Any) -> list[int]:
    divided = divide_layers(num_layers, **how)
    assert [layer for stage in divided for layer in stage] == list(range(num_layers))
    return [len(stage) for stage in divided]


def test_layers_divide_evenly_where_nothing_is_said() -> None:
    assert counts(8, stages=4) == [2, 2, 2, 2]
    assert counts(8, stages=2, chunks=2) == [2, 2, 2, 2]
    assert counts(5, stages=1) == [5]


def test_sixty_one_layers_on_sixteen_stages() -> None:
    assert counts(61, stages=16, first=4, last=1) == [4] * 15 + [1]
    assert counts(61, stages=16, layout=[3] + [4] * 14 + [2]) == [3] + [4] * 14 + [2]
    text = "Et*3|(t*4|)*14ttmL"
    assert counts(61, stages=16, layout=text, mtp_num_layers=1) == [3] + [4] * 14 + [2]
    with pytest.raises(ConfigError, match=r"num_layers is 61; expected a multiple .* = 16 x 1, or a layout"):
        divide_layers(61, stages=16)


@pytest.mark.parametrize("seed", range(20))
def test_any_layout_holds_every_layer_once(seed: int) -> None:
    draw = random.Random(seed)
    stages, chunks = draw.randint(1, 6), draw.randint(1, 3)
    layout = [draw.randint(1, 5) for _ in range(stages * chunks)]
    if len(layout) > 1:
        layout[draw.choice((0, -1))] = draw.randint(0, 2)
    assert counts(sum(layout), stages=stages, chunks=chunks, layout=layout) == layout
    text = "|".join("t" * count for count in layout)
    assert counts(sum(layout), stages=stages, chunks=chunks, layout=f"E{text}L") == layout
    assert chunks_of_layout(layout, stages) == chunks_of_layout(f"E{text},L", stages) == chunks


def test_ends_are_shared_out_over_chunks() -> None:
    # Stage 0 has 2 and stage 1 has 4 layers, half of them in each chunk.
    assert counts(6, stages=2, chunks=2, first=2) == [1, 2, 1, 2]
    assert counts(10, stages=3, first=2, last=4) == [2, 4, 4]
    assert counts(4, stages=2, last=0) == [4, 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ettt|tt|tL", [3, 2, 1]),
        ("E|t|L", [0, 1, 0]),
        ("Et*3|(tt|)*2L", [3, 2, 2, 0]),
        ("E,t*2 | (t|t*2|)*2, t, m*2, L", [2, 1, 2, 1, 2, 1]),
        ("((t|)*2tt|)*2t", [1, 1, 2, 1, 1, 2, 1]),
        ("tt|tt", [2, 2]),
        ("3, 2,2,0", [3, 2, 2, 0]),
        ("Et*0t|tL", [1, 1]),
    ],
)
def test_a_text_is_read_as_later_versions_read_it(text: str, expected: list[int]) -> None:
    assert counts_of_text(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Etx|tL", "one of E t m L"),
        ("tE|tL", "the embedding E once, at the beginning"),
        ("Et|tLt", "the output layer L once, at the end"),
        ("Et|EtL", "the embedding E once"),
        ("(Et|tL", "a [)] for every [(]"),
        ("Et|t)L", "no '[)]' there"),
        ("Et*|tL", "a number of at most 5 digits"),
        ("Et*9999999|tL", "a number of at most 5 digits"),
        ("E(t*9999|)*9999L", "letters when written out"),
        ("(" * 60 + "t" + ")" * 60, "at most 50 parentheses"),
        ("Etm|tL", "every m on the last virtual stage"),
        ("Et|mtL", "after its layers"),
        ("balanced", "balanced_layout has them"),
    ],
)
def test_a_text_that_is_none_is_an_error_of_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        counts_of_text(text, None)
    assert "\n" not in str(error.value)


def test_m_are_as_many_as_depths() -> None:
    assert counts_of_text("Et|tmmL", 2) == [1, 1]
    assert counts_of_text("Et|tL", 2) == [1, 1]
    for depths in (0, 1):
        with pytest.raises(ConfigError, match=f"mtp_num_layers = {depths} times m"):
            counts_of_text("Et|tmmL", depths)


@pytest.mark.parametrize(
    ("num_layers", "how", "message"),
    [
        (5, {"stages": 2}, r"num_layers is 5; .*pipeline_model_parallel_layout, 3,2 for example"),
        (6, {"stages": 2, "chunks": 2}, r"= 2 x 2, or a layout.*2,2,1,1 for example"),
        (5, {"stages": 2, "layout": [3, 1]}, r"has 4 layers \(\[3, 1\]\); expected num_layers = 5"),
        (5, {"stages": 2, "layout": [5]}, "has 1 virtual stages; expected 2 pipeline stages x 1 chunks = 2"),
        (4, {"stages": 3, "layout": [2, 0, 2]}, "virtual stage 1 .* has no layer"),
        (4, {"stages": 2, "layout": [5, -1]}, "expected a list of numbers of layers"),
        (4, {"stages": 2, "layout": [True, 3]}, "expected a list of numbers of layers"),
        (4, {"stages": 2, "layout": [2, 2], "first": 2}, "together with a number of layers"),
        (5, {"stages": 1, "first": 3}, "leave 2 of 5 layers to 0 other"),
        (61, {"stages": 16, "first": 3}, "leave 58 of 61 layers to 15 other"),
        (4, {"stages": 2, "first": 6}, "leave -2 of 4 layers"),
        (7, {"stages": 2, "chunks": 2, "first": 3}, "pipeline stage 0 has 3 layers for 2 chunks"),
        (4, {"stages": 0}, "found 0 pipeline stages"),
    ],
)
def test_what_leaves_a_layer_out_is_an_error(num_layers: int, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        divide_layers(num_layers, **how)


def test_a_configuration_is_asked_by_either_versions_names() -> None:
    plain = SimpleNamespace(
        num_layers=6, pipeline_model_parallel_size=3, virtual_pipeline_model_parallel_size=None
    )
    assert stage_layers(plain) == [[0, 1], [2, 3], [4, 5]]
    old = SimpleNamespace(**vars(plain), first_pipeline_num_layers=0, last_pipeline_num_layers=None)
    assert stage_layers(old) == [[], [0, 1, 2], [3, 4, 5]]
    new = SimpleNamespace(**vars(old), num_layers_in_last_pipeline_stage=2)
    assert end_counts(new) == (0, 2) and stage_layers(new) == [[], [0, 1, 2, 3], [4, 5]]
    new.last_pipeline_num_layers = 3
    with pytest.raises(
        ConfigError, match=r"num_layers_in_last_pipeline_stage 2 and last_pipeline_num_layers 3"
    ):
        stage_layers(new)
    layout = SimpleNamespace(**vars(plain), pipeline_model_parallel_layout="Et*3|tt|tmL", mtp_num_layers=1)
    assert stage_layers(layout) == [[0, 1, 2], [3, 4], [5]]
    layout.mtp_num_layers = None
    with pytest.raises(ConfigError, match="mtp_num_layers = 0 times m"):
        stage_layers(layout)


def test_spreading_gives_what_is_left_to_the_first() -> None:
    assert spread(61, 16) == [4] * 13 + [3] * 3
    assert spread(2, 3) == [1, 1, 0]


def test_layers_of_the_ends_are_refused_where_stages_are_a_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank has both ends there."""
    from mt_megatron.layers import stage_layers

    config = SimpleNamespace(
        num_layers=8,
        pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=2,
        num_layers_in_last_pipeline_stage=6,
    )
    monkeypatch.setattr(stage_layers.stage_order, "is_v", lambda: True)
    with pytest.raises(ConfigError, match="stages in a V, where the first rank has both"):
        stage_layers.share_of_this_stage(config)
