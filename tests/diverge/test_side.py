"""Sides are checked before a process is started, and so is whether two of them can be compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_megatron.cli.main import main
from mt_megatron.diverge.side import Side, check_pair, make_side
from mt_megatron.errors import ConfigError
from tests.diverge.recordings import MODEL, side


def test_a_side_takes_as_many_processes_as_its_layout_needs() -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    assert side("b", flags, None).processes == 4
    with pytest.raises(ConfigError, match="side b, 3 process"):
        side("b", flags, 3)


@pytest.mark.parametrize("words", [["--config", "FILE"], ["--config=FILE"]])
def test_a_file_of_a_sides_own_is_read_in_the_place_of_both_sides(tmp_path: Path, words: list[str]) -> None:
    for name, seed in (("both", 5), ("own", 6)):
        (tmp_path / f"{name}.yaml").write_text(f"train:\n  seed: {seed}\n")

    def of(name: str) -> list[str]:
        return [word.replace("FILE", str(tmp_path / f"{name}.yaml")) for word in words]

    common = MODEL.replace("--seed 3", "").split()
    for own, seed in (([], 5), (of("own"), 6)):
        made = make_side(
            "b", backend="cpu", common=[*of("both"), *common], own=own, processes=1, check_files=False
        )
        assert made.config().train.seed == seed


def test_a_side_comes_back_from_its_file(tmp_path: Path) -> None:
    one = side("a", "--bf16")
    one.write(tmp_path / "side.json")
    assert Side.read(tmp_path / "side.json") == one


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seed 4", "seed is 3 on side a and 4 on side b"),
        ("--global-batch-size 8", "global_batch_size is 4 on side a and 8 on side b"),
        ("--micro-batch-size 2", "calculate-per-token-loss"),
        ("--vocab-size 96", "the padded vocabulary is 64 on side a and 96 on side b"),
        ("--load elsewhere", "load is None on side a and elsewhere on side b"),
        ("--seq-length 8", "seq_length is 16 on side a and 8"),
    ],
)
def test_sides_that_do_other_work_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_pair(side("a"), side("b", flags))


def test_dropout_is_switched_off_with_a_note() -> None:
    on = "--hidden-dropout 0.1 --attention-dropout 0.1"
    config = side("b", on).config().to_dict()["model"]
    assert config["hidden_dropout"] == config["attention_dropout"] == 0
    assert any("dropout" in note for note in check_pair(side("a", on), side("b", on)))
    off = "--hidden-dropout 0 --attention-dropout 0"
    assert check_pair(side("a", off), side("b", off)) == []


def test_wrong_use_ends_with_2_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = MODEL.replace("--train-data-path given-by-the-test", "--mock-data").split()
    arguments = ["diverge", "--a", "cpu", "--b", "cpu", "--output", str(tmp_path / "run"), *data]
    assert main([*arguments, "--b-flags=--seed 9"]) == 2
    assert "vocab_size is 64 with mock_data" in capsys.readouterr().err
    data += ["--vocab-size", "4096"]
    arguments = ["diverge", "--a", "cpu", "--b", "cpu", "--output", str(tmp_path / "run"), *data]
    assert main([*arguments, "--b-flags=--seed 9"]) == 2
    assert "seed is 3 on side a and 9 on side b" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    assert main(arguments) == 2
    assert "not an earlier comparison" in capsys.readouterr().err
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["thesis.txt"]
