"""The GEMM seam computes a linear's three products, can be replaced, and can wait with one."""

from __future__ import annotations

import pytest
import torch

from mt_megatron.errors import ConfigError, MtMegatronError
from mt_megatron.seams import gemm as seam

T, N, K = 6, 5, 4


@pytest.fixture(autouse=True)
def _default():
    yield
    seam.set_gemm(None)


def operands(role, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator).to(dtype) for shape in ((T, K), (N, K), (T, N)))
    a, b = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}[role]
    subscripts = {"fprop": "tk,nk->tn", "dgrad": "tn,nk->tk", "wgrad": "tn,tk->nk"}[role]
    return a, b, torch.einsum(subscripts, a.double(), b.double())


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_default_is_the_product_of_its_role(role):
    a, b, expected = operands(role)
    torch.testing.assert_close(seam.gemm(role, a, b), expected)
    out = torch.full_like(expected, 7.0)
    assert seam.gemm(role, a, b, out=out, accumulate=True) is out
    torch.testing.assert_close(out, expected + 7.0)
    assert seam.gemm(role, a, b, out=out) is out
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("accumulate", [False, True])
def test_low_precision_result_goes_into_an_fp32_buffer(accumulate):
    a, b, _ = operands("wgrad", torch.bfloat16)
    out = torch.ones(N, K)
    seam.gemm("wgrad", a, b, out=out, accumulate=accumulate)
    expected = seam.gemm("wgrad", a, b).float() + (1.0 if accumulate else 0.0)
    assert out.dtype is torch.float32
    assert torch.equal(out, expected)


def test_recipe_without_a_feature_that_knows_it_is_refused():
    a, b, _ = operands("fprop")
    with pytest.raises(ConfigError, match="e4m3"):
        seam.gemm("fprop", a, b, recipe="e4m3")


def test_installed_implementation_gets_every_argument_and_two_are_refused():
    calls = []

    def mine(role, a, b, *, out=None, accumulate=False, recipe=None):
        calls.append((role, accumulate, recipe))
        return seam.torch_gemm(role, a, b, out=out, accumulate=accumulate)

    seam.set_gemm(mine)
    seam.set_gemm(mine)
    a, b, expected = operands("wgrad")
    out = torch.zeros_like(expected)
    seam.gemm("wgrad", a, b, out=out, accumulate=True, recipe="r")
    assert calls == [("wgrad", True, "r")]
    with pytest.raises(ConfigError, match="already"):
        seam.set_gemm(lambda *args, **kwargs: None)
    seam.set_gemm(None)
    seam.gemm("fprop", *operands("fprop")[:2])
    assert len(calls) == 1


def test_queue_runs_first_in_first_out_and_counts_what_is_pending():
    weight, other = torch.zeros(1), torch.zeros(1)
    order = []
    with seam.deferred_wgrad() as queue:
        assert seam.wgrad_queue() is queue
        for number, tensor in enumerate((weight, other, weight)):
            seam.wgrad_queue().put(tensor, lambda n=number: order.append((n, seam.wgrad_pending(weight))))
    assert seam.wgrad_queue() is None
    assert len(queue) == 3 and seam.wgrad_pending(weight) and order == []
    with pytest.raises(MtMegatronError, match="2 deferred"):
        seam.require_no_pending_wgrad(iter([weight]))
    assert queue.flush(1) == 1
    assert order == [(0, True)]
    assert queue.flush() == 2
    # The last gradient of a weight is computed when nothing of it is pending any more.
    assert order == [(0, True), (1, True), (2, False)]
    seam.require_no_pending_wgrad(iter([weight, other]))
    assert queue.flush() == 0


def test_contexts_nest_and_a_given_queue_is_used():
    mine = seam.DeferredWgrad()
    with seam.deferred_wgrad() as outer:
        with seam.deferred_wgrad(mine) as inner:
            assert inner is mine and seam.wgrad_queue() is mine
        assert seam.wgrad_queue() is outer


def test_discard_drops_what_waits():
    weight = torch.zeros(1)
    queue = seam.DeferredWgrad()
    queue.put(weight, lambda: pytest.fail("computed"))
    assert queue.discard() == 1
    assert not seam.wgrad_pending(weight) and queue.flush() == 0
