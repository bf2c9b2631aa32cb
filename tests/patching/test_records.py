"""Records are small, the same bytes for the same content, and a damaged one says so."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from mt_megatron.errors import PatchError
from mt_megatron.patching.digest import read_fingerprints
from mt_megatron.patching.records import read_record, write_record

CONTENT = {"module:name": {"digest": "0" * 64, "lines": "defb2e7b 72743abf"}, "ß": [1, None]}


@pytest.mark.parametrize("name", ["some.json", "some.json.gz"])
def test_what_was_written_is_read(tmp_path: Path, name: str) -> None:
    write_record(tmp_path / name, CONTENT)
    assert read_record(tmp_path / name) == CONTENT


def test_the_name_says_whether_it_is_compressed(tmp_path: Path) -> None:
    write_record(tmp_path / "some.json", CONTENT)
    write_record(tmp_path / "some.json.gz", CONTENT)
    plain = (tmp_path / "some.json").read_bytes()
    assert json.loads(plain) == CONTENT
    assert gzip.decompress((tmp_path / "some.json.gz").read_bytes()) == plain


def test_neither_time_nor_name_is_in_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(tmp_path / "some.json.gz", CONTENT)
    monkeypatch.setattr("time.time", lambda: 2e9)
    write_record(tmp_path / "another.json.gz", CONTENT)
    found = (tmp_path / "some.json.gz").read_bytes()
    assert found == (tmp_path / "another.json.gz").read_bytes()
    # RFC 1952: magic and method, no optional field such as a name, no time.
    assert found[:8] == b"\x1f\x8b\x08" + b"\x00" * 5


def test_another_compression_of_the_same_content_stays(tmp_path: Path) -> None:
    path = tmp_path / "some.json.gz"
    write_record(path, CONTENT)
    other = gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=0, mtime=5)
    path.write_bytes(other)
    write_record(path, CONTENT)
    assert path.read_bytes() == other
    write_record(path, {})
    assert read_record(path) == {}


def test_a_damaged_one_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "some.json.gz"
    path.write_bytes(b"no gzip")
    write_record(path, CONTENT)
    assert read_record(path) == CONTENT


def flipped(packed: bytes) -> bytes:
    """One bit of the checksum another one."""
    return packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.json.gz", b"{}", "BadGzipFile"),
        ("a.json.gz", b"", "JSONDecodeError"),
        ("a.json.gz", gzip.compress(b"{}" * 99)[:-9], "EOFError"),
        ("a.json.gz", flipped(gzip.compress(b"{}")), "CRC check failed"),
        ("a.json.gz", gzip.compress(b"{}")[:10] + b"\xff" * 20, "error: Error -3"),
        ("a.json.gz", gzip.compress(b"{"), "JSONDecodeError"),
        ("a.json.gz", gzip.compress(b"\xff"), "UnicodeDecodeError"),
        ("a.json.gz", None, "FileNotFoundError"),
        ("a.json", gzip.compress(b"{}"), "UnicodeDecodeError"),
    ],
    # The bytes hold the time, and workers that collect at different times must find the same tests.
    ids=range(9),
)
def test_an_error_says_what_was_found_and_what_to_do(
    tmp_path: Path, name: str, content: bytes | None, found: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PatchError, match=re.escape(f"{path} cannot be read (")) as caught:
        read_record(path)
    expected = "expected JSON that is compressed with gzip." if name.endswith(".gz") else "expected JSON."
    for part in (found, expected, "Reinstall mt_megatron, or run 'mt-megatron patches record'"):
        assert part in str(caught.value)


@pytest.mark.parametrize("content", [[], {"a": []}, {"a": {"digest": "x"}}])
def test_fingerprints_of_another_shape_are_refused(tmp_path: Path, content: object) -> None:
    write_record(tmp_path / "some.json.gz", content)
    with pytest.raises(PatchError, match="expected a digest and lines for each target"):
        read_fingerprints(tmp_path / "some.json.gz")
