"""Documents of shards: every one once whatever the shards, every bad one counted; no processes here."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_megatron.data.prepare.findings import Finding
from mt_megatron.data.prepare.inputs import Unit, find_inputs, units
from mt_megatron.data.prepare.reading import Reading, ShardReader

LIMIT = 4000


def compress(content: bytes, suffix: str) -> bytes:
    """``content`` as a file that ends with ``suffix``; in several members or frames when it is long."""
    half = len(content) // 2
    if suffix.endswith(".gz"):
        return gzip.compress(content[:half]) + gzip.compress(content[half:])
    if suffix.endswith(".zst"):
        # Flushed blocks, so that a cut-off file still gives what comes before.
        out = io.BytesIO()
        with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
            for start in range(0, len(content), 500):
                writer.write(content[start : start + 500])
                writer.flush(zstandard.FLUSH_BLOCK)
        return out.getvalue() + zstandard.compress(b"")
    return content


def read(
    path: Path, size: int, *, readers: int = 1, keys: tuple[str, ...] = ("text",), **options: Any
) -> tuple[list[tuple[str, ...]], list[Finding]]:
    """All documents and findings of ``path`` in shards of ``size``, given to ``readers`` in turn."""
    found: list[Finding] = []
    reading = Reading(
        keys=keys,
        max_document_bytes=options.pop("limit", LIMIT),
        text_documents=options.pop("text_documents", "line"),
        shard_bytes=size,
    )
    files = find_inputs([str(path)], options.pop("format", None))
    made = [ShardReader(reading, found.append) for _ in range(readers)]
    documents, turn = [], 0
    for unit in units(files, size, text_documents=reading.text_documents):
        before, shard, ended = 0, 0, False
        while shard < unit.shards if unit.shards is not None else not ended:
            reader, first = made[turn % readers], len(found)
            turn += 1
            documents += list(reader.read(unit, shard))
            if unit.kind == "lines":
                for i in range(first, len(found)):
                    if found[i].at is not None:
                        found[i] = Finding(**{**found[i].as_dict(), "at": found[i].at + before})
            before += reader.lines
            ended, shard = reader.ended, shard + 1
    for reader in made:
        reader.close()
    return documents, found


def kinds(found: list[Finding]) -> Counter[str]:
    return Counter(each.kind for each in found)


TEXTS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1).filter(
    lambda text: not text.isspace()
)
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=30),
    size=st.integers(1, 400),
    readers=st.integers(1, 3),
    suffix=st.sampled_from(SUFFIXES),
    newline=st.booleans(),
)
def test_every_document_comes_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    size: int,
    readers: int,
    suffix: str,
    newline: bool,
) -> None:
    path = tmp_path_factory.mktemp("read") / f"a{suffix}"
    content = "\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts) + "\n" * newline
    path.write_bytes(compress(content.encode(), suffix))
    documents, found = read(path, size, readers=readers)
    assert documents == [(text,) for text in texts]
    assert found == []


DAMAGE = {
    "not_utf8": b'{"text": "caf\xe9"}',
    "nul": b'{"text": "a\0b"}',
    "broken_json": b'{"text": "a',
    "not_an_object": b'["text"]',
    "missing_key": b'{"body": "a"}',
    "too_long": b'{"text": "' + b"x" * LIMIT + b'"}',
    "empty": b'{"text": "  \\n"}',
    "blank_line": b"  ",
}
MORE = {
    "nul in a string": ("nul", b'{"text": "a\\u0000b"}'),
    "surrogate": ("not_utf8", b'{"text": "a\\ud800b"}'),
    "number": ("missing_key", b'{"text": 5}'),
    "null": ("missing_key", b'{"text": null}'),
    "nested": ("broken_json", b"[" * 3900),
    "utf-16": ("nul", '{"text": "a"}'.encode("utf-16-le")),
    "number alone": ("not_an_object", b"5"),
}
CASES = {**{kind: (kind, line) for kind, line in DAMAGE.items()}, **MORE}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_line_is_counted_and_named(tmp_path: Path, name: str) -> None:
    kind, line = CASES[name]
    good = b'{"text": "good"}\n'
    (tmp_path / "a.jsonl").write_bytes(good * 3 + line + b"\n" + good)
    documents, found = read(tmp_path / "a.jsonl", 40)
    assert documents == [("good",)] * 4
    assert [(each.kind, each.at, each.file) for each in found] == [(kind, 4, str(tmp_path / "a.jsonl"))]
    assert f"{tmp_path / 'a.jsonl'}, line 4: " in found[0].line()


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.sampled_from(["good", *DAMAGE]), min_size=1, max_size=25),
    size=st.integers(1, 3000),
    readers=st.integers(1, 3),
    suffix=st.sampled_from(SUFFIXES),
)
def test_whatever_is_damaged_is_counted(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int, readers: int, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("read") / f"a{suffix}"
    content = b"".join(DAMAGE.get(kind, b'{"text": "good"}') + b"\n" for kind in lines)
    path.write_bytes(compress(content, suffix))
    documents, found = read(path, size, readers=readers)
    assert len(documents) == lines.count("good")
    expected = [(kind, number) for number, kind in enumerate(lines, start=1) if kind != "good"]
    assert [(each.kind, each.at) for each in found] == expected


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(5, 60),
    cut=st.floats(0.02, 0.98),
    size=st.integers(50, 5000),
    readers=st.integers(1, 3),
    suffix=st.sampled_from(SUFFIXES[1:]),
)
def test_a_file_that_is_cut_off_is_told_once(
    tmp_path_factory: pytest.TempPathFactory, count: int, cut: float, size: int, readers: int, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("read") / f"a{suffix}"
    rng = [str(hash((i, count)) % 10**12) * 3 for i in range(count)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in rng).encode()
    whole = gzip.compress(content) if suffix.endswith(".gz") else compress(content, suffix)[:-9]
    path.write_bytes(whole[: max(4, int(len(whole) * cut))])
    documents, found = read(path, size, readers=readers)
    assert [texts[0] for texts in documents] == rng[: len(documents)]
    assert kinds(found) == {"truncated": 1}


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_a_damaged_file_is_told_once(tmp_path: Path, suffix: str) -> None:
    content = "".join(json.dumps({"text": f"{i * 7919}"}) + "\n" for i in range(400)).encode()
    whole = bytearray(compress(content, suffix))
    whole[len(whole) // 2 : len(whole) // 2 + 40] = b"\xff" * 40
    (tmp_path / f"a{suffix}").write_bytes(whole)
    documents, found = read(tmp_path / f"a{suffix}", 900, readers=2)
    assert len(documents) < 400
    assert sum(kinds(found)[kind] for kind in ("damaged", "truncated")) == 1


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_what_is_not_compressed_at_all_is_told(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a{suffix}").write_bytes(b'{"text": "plain"}\n')
    documents, found = read(tmp_path / f"a{suffix}", 100)
    assert documents == [] and kinds(found) == {"damaged": 1}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.jsonl", "empty"), ("a.txt", "empty"), ("a.jsonl.gz", "truncated"), ("a.zst", "truncated")],
)
@pytest.mark.parametrize("text_documents", ["file", "line"])
def test_an_empty_file_is_told(tmp_path: Path, name: str, kind: str, text_documents: str) -> None:
    (tmp_path / name).write_bytes(b"")
    documents, found = read(tmp_path / name, 50, text_documents=text_documents)
    assert documents == [] and kinds(found) == {kind: 1}


def test_json_that_ends_within_a_line_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b')
    documents, found = read(tmp_path / "a.jsonl", 100)
    assert documents == [("a",)]
    assert "the file ends within this line" in found[0].line()


def test_marks_and_line_ends_are_noticed_and_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    documents, found = read(tmp_path / "a.jsonl", 5)
    assert documents == [("a",), ("b",)]
    assert kinds(found)["byte_order_mark"] == 1 and "crlf" in kinds(found)
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    documents, found = read(tmp_path / "b.txt", 5, text_documents="file")
    assert documents == [("a\r\nb\r\n",)] and kinds(found) == {"byte_order_mark": 1, "crlf": 1}


def test_marks_between_joined_files_cost_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n' * 3)
    documents, found = read(tmp_path / "a.jsonl", 20)
    assert documents == [("a",)] * 3
    assert [(each.kind, each.at) for each in found] == [("byte_order_mark", number) for number in (1, 2, 3)]


def test_text_files_are_documents_or_their_lines_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("drei é\nvier".encode()))
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "d.txt").write_text("long " * LIMIT)
    documents, found = read(tmp_path, 50, text_documents="file")
    assert documents == [("one\n\ntwo\n",), ("drei é\nvier",)]
    assert kinds(found) == {"not_utf8": 1, "too_long": 1}
    documents, found = read(tmp_path, 50)
    assert documents == [("one",), ("two",), ("drei é",), ("vier",)]
    assert kinds(found) == {"empty": 1, "not_utf8": 1, "too_long": 1}


def test_parquet_rows_by_row_group(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = ["a", None, " ", "b\0", "c" * 5000, *(f"row {i}" for i in range(995))]
    table = pyarrow.table({"text": texts, "title": [f"t{i}" for i in range(1000)], "n": list(range(1000))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    documents, found = read(tmp_path / "a.parquet", 100, keys=("text", "title"))
    assert len(documents) == 996 and documents[0] == ("a", "t0") and documents[-1] == ("row 994", "t999")
    assert [(each.kind, each.at) for each in found] == [
        ("missing_key", 2),
        ("empty", 3),
        ("nul", 4),
        ("too_long", 5),
    ]
    assert f"{tmp_path / 'a.parquet'}, row 2: " in found[0].line()
    _, found = read(tmp_path / "a.parquet", 100, keys=("body",))
    assert kinds(found) == {"missing_key": 4} and "no column 'body'; it has text, title, n" in found[0].line()
    _, found = read(tmp_path / "a.parquet", 100, keys=("n",))
    assert kinds(found) == {"missing_key": 1000}
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-100])
    documents, found = read(tmp_path / "cut.parquet", 100)
    assert documents == [] and kinds(found) == {"truncated": 1}


def test_memory_of_a_line_is_bounded_by_the_limit(tmp_path: Path) -> None:
    import tracemalloc

    with (tmp_path / "a.jsonl").open("wb") as file:
        for _ in range(40):
            file.write(b"x" * (1 << 20))
        file.write(b'\n{"text": "after"}\n')
    tracemalloc.start()
    documents, found = read(tmp_path / "a.jsonl", 1 << 30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert documents == [("after",)] and kinds(found) == {"too_long": 1}
    assert peak < 8 << 20


def test_units_in_plain_types_come_back(tmp_path: Path) -> None:
    from dataclasses import asdict

    from mt_megatron.data.prepare.encode_worker import unit_from

    (tmp_path / "a.txt").write_text("a")
    (unit,) = units(find_inputs([str(tmp_path)], None), 10, text_documents="file")
    assert isinstance(unit, Unit) and unit_from(json.loads(json.dumps(asdict(unit)))) == unit
