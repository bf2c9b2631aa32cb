"""Parcels that wait for a sidecar: they keep copies on the host, and nothing of a step's tensors."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mt_megatron.backends.cpu import CpuBackend
from mt_megatron.parallel.rank_layout import RankLayout
from mt_megatron.scope.interfaces import NoControl, StepFigures
from mt_megatron.scope.recording.checks import checked
from mt_megatron.scope.session import Session
from mt_megatron.scope.watch.head import MOST_SEEN
from mt_megatron.scope.watch.host_copies import Copier
from mt_megatron.scope.watch.outbox import Outbox
from mt_megatron.scope.watch.parts import Parts
from mt_megatron.scope.watch.sampled_step import SampledStep
from mt_megatron.scope.watch.sender import MOST_QUEUED, Parcel
from mt_megatron.scope.watch.sums import channel_maxima, moments, square_sum
from mt_megatron.scope.watch.tensors import MOST_STEP, Tensors


class Queue:
    """Sender that keeps what it is given."""

    def __init__(self) -> None:
        self.parcels: list[Parcel] = []

        self.dropped = (0, 0)

    def put(self, parcel: Parcel) -> None:
        self.parcels.append(parcel)

    def count(self, size: int) -> None:
        self.dropped = (self.dropped[0] + 1, self.dropped[1] + size)


def step(queue: Queue) -> None:
    """Hand over statistics of all kinds and tensors in both encodings."""
    outbox: Any = Outbox(queue, CpuBackend(), tensor_parallel_size=1)  # type: ignore[arg-type]
    parts, tensors = Parts(torch.device("cpu")), Tensors()
    values = torch.arange(256.0 * 40).reshape(256, 40)
    parts.add("a", "activation_rms", [square_sum(values), float(values.numel())])
    parts.largest("a", "activation_max", values.max())
    parts.outliers("a", channel_maxima(values), square_sum(values), values.numel())
    parts.moments("a", values.numel(), *moments(values))
    for name, rows in (("exact", 2), ("tiles", 256)):
        tensors.add("a", name, values[:rows], index={"sample": 0}, microbatch=0, shape=(rows, 40))
    outbox.stats(1, parts, None)
    outbox.tensors(1, tensors, None)


def live() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_what_waits_keeps_no_tensor_of_the_step() -> None:
    step(Queue())
    before = live()
    queue = Queue()
    step(queue)
    assert live() == before
    frames = [dict(frame) for parcel in queue.parcels for frame in parcel.frames()]
    assert [frame["k"] for frame in frames] == ["schema", "stats", "tensor", "tensor"]
    values = np.arange(256 * 40, dtype=np.float32).reshape(256, 40)
    exact, tiles = frames[2:]
    assert (exact["encoding"], tiles["encoding"]) == ("f32", "q8")
    assert np.array_equal(exact["data"], values[:2]) and exact["error"] == 0.0
    back = tiles["low"] + tiles["scale"] * tiles["data"]
    assert np.abs(back - values).max() <= tiles["error"] * (1 + 1e-6)
    # Its memory is its own: it goes back to the system when it is sent.
    owner = exact["data"]
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner.obj if isinstance(owner, memoryview) else owner, mmap.mmap)


@pytest.mark.parametrize("records", [True, False])
def test_attempts_are_counted_without_a_look_at_what_is_dropped(records: bool) -> None:
    """Also where nothing is recorded any more, because the rank's statistics have failed."""
    queue = Queue()
    outbox: Any = Outbox(queue, CpuBackend(), tensor_parallel_size=1)  # type: ignore[arg-type]
    figures = StepFigures(loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, skipped=False)

    def parts() -> Parts:
        found = Parts(torch.device("cpu"))
        found.add("a", "activation_rms", [torch.ones(()), 1.0])
        return found

    for number, mark in ((1, None), (2, None), (3, "noise"), (4, "noise")):
        outbox.step(number, figures, 0.1, mark)
        if records:
            outbox.stats(number, parts(), mark)
    for mark in ("pair noise: baseline", "pair noise: gaussian"):  # beside step 5
        outbox.beside(5, mark)
        if records:
            outbox.stats(5, parts(), mark)
    outbox.step(5, figures, 0.1, None)
    if records:
        outbox.stats(5, parts(), None)
    for number in (4, 5):  # gone back to step 3
        outbox.step(number, figures, 0.1, None)
    outbox.step(5, figures, 0.1, None)  # gone back by one step
    sent = [frame for parcel in queue.parcels for frame in parcel.frames()]
    found = [(frame["i"], frame["attempt"]) for frame in sent if frame["k"] != "schema"]
    if not records:
        steps = [(1, 0), (2, 0), (3, 0), (4, 0), (5, 3), (4, 4), (5, 4), (5, 5)]
        assert found == steps
        return
    assert found == [
        *((number, 0) for number in (1, 2, 3, 4) for _ in range(2)),
        *((5, 1), (5, 2), (5, 3), (5, 3)),
        *((4, 4), (5, 4), (5, 5)),
    ]
    beside = {frame["attempt"]: frame["beside"] for frame in sent if frame["k"] == "stats"}
    assert beside == {0: False, 1: True, 2: True, 3: False}


def test_an_undo_is_sent_at_once_and_counts_once() -> None:
    queue = Queue()
    outbox: Any = Outbox(queue, CpuBackend(), tensor_parallel_size=1)  # type: ignore[arg-type]
    figures = StepFigures(loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, skipped=False)
    for number in (1, 2, 3):
        outbox.step(number, figures, 0.1, None)
    outbox.back(1)
    assert queue.parcels[-1].must
    for number in (2, 3):
        outbox.step(number, figures, 0.1, None)
    outbox.beside(4, "pair noise: baseline")
    outbox.back(3)
    outbox.step(4, figures, 0.1, None)
    sent = [frame for parcel in queue.parcels for frame in parcel.frames()]
    assert [(each["k"], each.get("i", each.get("first")), each["attempt"]) for each in sent] == [
        *(("step", number, 0) for number in (1, 2, 3)),
        *(("back", 2, 1), ("step", 2, 1), ("step", 3, 1)),
        *(("back", 4, 3), ("step", 4, 3)),
    ]
    assert all(checked(each) for each in sent)


def test_tensors_beyond_the_bound_are_told_once_and_not_of_the_sidecar() -> None:
    queue, said = Queue(), list[str]()
    session: Any = object.__new__(Session)
    session._said, session._rank, session._say, session._mark = set(), 0, said.append, None
    session._layout, session._is_loss_summed = RankLayout(world_size=1), False
    session._at = session._layout.coordinates(0)
    session._asked = SimpleNamespace(head=SimpleNamespace(taken=lambda: ([], 0)))
    session.control = NoControl()
    outbox: Any = Outbox(queue, CpuBackend(), tensor_parallel_size=1)  # type: ignore[arg-type]
    for number in (20, 40, 60):
        tensors = Tensors(most_bytes=1)
        tensors.add("a", "activation", torch.ones(2, 2), index={}, microbatch=0, shape=(2, 2))
        parts = Parts(torch.device("cpu"))
        session._send(outbox, SampledStep(iteration=number, sampled=True, parts=parts, tensors=tensors), 8)
    assert len(said) == 1 and "16 bytes of step 20 are left out" in said[0]
    assert queue.dropped == (3, 48) and outbox.dropped == (0, 0)


def test_all_that_a_step_may_send_has_room_in_the_queue() -> None:
    queue = Queue()
    outbox: Any = Outbox(queue, CpuBackend(), tensor_parallel_size=1)  # type: ignore[arg-type]
    tensors, values = Tensors(), torch.ones(2048, 2048)
    for number in range(8):
        tensors.add("a", "activation", values, index={"n": number}, microbatch=0, shape=(2048, 2048))
    assert tensors.dropped and tensors.size > 0.7 * MOST_STEP
    outbox.tensors(1, tensors, None)
    sizes = [parcel.size for parcel in queue.parcels]
    assert max(sizes) < 5 * 2**20, "some copies are made of a parcel that is encoded"
    assert sum(sizes) + MOST_SEEN + 2**20 < MOST_QUEUED
    sent = [frame["index"]["n"] for parcel in queue.parcels for frame in parcel.frames()]
    assert sorted(set(sent)) == list(range(len(set(sent)))) and len(set(sent)) >= 3


def test_experts_of_other_ranks_are_modules_of_the_model() -> None:
    """Data-parallel ranks hold other experts; of everything else the first one's list is enough."""
    layer = torch.nn.ModuleDict({"router": torch.nn.Identity(), "local_experts": torch.nn.ModuleList()})
    layer["local_experts"].append(torch.nn.Identity())
    listed = []
    for rank in range(4):
        session: Any = object.__new__(Session)
        session._layout, session._rank = RankLayout(world_size=4, ep=2), rank
        session._at = session._layout.coordinates(rank)
        session._chunks = (torch.nn.ModuleDict({"experts": layer}),)
        listed.append([path for path in session._about()["paths"] if path.count(".") > 1 or rank == 0])
    assert listed[1] == ["experts.local_experts.0"] and "experts.router" in listed[0]
    assert listed[2:] == [[], []]


def test_what_is_held_is_divided_or_left_out() -> None:
    tensors, values = Tensors(), torch.arange(256.0 * 40).reshape(256, 40)
    for name, rows in (("gradient", 2), ("gradient", 256), ("activation", 2)):
        tensors.add("a", name, values[:rows], index={}, microbatch=0, shape=(rows, 40))
    tensors.divide("gradient", 8)
    exact, tiles, other = tensors.held
    assert torch.equal(exact.data, values[:2] / 8) and torch.equal(other.data, values[:2])
    assert tiles.scale is not None and tiles.low is not None and tiles.error is not None
    width = -(-tiles.data.shape[1] // tiles.scale.shape[1])
    height = -(-tiles.data.shape[0] // tiles.scale.shape[0])
    low, scale = (
        each.repeat_interleave(height, 0)[:256].repeat_interleave(width, 1)[:, :40]
        for each in (tiles.low, tiles.scale)
    )
    assert (low + scale * tiles.data - values / 8).abs().max() <= tiles.error * 1.01 < 1.0
    tensors.divide("gradient", None)
    assert [each.what for each in tensors.held] == ["activation"]


def held(tensors: Tensors) -> list[dict[str, Any]]:
    return [{**each.about(), "data": [part.tolist() for part in each.tensors()]} for each in tensors.held]


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ((3, 5, 7), MOST_STEP),  # sent exactly
        ((3, 40, 130), MOST_STEP),
        ((3, 40, 130), 2 * 40 * (130 + 24)),  # room for two
        ((2, 3000, 1500), 2 * MOST_STEP),  # cut by rows
        ((0, 40, 130), MOST_STEP),
        ((3, 0, 130), MOST_STEP),
    ],
)
def test_several_at_once_are_those_one_by_one(shape: tuple[int, int, int], most: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if values.numel() > 10_000:
        values[1, 2, 3], values[-1, 0, 0] = torch.nan, torch.inf
    common: dict[str, Any] = {"microbatch": 0, "shape": shape[1:], "offset": (2, 0)}
    indices = [{"head": number} for number in range(shape[0])]
    one_by_one, at_once = Tensors(most), Tensors(most)
    for own, index in zip(values, indices, strict=True):
        one_by_one.add("a", "attention", own, index=index, **common)
    at_once.add_alike("a", "attention", values, indices=indices, **common)
    assert str(held(at_once)) == str(held(one_by_one))
    assert (at_once.size, at_once.dropped) == (one_by_one.size, one_by_one.dropped)


def test_copies_of_a_device_are_in_order() -> None:
    """One copy for each dtype."""
    backend: Any = SimpleNamespace(
        device_type="another", pins_host_memory=lambda: False, timed_event=lambda: None
    )
    given = [
        torch.arange(6.0).view(2, 3),
        torch.tensor(7, dtype=torch.uint8),
        torch.zeros(0, 4),
        torch.tensor([[8, 9]], dtype=torch.uint8).t(),
        torch.tensor(2.5),
    ]
    found = Copier(backend).copy(given)()
    assert [each.shape for each in found] == [tuple(each.shape) for each in given]
    assert [each.tolist() for each in found] == [each.tolist() for each in given]
    assert Copier(backend).copy([])() == []
