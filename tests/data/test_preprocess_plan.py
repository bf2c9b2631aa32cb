"""Files found under a prefix: continued, left as they are, made anew or refused."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from mt_megatron.data.loader.tokenizer import train_tokenizer
from mt_megatron.data.prepare.inputs import find_inputs
from mt_megatron.data.prepare.merging import findings_of, merge_key
from mt_megatron.data.prepare.preprocess import preprocess, shard_name
from mt_megatron.data.prepare.preprocess_options import PreprocessOptions
from mt_megatron.data.prepare.preprocess_plan import is_output, locked, overwrite, plan_of
from mt_megatron.errors import DataError
from tests.data.test_preprocess import Lines, made, options, texts, write_jsonl
from tests.nfs_locks import flock_that_fails


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_pair_that_is_not_whole_is_not_made_already(tmp_path: Path, suffix: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["5 7", "1"])
    given = options(tmp_path, source, tokenizer_type="NullTokenizer", vocab_size=9, workers=1)
    first = preprocess(given, Lines())
    whole, path = made(first.prefixes[0]), Path(first.prefixes[0] + suffix)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"document\.json says .* complete, and it is not: .*--overwrite"):
        preprocess(given, Lines())
    path.unlink()
    with pytest.raises(DataError, match=rf"document\{suffix} does not exist.*--overwrite"):
        preprocess(given, Lines())
    overwrite(given)
    assert made(preprocess(given, Lines()).prefixes[0]) == whole


def test_lengths_that_do_not_fit_the_shard_are_not_merged(tmp_path: Path) -> None:
    for name, content in (("0.bin", b"abc"), ("0.lengths", bytes([1, 0, 0, 0, 1, 0, 0, 0]))):
        (tmp_path / f"{shard_name(0, 0)}.{name}").write_bytes(content)
    summary = tmp_path / f"{shard_name(0, 0)}.json"
    summary.write_text(json.dumps({"crc32": [zlib.crc32(b"abc")], "tokens": [3]}))
    with pytest.raises(DataError, match="is damaged and was removed"):
        merge_key(tmp_path, 0, 257)
    assert not summary.exists()


@pytest.mark.parametrize("kind", ["0.bin", "0.lengths", "findings"])
def test_a_shard_without_one_of_its_files_is_made_again(tmp_path: Path, kind: str) -> None:
    shard = {"0.bin": b"abc", "0.lengths": bytes([3, 0, 0, 0]), "findings": b""}
    for name, content in shard.items():
        if name != kind:
            (tmp_path / f"{shard_name(0, 0)}.{name}").write_bytes(content)
    summary = tmp_path / f"{shard_name(0, 0)}.json"
    summary.write_text(json.dumps({"crc32": [zlib.crc32(b"abc")], "tokens": [3], "lines": 0}))
    with pytest.raises(DataError, match="is damaged and was removed"):
        findings_of(tmp_path, tmp_path / "problems.jsonl", [], limit=5)
        merge_key(tmp_path, 0, 257)
    assert not summary.exists()


def test_storage_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["5 7"])
    given = options(tmp_path, source, tokenizer_type="NullTokenizer", vocab_size=9, workers=1)
    monkeypatch.setattr(fcntl, "flock", flock_that_fails(errno.ENOLCK))
    told = Lines()
    assert preprocess(given, told).documents == 1
    assert any("has no file locks (No locks available)" in line for line in told.lines)


def test_what_another_process_makes_is_not_overwritten(tmp_path: Path) -> None:
    given = options(tmp_path, tmp_path / "a.jsonl")
    folder = Path(given.output_prefix + ".preprocess")
    there = Path(given.output_prefix + "_text_document.bin")
    folder.mkdir(parents=True)
    there.touch()
    with locked(folder, print), pytest.raises(DataError, match="another process is working"):
        overwrite(given)
    assert folder.exists() and there.exists()
    overwrite(given)
    assert not folder.exists() and not there.exists()


def test_a_busy_lock_is_known_whatever_the_storage_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["5 7"])
    given = options(tmp_path, source, tokenizer_type="NullTokenizer", vocab_size=9, workers=1)
    for number in (errno.EACCES, errno.EAGAIN):
        monkeypatch.setattr(fcntl, "flock", flock_that_fails(number))
        for work in (partial(preprocess, given, Lines()), partial(overwrite, given)):
            with pytest.raises(DataError, match="another process is working"):
                work()


def test_a_lock_whose_file_was_removed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "a.preprocess", fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        # Another process ends between the opening of the file and its lock.
        monkeypatch.setattr(fcntl, "flock", real)
        shutil.rmtree(folder)
        real(descriptor, operation)

    folder.mkdir()
    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        locked(folder, print),
        pytest.raises(DataError, match="another process is working"),
        locked(folder, print),
    ):
        pass


def test_the_lock_is_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, left = options(tmp_path, tmp_path / "a.jsonl"), list[str]()
    folder = Path(given.output_prefix + ".preprocess")
    folder.mkdir(parents=True)
    (folder / "plan.json").touch()

    def rmtree(path: Path, **more: bool) -> None:
        left.extend(each.name for each in path.iterdir())

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    overwrite(given)
    assert left == [".lock"]


@pytest.mark.parametrize("given", ["in", "in/**"])
def test_an_output_within_the_input_is_no_input(tmp_path: Path, given: str) -> None:
    source = tmp_path / "in" / "a.jsonl"
    source.parent.mkdir()
    source.write_text('{"text": "5 7"}\n{"body": "x"}\n')
    work = options(
        tmp_path,
        tmp_path / given,
        output_prefix=str(tmp_path / "in" / "out"),
        tokenizer_type="NullTokenizer",
        vocab_size=9,
        max_bad_share=1.0,
        workers=1,
    )
    first = preprocess(work, Lines())
    assert preprocess(work, Lines()) == replace(first, already=True)
    # As a kill leaves it: a plan, and nothing of the result.
    plan = json.loads(Path(first.prefixes[0] + ".json").read_text())["plan"]
    overwrite(work)
    folder = Path(work.output_prefix + ".preprocess")
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({**plan, "shard_bytes": 1 << 19}))
    assert preprocess(work, Lines()) == first


def test_symbolic_links_lead_to_the_output_as_well(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to("in")
    names = ("out_text_document.bin", "out.preprocess/plan.json", "a.jsonl")
    for output, input in (("in", "link"), ("link", "in")):
        given = options(tmp_path, output_prefix=str(tmp_path / output / "out"))
        assert [is_output(given, str(tmp_path / input / name)) for name in names] == [True, True, False]


def test_another_end_of_documents_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    train_tokenizer(texts(20), vocab_size=270, output=folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))

    def given(model: Path) -> PreprocessOptions:
        kind: dict[str, Any] = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model)}
        return options(tmp_path, source, workers=1, **kind)

    first = preprocess(given(folder), Lines())
    with pytest.raises(DataError, match=r"made otherwise .tokenizer_eod \d+ -> 0"):
        preprocess(given(folder / "tokenizer.json"), Lines())
    sidecar = Path(first.prefixes[0] + ".json")
    said = json.loads(sidecar.read_text())
    del said["plan"]["options"]["tokenizer_eod"]
    sidecar.write_text(json.dumps(said))
    assert preprocess(given(folder), Lines()).already, "a plan of before does not name it: the sidecar does"
    with pytest.raises(DataError, match=r"made otherwise .tokenizer_eod \d+ -> 0"):
        preprocess(given(folder / "tokenizer.json"), Lines())
    models = (folder, folder / "tokenizer.json")
    plans = [plan_of(replace(given(model), append_eod=False), []) for model in models]
    assert plans[0] == plans[1], "no document ends with it"


def test_data_of_a_version_that_cut_documents_is_not_taken_for_this(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    model = tmp_path / "tokenizer.json"
    train_tokenizer(texts(20), vocab_size=270, output=model)
    impl = tokenizers.Tokenizer.from_file(str(model))
    impl.enable_truncation(max_length=5)
    impl.save(str(model))
    kind: dict[str, Any] = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model)}
    given = options(tmp_path, source, workers=1, **kind)
    plan = plan_of(given, find_inputs(given.inputs, None))
    before = json.loads(json.dumps(plan))
    assert before["options"].pop("truncation_and_padding") == "not applied"
    # An unfinished run, and a result.
    folder = Path(given.output_prefix + ".preprocess")
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({**before, "shard_bytes": 1 << 19}))
    with pytest.raises(DataError, match="started otherwise .truncation_and_padding None -> not applied"):
        preprocess(given, Lines())
    overwrite(given)
    sidecar = Path(preprocess(given, Lines()).prefixes[0] + ".json")
    assert preprocess(given, Lines()).already
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "plan": before}))
    with pytest.raises(DataError, match="made otherwise .truncation_and_padding None -> not applied"):
        preprocess(given, Lines())
