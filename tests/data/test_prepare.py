"""Preparing a corpus: once, whole or not at all, and never over something else."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from mt_megatron.data.loader.tokenizer import Tokenizer
from mt_megatron.data.prepare.corpus import split_of
from mt_megatron.data.prepare.prepare import Corpus, load_corpus, prepare_corpus
from mt_megatron.errors import DataError
from tests.nfs_locks import flock_that_fails
from tests.second_lane import DAILY

ROOT = Path(__file__).resolve().parents[2]
FILES = ("tokenizer.json", "train.bin", "train.idx", "valid.bin", "valid.idx", "corpus.json")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(60):
        lines = (f"document {i} line {j} says {(i * 37 + j * 11) % 101} times\n" for j in range(40))
        (folder / f"d{i:02d}.txt").write_text("".join(lines))
    (folder / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    (folder / "nothing.txt").write_text("")
    return folder


def _prepare(output: Path, texts: Path, **options):
    lines: list[str] = []
    corpus = prepare_corpus(output, corpus=texts, vocab_size=300, log=lines.append, **options)
    return corpus, lines


def _digest(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


def test_files_hold_every_document_once_with_its_end(texts: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    corpus, lines = _prepare(tmp_path / "out", texts)
    tokenizer = Tokenizer(corpus.tokenizer_path)
    found: dict[str, str] = {}
    for split, prefix in (("train", corpus.train_prefix), ("valid", corpus.valid_prefix)):
        data = IndexedDataset(prefix)
        for ids in data:
            assert ids[-1] == tokenizer.eod
            assert tokenizer.eod not in ids[:-1]
            text = tokenizer.decode(ids[:-1].tolist())
            found[text] = split
        assert list(data.document_indices) == list(range(len(data) + 1)), "one sequence a document"
        tokens = int(data.sequence_lengths.sum())
        assert tokens == (corpus.train_tokens if split == "train" else corpus.valid_tokens)
    assert found == {
        (texts / f"d{i:02d}.txt").read_text(): split_of(f"d{i:02d}.txt", 0.05) for i in range(60)
    }
    assert {s.name for s in corpus.skipped} == {"latin.txt", "nothing.txt"}
    assert any("latin.txt" in line for line in lines)
    assert 0 < corpus.bigram_nats < corpus.unigram_nats < np.log(300) + 1


def test_the_tokenizer_does_not_see_held_out_documents(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(60):
        name = f"d{i:02d}.txt"
        secret = "zqxjk" * 400 if split_of(name, 0.05) == "valid" else ""
        (texts / name).write_text("some plain words again and again\n" * 30 + secret)
    corpus = prepare_corpus(tmp_path / "out", corpus=texts, vocab_size=270, log=lambda line: None)
    vocabulary = Tokenizer(corpus.tokenizer_path).vocabulary()
    assert not any("zq" in token for token in vocabulary)


def test_a_second_call_leaves_everything_as_it_is(texts: Path, tmp_path: Path) -> None:
    first, _ = _prepare(tmp_path, texts)
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in FILES}
    second, lines = _prepare(tmp_path, texts)
    assert second == first == load_corpus(tmp_path)
    assert times == {name: (tmp_path / name).stat().st_mtime_ns for name in FILES}
    assert len(lines) == 1 and "already prepared" in lines[0]


def test_the_result_is_the_same_anywhere(texts: Path, tmp_path: Path) -> None:
    _prepare(tmp_path / "a", texts)
    _prepare(tmp_path / "b", texts)
    assert _digest(tmp_path / "a") == _digest(tmp_path / "b")


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_or_half_prepared_folder_is_rebuilt(texts: Path, tmp_path: Path, name: str) -> None:
    corpus, _ = _prepare(tmp_path, texts)
    before = _digest(tmp_path)
    if name == "corpus.json":
        # As if killed between the files and the manifest.
        (tmp_path / ".building").mkdir()
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    with pytest.raises(DataError, match="no complete corpus"):
        load_corpus(tmp_path)
    again, lines = _prepare(tmp_path, texts)
    assert again == corpus
    assert _digest(tmp_path) == before
    assert any("incomplete" in line for line in lines)


def test_other_inputs_or_options_are_refused_and_named(texts: Path, tmp_path: Path) -> None:
    output, copy = tmp_path / "out", tmp_path / "copy"
    copy.mkdir()
    for file in texts.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    _prepare(output, copy)
    before = _digest(output)
    with pytest.raises(DataError, match=r"vocab_size 300 -> 310.*--force"):
        prepare_corpus(output, corpus=copy, vocab_size=310, log=lambda line: None)
    with pytest.raises(DataError, match="max_train_tokens 10000000 -> 500"):
        _prepare(output, copy, max_train_tokens=500)
    with pytest.raises(DataError, match="corpus .*copy -> python-standard-library"):
        prepare_corpus(output, vocab_size=300, log=lambda line: None)
    os.utime(copy / "d00.txt", ns=(1, 1))
    _prepare(output, copy)
    (copy / "d00.txt").write_text("changed")
    with pytest.raises(DataError, match="files have changed"):
        _prepare(output, copy)
    assert _digest(output) == before
    _prepare(output, copy, force=True)
    assert _digest(output) != before


def test_files_of_somebody_else_are_not_overwritten(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"train\.bin, not made by this command"):
        _prepare(tmp_path, texts)
    assert (tmp_path / "train.bin").read_bytes() == b"mine"


def test_the_limit_ends_after_the_document_that_reaches_it(texts: Path, tmp_path: Path) -> None:
    whole, _ = _prepare(tmp_path / "whole", texts)
    limit = whole.train_tokens // 2
    half, _ = _prepare(tmp_path / "half", texts, max_train_tokens=limit)
    longest = whole.train_tokens / whole.train_documents * 1.5
    assert limit <= half.train_tokens < limit + longest
    everything, _ = _prepare(tmp_path / "all", texts, max_train_tokens=None)
    assert everything.train_tokens == whole.train_tokens


@pytest.mark.parametrize("pieces", [2, 3, 5])
def test_of_a_few_documents_one_is_held_out(pieces: int, tmp_path: Path) -> None:
    """A text of some 100 KiB has few pieces, none of which the usual fraction may hold out."""
    text = tmp_path / "poem.txt"
    text.write_text("a line of some words and more\n" * (pieces * 64 * 1024 // 30))
    lines: list[str] = []
    made = prepare_corpus(tmp_path / "out", corpus=text, vocab_size=260, log=lines.append)
    assert made.train_documents >= 1 and made.valid_documents >= 1
    assert any("0.05 holds no document out" in line for line in lines)
    prepare_corpus(tmp_path / "out", corpus=text, vocab_size=260, log=lines.append)
    assert made == load_corpus(tmp_path / "out")


def test_too_few_documents_are_an_error_and_leave_no_manifest(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("a line of text\n" * 50)
    with pytest.raises(DataError, match="1 fell to 'train' and 0 to 'valid'.* another --validation-fraction"):
        prepare_corpus(tmp_path / "out", corpus=texts, vocab_size=260, log=lambda line: None)
    assert not (tmp_path / "out" / "corpus.json").exists()


def test_a_given_tokenizer_is_used_and_copied(texts: Path, tmp_path: Path) -> None:
    first, _ = _prepare(tmp_path / "a", texts)
    second = prepare_corpus(
        tmp_path / "b", corpus=texts, tokenizer=first.tokenizer_path, log=lambda line: None
    )
    assert (tmp_path / "b" / "train.bin").read_bytes() == (tmp_path / "a" / "train.bin").read_bytes()
    assert second.vocab_size == 300


def _folder_with_stop(texts: Path, tmp_path: Path) -> Path:
    """A published tokenizer of 301 tokens, the last of which ends documents by ``tokenizer_config.json``."""
    first, _ = _prepare(tmp_path / "a", texts)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    impl = tokenizers.Tokenizer.from_file(str(first.tokenizer_path))
    impl.add_special_tokens(["<|stop|>"])
    impl.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|stop|>"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_the_end_of_documents_is_that_of_the_given_folder(texts: Path, tmp_path: Path) -> None:
    folder = _folder_with_stop(texts, tmp_path)

    def prepared(tokenizer: Path) -> Corpus:
        return prepare_corpus(tmp_path / "b", corpus=texts, tokenizer=tokenizer, log=lambda line: None)

    made = prepared(folder)
    assert np.fromfile(made.train_prefix + ".bin", dtype=np.uint16)[-1] == 300
    manifest = tmp_path / "b" / "corpus.json"
    said = json.loads(manifest.read_text())
    assert said["eod"] == 300 and prepared(folder) == made
    with pytest.raises(DataError, match="made otherwise .eod 300 -> 0.*--force"):
        prepared(folder / "tokenizer.json")
    del said["eod"], said["options"]["eod"]
    manifest.write_text(json.dumps(said))
    assert prepared(folder) == made, "a manifest of before does not name it: the data ends with it"
    with pytest.raises(DataError, match="made otherwise .eod 300 -> 0.*--force"):
        prepared(folder / "tokenizer.json")


def test_a_corpus_of_a_version_that_cut_documents_is_not_taken_for_this(texts: Path, tmp_path: Path) -> None:
    first, _ = _prepare(tmp_path / "a", texts)
    impl = tokenizers.Tokenizer.from_file(str(first.tokenizer_path))
    impl.enable_truncation(max_length=5)
    impl.save(str(tmp_path / "tokenizer.json"))

    def prepared() -> Corpus:
        return prepare_corpus(
            tmp_path / "b", corpus=texts, tokenizer=tmp_path / "tokenizer.json", log=lambda line: None
        )

    made = prepared()
    assert made.train_tokens == first.train_tokens and prepared() == made
    manifest = tmp_path / "b" / "corpus.json"
    said = json.loads(manifest.read_text())
    del said["options"]["truncation_and_padding"]
    manifest.write_text(json.dumps(said))
    with pytest.raises(DataError, match="made otherwise .truncation_and_padding None -> not applied"):
        prepared()


def test_the_prepared_folder_holds_the_same_tokenizer(texts: Path, tmp_path: Path) -> None:
    folder, output = _folder_with_stop(texts, tmp_path), tmp_path / "b"
    lines: list[str] = []
    further = ("chat_template.jinja", "tokenizer_config.json")

    def prepared(tokenizer: Path | None, **options: bool) -> Corpus:
        return prepare_corpus(
            output, corpus=texts, vocab_size=300, tokenizer=tokenizer, log=lines.append, **options
        )

    made = prepared(folder)
    given, copied = Tokenizer(folder), Tokenizer(made.tokenizer_path)
    assert (copied.identity, copied.eod, copied.eod_token) == (given.identity, 300, "<|stop|>")
    assert json.loads((output / "corpus.json").read_text())["eod"] == Tokenizer(output).eod == 300
    assert [(output / name).read_bytes() for name in further] == [
        (folder / name).read_bytes() for name in further
    ]
    assert f"train with --tokenizer-model {output}: " in lines[-1]
    (output / further[0]).unlink()
    assert prepared(folder) == made and "incomplete" in "".join(lines), "one of its files is missing"
    assert (output / further[0]).exists()
    # Another preparation leaves no file of the tokenizer before.
    trained = prepared(None, force=True)
    assert trained.tokenizer_path == output / "tokenizer.json"
    assert Tokenizer(output).eod == 0 and not any((output / name).exists() for name in further)
    # A file that is none of the data's tokenizer changes nothing.
    (output / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    assert Tokenizer(trained.tokenizer_path).eod == 0


def test_a_build_that_fails_takes_none_of_its_tokenizers_files_away(texts: Path, tmp_path: Path) -> None:
    """The output is the folder of the given tokenizer, which an earlier preparation has filled."""
    made, output = _folder_with_stop(texts, tmp_path), tmp_path / "b"
    prepare_corpus(output, corpus=texts, vocab_size=300, tokenizer=made)
    further = {
        name: (output / name).read_bytes() for name in ("chat_template.jinja", "tokenizer_config.json")
    }
    with pytest.raises(DataError, match="[1-9][0-9]* fell to 'train' and 0 to 'valid'"):
        prepare_corpus(
            output,
            corpus=texts,
            vocab_size=300,
            tokenizer=output,
            max_train_tokens=1,
            force=True,
        )
    assert {name: (output / name).read_bytes() for name in further} == further
    assert Tokenizer(output).eod_token == "<|stop|>"


def test_an_output_within_the_corpus_is_no_text(texts: Path, tmp_path: Path) -> None:
    shutil.copytree(texts, tmp_path / "texts")
    first, _ = _prepare(tmp_path / "texts" / "out", tmp_path / "texts")
    second, lines = _prepare(tmp_path / "texts" / "out", tmp_path / "texts")
    assert second == first and "already prepared" in lines[0]
    third, _ = _prepare(tmp_path / "texts" / "out", tmp_path / "texts", force=True)
    assert third == first


@pytest.mark.parametrize("corpus", ["link", "texts/../texts"])
def test_an_output_within_the_corpus_by_another_path_is_no_text(
    texts: Path, tmp_path: Path, corpus: str
) -> None:
    shutil.copytree(texts, tmp_path / "texts")
    (tmp_path / "link").symlink_to("texts")
    first, _ = _prepare(tmp_path / "texts" / "out", tmp_path / corpus)
    second, lines = _prepare(tmp_path / "texts" / "out", tmp_path / corpus)
    assert second == first and "already prepared" in lines[0]


def test_storage_without_locks_is_said(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", flock_that_fails(errno.ENOLCK))
    corpus, lines = _prepare(tmp_path, texts)
    assert corpus.train_documents
    assert any("has no file locks (No locks available)" in line for line in lines)
    # As a process that was killed leaves it.
    (tmp_path / ".building.host-1-00000000").mkdir()
    (tmp_path / "corpus.json").unlink()
    again, lines = _prepare(tmp_path, texts)
    assert again == corpus and any("is incomplete" in line for line in lines)
    assert any(".building.host-1-00000000 in " in line and "Remove it when" in line for line in lines)


@pytest.mark.parametrize("moment", ["encoding", "naming the files"])
def test_without_locks_no_process_takes_the_files_of_another(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    _prepare(tmp_path / "reference", texts)
    output, other, real = tmp_path / "out", list[Corpus](), os.replace
    files: list[int] = []
    lines: list[str] = []

    def another_process() -> None:
        if not other:
            monkeypatch.setattr(os, "replace", real)
            corpus, said = _prepare(output, texts)
            other.append(corpus)
            lines.extend(said)
            files.extend((output / name).stat().st_ino for name in FILES)

    def replace(source: Path, target: Path) -> None:
        another_process()
        real(source, target)

    monkeypatch.setattr(fcntl, "flock", flock_that_fails(errno.ENOLCK))
    if moment != "encoding":
        monkeypatch.setattr(os, "replace", replace)
    corpus = prepare_corpus(
        output,
        corpus=texts,
        vocab_size=300,
        log=lambda line: another_process() if line == f"data: {moment}" else None,
    )
    assert [corpus] == other and load_corpus(output) == corpus
    assert any(".building." in line and "stays: another process may work" in line for line in lines)
    assert _digest(output) == _digest(tmp_path / "reference")
    if moment == "encoding":
        assert files == [(output / name).stat().st_ino for name in FILES], "a run may read them already"
    assert not list(output.glob(".building*"))


def test_a_busy_lock_is_waited_for_whatever_the_storage_answers(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, answers = fcntl.flock, [errno.EACCES, errno.EAGAIN]

    def flock(descriptor: int, operation: int) -> None:
        if answers:
            flock_that_fails(answers.pop())(descriptor, operation)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    _, lines = _prepare(tmp_path, texts)
    assert (
        lines[0].startswith(f"data: waiting for another process that prepares {tmp_path} (") and not answers
    )
    assert not any("waiting" in line for line in lines[1:])
    assert not any("no file locks" in line for line in lines)


@pytest.mark.parametrize(
    "options", [{"validation_fraction": 0.0}, {"validation_fraction": 1.0}, {"max_train_tokens": 0}]
)
def test_impossible_options_are_refused(texts: Path, tmp_path: Path, options: dict) -> None:
    with pytest.raises(DataError, match="expected"):
        _prepare(tmp_path / "out", texts, **options)
    assert not (tmp_path / "out").exists()


_START = """
import sys
from pathlib import Path
from mt_megatron.data.prepare.prepare import prepare_corpus
output, texts = Path(sys.argv[1]), Path(sys.argv[2])
prepare_corpus(output, corpus=texts, vocab_size=300, log=lambda line: print(line, flush=True))
"""


def _start(output: Path, texts: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _START, str(output), str(texts)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_processes_that_start_together_prepare_once(texts: Path, tmp_path: Path) -> None:
    processes = [_start(tmp_path, texts) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    built = [out for out, _ in outputs if "training a byte-level BPE" in out]
    reused = [out for out, _ in outputs if "already prepared" in out]
    assert (len(built), len(reused)) == (1, 2), outputs
    assert (
        json.loads((tmp_path / "corpus.json").read_text())["train_tokens"]
        == load_corpus(tmp_path).train_tokens
    )


def test_a_killed_preparation_leaves_nothing_that_counts(texts: Path, tmp_path: Path) -> None:
    _prepare(tmp_path / "reference", texts)
    big = tmp_path / "big"
    big.mkdir()
    # Encoding must take much longer than this test needs to see it begin.
    for i in range(3000 if DAILY else 1200):
        (big / f"d{i}.txt").write_text((texts / f"d{i % 60:02d}.txt").read_text() * 5)
    output = tmp_path / "out"
    process = _start(output, big)
    deadline = time.monotonic() + 60
    while not (output / ".building" / "train.bin").exists():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert not (output / "corpus.json").exists()
    with pytest.raises(DataError, match="no complete corpus"):
        load_corpus(output)
    _prepare(output, texts)
    assert _digest(output) == _digest(tmp_path / "reference")
    assert not (output / ".building").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("caf\xe9\n".encode("latin-1") * 2000, "corpus.txt: not UTF-8 (byte 3)"),
        ("text\n".encode("utf-16"), "corpus.txt: not UTF-8 (byte 0)"),
        (b"", "corpus.txt: empty"),
        (b"hello world\n", "12 characters, yield only 266 tokens"),
    ],
)
def test_what_is_wrong_with_the_text_is_named(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(content)
    with pytest.raises(DataError, match=re.escape(says)):
        prepare_corpus(tmp_path / "out", corpus=tmp_path / "corpus.txt", log=lambda line: None)


def test_a_folder_without_a_usable_file_names_them(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "texts" / "b.txt").touch()
    with pytest.raises(DataError, match="can be used for training") as caught:
        prepare_corpus(tmp_path / "out", corpus=tmp_path / "texts", log=lambda line: None)
    assert "a.txt: not UTF-8 (byte 3)" in str(caught.value) and "b.txt: empty" in str(caught.value)


def test_another_key_leads_to_preprocess(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match="preprocess --json-keys"):
        prepare_corpus(tmp_path / "out", corpus=tmp_path / "docs.jsonl", log=lambda line: None)


@pytest.mark.parametrize("limit", [None, 2000])
def test_progress_reaches_the_end_of_both_passes(texts: Path, tmp_path: Path, limit: int | None) -> None:
    seen: list[tuple[int, int, int, int]] = []
    corpus, _ = _prepare(
        tmp_path / "out", texts, max_train_tokens=limit, advance=lambda *now: seen.append(now)
    )
    reading = [now for now in seen if now[3] == 0]
    encoding = [now for now in seen if now[3] > 0]
    for one in (reading, encoding):
        assert [now[0] for now in one] == sorted(now[0] for now in one)
        assert one[-1][0] == pytest.approx(one[-1][1], rel=0.05)
    assert encoding[-1][3] == corpus.train_tokens


def test_preparing_imports_no_torch(texts: Path, tmp_path: Path) -> None:
    code = _START + "assert not {'torch', 'megatron.core'} & set(sys.modules)"
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), str(texts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "counting unigrams" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--corpus absent", "--corpus absent: there is nothing"),
        ("--tokenizer absent.json", "--tokenizer absent.json: there is nothing"),
        ("--vocab-size 100", "--vocab-size 100: expected at least 257"),
    ],
)
def test_wrong_words_are_refused_before_torch_is_imported(words: str, says: str, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom mt_megatron.cli.main import main\n"
        f"code = main(['prepare', '--output', 'out', *{words.split()!r}])\n"
        "print(code, 'torch' in sys.modules, 'megatron.core' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 False False\n" and says in done.stderr
