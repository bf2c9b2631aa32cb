"""Statistics that the host makes of single kernels' results, as on an accelerator, against the CPU's own."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mt_megatron.parallel.rank_layout import RankLayout
from mt_megatron.scope.watch import parts as parts_module
from mt_megatron.scope.watch import scalars
from mt_megatron.scope.watch.defaults import _activation, _Layer
from mt_megatron.scope.watch.parts import Parts
from mt_megatron.scope.watch.shares import Place
from mt_megatron.seams.taps import Call

CPU = torch.device("cpu")
CALL = Call(module=torch.nn.Identity(), microbatch=0, chunk=0, recomputing=False, ordinal=0)
PLACE = Place(
    layout=RankLayout(world_size=1),
    at=RankLayout(world_size=1).coordinates(0),
    sequence_parallel=False,
    micro_batch_size=2,
    seq_length=8,
)


class Kernels(TorchDispatchMode):
    """Counts operations but views."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call.__name__.split(".")[0] not in ("view", "detach", "slice", "_unsafe_view", "alias"):
            self.found[str(call)] += 1
        return call(*args, **(kwargs or {}))


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "defers", lambda device: True)


def random(seed: int) -> torch.Tensor:
    return torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(seed))


def layers_into(parts: Parts, inputs: list[torch.Tensor]) -> None:
    """Two layers and a module, for each micro-batch of ``inputs``."""
    first = _Layer("decoder.layers.0", parts, PLACE, None)
    second = _Layer("decoder.layers.1", parts, PLACE, first)
    for hidden in inputs:
        for layer, factor in ((first, 2.0), (second, -0.5)):
            layer.before(CALL, (hidden,), {})
            hidden = hidden * factor
            layer.after(CALL, (hidden, None))
        _activation(parts, PLACE, "decoder.layers.0.mlp", CALL, hidden)


def values_of(parts: Parts) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    layout, vector, values = parts.taken()
    found, split, at = values(vector.numpy()), {}, 0
    for path, statistic, length in layout:
        split[path, statistic] = found[at : at + length]
        at += length
    assert at == len(found)
    return split


def test_both_ways_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for way in (False, True):
        monkeypatch.setattr(parts_module, "defers", lambda device, way=way: way)
        parts = Parts(CPU)
        layers_into(parts, [random(1), random(2)])
        found.append(values_of(parts))
    plain, deferred = found
    assert set(plain) == set(deferred) and len(plain) == 13
    for key, value in plain.items():
        assert deferred[key] == pytest.approx(value, rel=1e-5), key


def test_few_kernels_are_launched(deferred: None) -> None:
    parts = Parts(CPU)
    hidden = [random(1), random(2)]
    layers_into(parts, hidden[:1])
    with Kernels() as kernels:
        layers_into(parts, hidden[1:])
    # Norm, channels' maxima, their largest, the maximum of micro-batches; norm of the first input; norm
    # and largest of the module; two multiplications of this test.
    assert sum(kernels.found.values()) == 2 * 4 + 1 + 2 + 2, kernels.found


def test_an_output_that_was_written_to_is_no_known_input(deferred: None) -> None:
    parts = Parts(CPU)
    first = _Layer("decoder.layers.0", parts, PLACE, None)
    second = _Layer("decoder.layers.1", parts, PLACE, first)
    hidden = random(1)
    first.before(CALL, (hidden,), {})
    first.after(CALL, hidden)
    hidden.mul_(3.0)
    second.before(CALL, (hidden,), {})
    second.after(CALL, hidden)
    after, before = values_of(parts)["decoder.layers.1", "residual_growth"]
    assert before == pytest.approx(after)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_told_at_once_and_counted_next(deferred: None, bad: float) -> None:
    told = threading.Event()
    hidden = random(3)
    hidden[0, 0, :3] = bad
    kind = 0 if bad != bad else 1
    path = "decoder.layers.1"
    parts = Parts(CPU, not_finite=told)
    assert not parts.counts
    layers_into(parts, [hidden])
    values = values_of(parts)
    assert values[path, "not_finite"][kind] == 1 and values[path, "not_finite"][1 - kind] == 0
    assert not np.isfinite(values[path, "activation_max"][0])
    assert np.isinf(values[path, "outlier_channels"][1])
    assert told.is_set()
    parts = Parts(CPU, not_finite=told)
    layers_into(parts, [hidden])
    assert values_of(parts)[path, "not_finite"][kind] == 3
    parts = Parts(CPU, not_finite=told)
    layers_into(parts, [random(4)])
    assert values_of(parts)[path, "not_finite"].tolist() == [0, 0] and not told.is_set()


def test_frames_without_the_statistic_say_nothing_about_it(deferred: None) -> None:
    told = threading.Event()
    told.set()
    parts = Parts(CPU, not_finite=told)
    parts.add("a", "histogram", torch.ones(3))
    values_of(parts)
    assert told.is_set()


def test_another_call_at_the_same_place_is_no_known_input(deferred: None) -> None:
    """As where memory is used again: of another micro-batch, another chunk, or a call that nobody numbers."""
    for call, other in (
        (CALL, CALL._replace(microbatch=1)),
        (CALL, CALL._replace(chunk=1)),
        (CALL._replace(microbatch=-1), CALL._replace(microbatch=-1)),
    ):
        parts = Parts(CPU)
        first = _Layer("decoder.layers.0", parts, PLACE, None)
        second = _Layer("decoder.layers.1", parts, PLACE, first)
        hidden = random(1)
        first.before(call, (hidden,), {})
        first.after(call, hidden)
        # Without a new version, as a transport writes.
        np.asarray(hidden.numpy())[:] *= 3.0
        second.before(other, (hidden,), {})
        second.after(other, hidden)
        after, before = values_of(parts)["decoder.layers.1", "residual_growth"]
        assert before == pytest.approx(after)


def test_calls_of_different_width_are_added_up(deferred: None) -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    parts = Parts(CPU)
    parts.later("a", "update_ratio", [one, one, one, two], scalars.update, (0.0, 1.0))
    parts.later("a", "update_ratio", [one, one, one], scalars.update, (0.0, 2.0))
    parts.later("a", "update_ratio", [one, one, one], scalars.update, (0.0, 2.0))
    assert values_of(parts)["a", "update_ratio"].tolist() == [12.0, 27.0]


def test_a_scalar_of_several_entries_is_copied_once(deferred: None) -> None:
    parts, one = Parts(CPU), torch.tensor(3.0)
    parts.later("a", "weight_norm", [one], scalars.squares)
    parts.later("b", "activation_rms", [one], scalars.squares, [2.0])
    layout, vector, values = parts.taken()
    assert vector.numel() == 1 and values(vector.numpy()).tolist() == [9.0, 9.0, 2.0]
    assert [length for _, _, length in layout] == [1, 2]
