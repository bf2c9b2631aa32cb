"""A run's status is that of its last start, whatever earlier starts have left in its folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mt_megatron.errors import ScanError
from mt_megatron.scan.format.recording_end import Ending
from mt_megatron.scan.format.records import KIND, OPEN, SPAN
from mt_megatron.scan.format.run_files import run_files, segment_path, write_run
from mt_megatron.scan.format.segments import SegmentWriter
from mt_megatron.scan.monitor.status import run_status

SECOND = 1_000_000_000


def write_start(
    run: Path, session: int, *, steps: tuple[int, int], begin: int, stands: bool = False, dropped: int = 0
) -> None:
    """One segment of rank 0: a start of the run that takes ``steps``, from ``begin`` seconds on by its clock,
    one a second; ``stands``: in a collective that does not end."""
    folder = run_files(run).rank_folder(0)
    folder.mkdir(parents=True, exist_ok=True)
    count = steps[1] - steps[0] + 1
    spans = np.zeros(count + stands, dtype=SPAN)
    spans["begin"] = (begin + np.arange(len(spans))) * SECOND
    spans["end"] = spans["begin"] + SECOND
    spans["iteration"], spans["kind"], spans["peer"] = steps[0] + np.arange(len(spans)), KIND["step"], -1
    if stands:
        spans["end"][-1], spans["kind"][-1], spans["name"][-1] = OPEN, KIND["collective"], 1
    writer = SegmentWriter(segment_path(folder, session), 0, {"rank": 0, "session": session})
    writer.strings(["", "all_reduce" if stands else "forward"])
    writer.spans(spans)
    if dropped:
        writer.note({"what": "dropped", "events": dropped, "why": "disk too slow"})
    writer.close()


def test_a_start_in_the_same_folder_is_not_mixed_with_the_one_before(tmp_path: Path) -> None:
    write_run(run_files(tmp_path), {"world_size": 1})
    write_start(tmp_path, 0, steps=(1, 9), begin=500, stands=True, dropped=7)
    (before,) = run_status(tmp_path).ranks
    assert (before.step, before.inside, before.dropped) == (9, "all_reduce 0", 7)
    # The machine has been started anew: its clock began at 0 again.
    write_start(tmp_path, 1, steps=(6, 12), begin=3)
    (now,) = run_status(tmp_path).ranks
    assert (now.step, now.inside, now.dropped, now.ended) == (12, "", 0, None)
    Ending(run_files(tmp_path).rank_folder(0), 1).say("closed", "", 12)
    assert run_status(tmp_path).ended


def test_both_newest_segments_of_one_start_are_read(tmp_path: Path) -> None:
    write_run(run_files(tmp_path), {"world_size": 1})
    write_start(tmp_path, 0, steps=(1, 9), begin=500)
    folder = run_files(tmp_path).rank_folder(0)
    writer = SegmentWriter(segment_path(folder, 1), 0, {"rank": 0, "session": 0})
    writer.close()
    (rank,) = run_status(tmp_path).ranks
    assert rank.step == 9, "the newest holds no whole step yet"


def test_a_damaged_file_of_one_rank_hides_no_other(tmp_path: Path) -> None:
    write_run(run_files(tmp_path), {"world_size": 2})
    write_start(tmp_path, 0, steps=(1, 9), begin=500)
    other = run_files(tmp_path).rank_folder(1)
    other.mkdir()
    segment_path(other, 0).write_bytes(bytes(4096))
    status = run_status(tmp_path)
    assert [rank.rank for rank in status.ranks] == [0] and status.absent == (1,)
    segment_path(run_files(tmp_path).rank_folder(0), 1).write_bytes(bytes(4096))
    (rank,) = run_status(tmp_path).ranks
    assert rank.step == 9
    segment_path(run_files(tmp_path).rank_folder(0), 0).unlink()
    with pytest.raises(ScanError, match="is no segment of a trace"):
        run_status(tmp_path)
