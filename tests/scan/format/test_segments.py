"""A trace's files read back what was written, and of a damaged file everything before the damage."""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.errors import ScanError
from mt_megatron.scan.format import segments
from mt_megatron.scan.format.names import Names
from mt_megatron.scan.format.records import COUNTER, OPEN, PING, SPAN
from mt_megatron.scan.format.run_files import (
    existing_run,
    read_run,
    run_files,
    segment_path,
    segment_paths,
    write_run,
)
from mt_megatron.scan.format.segment_retention import SegmentRing
from mt_megatron.scan.format.segments import Group, SegmentWriter, read_blocks, read_rank


def spans(count: int, first: int = 0) -> np.ndarray:
    made = np.zeros(count, SPAN)
    made["begin"] = np.arange(first, first + count)
    made["end"] = made["begin"] + 5
    return made


def write(path: Path, *, session: int = 0, first: int = 0, **more: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    writer = SegmentWriter(path, 3, {"rank": 3, "session": session, **more})
    writer.strings(["", "send"])
    writer.groups({1: Group(name="tp", ranks=(0, 1))})
    writer.spans(spans(3, first))
    counters = np.zeros(2, COUNTER)
    counters["value"] = 2.5
    writer.counters(counters)
    pings = np.zeros(1, PING)
    pings["peer"] = 7
    writer.pings(pings)
    writer.note({"what": "level", "level": "full"})
    writer.spans(spans(2, first + 3).tobytes())
    writer.close()


def test_everything_comes_back(tmp_path: Path) -> None:
    write(segment_path(tmp_path / "rank-00003", 0))
    trace = read_rank(tmp_path / "rank-00003")
    assert trace.meta == {"rank": 3, "session": 0, "what": "meta"}
    assert trace.strings == ["", "send"]
    assert trace.groups == {1: Group(name="tp", ranks=(0, 1))}
    assert trace.spans.tobytes() == spans(5).tobytes()
    assert trace.counters["value"].tolist() == [2.5, 2.5]
    assert trace.pings["peer"].tolist() == [7]
    assert [note["what"] for note in trace.notes] == ["meta", "level"]
    assert trace.damaged == ()


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    path = segment_path(tmp_path / "rank-00000", 0)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        SegmentWriter(path, 0, {})


def test_a_growing_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "000000.scan"
    writer = SegmentWriter(path, 0, {})
    seen = list(read_blocks(path))
    assert [kind for kind, _, _ in seen] == [segments.NOTE]
    offset = seen[-1][2]
    assert list(read_blocks(path, offset)) == []
    writer.spans(spans(2))
    ((kind, payload, offset),) = read_blocks(path, offset)
    assert kind == segments.SPANS and payload["begin"].tolist() == [0, 1]
    writer.spans(spans(1))
    assert len(list(read_blocks(path, offset))) == 1
    writer.close()


def test_every_cut_leaves_a_readable_beginning(tmp_path: Path) -> None:
    whole_path, cut_path = tmp_path / "whole.scan", tmp_path / "cut.scan"
    write(whole_path)
    data = whole_path.read_bytes()
    ends = [end for _, _, end in read_blocks(whole_path)]
    for length in range(0, len(data), 3):
        cut_path.write_bytes(data[:length])
        assert [end for _, _, end in read_blocks(cut_path)] == [end for end in ends if end <= length]


def test_no_changed_byte_goes_unnoticed(tmp_path: Path) -> None:
    whole_path, path = tmp_path / "whole.scan", tmp_path / "changed.scan"
    write(whole_path)
    data = whole_path.read_bytes()
    ends = [end for _, _, end in read_blocks(whole_path)]
    head = len(segments._FILE_MAGIC) + 4  # Behind it lies the rank, of which the meta note says the same.
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        if place < head:
            with pytest.raises(ScanError, match="no segment|format version"):
                list(read_blocks(path))
        elif place >= head + 4:
            assert [end for _, _, end in read_blocks(path)] == [end for end in ends if end <= place]


def test_damage_is_said(tmp_path: Path) -> None:
    path = segment_path(tmp_path / "rank-00003", 0)
    write(path)
    with open(path, "ab") as file:
        file.write(b"torn")
    trace = read_rank(path.parent)
    assert len(trace.spans) == 5
    assert trace.damaged == (f"{path}: the last 4 of {path.stat().st_size} bytes are no whole block",)
    assert trace.unreadable == (), "the end of a rank that was killed"


def test_a_segment_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "rank-00003"
    write(segment_path(folder, 0))
    segment_path(folder, 1).write_bytes(bytes(4096))
    segment_path(folder, 2).mkdir()
    write(segment_path(folder, 3), first=10)
    trace = read_rank(folder)
    assert trace.spans["begin"].tolist() == [*range(5), *range(10, 15)]
    zeros, no_file = trace.damaged
    assert "000001.scan is no segment of a trace" in zeros
    assert "000002.scan cannot be read" in no_file and "copy it again" in no_file
    assert segments.sessions(folder) == [0] and segments.segment_meta(segment_path(folder, 1)) is None


@pytest.mark.parametrize("says_first", [True, False], ids=["today", "files of earlier versions"])
def test_what_is_damaged_of_an_earlier_session_concerns_no_later_one(
    tmp_path: Path, says_first: bool
) -> None:
    """Damage before an earlier session's readable file is that session's; behind the last of them only the
    first number of the later session tells."""
    folder = tmp_path / "rank-00003"
    for number in (0, 2, 4):
        segment_path(folder, number).parent.mkdir(exist_ok=True)
        segment_path(folder, number).write_bytes(bytes(4096))
    write(segment_path(folder, 1), session=0)
    more = {"first_segment": 3} if says_first else {}
    write(segment_path(folder, 3), session=1, first=10, **more)
    trace = read_rank(folder)
    named = [sentence.split(" is no")[0].rsplit("/", 1)[1] for sentence in trace.unreadable]
    assert named == (["000004.scan"] if says_first else ["000002.scan", "000004.scan"])
    assert len(read_rank(folder, session=0).unreadable) == 3
    ring = SegmentRing(folder, 3, Names(), {})
    assert (ring.meta["session"], ring.meta["first_segment"]) == (2, 5)


def test_a_file_that_breaks_off_gives_what_was_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = segment_path(tmp_path / "rank-00003", 0)
    write(path)
    whole = list(read_blocks(path))

    def broken(path: Path, offset: int = 0) -> Iterator[tuple[int, Any, int]]:
        yield from whole[:4]
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    assert [kind for kind, _, _ in whole[:4]].count(segments.SPANS) == 1
    monkeypatch.setattr(segments, "read_blocks", broken)
    trace = read_rank(path.parent)
    assert len(trace.spans) == 3 and trace.strings == ["", "send"]
    assert len(trace.damaged) == 1 and "cannot be read" in trace.damaged[0]
    assert trace.unreadable == trace.damaged


def test_each_segment_can_be_read_alone(tmp_path: Path) -> None:
    folder = tmp_path / "rank-00003"
    for number in range(3):
        write(segment_path(folder, number), first=10 * number)
    assert read_rank(folder).spans["begin"].tolist() == [*range(5), *range(10, 15), *range(20, 25)]
    for path in segment_paths(folder)[:2]:
        path.unlink()
    trace = read_rank(folder)
    assert trace.strings == ["", "send"] and trace.groups and trace.meta["rank"] == 3
    assert trace.spans["begin"].tolist() == [*range(20, 25)]


def test_the_newest_session_is_read_unless_another_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "rank-00003"
    write(segment_path(folder, 0), session=0)
    write(segment_path(folder, 1), session=1, first=100)
    assert read_rank(folder).spans["begin"].min() == 100
    assert read_rank(folder, session=0).spans["begin"].max() == 4
    assert segments.sessions(folder) == [0, 1]
    with pytest.raises(ScanError, match=r"found sessions \[0, 1\].*expected 2"):
        read_rank(folder, session=2)


def test_a_span_written_while_open_is_there_once(tmp_path: Path) -> None:
    made = spans(6)
    made["begin"] = [1, 2, 2, 3, 3, 1]
    made["kind"] = [1, 2, 2, 3, 3, 1]
    made["end"] = [OPEN, OPEN, 9, OPEN, OPEN, 7]
    kept = segments.without_ended(made)
    assert sorted(kept[["begin", "end"]].tolist()) == [(1, 7), (2, 9), (3, OPEN)]
    other_thread = made.copy()
    other_thread["thread"] = [0, 0, 1, 0, 0, 1]
    assert len(segments.without_ended(other_thread)) == 5


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000" / "000000.scan"
    path.parent.mkdir()
    path.write_bytes(b"GIF89a, and more than a header")
    with pytest.raises(ScanError, match="is no segment of a trace"):
        read_rank(path.parent)
    path.write_bytes(struct.pack("<8sII", b"MTSCAN\x00\x01", 99, 0))
    with pytest.raises(ScanError, match="found format version 99, expected 1"):
        read_rank(path.parent)
    path.write_bytes(b"")
    with pytest.raises(ScanError, match="found no readable segment"):
        read_rank(path.parent)
    writer = SegmentWriter(tmp_path / "x", 0, {})
    with pytest.raises(ScanError, match="found records of"):
        writer.spans(np.zeros(1, COUNTER))
    with pytest.raises(ScanError, match="expected a multiple of 72"):
        writer.spans(b"x" * 71)
    writer.close()


def test_blocks_of_a_kind_from_the_future_are_passed_over(tmp_path: Path) -> None:
    path = segment_path(tmp_path / "rank-00000", 0)
    path.parent.mkdir()
    writer = SegmentWriter(path, 0, {})
    writer._block(77, b"new")
    writer.spans(spans(2))
    writer.close()
    assert [payload for kind, payload, _ in read_blocks(path) if kind == 77] == [b"new"]
    assert len(read_rank(path.parent).spans) == 2


def test_the_run_folder_or_its_scan_folder_may_be_given(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    assert files.root == tmp_path / "scan" == run_files(tmp_path / "scan").root
    with pytest.raises(ScanError, match="found no trace in"):
        existing_run(tmp_path)
    write_run(files, {"world_size": 2})
    assert read_run(existing_run(tmp_path)) == {"format_version": 1, "simulated": False, "world_size": 2}
    assert stat.S_IMODE(files.run_json.stat().st_mode) == 0o600
    assert os.listdir(files.root) == ["run.json"]
    files.rank_folder(12).mkdir()
    files.rank_folder(3).mkdir()
    assert files.ranks() == [3, 12]
    files.run_json.write_text('{"format_version": 2}')
    with pytest.raises(ScanError, match="found format version 2, expected 1"):
        read_run(files)
    files.run_json.write_text("{")
    with pytest.raises(ScanError, match="cannot be read"):
        read_run(files)
    files.run_json.unlink()
    with pytest.raises(ScanError, match="rank 0 writes it"):
        read_run(files)


def test_reading_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, mt_megatron.scan.format.segments, mt_megatron.scan.format.run_files, "
        "mt_megatron.scan.record.control, mt_megatron.scan.record.levels\n"
        "assert not {'torch', 'megatron', 'psutil'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
