"""The linears' autograd on one process: equal to torch's own, and the gradient goes where it should."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mt_megatron.errors import ConfigError
from mt_megatron.seams import gemm as seam

S, B, K, N = 7, 3, 16, 24


def make(dtype=torch.float32, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    weight = torch.nn.Parameter(tensor(N, K).detach())
    return tensor(S, B, K), weight, tensor(N) if bias else None, tensor(S, B, N).detach()


def ours(x, w, b, *, fused=False, buffer=None, limit=0):
    from mt_megatron.layers.linear import TensorParallelLinear

    return TensorParallelLinear.apply(x, w, b, fused, False, False, buffer, limit)


def gradients(function, x, w, b, dy):
    for tensor in (x, w, b):
        if tensor is not None:
            tensor.grad = None
    output = function(x, w, b)
    output.backward(dy.to(output.dtype))
    return output.detach(), x.grad, w.grad, None if b is None else b.grad


@pytest.mark.parametrize("bias", [True, False])
def test_fp32_gradients_are_torchs_to_the_bit(bias):
    x, w, b, dy = make(bias=bias)
    _, *mine = gradients(ours, x, w, b, dy)
    output, *theirs = gradients(F.linear, x, w, b, dy)
    for found, expected in zip(mine, theirs, strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)
    torch.testing.assert_close(ours(x, w, b), output)


def test_gradcheck():
    x, w, b, _ = make(torch.float64)
    assert torch.autograd.gradcheck(ours, (x, w, b))


def test_two_dimensional_non_contiguous_and_empty_inputs():
    x, w, b, _ = make()
    flat, permuted = x.detach().reshape(S * B, K), x.detach().transpose(0, 1)
    torch.testing.assert_close(ours(flat, w, b), F.linear(flat, w, b))
    torch.testing.assert_close(ours(permuted, w, b), F.linear(permuted, w, b))
    nothing = torch.zeros(0, K, requires_grad=True)
    ours(nothing, w, b).sum().backward()
    assert torch.equal(w.grad, torch.zeros_like(w))


def test_output_may_be_changed_in_place():
    x, w, b, dy = make()
    output = ours(x, w, b)
    assert output._base is None
    output.mul_(2.0)
    output.backward(dy)
    torch.testing.assert_close(x.grad, 2 * dy @ w.detach())


def test_bf16_matches_torch():
    x, w, b, dy = make(torch.bfloat16, bias=False)
    for found, expected in zip(gradients(ours, x, w, b, dy), gradients(F.linear, x, w, b, dy), strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_computes_in_its_dtype_wherever_backward_runs(backward_inside):
    x, w, _, dy = make(bias=False)
    found = []
    for function in (ours, F.linear):
        x.grad = w.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = function(x, w, None)
            assert output.dtype is torch.bfloat16
            if backward_inside:
                output.backward(dy.bfloat16())
        if not backward_inside:
            output.backward(dy.bfloat16())
        assert x.grad.dtype is torch.float32 and w.grad.dtype is torch.float32
        found.append((output.detach(), x.grad, w.grad))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_without_autocast_a_dtype_mismatch_is_an_error():
    x, w, _, _ = make(bias=False)
    with pytest.raises(RuntimeError, match="dtype"):
        ours(x.bfloat16(), w, None)


def test_every_gemm_goes_through_the_seam_with_the_weights_recipe():
    calls = []

    def spy(role, a, b, *, out=None, accumulate=False, recipe=None):
        calls.append((role, tuple(a.shape), tuple(b.shape), accumulate, recipe))
        return seam.torch_gemm(role, a, b, out=out, accumulate=accumulate)

    x, w, b, dy = make()
    w.gemm_recipe = "recipe"
    seam.set_gemm(spy)
    try:
        gradients(ours, x, w, b, dy)
    finally:
        seam.set_gemm(None)
    assert calls == [
        ("fprop", (S * B, K), (N, K), False, "recipe"),
        ("dgrad", (S * B, N), (N, K), False, "recipe"),
        ("wgrad", (S * B, N), (S * B, K), False, "recipe"),
    ]


def test_gradients_nobody_needs_are_not_computed():
    roles = []

    def spy(role, *args, **kwargs):
        roles.append(role)
        return seam.torch_gemm(role, *args, **kwargs)

    x, w, b, dy = make()
    seam.set_gemm(spy)
    try:
        ours(x.detach(), w, b).backward(dy)
        ours(x, w.detach(), b).backward(dy)
    finally:
        seam.set_gemm(None)
    assert roles == ["fprop", "wgrad", "fprop", "dgrad"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fusion_accumulates_micro_batches_in_main_grad(dtype):
    x, w, b, dy = make(dtype)
    w.main_grad = torch.full((N, K), 3.0)
    for _ in range(2):
        ours(x, w, b, fused=True).backward(dy)
    assert w.grad is None
    once = seam.gemm("wgrad", dy.reshape(-1, N), x.detach().reshape(-1, K)).float()
    torch.testing.assert_close(w.main_grad, 3.0 + 2 * once)


@pytest.mark.parametrize("zero_out", [False, True])
def test_fusion_leaves_ddps_hook_a_gradient_to_ignore(zero_out):
    x, w, b, dy = make()
    w.main_grad, w.grad_added_to_main_grad = torch.zeros(N, K), False
    if zero_out:
        w.zero_out_wgrad = True
    ours(x, w, b, fused=True).backward(dy)
    assert w.grad_added_to_main_grad is True
    assert w.grad.shape == w.shape and w.grad.dtype is w.dtype
    if zero_out:
        assert not w.grad.any()


def test_fusion_without_main_grad_says_what_to_do():
    x, w, b, _ = make()
    with pytest.raises(ConfigError, match="no main_grad.*DistributedDataParallel"):
        ours(x, w, b, fused=True).sum().backward()


@pytest.mark.parametrize(("limit", "kept"), [(0, 3), (2, 2)])
def test_output_layer_puts_micro_batches_off_and_drain_computes_them(limit, kept):
    from mt_megatron.layers.linear import drain_embedding_wgrad

    weight, expected, activations, buffer = None, torch.zeros(N, K), [], []
    for seed in range(3):
        x, w, _, dy = make(bias=False, seed=seed)
        if weight is None:
            weight = torch.nn.Parameter(w.detach().clone())
            weight.main_grad = torch.zeros(N, K)
        if limit == 0 or len(activations) < limit:
            activations.append(x.detach())
        ours(x, weight, None, fused=True, buffer=buffer, limit=limit).backward(dy)
        assert x.grad is not None
        expected += dy.reshape(-1, N).t() @ x.detach().reshape(-1, K)
    assert len(buffer) == kept
    assert not torch.allclose(weight.main_grad, expected)
    drain_embedding_wgrad(SimpleNamespace(sequence_parallel=False), activations, buffer, weight)
    assert activations == [] and buffer == []
    torch.testing.assert_close(weight.main_grad, expected)
    with pytest.raises(ConfigError, match="1 activations and 0 output gradients"):
        drain_embedding_wgrad(SimpleNamespace(sequence_parallel=False), [x], [], weight)


def test_deferred_gradient_arrives_with_its_hooks_when_flushed():
    x, w, b, dy = make()
    _, dx, dw, db = gradients(F.linear, x, w, b, dy)
    x.grad = w.grad = b.grad = None
    seen = []
    # torch runs these hooks in the backward pass as well, where there is no gradient yet.
    w.register_post_accumulate_grad_hook(lambda weight: seen.extend([] if weight.grad is None else [1]))
    with seam.deferred_wgrad() as queue:
        ours(x, w, b).backward(dy)
        ours(x, w, b).backward(dy)
    assert w.grad is None and len(queue) == 2
    torch.testing.assert_close(x.grad, 2 * dx)
    torch.testing.assert_close(b.grad, 2 * db)
    assert seen == []
    assert queue.flush(1) == 1
    assert torch.equal(w.grad, dw) and len(seen) == 1
    queue.flush()
    torch.testing.assert_close(w.grad, 2 * dw)
    assert len(seen) == 2


def test_deferred_gradient_goes_to_main_grad_under_fusion():
    x, w, b, dy = make()
    w.main_grad = torch.zeros(N, K)
    with seam.deferred_wgrad() as queue:
        ours(x, w, b, fused=True).backward(dy)
    assert not w.main_grad.any()
    queue.flush()
    torch.testing.assert_close(w.main_grad, dy.reshape(-1, N).t() @ x.detach().reshape(-1, K))
    assert w.grad is None


def test_deferral_survives_recomputation():
    from torch.utils.checkpoint import checkpoint

    x, w, b, dy = make()
    _, dx, dw, _ = gradients(F.linear, x, w, b, dy)
    for reentrant in (True, False):
        x.grad = w.grad = b.grad = None
        with seam.deferred_wgrad() as queue:
            checkpoint(lambda x: ours(x, w, b), x, use_reentrant=reentrant).backward(dy)
        assert w.grad is None and torch.equal(x.grad, dx)
        queue.flush()
        assert torch.equal(w.grad, dw)


def test_gradient_of_a_weight_that_is_no_parameter_is_not_deferred():
    x, w, b, dy = make()
    _, _, dw, _ = gradients(F.linear, x, w, b, dy)
    w.grad = None
    with seam.deferred_wgrad() as queue:
        ours(x, w * 1.0, b).backward(dy)
    assert len(queue) == 0 and torch.equal(w.grad, dw)


def test_weight_changed_before_backward_is_an_error():
    x, w, b, dy = make()
    output = ours(x, w, b)
    with torch.no_grad():
        w.mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        output.backward(dy)


def test_second_derivatives_are_refused():
    x, w, b, _ = make(torch.float64)
    (dx,) = torch.autograd.grad(ours(x, w, b).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_conflicting_reductions_are_refused():
    from mt_megatron.layers.linear import TensorParallelLinear

    x, w, b, _ = make()
    with pytest.raises(ConfigError, match="both allreduce_dgrad and sequence_parallel"):
        TensorParallelLinear.apply(x, w, b, False, True, True, None, 0)


def test_frozen_weight_gets_no_gradient_and_its_bias_does():
    from mt_megatron.layers.linear import FrozenLinear

    x, w, b, dy = make()
    w.requires_grad_(False)
    mine = gradients(lambda x, w, b: FrozenLinear.apply(x, w, b, False), x, w, b, dy)
    theirs = gradients(F.linear, x, w, b, dy)
    torch.testing.assert_close(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1]) and mine[2] is None and torch.equal(mine[3], theirs[3])


def test_cuda_asks_for_the_fp32_accumulators():
    """On a fake device: the path is taken and gives the right dtype, nothing is computed."""
    if not seam._HAS_OUT_DTYPE:
        pytest.skip("this torch has no GEMM with another output dtype")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls.append(str(function))
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(), Record() as record:
        dy, x = (torch.empty(8, n, dtype=torch.bfloat16, device="cuda") for n in (N, K))
        out = torch.empty(N, K, dtype=torch.float32, device="cuda")
        assert seam.gemm("wgrad", dy, x, out=out, accumulate=True).dtype is torch.float32
    assert "aten.mm.dtype" in record.calls


def test_inference_mode():
    x, w, b, _ = make()
    expected = ours(x, w, b).detach()
    with torch.inference_mode():
        assert torch.equal(ours(x, w, b), expected)
        assert torch.equal(ours(x.clone(), torch.nn.Parameter(w.clone()), b.clone()), expected)
