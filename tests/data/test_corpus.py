"""Corpora: deterministic order and split, nothing dropped without being named."""

from __future__ import annotations

import gzip
import json
import re
import sys
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mt_megatron.data.prepare.corpus import open_source, read_documents, split_of, standard_library
from mt_megatron.data.prepare.inputs import find_inputs
from mt_megatron.errors import DataError
from tests.data.test_reading import compress


def _names(path: Path) -> list[str]:
    return [document.name for document in read_documents(open_source(path), [])]


def test_folder_is_read_in_an_order_that_ignores_creation_order(tmp_path: Path) -> None:
    names = [f"{i:02d}.txt" for i in range(20)]
    for folder, order in (("a", names), ("b", names[::-1])):
        (tmp_path / folder).mkdir()
        for name in order:
            (tmp_path / folder / name).write_text(name)
    assert _names(tmp_path / "a") == _names(tmp_path / "b")
    assert sorted(_names(tmp_path / "a")) == names
    assert _names(tmp_path / "a") != names, "hash order, so that a limit takes an even sample"


def test_unusable_files_are_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "blank.txt").write_text(" \n")
    skipped: list = []
    assert [d.name for d in read_documents(open_source(tmp_path), skipped)] == ["good.txt"]
    assert {s.name: s.reason for s in skipped} == {"latin.txt": "not UTF-8 (byte 3)", "blank.txt": "empty"}


def test_hidden_files_second_links_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    for name in ("keep.txt", ".hidden", "site-packages/x.txt", "__pycache__/y.txt", ".git/z.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.txt").symlink_to(tmp_path / "keep.txt")
    assert _names(tmp_path) == ["keep.txt"]


def test_links_are_followed_and_each_file_comes_once(tmp_path: Path) -> None:
    """As in a snapshot of the hub, which holds nothing else."""
    for name in ("blobs/a1", "blobs/b2", "elsewhere/deep/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    root = tmp_path / "snapshot"
    (root / "own").mkdir(parents=True)
    (root / "a.txt").symlink_to("../blobs/a1")
    (root / "again.txt").symlink_to("../blobs/a1")
    (root / "own" / "b.txt").symlink_to("../../blobs/b2")
    (root / "own" / "up").symlink_to("..")
    (root / "folder").symlink_to("../elsewhere")
    assert sorted(_names(root)) == ["a.txt", "folder/deep/c.txt", "own/b.txt"]
    assert [Path(each.path).name for each in find_inputs([str(root)], None)] == ["a.txt", "c.txt", "b.txt"]
    with pytest.raises(DataError, match="named twice"):
        find_inputs([str(root), str(tmp_path / "blobs" / "a1")], None)
    (root / "gone.txt").symlink_to("../blobs/missing")
    for given in (root, root / "*.txt"):
        with pytest.raises(DataError, match=r"gone.txt is a symbolic link to ../blobs/missing"):
            find_inputs([str(given)], None)


@pytest.mark.parametrize("suffix", [".json", ".ndjson", ".JSONL", ".jsonl.gz", ".Json.ZST", ".parquet"])
def test_formats_are_those_of_preprocess(tmp_path: Path, suffix: str) -> None:
    """Megatron-LM's own example is ``my-corpus.json``, of JSON lines."""
    texts = [f"text {number}" for number in range(30)]
    file = tmp_path / f"corpus{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=7)
    else:
        lines = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts)
        file.write_bytes(compress(lines.encode(), suffix.lower()))
    documents = list(read_documents(open_source(file), []))
    assert [document.text for document in documents] == texts
    assert [document.name for document in documents] == [f"{file.name}:{i}" for i in range(1, 31)]
    (each,) = find_inputs([str(file)], None)
    assert each.format == ("parquet" if suffix == ".parquet" else "jsonl")


def test_one_bad_line_is_left_out_and_many_are_an_error(tmp_path: Path) -> None:
    file, skipped = tmp_path / "c.jsonl", []
    good = [json.dumps({"text": f"text {number}"}) for number in range(40)]
    file.write_text("\n".join([*good, "{broken", '{"body": 1}']) + "\n")
    assert len(list(read_documents(open_source(file), skipped))) == 40
    assert [(each.name, each.reason) for each in skipped] == [
        ("c.jsonl:41", "not JSON"),
        ("c.jsonl:42", "an object without the key, or without a string under it"),
    ]
    file.write_text("\n".join([*good, *["{broken"] * 3]) + "\n")
    with pytest.raises(DataError, match=r"bad or lost \(3 broken_json\)(.|\n)*line 41(.|\n)*--max-bad-share"):
        list(read_documents(open_source(file), []))
    file.with_suffix(".jsonl.gz").write_bytes(gzip.compress("\n".join(good).encode())[:-30])
    with pytest.raises(DataError, match="1 truncated"):
        list(read_documents(open_source(file.with_suffix(".jsonl.gz")), []))


@pytest.mark.parametrize(("indent", "hint"), [(None, "jq -c '.[]'"), (1, "jq -c '.[]'"), (0, "jq -c '.[]'")])
def test_an_array_of_json_is_given_a_hint(tmp_path: Path, indent: int | None, hint: str) -> None:
    (tmp_path / "c.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=indent))
    with pytest.raises(DataError, match=re.escape(hint)):
        list(read_documents(open_source(tmp_path / "c.json"), []))


def test_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    (tmp_path / "b.txt").write_bytes(b"other")
    texts = {d.name: d.text for d in read_documents(open_source(tmp_path), [])}
    assert texts["a.txt"] == "one\r\ntwo\n"


def test_json_lines_hold_a_document_each(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text("\n".join(json.dumps({"text": t}) for t in ("first", "", "third")) + "\n\n")
    skipped: list = []
    documents = list(read_documents(open_source(file), skipped))
    assert [(d.name, d.text) for d in documents] == [("c.jsonl:1", "first"), ("c.jsonl:3", "third")]
    assert [s.name for s in skipped] == ["c.jsonl:2"]


@pytest.mark.parametrize("line", ["{not json", '"a string"', '{"content": "x"}', '{"text": 3}'])
def test_a_wrong_json_line_names_file_and_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"c\.jsonl, line 2"):
        list(read_documents(open_source(file), []))


def test_a_single_text_file_is_cut_at_line_ends_and_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    text = "".join(f"line {i} of a long book\n" for i in range(20_000))
    file.write_text(text)
    documents = list(read_documents(open_source(file), []))
    assert len(documents) > 5
    assert "".join(d.text for d in documents) == text
    assert all(d.text.endswith("\n") for d in documents)


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found nothing at"):
        open_source(tmp_path / "missing")
    with pytest.raises(DataError, match="holds no files"):
        open_source(tmp_path)


def test_standard_library_is_source_of_the_running_python_only() -> None:
    source = standard_library()
    assert source.root == Path(sysconfig.get_paths()["stdlib"])
    names = [source.relative(file) for file in source.files]
    assert "argparse.py" in names
    assert all(name.endswith(".py") and "site-packages" not in name for name in names)
    assert len(names) > 500, sys.version


def test_split_is_stable_even_and_independent_of_the_other_documents() -> None:
    names = [f"folder/file{i}.py" for i in range(20_000)]
    held_out = {n for n in names if split_of(n, 0.05) == "valid"}
    assert 0.04 < len(held_out) / len(names) < 0.06
    assert held_out <= {n for n in names if split_of(n, 0.10) == "valid"}, "a larger share only adds"
    # A constant of the format: another hash would move documents of prepared corpora across the split.
    assert [split_of(n, 0.05) for n in ("argparse.py", "optparse.py")] == ["train", "valid"]


def test_fingerprints_see_renames_edits_and_times(tmp_path: Path) -> None:
    import os

    (tmp_path / "a.txt").write_text("one")
    first = open_source(tmp_path)
    quick, content = first.quick_fingerprint(), first.content_fingerprint()
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert open_source(tmp_path).quick_fingerprint() != quick
    assert open_source(tmp_path).content_fingerprint() == content
    (tmp_path / "a.txt").write_text("two")
    assert open_source(tmp_path).content_fingerprint() != content
