"""Device times are read back without waiting and lie where the host's clock says; what hangs is open."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mt_megatron.backends.cpu.backend import CpuBackend
from mt_megatron.backends.cuda import CudaBackend
from mt_megatron.scan.format.records import KIND, OPEN
from mt_megatron.scan.format.segments import RankTrace, read_rank
from mt_megatron.scan.record.device_spans import DeviceClock, DeviceTime
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.seams import events
from tests.emulators import environment, needs_emulated_musa
from tests.fake_cuda.stand_in import RecordingCuda
from tests.launch import run_command
from tests.scan.record import fake_device

MS = 1_000_000


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_device.Device]:
    made = fake_device.Device(drift_ppm=50.0, offset_ns=10**15)
    monkeypatch.setattr(fake_device, "current", made)
    with RecordingCuda(devices=1).installed():
        monkeypatch.setattr(torch.cuda, "Event", fake_device.Event)
        monkeypatch.setattr(torch.cuda, "Stream", fake_device.Stream)
        yield made
    assert not events.listening()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("scan-")]


def trace(folder: Path, body: Any, *, backend: Any = None, level: str = "base") -> np.ndarray:
    """The spans that a recorder with device times leaves of ``body(recorder)``.

    Pauses are left out: a long garbage collection may fall into any test.
    """
    spans = trace_of(folder, body, backend=backend, level=level).spans
    return spans[spans["kind"] != KIND["pause"]]


def trace_of(folder: Path, body: Any, *, backend: Any = None, level: str = "base") -> RankTrace:
    """All that a recorder with device times leaves of ``body(recorder)``."""
    recorder = Recorder(folder, rank=0, level=level)
    timing = DeviceTime(backend or CudaBackend(), recorder.add_spans, recorder.note)
    recorder.start()
    timing.start(recorder.level)
    body(recorder)
    timing.stop()
    recorder.close()
    assert recorder.failed is None
    return read_rank(recorder.files.rank_folder(0))


def collective(seq: int) -> Any:
    return events.span("collective", op="all_reduce", group="tp", ranks=(0, 1), seq=seq, bytes=8)


def test_a_moment_of_the_device_is_placed_on_the_hosts_clock(device: fake_device.Device) -> None:
    clock = DeviceClock(CudaBackend())
    clock.anchor()
    time.sleep(0.05)
    assert clock.anchor() is not None and clock.last is not None
    assert clock.drift_ppm == pytest.approx(50.0, abs=1 + 4 * clock.last.uncertainty_ns / 50)
    errors = []
    for _ in range(20):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        errors.append(clock.host_ns(event) - event.passed_ns)
    assert np.abs(errors).max() <= clock.last.uncertainty_ns + 2_000


def test_without_an_anchor_nothing_is_placed(device: fake_device.Device) -> None:
    with pytest.raises(LookupError):
        DeviceClock(CudaBackend()).host_ns(torch.cuda.Event(enable_timing=True))


def test_spans_get_the_devices_times(device: fake_device.Device, tmp_path: Path) -> None:
    expected = []

    def body(recorder: Recorder) -> None:
        with events.span("step", iteration=1):
            for seq in range(3):
                device.work(30 * MS)
                began = device.default.free_at
                with collective(seq):
                    device.work(20 * MS)
                expected.append((began, device.default.free_at))

    found = trace_of(tmp_path, body)
    spans = found.spans[found.spans["kind"] == KIND["collective"]]
    spans = spans[spans["end"] != OPEN]
    assert spans["seq"].tolist() == [0, 1, 2]
    for span, (began, ended) in zip(spans, expected, strict=True):
        # The host was through at once, the device was not.
        assert span["end"] - span["begin"] < 20 * MS
        assert abs(int(span["device_begin"]) - began) < 1 * MS
        assert abs(int(span["device_end"]) - ended) < 1 * MS
    step = found.spans[found.spans["kind"] == KIND["step"]]
    assert step["device_begin"].tolist() == [0]
    notes = [note for note in found.notes if note["what"] == "device_clock"]
    assert notes and 0 <= notes[-1]["uncertainty_ns"] < 5 * MS and notes[-1]["early_ns"] < 5 * MS


def test_every_direction_of_a_transfer_is_timed(device: fake_device.Device, tmp_path: Path) -> None:
    transfers = (("send", 1, 0, 8), ("recv", 1, 0, 8))

    def body(recorder: Recorder) -> None:
        with events.span("p2p", group="pp", ranks=(0, 1), bytes=8, transfers=transfers):
            device.work(MS)

    spans = trace(tmp_path, body)
    assert len(spans) == 2 and (spans["device_end"] > spans["device_begin"]).all()


def test_what_the_device_does_not_pass_is_open(device: fake_device.Device, tmp_path: Path) -> None:
    def body(recorder: Recorder) -> None:
        with collective(0):
            pass
        device.hangs = True
        with collective(1):
            pass
        time.sleep(1.2)

    found = trace(tmp_path, body)
    assert found["seq"].tolist() == [0, 1]
    assert found["end"][0] != OPEN and found["device_end"][0] >= found["device_begin"][0] > 0
    assert found["end"][1] == OPEN


def test_layers_are_timed_from_level_full_on(device: fake_device.Device, tmp_path: Path) -> None:
    def layer(recorder: Recorder) -> None:
        with events.span("layer", number=1):
            pass

    assert len(trace(tmp_path / "base", layer)) == 0 and device.recorded <= 10
    (span,) = trace(tmp_path / "full", layer, level="full")
    assert span["device_begin"] > 0


def test_the_hosts_own_work_is_not_timed_twice(tmp_path: Path) -> None:
    def body(recorder: Recorder) -> None:
        assert [each.name for each in threading.enumerate()].count("scan-device-time") == 0
        with collective(0):
            pass

    (span,) = trace(tmp_path, body, backend=CpuBackend())
    assert span["device_begin"] == span["device_end"] == 0


def test_a_device_that_refuses_events_costs_no_step(
    device: fake_device.Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(self: Any, stream: Any = None) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    def body(recorder: Recorder) -> None:
        with collective(0):
            pass
        time.sleep(0.4)
        monkeypatch.setattr(fake_device.Event, "record", refuse)
        for seq in (1, 2):
            with collective(seq):
                pass

    with caplog.at_level(logging.WARNING, logger="mt_megatron"):
        found = trace(tmp_path, body)
    assert sorted(found["seq"].tolist()) == [0, 1, 2]
    assert len([each for each in caplog.records if "device times are no longer taken" in each.message]) == 1


def test_a_listener_in_the_middle_of_an_event_ends_nothing(device: fake_device.Device) -> None:
    delivered: list[Any] = []
    timing = DeviceTime(CudaBackend(), delivered.append, lambda **_: None)
    with collective(0):
        timing.start("base")
    timing.stop()
    assert delivered == [] and timing.failed is None


_MUSA = """
import sys, time
import mt_megatron
mt_megatron.patch("musa")
import torch
from pathlib import Path
from mt_megatron.scan.record.device_spans import DeviceTime
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.scan.format.segments import read_rank
from mt_megatron.seams import events

recorder = Recorder(Path(sys.argv[1]), rank=0, level="full")
timing = DeviceTime(mt_megatron.backend(), recorder.add_spans, recorder.note)
recorder.start()
timing.start("full")
x = torch.randn(64, 64, device="musa")
with events.span("step", iteration=1):
    for number in range(5):
        with events.span("layer", number=number):
            x = torch.relu(x @ x) / 100
timing.stop()
recorder.close()
assert timing.failed is None, timing.failed
spans = read_rank(recorder.files.rank_folder(0)).spans
layers = spans[(spans["kind"] == 6) & (spans["end"] != -1)]
assert len(layers) == 5, len(layers)
for layer in layers:
    # What is emulated runs at once: the device's times are the host's, as well as the clocks compare.
    assert layer["device_begin"] <= layer["device_end"], layer
    assert abs(int(layer["device_begin"]) - int(layer["begin"])) < 20_000_000, layer
print("musa ok")
"""


@needs_emulated_musa()
def test_emulated_musa(tmp_path: Path) -> None:
    done = run_command(
        [sys.executable, "-W", "ignore", "-c", _MUSA, str(tmp_path)],
        env={**os.environ, **environment()},
        timeout=120,
    )
    assert done.returncode == 0 and "musa ok" in done.stdout, done.stderr[-3000:]
