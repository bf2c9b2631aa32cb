"""Lists of layers as text: what Megatron-LM evaluates is read, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_megatron.config.parse import load_config
from mt_megatron.config.types import layer_counts, layer_kinds
from mt_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        (" 2 ", 2),
        ("[0,1,1]", [0, 1, 1]),
        ("([0]*3+[1]*2)", [0, 0, 0, 1, 1]),
        ("[0]+([1,0]*2)", [0, 1, 0, 1, 0]),
        ("2*[1]", [1, 1]),
        (["0", "1"], ["0", "1"]),
        (3, 3),
    ],
)
def test_texts_of_kinds(text: object, expected: object) -> None:
    assert layer_kinds(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getcwd()",
        "[x for x in [1]]",
        "[0]*(10**9)",
        "[0]*999999999",
        "[[0]]*2",
        "1+1",
        "[0]-[1]",
        "[True]",
        "[0.5]",
        "(" * 500,
        "",
        "[0]*[1]",
    ],
)
def test_other_texts_stay_texts_and_are_refused_by_name(text: str) -> None:
    assert layer_kinds(text) == text
    with pytest.raises(ConfigError, match="moe_layer_freq is"):
        load_config(["--moe-layer-freq", text])


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40)), min_size=1, max_size=5))
def test_runs_of_layers_are_read_as_python_would(runs: list[tuple[int, int]]) -> None:
    text = "(" + "+".join(f"[{kind}]*{count}" for kind, count in runs) + ")"
    expected = [kind for kind, count in runs for _ in range(count)]
    assert layer_kinds(text) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["8,8,7"], (8, 8, 7)),
        (["[8, 7]"], (8, 7)),
        (["8", "8", "7"], (8, 8, 7)),
        (["8"], (8,)),
        (["balanced"], "balanced"),
        (["Et*3|t*4L"], "Et*3|t*4L"),
        (["none"], None),
    ],
)
def test_layouts(words: list[str], expected: object) -> None:
    config = load_config(["--pipeline-model-parallel-layout", *words])
    assert config.model.pipeline_model_parallel_layout == expected


def test_numbers_of_a_file_are_numbers() -> None:
    assert layer_counts(8) == [8] and layer_counts(True) is True and layer_counts([1, 2]) == [1, 2]


@pytest.mark.parametrize(
    ("stages", "layout", "chunks"), [(2, "3,1", None), (2, "1 1 1 1", 2), (3, "1 1 1 1", None)]
)
def test_a_layout_says_how_many_chunks_there_are(stages: int, layout: str, chunks: int | None) -> None:
    argv = ["--pipeline-model-parallel-size", str(stages), "--pipeline-model-parallel-layout"]
    config = load_config([*argv, *layout.split()])
    assert config.virtual_pipeline_model_parallel_size == chunks
    assert config.model.overlap_p2p_comm == (chunks is not None)
