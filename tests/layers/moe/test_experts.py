"""Expert layers on one process: every way of computing them is a loop over tokens, gradients included."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

from mt_megatron.errors import ConfigError
from mt_megatron.seams import gemm as seam
from mt_megatron.seams import grouped_gemm as grouped_seam

TOKENS, TOPK, EXPERTS, HIDDEN, FFN = 29, 3, 6, 16, 24
KERNEL = pytest.param(
    "kernel", marks=pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="no kernel")
)


@pytest.fixture(scope="module")
def layers():
    import megatron.core  # noqa: F401 (before layers that are made for it)

    from mt_megatron.layers.moe import experts, permutation

    return experts, permutation


@pytest.fixture
def kernel(layers, monkeypatch):
    """torch's grouped kernel for everything, which a CPU has in fp32 and bf16."""

    def use(wanted=True):
        if wanted:
            try:
                torch._grouped_mm(
                    torch.ones(4, 8), torch.ones(1, 8, 8), offs=torch.tensor([4], dtype=torch.int32)
                )
            except (RuntimeError, NotImplementedError):
                pytest.skip("this torch has no grouped kernel for a CPU")
        for module in (layers[0], grouped_seam):
            monkeypatch.setattr(module, "has_grouped_kernel", lambda a, b: wanted)

    return use


def make(dtype=torch.float32, seed=0, indices=None, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    if indices is None:
        # The last expert gets nothing.
        indices = torch.rand(tokens, EXPERTS - 1, generator=generator).argsort(1)[:, :TOPK]
    hidden = tensor(tokens, HIDDEN).requires_grad_()
    probs = torch.rand(indices.shape, generator=generator).to(dtype).requires_grad_()
    w1 = torch.nn.Parameter(tensor(EXPERTS, 2 * FFN, HIDDEN, scale=0.3))
    w2 = torch.nn.Parameter(tensor(EXPERTS, HIDDEN, FFN, scale=0.3))
    return hidden, probs, w1, w2, indices


def loop(hidden, probs, w1, w2, indices):
    """A token, a choice at a time."""
    tokens = []
    for t in range(hidden.shape[0]):
        token = torch.zeros_like(hidden[t])
        for k in range(indices.shape[1]):
            gate, up = F.linear(hidden[t], w1[indices[t, k]]).chunk(2)
            token = token + probs[t, k] * F.linear(F.silu(gate) * up, w2[indices[t, k]])
        tokens.append(token)
    return torch.stack(tokens)


def fused(layers, **options):
    def run(hidden, probs, w1, w2, indices):
        routing = layers[1].route(indices, 0, EXPERTS, all_local=True)
        return layers[0].experts_swiglu(hidden, probs, w1, w2, routing, **options)

    return run


def in_pieces(layers, **options):
    def run(hidden, probs, w1, w2, indices):
        experts, permutation = layers
        routing = permutation.route(indices, 0, EXPERTS, all_local=True)
        counts = torch.bincount(indices.reshape(-1), minlength=EXPERTS)
        gate, up = experts.grouped_linear(routing.take(hidden), w1, counts, **options).chunk(2, -1)
        rows = experts.grouped_linear(F.silu(gate) * up, w2, routing.groups, **options)
        return routing.combine(rows, probs)

    return run


def grouped_before(layers, **options):
    """Rows that came grouped already, as from other ranks."""

    def run(hidden, probs, w1, w2, indices):
        experts, permutation = layers
        routing = permutation.route(indices, 0, EXPERTS, all_local=True)
        rows = experts.experts_swiglu(routing.take(hidden), None, w1, w2, routing.groups, **options)
        return routing.combine(rows, probs)

    return run


WAYS = {"fused": fused, "in pieces": in_pieces, "grouped before": grouped_before}


def gradients(function, case, seed=9):
    *tensors, indices = case
    output = function(*tensors, indices)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, tensors, grad)]


def close(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        scale = other.double().abs().max().clamp_min(1e-12)
        if (one.double() - other.double()).abs().max() > tolerance * scale:
            return False
    return True


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("products", ["one by one", KERNEL])
def test_every_way_is_the_loop(layers, kernel, way, products):
    kernel(products == "kernel")
    case = make()
    assert close(gradients(WAYS[way](layers), case), gradients(loop, case), 2e-6)


@pytest.mark.parametrize("way", WAYS)
def test_gradcheck_in_double(layers, way):
    case = make(torch.float64, tokens=4)
    assert torch.autograd.gradcheck(
        lambda *tensors: WAYS[way](layers)(*tensors, case[-1]), case[:-1], fast_mode=True
    )


def test_experts_in_another_order_are_noticed(layers):
    """The control: the same experts under other numbers are another layer."""
    hidden, probs, w1, w2, indices = make()
    swapped = torch.tensor([1, 0, *range(2, EXPERTS)])
    found = gradients(fused(layers), (hidden, probs, w1, w2, swapped[indices]))
    assert not close(found, gradients(loop, (hidden, probs, w1, w2, indices)), 1e-2)


@pytest.mark.parametrize("products", ["one by one", KERNEL])
def test_bf16_is_as_close_to_fp32_as_the_loop_is(layers, kernel, products):
    kernel(products == "kernel")
    low = make(torch.bfloat16)
    exact = gradients(loop, tuple(t.detach().float().requires_grad_() for t in low[:-1]) + (low[-1],))

    def errors(found):
        return [float((f.float() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]

    ours, theirs = errors(gradients(fused(layers), low)), errors(gradients(loop, low))
    assert all(mine < 1.3 * other for mine, other in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("products", ["one by one", KERNEL])
def test_no_tokens_at_all(layers, kernel, way, products):
    kernel(products == "kernel")
    case = make(indices=torch.zeros(0, TOPK, dtype=torch.long), tokens=0)
    output, hidden, probs, w1, w2 = gradients(WAYS[way](layers), case)
    assert output.shape == hidden.shape == (0, HIDDEN) and probs.shape == (0, TOPK)
    assert not w1.any() and not w2.any() and w1.shape == case[2].shape


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_add_up_in_main_grad(layers, way, dtype):
    case = make(dtype)
    _, _, _, w1, w2 = gradients(WAYS[way](layers), case)
    for weight in case[2:4]:
        weight.main_grad = torch.full(weight.shape, 3.0)
        weight.grad_added_to_main_grad = False
    run = WAYS[way](layers, gradient_accumulation_fusion=True)
    for _ in range(2):
        output = run(*case)
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
        output.backward(grad)
    for weight, alone in zip(case[2:4], (w1, w2), strict=True):
        assert weight.grad is None and weight.grad_added_to_main_grad
        torch.testing.assert_close(weight.main_grad, 3 + 2 * alone.float(), rtol=1e-5, atol=1e-5)


def test_fusion_without_main_grad_is_refused(layers):
    hidden, probs, w1, w2, indices = make()
    output = fused(layers, gradient_accumulation_fusion=True)(hidden, probs, w1, w2, indices)
    with pytest.raises(ConfigError, match="main_grad"):
        output.sum().backward()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fusion", [False, True])
def test_deferred_gradients_are_the_same_bits_when_flushed(layers, way, fusion):
    found = []
    for deferred in (False, True):
        hidden, probs, w1, w2, indices = make()
        for weight in (w1, w2):
            weight.main_grad = torch.zeros_like(weight)
        run = WAYS[way](layers, gradient_accumulation_fusion=fusion)
        if deferred:
            with seam.deferred_wgrad() as queue:
                run(hidden, probs, w1, w2, indices).square().sum().backward()
            assert w1.grad is None and not w1.main_grad.any() and seam.wgrad_pending(w2)
            assert queue.flush() == 2
        else:
            run(hidden, probs, w1, w2, indices).square().sum().backward()
        found.append([w.main_grad if fusion else w.grad for w in (w1, w2)])
    for now, later in zip(*found, strict=True):
        assert torch.equal(now, later) and now.any()


@pytest.mark.parametrize("way", WAYS)
def test_installed_gemms_get_every_experts_products(layers, way):
    calls = []

    def spy(role, a, b, *, out=None, accumulate=False, recipe=None):
        calls.append((role, tuple(a.shape), tuple(b.shape), recipe))
        return seam.torch_gemm(role, a, b, out=out, accumulate=accumulate)

    case = make()
    expected = gradients(WAYS[way](layers), case)
    case[2].gemm_recipe, case[3].gemm_recipe = "first", "second"
    seam.set_gemm(spy)
    try:
        found = gradients(WAYS[way](layers), case)
    finally:
        seam.set_gemm(None)
    assert close(found, expected, 1e-6)
    counts = torch.bincount(case[-1].reshape(-1), minlength=EXPERTS).tolist()
    for count in set(filter(None, counts)):
        times = counts.count(count)
        for role, a, b, recipe in [
            ("fprop", (count, HIDDEN), (2 * FFN, HIDDEN), "first"),
            ("fprop", (count, FFN), (HIDDEN, FFN), "second"),
            ("dgrad", (count, 2 * FFN), (2 * FFN, HIDDEN), "first"),
            ("dgrad", (count, HIDDEN), (HIDDEN, FFN), "second"),
            ("wgrad", (count, 2 * FFN), (count, HIDDEN), "first"),
            ("wgrad", (count, HIDDEN), (count, FFN), "second"),
        ]:
            assert calls.count((role, a, b, recipe)) == times, role
    assert len(calls) == 6 * len(list(filter(None, counts)))


def test_autocast_computes_in_its_dtype(layers):
    case = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = fused(layers)(*case)
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    assert all(t.grad.dtype is torch.float32 for t in case[:-1])
    low = tuple(t.detach().bfloat16().requires_grad_() for t in case[:-1])
    assert torch.equal(output, fused(layers)(*low, case[-1]))


def test_a_weight_changed_between_forward_and_backward_is_an_error(layers):
    hidden, probs, w1, w2, indices = make()
    output = fused(layers)(hidden, probs, w1, w2, indices)
    with torch.no_grad():
        w2.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        output.sum().backward()


def test_one_products_output_is_all_that_is_kept_beside_the_input(layers):
    hidden, probs, w1, w2, indices = make()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused(layers)(hidden, probs, w1, w2, indices)
    own = [t for t in kept if t.data_ptr() not in (hidden.data_ptr(), probs.data_ptr())]
    assert [tuple(t.shape) for t in own] == [(TOKENS * TOPK, 2 * FFN)]


def test_counts_that_do_not_add_up_are_refused(layers):
    hidden, _, w1, _, _ = make()
    with pytest.raises(ConfigError, match="29 rows and counts that add up to 12"):
        layers[0].grouped_linear(hidden, w1, torch.tensor([2] * EXPERTS))


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="no kernel")
@pytest.mark.parametrize("way", ["fused", "in pieces"])
def test_nothing_is_read_from_the_device(layers, kernel, way, monkeypatch):
    """Tensors without numbers: whoever wants one from the host fails."""
    for module in (layers[0], grouped_seam):
        monkeypatch.setattr(module, "has_grouped_kernel", lambda a, b: True)
    # torch has no autocast for a device without numbers.
    monkeypatch.setattr(layers[0].linear, "_autocast_dtype", lambda tensor: None)
    monkeypatch.setattr(layers[0].linear, "_autocast_off", lambda tensor: contextlib.nullcontext())
    *tensors, indices = make(torch.bfloat16)
    tensors = [torch.nn.Parameter(t.detach().to("meta")) for t in tensors]

    def run(indices, all_local=True):
        routing = layers[1].route(indices, 0, EXPERTS, all_local=all_local)
        hidden, probs, w1, w2 = tensors
        if way == "fused":
            output = layers[0].experts_swiglu(hidden, probs, w1, w2, routing)
        else:
            gate, up = layers[0].grouped_linear(routing.take(hidden), w1, routing.groups).chunk(2, -1)
            rows = layers[0].grouped_linear(F.silu(gate) * up, w2, routing.groups)
            output = routing.combine(rows, probs)
        output.sum().backward()

    run(indices.to("meta"))
    assert all(t.grad.shape == t.shape for t in tensors)
    # The controls: how many choices are this rank's, and products one by one, are read.
    with pytest.raises((RuntimeError, NotImplementedError)):
        run(indices.to("meta"), all_local=False)
    for module in (layers[0], grouped_seam):
        monkeypatch.setattr(module, "has_grouped_kernel", lambda a, b: False)
    with pytest.raises((RuntimeError, NotImplementedError)):
        run(indices.to("meta"))
