"""The Perfetto trace, decoded by a reader of its own, says what the Chrome trace says."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.scan.analysis.trace import open_trace
from mt_megatron.scan.export.chrome import write_chrome
from mt_megatron.scan.export.pftrace import varint, write_pftrace
from mt_megatron.scan.format.run_files import run_files
from tests.scan.handmade import HandmadeRun, write_handmade


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of every field of a message."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(data):
        key = number()
        field, wire = key >> 3, key & 7
        if wire == 0:
            yield field, number()
        elif wire == 1:
            yield field, data[at : at + 8]
            at += 8
        elif wire == 2:
            length = number()
            yield field, data[at : at + length]
            at += length
        else:
            raise AssertionError(f"wire type {wire} at {at}")
    assert at == len(data)


def message(data: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for field, value in fields(data):
        found[field].append(value)
    return found


def packets(path: Path) -> Iterator[dict[int, list[Any]]]:
    """Packets in the file's order, unpacked. Every compressed one must stay below the reader's limit."""
    for field, value in fields(path.read_bytes()):
        assert field == 1
        packet = message(value)
        if 50 not in packet:
            yield packet
            continue
        inner = zlib.decompress(packet[50][0])
        assert len(inner) < 512 << 10
        for each, unpacked in fields(inner):
            assert each == 1
            yield message(unpacked)


def _value(field: int, values: list[Any]) -> Any:
    """Of an argument: field 5 is a floating-point number."""
    return struct.unpack("<d", values[0])[0] if field == 5 else values[0]


def chrome_events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def chrome_slices(events: list[dict[str, Any]]) -> Counter[tuple[int, int, int, str]]:
    """Process, begin, end (ns) and name of the slices of a Chrome trace."""
    return Counter(
        (e["pid"], round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000), e["name"])
        for e in events
        if e["ph"] == "X"
    )


class Decoded:
    def __init__(self, path: Path) -> None:
        self.tracks: dict[int, dict[int, list[Any]]] = {}
        self.slices: list[tuple[int, int, int, str, int]] = []
        """(process, begin, end, name, track)"""
        self.flows: dict[int, list[int]] = defaultdict(list)
        self.counters: Counter[str] = Counter()
        self.arguments: dict[str, list[tuple[str, Any]]] = {}
        """Slice -> its arguments, floating-point numbers decoded; of slices of one name the last."""
        names: dict[int, dict[int, str]] = defaultdict(dict)
        arguments: dict[int, dict[int, str]] = defaultdict(dict)
        events: dict[int, list[tuple[int, int, dict[int, list[Any]], int]]] = defaultdict(list)
        for order, packet in enumerate(packets(path)):
            sequence = packet[10][0]
            for descriptor in packet.get(60, []):
                self.tracks[message(descriptor)[1][0]] = message(descriptor)
            for interned in packet.get(12, []):
                for name in message(interned).get(2, []):
                    names[sequence][message(name)[1][0]] = message(name)[2][0].decode()
                for name in message(interned).get(3, []):
                    arguments[sequence][message(name)[1][0]] = message(name)[2][0].decode()
            for event in packet.get(11, []):
                decoded = message(event)
                events[decoded[11][0]].append((packet[8][0], order, decoded, sequence))
        for track, rows in events.items():
            self._track(track, rows, names, arguments)

    def _track(
        self,
        track: int,
        rows: list[Any],
        names: dict[int, dict[int, str]],
        arguments: dict[int, dict[int, str]],
    ) -> None:
        stack: list[tuple[int, str]] = []
        for time, _, event, sequence in sorted(rows, key=lambda row: row[:2]):
            kind = event[9][0]
            if kind == 4:
                self.counters[self.tracks[track][2][0].decode()] += 1
                struct.unpack("<d", event[44][0])
            elif kind == 1:
                stack.append((time, names[sequence][event[10][0]]))
                said = [message(each) for each in event.get(4, [])]
                self.arguments[stack[-1][1]] = [
                    (arguments[sequence][each.pop(1)[0]], _value(*each.popitem())) for each in said
                ]
                for flow in event.get(47, []):
                    self.flows[struct.unpack("<Q", flow)[0]].append(time)
            else:
                begin, name = stack.pop()
                self.slices.append((sequence - 1, begin, time, name, track))
        assert not stack


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pftrace")
    write_handmade(folder, HandmadeRun(steps=4, slow_rank=1))
    trace = open_trace(folder)
    write_chrome(trace, folder / "t.json.gz")
    write_pftrace(trace, folder / "t.pftrace")
    return folder


def test_holds_the_same_spans_as_the_chrome_trace(run: Path) -> None:
    decoded, events = Decoded(run / "t.pftrace"), chrome_events(run / "t.json.gz")
    assert Counter(each[:4] for each in decoded.slices) == chrome_slices(events)
    counters = Counter(e["name"] for e in events if e["ph"] == "C")
    assert decoded.counters == counters and counters


def test_arrows_have_two_ends(run: Path) -> None:
    flows = Decoded(run / "t.pftrace").flows
    assert len(flows) == 4 * 2 * 2 * 2 and {len(times) for times in flows.values()} == {2}


def test_findings_lie_over_their_steps_as_in_the_chrome_trace(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=4))
    rows: list[dict[str, Any]] = [
        {"cause": "slow_compute", "ranks": [1], "first_step": 2, "last_step": 3, "evidence": ["a", "b"]},
        {"cause": "slow_data", "ranks": [2], "first_step": 3, "last_step": 9, "evidence": []},
        {"cause": "slow_data", "ranks": [3], "first_step": 8, "last_step": 9, "evidence": []},
    ]
    common = {"lateness": "late_arrival", "lost_fraction": 0.1, "confidence": 0.9, "time_unix": 1.0}
    lines = [json.dumps({**row, **common, "named_at_step": 9}) + "\n" for row in rows]
    run_files(tmp_path).findings.write_text("".join(lines))
    trace = open_trace(tmp_path)
    write_chrome(trace, tmp_path / "t.json.gz")
    write_pftrace(trace, tmp_path / "t.pftrace")
    decoded = Decoded(tmp_path / "t.pftrace")
    wanted = chrome_slices(chrome_events(tmp_path / "t.json.gz"))
    assert Counter(each[:4] for each in decoded.slices) == wanted
    bars = [(name, decoded.tracks[track]) for process, _, _, name, track in decoded.slices if process == 4]
    assert [name for name, _ in bars] == ["Rank 1 computes slowly", "Rank 2 waits for its training data"]
    (process,) = {track[5][0] for _, track in bars}
    assert message(decoded.tracks[process][3][0])[6] == [b"MegaScan: findings"]
    assert decoded.arguments["Rank 1 computes slowly"] == [("confidence", 0.9), ("evidence", b"a; b")]


def test_every_track_belongs_to_a_process_with_the_ranks_name(run: Path) -> None:
    decoded = Decoded(run / "t.pftrace")
    processes = {
        uuid: message(track[3][0])[6][0].decode() for uuid, track in decoded.tracks.items() if 3 in track
    }
    assert sorted(processes.values())[1] == "rank 1 (dp 1 pp 0 tp 0) node-1"
    for process, _, _, _, track in decoded.slices:
        assert processes[decoded.tracks[track][5][0]].startswith(f"rank {process} ")
    numbers = [message(track[4][0])[2][0] for track in decoded.tracks.values() if 4 in track]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        (0, b"\x00"),
        (127, b"\x7f"),
        (128, b"\x80\x01"),
        (300, b"\xac\x02"),
        (2**64 - 1, b"\xff" * 9 + b"\x01"),
    ],
)
def test_varints(value: int, wire: bytes) -> None:
    assert varint(value) == wire
