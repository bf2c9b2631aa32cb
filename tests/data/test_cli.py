"""``mt-megatron prepare``: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mt_megatron.cli.main import main


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"d{i:02d}.txt").write_text(f"document {i} says {i * 37 % 101} and {i * 11 % 7}\n" * 20)
    return folder


def test_prepares_and_prints_one_object(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["prepare", "--output", str(tmp_path / "out"), "--corpus", str(texts), "--vocab-size", "280"]
    assert main([*argv, "--json"]) == 0
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert made["vocab_size"] == 280 and made["train_documents"] + made["valid_documents"] == 60
    assert "training a byte-level BPE" in printed.err
    assert main(argv) == 0
    assert "already prepared" in capsys.readouterr().out


def test_a_limit_of_zero_is_none(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["prepare", "--corpus", str(texts), "--vocab-size", "280", "--json", "--output"]
    assert main([*argv, str(tmp_path / "all"), "--max-tokens", "0"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert main([*argv, str(tmp_path / "some"), "--max-tokens", "2000"]) == 0
    some = json.loads(capsys.readouterr().out)
    assert 2000 <= some["train_tokens"] < everything["train_tokens"]


def test_a_missing_corpus_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--output", str(tmp_path / "out"), "--corpus", str(tmp_path / "nothing")]) == 2
    assert "there is nothing; check the path" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [[], ["--output", "x", "--vocab-size", "0"], ["--output", "x", "--max-tokens", "-1"]]
    + [["--output", "x", "--validation-fraction", f] for f in ("0", "1", "nan", "a")]
    + [["--output", "x", "--unknown", "1"]],
)
def test_wrong_use_ends_with_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prepare", *wrong])
    assert ended.value.code == 2
    assert "--help" in capsys.readouterr().err


def test_help_has_an_example_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prepare", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text and "exit codes: 0" in text
