"""Speed, MFU and the share of communication, by a clock that the tests move."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mt_megatron.backends.cpu.backend import CpuBackend
from mt_megatron.seams import events
from mt_megatron.training.logging.output import CommunicationClock
from mt_megatron.training.logging.throughput import Peak, Window, peak_of


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def result(loss: float = 2.0, tokens: int = 900) -> Any:
    return SimpleNamespace(loss=loss, tokens=tokens)


def test_two_steps_of_a_thousand_tokens_in_four_seconds_on_two_devices() -> None:
    now, spent = Clock(), Clock()
    window = Window(communication=spent, now=now)
    for _ in range(2):
        now.time += 2.0
        spent.time += 0.5
        window.add(result(), tokens_processed=1000)
    speed = window.speed(flops_per_token=6e9, world_size=2, peak=Peak(flops=1e13, source="test"))
    assert speed.tokens_per_second == 450, "tokens that count"
    assert speed.step_seconds == 2.0
    assert speed.flops_per_second_per_device == 6e9 * 2000 / 4 / 2, "all tokens cost"
    assert speed.mfu == pytest.approx(0.15)
    assert speed.communication_share == pytest.approx(0.25)


def test_what_is_paused_is_in_no_figure() -> None:
    now, spent = Clock(), Clock()
    window = Window(communication=spent, now=now)
    now.time += 1.0
    spent.time += 0.25
    window.add(result(), tokens_processed=1000)
    with window.paused():
        now.time += 60.0
        spent.time += 60.0
    speed = window.speed(flops_per_token=1.0, world_size=1, peak=Peak(flops=None, source=""))
    assert speed.step_seconds == 1.0 and speed.communication_share == pytest.approx(0.25)
    assert speed.mfu is None


def test_a_pause_within_a_pause_counts_once() -> None:
    """A command is attended to beside the training, and the pause that it asks for begins within."""
    now, spent = Clock(), Clock()
    window = Window(communication=spent, now=now)
    now.time += 1.0
    spent.time += 0.25
    window.add(result(), tokens_processed=1000)
    with window.paused():
        now.time += 1.0
        with window.paused():
            now.time += 60.0
            spent.time += 60.0
            made = window.remember()
    now.time += 5.0
    for each, seconds in ((window, 6.0), (made(), 1.0)):
        speed = each.speed(flops_per_token=1.0, world_size=1, peak=Peak(flops=None, source=""))
        assert speed.step_seconds == seconds
        assert speed.communication_share == pytest.approx(0.25 / seconds)


def test_the_loss_is_the_mean_of_the_finite_ones() -> None:
    window = Window()
    for loss in (1.0, math.nan, 3.0):
        window.add(result(loss), tokens_processed=1)
    assert window.loss() == 2.0
    empty = Window()
    empty.add(result(math.inf), tokens_processed=1)
    assert math.isnan(empty.loss())


def config(peak: float | None = None, dtype: str = "bfloat16") -> Any:
    return SimpleNamespace(logging=SimpleNamespace(peak_tflops=peak), params_dtype=dtype)


def test_the_peak_is_given_or_the_tables_or_unknown() -> None:
    class Card(CpuBackend):
        name = "card"

        def peak_flops(self, dtype: torch.dtype) -> float | None:
            return 1e14 if dtype is torch.bfloat16 else None

    assert peak_of(config(2.5), Card()) == Peak(flops=2.5e12, source="--peak-tflops")
    assert peak_of(config(), Card()) == Peak(flops=1e14, source="table of card, bfloat16, dense")
    unknown = peak_of(config(dtype="float32"), Card())
    assert unknown.flops is None and unknown.source == "unknown peak, give --peak-tflops"
    assert peak_of(config(), CpuBackend()).flops is None, "no CPU's peak is guessed"


def test_nested_communication_counts_once_and_other_events_not_at_all() -> None:
    now = Clock()
    clock = CommunicationClock(now)
    try:
        with events.span("layer"), events.span("collective"):
            now.time += 1.0
            with events.span("p2p"):
                now.time += 2.0
            now.time += 4.0
        with events.span("optimizer"):
            now.time += 8.0
        with events.span("p2p"):
            now.time += 16.0
        assert clock.seconds() == 23.0
    finally:
        clock.close()
    with events.span("collective"):
        now.time += 32.0
    assert clock.seconds() == 23.0 and not events.listening()


def test_an_end_whose_begin_was_missed_counts_nothing() -> None:
    now = Clock()
    with events.span("step"):
        clock = CommunicationClock(now)
    events.end("collective")
    now.time += 5.0
    with events.span("collective"):
        now.time += 1.0
    clock.close()
    assert clock.seconds() == 1.0


def test_threads_do_not_disturb_each_other() -> None:
    import threading

    clock = CommunicationClock()
    barrier = threading.Barrier(2)

    def work() -> None:
        for _ in range(200):
            barrier.wait()
            with events.span("collective"):
                pass

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.close()
    assert 0.0 < clock.seconds() < 10.0
    assert all(thread.depth == 0 for thread in clock._threads)


def test_drawing_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, mt_megatron.training.logging.picture\n"
        "print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
