"""A trace in the Chrome trace event format, for chrome://tracing and Perfetto's viewer: one process a rank.

Written rank after rank in a stream. Transfers whose both sides were recorded are joined by arrows.
Format: "Trace Event Format" (Google, 2016), JSON object form; times are us with ns as decimals.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.trace import Trace
from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.findings.recorded import findings_on_record
from mt_megatron.scan.findings.text import headline
from mt_megatron.scan.format.records import KINDS
from mt_megatron.scan.format.run_files import whole_file

from .export_index import Survey, survey, transfers
from .output_file import Exported, rank_title
from .rank_stream import EVERYTHING, Piece, Selection, pieces
from .tracks import Lanes, Plotted, counter_points, labels, slices, step_thread, track_name

Arrow = tuple[int, int, int]
"""Sender, receiver, number of the transfer on that edge."""


def arrow_number(arrow: Arrow) -> int:
    """One number of 64 bits, made of what both ends know; Perfetto draws no arrow that other text names."""
    source, target, number = arrow
    return (source & 0xFFFF) << 48 | (target & 0xFFFF) << 32 | (number & 0xFFFFFFFF)


_LEVEL = 3
"""Of gzip: a third of the time of the usual 6, and a tenth larger."""


def write_chrome(trace: Trace, path: Path, selection: Selection = EVERYTHING) -> Exported:
    """Write ``trace`` to ``path``, compressed if it ends in ``.gz``. Raises ``OSError`` and ``ScanError``."""
    found = survey(trace, selection)
    ranks = [rank for rank in trace.ranks if selection.has_rank(rank)]
    events = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as raw:
        # No name and no time inside: the same trace gives the same file.
        packed = gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) if path.name.endswith(".gz") else raw
        with io.TextIOWrapper(packed, encoding="utf-8", write_through=False) as out:
            facts = json.dumps(_facts(trace, found))
            out.write('{"displayTimeUnit":"ms","otherData":' + facts + ',"traceEvents":[\n')
            for rank in ranks:
                for event in _rank(trace, rank, selection, found):
                    out.write(",\n" + event if events else event)
                    events += 1
            for event in _findings(trace, found):
                out.write(",\n" + event if events else event)
                events += 1
            out.write("\n]}\n")
    return Exported(path=path, events=events, ranks=len(ranks), bytes=path.stat().st_size)


def _facts(trace: Trace, found: Survey) -> dict[str, Any]:
    return {
        "run": trace.files.root.parent.name,
        "simulated": trace.simulated,
        "layout": dict(trace.facts.get("layout", {})),
        "reference_rank": trace.clocks.reference,
        "origin_ns": found.origin,
        "notes": list(trace.notes),
    }


def _rank(trace: Trace, rank: int, selection: Selection, found: Survey) -> Iterator[str]:
    yield _meta(rank, "process_name", {"name": rank_title(trace, rank)})
    yield _meta(rank, "process_sort_index", {"sort_index": rank})
    lanes, named, plotted = Lanes(), set[int](), Plotted()
    for piece in pieces(trace, rank, selection):
        texts = [json.dumps(text) for text in labels(piece)]
        arrows = arrows_of(piece, found)
        columns = _columns(piece)
        seen: set[int] = set()
        training = step_thread(piece)
        for each in slices(piece, lanes):
            if each.track not in named:
                named.add(each.track)
                yield _meta(rank, "thread_name", {"name": track_name(each.track, training)}, each.track)
                yield _meta(rank, "thread_sort_index", {"sort_index": each.track}, each.track)
            begin = each.begin - found.origin
            kind, arguments = columns[each.index]
            yield (
                f'{{"ph":"X","pid":{rank},"tid":{each.track},"ts":{_us(begin)},'
                f'"dur":{_us(each.end - each.begin)},"name":{texts[each.index]},"cat":"{kind}",'
                f'"args":{arguments}}}'
            )
            # The host's span carries the arrow; the device's copy of it comes later.
            if each.index in arrows and each.index not in seen:
                seen.add(each.index)
                sends, arrow = arrows[each.index]
                at = begin if sends else max(begin, each.end - found.origin - 1)
                end = '"ph":"s"' if sends else '"ph":"f","bp":"e"'
                yield (
                    f'{{{end},"pid":{rank},"tid":{each.track},"ts":{_us(at)},"name":"transfer",'
                    f'"cat":"p2p","id":"{arrow_number(arrow):#x}"}}'
                )
        for time, name, value in counter_points(piece.counters, piece.strings, plotted):
            if time < found.origin:
                continue
            yield (
                f'{{"ph":"C","pid":{rank},"ts":{_us(time - found.origin)},"name":{json.dumps(name)},'
                f'"args":{{"value":{value:.6g}}}}}'
            )


def _columns(piece: Piece) -> list[tuple[str, str]]:
    """``(kind, arguments as JSON)`` per span; what nobody told is left out."""
    spans = piece.spans
    names = ("iteration", "microbatch", "chunk", "seq", "bytes", "work", "peer")
    values = zip(*(spans[name].tolist() for name in names), strict=True)
    kinds, groups = spans["kind"].tolist(), spans["group"].tolist()
    members = {
        number: f'"group":{json.dumps(group.name)},"ranks":"{_members(group.ranks)}",'
        for number, group in piece.groups.items()
    }
    unfinished = piece.unfinished.tolist()
    rows = []
    for kind, group, is_open, (step, microbatch, chunk, seq, size, work, peer) in zip(
        kinds, groups, unfinished, values, strict=True
    ):
        text = members.get(group, "") + f'"step":{step}'
        if microbatch >= 0:
            text += f',"microbatch":{microbatch}'
            text += f',"chunk":{chunk}' if chunk >= 0 else ""
        if seq >= 0:
            text += f',"seq":{seq}'
        if size >= 0:
            text += f',"bytes":{size}'
        if work > 0:
            text += f',"work":{work}'
        if peer >= 0:
            text += f',"peer":{peer}'
        if is_open:
            text += ',"unfinished":true'
        rows.append((KINDS[kind] if kind < len(KINDS) else "other", "{" + text + "}"))
    return rows


def _members(ranks: tuple[int, ...]) -> str:
    shown = " ".join(map(str, ranks[:16]))
    return shown + (f" ... ({len(ranks)})" if len(ranks) > 16 else "")


def arrows_of(piece: Piece, found: Survey) -> dict[int, tuple[bool, Arrow]]:
    """Span -> whether it sends, and the arrow that both ends name."""
    arrows: dict[int, tuple[bool, Arrow]] = {}
    for (sends, peer), indices in transfers(piece).items():
        edge = (piece.rank, peer) if sends else (peer, piece.rank)
        numbers: NDArray[np.int64] = piece.spans["seq"][indices].astype(np.int64)
        joined = found.joined(edge, numbers)
        for index, number in zip(indices[joined].tolist(), numbers[joined].tolist(), strict=True):
            arrows[index] = (sends, (*edge, number))
    return arrows


FINDINGS_TITLE = "MegaScan: findings"


def findings_process(trace: Trace) -> int:
    """The number of the process that shows the findings: that of no rank."""
    return max(trace.places, default=0) + 1


def finding_bars(trace: Trace, found: Survey) -> list[tuple[int, int, Finding]]:
    """Begin and end (ns of the reference clock) of the steps of each finding on record, as far as they are
    exported."""
    bars = []
    for finding in findings_on_record(trace.files):
        inside = [
            span for step, span in found.steps.items() if finding.first_step <= step <= finding.last_step
        ]
        if inside:
            bars.append((min(span[0] for span in inside), max(span[1] for span in inside), finding))
    return bars


def _findings(trace: Trace, found: Survey) -> Iterator[str]:
    """A process of its own on top, with a bar over the steps of each finding."""
    bars, process = finding_bars(trace, found), findings_process(trace)
    if not bars:
        return
    yield _meta(process, "process_name", {"name": FINDINGS_TITLE})
    yield _meta(process, "process_sort_index", {"sort_index": -1})
    for number, (begin, end, finding) in enumerate(bars):
        arguments = {"confidence": finding.confidence, "evidence": list(finding.evidence)}
        yield json.dumps(
            {
                "ph": "X",
                "pid": process,
                "tid": number,
                "ts": (begin - found.origin) / 1000,
                "dur": (end - begin) / 1000,
                "name": headline(finding),
                "cat": "finding",
                "args": arguments,
            }
        )


def _meta(process: int, name: str, arguments: dict[str, Any], thread: int = 0) -> str:
    return (
        f'{{"ph":"M","pid":{process},"tid":{thread},"ts":0,"name":"{name}","args":{json.dumps(arguments)}}}'
    )


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}" if ns >= 0 else f"{ns / 1000:.3f}"
