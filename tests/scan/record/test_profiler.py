"""Windows of torch's profiler become spans of the same trace, on the host's clock."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mt_megatron.backends.cpu.backend import CpuBackend
from mt_megatron.scan.format.records import KIND
from mt_megatron.scan.format.segments import read_rank
from mt_megatron.scan.record import profiler
from mt_megatron.scan.record.profiler import KernelWindows, clock_offset, kernel_spans
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.seams import events


class Windows:
    """``KernelWindows`` and what it delivers."""

    def __init__(self, backend: Any = None) -> None:
        self.names: list[str] = []
        self.spans: list[Any] = []
        self.notes: list[dict[str, Any]] = []
        self.windows = KernelWindows(
            backend or CpuBackend(),
            self.spans.append,
            self._number,
            lambda **note: self.notes.append(note),
        )

    def _number(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def all(self) -> Any:
        return np.concatenate(self.spans)


def multiply(times: int = 3) -> None:
    x = torch.ones(128, 128)
    for _ in range(times):
        x = x @ x / 128


def test_a_window_of_steps_in_the_trace(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, level="base")
    windows = KernelWindows(CpuBackend(), recorder.add_spans, recorder.string, recorder.note)
    recorder.start()
    with events.span("step", iteration=1):
        multiply()
    windows.start()
    assert windows.on
    for iteration in (2, 3):
        with events.span("step", iteration=iteration), events.span("forward", microbatch=0, chunk=0):
            multiply()
    windows.close()
    with events.span("step", iteration=4):
        multiply()
    recorder.close()
    trace = read_rank(recorder.files.rank_folder(0))
    assert windows.failed is None and not events.listening()
    spans = trace.spans
    products = spans[(spans["kind"] == KIND["kernel"]) & (spans["name"] == trace.strings.index("aten::mm"))]
    assert products["iteration"].tolist() == [2] * 3 + [3] * 3
    (note,) = [note for note in trace.notes if note["what"] == "kernels"]
    assert note["spans"] == (spans["kind"] == KIND["kernel"]).sum() and not note["on_device"]
    # Each lies within the forward pass that it belongs to, as well as the two clocks compare.
    for iteration in (2, 3):
        inside = (spans["kind"] == KIND["forward"]) & (spans["iteration"] == iteration)
        (forward,) = spans[inside]
        own = products[products["iteration"] == iteration]
        assert (own["begin"] >= forward["begin"] - note["uncertainty_ns"]).all()
        assert (own["end"] <= forward["end"] + note["uncertainty_ns"]).all()
    assert (products["device_begin"] == 0).all() and (products["end"] >= products["begin"]).all()


def test_a_long_window_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "STEPS_AT_ONCE", 2)
    found = Windows()
    found.windows.start()
    for iteration in range(1, 6):
        with events.span("step", iteration=iteration):
            multiply(1)
    found.windows.close()
    assert len(found.notes) == 3 and found.windows.failed is None
    spans = found.all()
    products = spans[spans["name"] == found.names.index("aten::mm")]
    assert sorted(products["iteration"].tolist()) == [1, 2, 3, 4, 5]


def test_the_tightest_marker_decides() -> None:
    # The profiler's clock is 1000 behind; the second marker lies closely between its readings.
    offset, uncertainty = clock_offset(
        [(100, 300), (500, 510), (700, 750)], [(1000, 1400), (1499, 1511), (1600, 1800)]
    )
    assert (offset, uncertainty) == (1000, 2)
    with pytest.raises(ValueError, match="found 1 markers in the profile, expected 2"):
        clock_offset([(1, 2)], [(1, 2), (3, 4)])


def test_kernels_of_a_device_have_its_times() -> None:
    spans = kernel_spans([(5, 9, 1, 0), (25, 26, 2, 7)], [(10, 4), (20, 5)], on_device=True)
    assert spans["device_begin"].tolist() == spans["begin"].tolist() == [5, 25]
    assert spans["device_end"].tolist() == [9, 26] and spans["iteration"].tolist() == [0, 5]
    assert spans["thread"].tolist() == [0, 7] and (spans["peer"] == -1).all()


def test_only_the_devices_part_is_kept_where_there_is_one() -> None:
    found = Windows()

    def event(name: str, device: str, begin: int) -> Any:
        return SimpleNamespace(
            name=lambda: name,
            device_type=lambda: SimpleNamespace(name=device),
            start_ns=lambda: begin,
            duration_ns=lambda: 10,
            device_resource_id=lambda: 7,
        )

    seen = [
        event("mt_megatron.scan", "CPU", 100),
        event("aten::mm", "CPU", 200),
        event("gemm_bf16", "CUDA", 300),
    ]
    profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: seen)))
    found.windows._convert(profile, [(1100, 1110)], [(1000, 8)])
    (span,) = found.all()
    assert found.names == ["gemm_bf16"] and span["iteration"] == 8
    assert span["begin"] == span["device_begin"] == 1300


def test_a_device_that_cannot_be_profiled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Unprofiled(CpuBackend):
        name = "musa"

        def profiler_activity(self) -> Any:
            return "MTIA"

    found = Windows(Unprofiled())
    with caplog.at_level(logging.WARNING, logger="mt_megatron"):
        found.windows.start()
        multiply(1)
        found.windows.stop()
        found.windows.start()
        multiply(1)
        found.windows.close()
    said = [each.message for each in caplog.records if "asks for the kernels of musa" in each.message]
    assert len(said) == 1 and "gets the host's operators" in said[0]
    assert "aten::mm" in found.names


def test_a_profiler_that_fails_ends_the_windows_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("another profiler is running")

    monkeypatch.setattr(torch.profiler, "profile", refuse)
    found = Windows()
    with caplog.at_level(logging.WARNING, logger="mt_megatron"):
        for _ in range(2):
            found.windows.start()
            with events.span("step", iteration=1):
                pass
            found.windows.close()
    assert found.windows.failed == "RuntimeError: another profiler is running"
    assert len([each for each in caplog.records if "no kernels are traced" in each.message]) == 1
    assert not events.listening()


def test_no_thread_is_left() -> None:
    found = Windows()
    found.windows.start()
    multiply(1)
    found.windows.close()
    deadline = time.monotonic() + 5
    while any(each.name == "scan-kernels" for each in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
