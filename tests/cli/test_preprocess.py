"""``mt-megatron preprocess``: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mt_megatron.cli.main import main
from mt_megatron.cli.preprocess import ConsoleProgress
from tests.launch import ROOT


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    return [
        "preprocess",
        *("--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "a")),
        *("--tokenizer-type", "ByteLevelTokenizer", "--append-eod", "--workers", "1"),
    ]


def test_prints_one_object_and_tells_on_stderr(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--json"]) == 0
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert (made["documents"], made["tokens"], made["already"]) == (2, [8], False)
    assert f"2 documents, 8 tokens in {made['prefixes'][0]}" in printed.err
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["already"]


def test_overwrite_starts_anew(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    (tmp_path / "a.jsonl").write_text('{"text": "three"}\n')
    assert main(argv) == 1
    assert "a.jsonl has changed" in capsys.readouterr().err
    assert main([*argv, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 1


def test_strict_ends_with_1(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": ""}\n')
    assert main([*argv, "--strict"]) == 1
    assert "--strict allows nothing to be left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--lang", "german"], "one rule for all languages"),
        (["--keep-newlines"], "newlines are kept"),
        (["--vocab-file", "x"], "--tokenizer-model tokenizer.json"),
        (["--merge-file", "x"], "--tokenizer-model tokenizer.json"),
        (["--partitions", "4"], "cut into shards by itself"),
        (["--workers", "0"], "expected at least 1"),
        (["--max-bad-share", "2"], "from 0 to 1"),
        (["--split-special-tokens", "--tokenizer-type", "Llama2Tokenizer"], "Leave them out"),
        (["--tokenizer-type", "TikTokenizer"], "expected one of HuggingFaceTokenizer"),
        (["--train-bpe", "300", "--tokenizer-model", "x"], "expected one"),
        (["--train-bpe", "300"], "--tokenizer-type is ByteLevelTokenizer"),
        (["--json-keys", "a", "a"], "names a key twice"),
    ],
)
def test_wrong_use_ends_with_2(
    argv: list[str], wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*argv, *wrong])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "package"), [("a.zst", "zstandard"), ("a.parquet", "pyarrow"), ("a.model", "sentencepiece")]
)
def test_a_package_that_is_missing_is_named(
    argv: list[str],
    tmp_path: Path,
    name: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    if package == "pyarrow":
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / name).write_bytes(b"x")
    if package == "sentencepiece":
        argv += ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(tmp_path / name)]
    else:
        argv += ["--input", str(tmp_path / name)]
    assert main(argv) == 1
    told = capsys.readouterr().err
    assert (
        f"the package {package}, which is not installed" in told and 'pip install "mt_megatron[data]"' in told
    )


def test_lines_without_a_terminal_and_a_bar_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 5.0, 12.0, 15.0, 30.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with ConsoleProgress(plain=True) as progress:
        for step in range(4):
            progress.advance(25 * step, 100, step, 10 * step)
    assert capsys.readouterr().err.splitlines() == [
        "preprocess: 25%, 1 documents, 10 tokens, 0.0 MB/s",
        "preprocess: 75%, 3 documents, 30 tokens, 0.0 MB/s",
    ]
    monkeypatch.undo()
    with ConsoleProgress(plain=False) as progress:
        progress.advance(50, 100, 1, 10)
        progress.say("[bold] is no markup")
    assert "[bold] is no markup" in capsys.readouterr().err


def test_help_has_an_example_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["preprocess", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text and "exit codes: 0" in text and "--keep-newlines" not in text


_SHORT = """
import sys
from mt_megatron.cli.progress import ConsoleProgress
with ConsoleProgress() as progress:
    progress.say("already there")
    if sys.argv[1] == "some":
        progress.show(progress.started, 5, 10, "5 of 10")
print("the result")
"""


@pytest.mark.parametrize("work", ["none", "some"])
@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_the_bar_leaves_no_line_on_a_terminal(work: str, terminal: str) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _SHORT, work],
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": terminal, "PYTHONPATH": str(ROOT)},
    )
    os.close(follower)
    written = b""
    with contextlib.suppress(OSError):  # The end of a terminal.
        while chunk := os.read(leader, 1 << 16):
            written += chunk
    os.close(leader)
    assert process.wait(timeout=60) == 0
    # What is erased last was the bar.
    _, _, shown = written.rpartition(b"\x1b[2K")
    lines = re.sub(rb"\x1b\[[?0-9;]*[a-zA-Z]", b"", shown).split()
    assert lines[-2:] == [b"the", b"result"] and b"0%" not in lines and b"50%" not in lines, written
