"""Statistics that the host makes of single kernels' results, as on an accelerator, against the CPU's own."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mt_megatron.parallel.rank_layout import RankLayout
from mt_megatron.scope.watch import attention_rows, scalars
from mt_megatron.scope.watch import deferred as deferred_module
from mt_megatron.scope.watch import parts as parts_module
from mt_megatron.scope.watch.attention_rows import Rows, products
from mt_megatron.scope.watch.defaults import _activation, _Layer
from mt_megatron.scope.watch.parts import Parts
from mt_megatron.scope.watch.shares import Place
from mt_megatron.scope.watch.sums import outliers_of
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
    # Norm, channels' maxima, the maximum of micro-batches; norm of the first input; norm and largest of the
    # module; two multiplications of this test.
    assert sum(kernels.found.values()) == 2 * 3 + 1 + 2 + 2, kernels.found


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("heads", [slice(None), slice(1, 2), slice(1, 3)])
@pytest.mark.parametrize("samples", [slice(None), slice(1, 3)])
def test_products_of_heads_and_groups(groups: int, heads: slice, samples: slice) -> None:
    """Against keys that are repeated for every head."""
    generator = torch.Generator().manual_seed(groups)
    query = torch.randn(8, 3, 4, 6, generator=generator)
    key = torch.randn(8, 3, groups, 10, generator=generator)  # as padded to the values' size
    key[..., 6:] = 0
    places = torch.tensor([1, 5, 7])
    rows = Rows(places=places, heads=heads, samples=samples)
    inputs: Any = SimpleNamespace(query=query, scale=0.3)
    whole = torch.einsum("rbhd,kbhd->bhrk", query[places], key[..., :6].repeat_interleave(4 // groups, 2))
    assert torch.allclose(products(inputs, rows, key), 0.3 * whole[samples, heads], atol=1e-6)


def test_attention_rows_of_several_calls_together(deferred: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call's values, whatever it shared kernels with."""
    calls = [
        ("a", random(1).mul(3.0), True),
        ("b", random(2), True),
        ("a", random(3), True),
        ("a", random(4)[:4], True),
        ("b", random(5).masked_fill(torch.ones(8, 2, 1, dtype=torch.bool), -torch.inf), False),
    ]
    found = []
    for most in (1, 2 * 8 * 2 * 64, 2**22):
        monkeypatch.setattr(attention_rows, "MOST_WAITING", most)
        parts = Parts(CPU)
        together = attention_rows.RowScalars(print)
        parts.at_end(together.give)
        for path, logits, all_attend in calls:
            together.add(parts, path, logits.clone(), all_attend=all_attend)
        found.append(values_of(parts))
    for path in "ab":
        own = [attention_rows.row_statistics(logits) for name, logits, _ in calls if name == path]
        for each in found:
            assert each[path, "attention_logit_max"][0] == max(float(largest) for largest, _, _ in own)
            entropies = [sum(float(entropy) for _, entropy, _ in own), sum(count for _, _, count in own)]
            assert each[path, "attention_entropy"].tolist() == pytest.approx(entropies, rel=1e-5)


def test_attention_rows_that_fail_cost_nothing_else(deferred: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of them is told as if it were all."""
    parts, lines = Parts(CPU), list[str]()
    together = attention_rows.RowScalars(lines.append)
    parts.at_end(together.give)
    parts.later(scalars.WEIGHT, ("a",), [torch.tensor(3.0)])
    together.add(parts, "a", random(1), all_attend=True)
    together.give(parts)

    def no_memory(*args: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "softmax", no_memory)
    together.add(parts, "b", random(2), all_attend=True)
    together.add(parts, "a", random(3)[:4], all_attend=True)
    assert lines == ["RuntimeError: out of memory"]
    monkeypatch.undo()
    monkeypatch.setattr(parts_module, "defers", lambda device: True)
    together.add(parts, "a", random(4), all_attend=True)
    assert values_of(parts).keys() == {("a", "weight_norm")} and len(lines) == 1


def test_what_is_never_taken_goes_at_once(deferred: None) -> None:
    """A step that raised an error leaves its logits to nobody."""
    parts = Parts(CPU)
    together = attention_rows.RowScalars(print)
    parts.at_end(together.give)
    logits = random(1)
    gone = weakref.ref(logits)
    together.add(parts, "a", logits, all_attend=True)
    gc.disable()
    try:
        del parts, together, logits
        assert gone() is None
    finally:
        gc.enable()


def test_channels_of_layers_of_different_width(deferred: None) -> None:
    parts = Parts(CPU)
    widths = {"a": 64, "b": 8, "c": 64}
    for path, width in widths.items():
        values = random(width)[..., :width]
        parts.later(scalars.LAYER, (path,), [scalars.norm(values)], [float(values.numel())])
        parts.channels(path, scalars.largest_of_channels(values))
    found = values_of(parts)
    for path, width in widths.items():
        values = random(width)[..., :width]
        pairs = outliers_of(values.abs().amax(dim=(0, 1))).tolist()
        assert found[path, "outlier_channels"].tolist() == pytest.approx(
            [*pairs, float(values.square().sum()), values.numel()]
        )
        assert found[path, "activation_max"][0] == pytest.approx(float(values.abs().max()))


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
    assert values[path, "not_finite"][kind] == 3 and values[path, "not_finite"][1 - kind] == 0
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


def test_ways_of_an_update_are_added_up(deferred: None) -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    parts = Parts(CPU)
    parts.later(scalars.UPDATE_BY_TENSOR, ("a",), [one, one, one, two], (0.0, 1.0))
    parts.later(scalars.UPDATE, ("a", "b"), [one, one, one], (0.0, 2.0))
    parts.later(scalars.UPDATE, ("b", "a"), [one, one, one], (0.0, 2.0))
    found = values_of(parts)
    assert found["a", "update_ratio"].tolist() == [12.0, 27.0]
    assert found["b", "update_ratio"].tolist() == [8.0, 18.0]


def test_a_scalar_of_several_calls_is_copied_once(deferred: None) -> None:
    parts, one = Parts(CPU), torch.tensor(3.0)
    parts.later(scalars.WEIGHT, ("a",), [one])
    parts.later(scalars.LAYER, ("b",), [one], [2.0])
    layout, vector, values = parts.taken()
    assert vector.numel() == 1 and values(vector.numpy()).tolist() == [9.0, 9.0, 2.0]
    assert parts.nbytes == 2 * (8 + 8 + 8) + 8, "places, calls and paths, and one known number"
    assert [length for _, _, length in layout] == [1, 2]


def test_many_scalars_are_joined_meanwhile(deferred: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of one number take more memory than it: few are kept, and each call keeps its own."""
    monkeypatch.setattr(deferred_module, "MOST_SINGLE", 5)
    parts, one = Parts(CPU), torch.tensor(2.0)
    for number in range(1, 8):
        kept = torch.tensor(float(number))
        parts.later(scalars.GROWTH, ("a",), [kept, one])
        parts.later(scalars.WEIGHT, ("a", "b"), [kept])
        gone = weakref.ref(kept)
        del kept
        assert len(parts._deferred._single) <= 5
    assert gone() is not None, "the last few wait"
    found = values_of(parts)
    assert found["a", "residual_growth"].tolist() == [140.0, 28.0]
    assert found["a", "weight_norm"].tolist() == found["b", "weight_norm"].tolist() == [140.0]


def test_a_maximum_that_is_not_a_number_stays(deferred: None) -> None:
    parts = Parts(CPU)
    for value in (1.0, float("nan"), 2.0):
        parts.later(scalars.OUTPUT, ("a",), [torch.tensor(1.0), torch.tensor(value)], [4.0])
    found = values_of(parts)
    assert np.isnan(found["a", "activation_max"][0]) and found["a", "not_finite"].tolist() == [1.0, 0.0]
