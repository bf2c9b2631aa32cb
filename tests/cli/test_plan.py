"""``mt-megatron plan``."""

from __future__ import annotations

import json

import pytest

from mt_megatron.cli.main import main
from mt_megatron.models import presets


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["plan", "--json", *arguments]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3.1_405b", 405_853_388_800),
        ("llama3_405b", 405_853_388_800),
    ],
)
def test_parameters_are_exact(capsys: pytest.CaptureFixture[str], name: str, expected: int) -> None:
    found = plan(capsys, "--model", name)
    assert found["parameters"] == found["active_parameters"] == expected
    assert sum(found["modules"].values()) == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", presets.names())
def test_the_comment_of_each_preset_states_its_true_count(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    vocabulary = ["--vocab-size", "4096"] if name == "llama3_tiny" else []
    count = plan(capsys, "--model", name, *vocabulary)["parameters"]
    assert f"{count:,} parameters" in presets.path(name).read_text()


def test_options_change_the_model_and_padding_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--model", "llama3_8b", "--tensor-model-parallel-size", "4", "--num-layers", "31")
    layer = (8_030_261_248 - 2 * 128256 * 4096 - 4096) // 32
    assert found["parameters"] == 8_030_261_248 - layer
    padded = found["padded"]
    assert isinstance(padded, dict)
    assert padded["vocab_size"] == 128512
    assert padded["parameters"] == found["parameters"] + 2 * 256 * 4096  # type: ignore[operator]


def test_text_names_model_parts_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama3_8b", "--tensor-model-parallel-size=4"]) == 0
    text = capsys.readouterr().out
    for part in ("llama3_8b: 32 layers", "8,030,261,248", "attention", "vocabulary padded to 128512"):
        assert part in text
    assert "router" not in text


def test_text_names_active_parameters_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama3_8b", "--num-experts", "8"]) == 0
    text = capsys.readouterr().out
    assert "router" in text and "active" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model is given. Name a preset"),
        (("--model", "llama3_tiny"), "vocab_size not set. Set --vocab-size"),
        (("--num-layers", "2"), "hidden_size"),
        (("--model", "llama3_8b", "--hidden-size", "4095"), "no multiple of num_attention_heads"),
    ],
)
def test_incomplete_models_are_wrong_use(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
