"""All experts at once: the codes, scales and products of the experts one by one, bit for bit.

Nothing here has a grouped kernel: ``torch._scaled_grouped_mm`` is simulated by a loop, behind torch's own
checks of its operands (its implementation for tensors without data).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mt_megatron.fp8 import grouped_products, products
from mt_megatron.fp8.activation import Activation
from mt_megatron.fp8.grouped import layout_of, multiple_of, quantise_groups
from mt_megatron.fp8.linear import Fp8Linear
from mt_megatron.fp8.quantise import Quantised, quantise
from mt_megatron.fp8.recipe import CONTRACTED, OPERANDS, PRESETS, ROLES, Recipe, native_recipes
from mt_megatron.fp8.state import Fp8State, Options
from mt_megatron.seams.gemm import WeightRef, gemm
from mt_megatron.seams.grouped_gemm import TokenGroups, groups_from

HOST = torch.device("cpu")
COUNTS = ([5, 0, 37, 128, 1, 130], [0, 0, 7], [16, 32], [0])
INPUTS, OUTPUTS = 80, 48
EVERY = [pytest.param(each, id=each.name) for each in PRESETS.values()]


def groups_of(counts: list[int]) -> TokenGroups:
    return groups_from(counts, sum(counts), HOST)


def drawn(counts: list[int], seed: int = 0) -> dict[str, tuple[Tensor, TokenGroups]]:
    generator = torch.Generator().manual_seed(seed)
    rows, experts = sum(counts), len(counts)
    of = groups_of(counts)
    x = torch.randn(rows, INPUTS, generator=generator).bfloat16()
    grad = torch.randn(rows, OUTPUTS, generator=generator).bfloat16()
    weight = torch.randn(experts * OUTPUTS, INPUTS, generator=generator).bfloat16()
    return {"input": (x, of), "grad": (grad, of), "weight": (weight, groups_of([OUTPUTS] * experts))}


def seeded(expert: int) -> torch.Generator:
    return torch.Generator().manual_seed(expert)


def same(found: Quantised, expected: Quantised) -> None:
    assert found.shape == expected.shape
    pairs = [(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))]
    pairs.append((found.inverse, expected.inverse))
    assert (found.second is None) == (expected.second is None)
    if found.second is not None and expected.second is not None:
        pairs.append((found.second, expected.second))
    for one, other in pairs:
        assert one.shape == other.shape
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))


@pytest.mark.parametrize("recipe", EVERY)
def test_codes_and_scales_are_each_experts_own(recipe: Recipe) -> None:
    for counts in COUNTS:
        sources = drawn(counts)
        if sum(counts) > 5:
            sources["input"][0][3, 2], sources["grad"][0][4, 1] = float("nan"), float("inf")
        for role in ROLES:
            product = recipe.product(role)
            if not product.quantised:
                continue
            for kind, spec, along in zip(
                OPERANDS[role], (product.a, product.b), CONTRACTED[role], strict=True
            ):
                source, groups = sources[kind]
                for kernel in (False, True):
                    made = quantise_groups(source, groups, spec, along, generators=seeded, kernel=kernel)
                    for expert, (start, end) in enumerate(groups.bounds()):
                        if end > start:
                            alone = quantise(source[start:end], spec, along, generator=seeded(expert))
                            same(made.of(expert), alone)


def test_counts_that_the_host_does_not_know_give_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = PRESETS["rowwise"]
    for counts in COUNTS:
        x, groups = drawn(counts)["input"]
        known = [quantise_groups(x, groups, recipe.wgrad.b, along, kernel=True) for along in (0, 1)]
        with monkeypatch.context() as patched:
            patched.setattr(TokenGroups, "on_host", property(lambda self: False))
            patched.setattr(TokenGroups, "bounds", None)
            unknown = [quantise_groups(x, groups, recipe.wgrad.b, along, kernel=True) for along in (0, 1)]
        for one, other in zip(known, unknown, strict=True):
            assert other.layout.rows % 16 == 0 and other.layout.rows >= one.layout.rows
            assert torch.equal(one.layout.ends, other.layout.ends)
            rows = one.layout.rows
            assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8)[:rows])
            assert not other.codes.view(torch.uint8)[rows:].any()
            kept = slice(None) if one.along == 0 else slice(rows)
            assert torch.equal(one.inverse, other.inverse[kept])


def test_padding_is_as_small_as_the_cast_allows() -> None:
    assert multiple_of(PRESETS["tensorwise"].fprop.a, 1) == 1
    assert multiple_of(PRESETS["tensorwise"].fprop.a, 1, kernel=True) == 16
    assert multiple_of(PRESETS["rowwise"].wgrad.a, 0) == 16
    assert multiple_of(PRESETS["mxfp8"].wgrad.a, 0) == 32
    assert multiple_of(PRESETS["blockwise"].wgrad.a, 0) == 128
    assert multiple_of(PRESETS["blockwise"].fprop.b, 1) == 128
    assert layout_of(groups_of([16, 32]), 16).place is None
    assert layout_of(groups_of([5, 0, 17]), 16).rows == 48


def simulated(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """What ``torch._scaled_grouped_mm`` is documented to compute, expert by expert. Rows beyond the last
    expert's, and weight gradients of experts without rows, are left as they were: NaN.

    Scales that are one number for all rows and columns are applied as that number: a CPU with AMX rounds a
    product by rows otherwise."""
    bare = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (a, b)]
    scales = [torch.empty_like(x, device="meta") for x in (scale_a, scale_b)]
    shape = torch.ops.aten._scaled_grouped_mm(
        *bare, *scales, offs=offs.to("meta"), out_dtype=out_dtype, use_fast_accum=use_fast_accum
    ).shape
    out = torch.full(tuple(shape), torch.nan, dtype=out_dtype)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        assert start % 16 == 0 and end % 16 == 0
        if end > start:
            rows, columns = slice(start, end), slice(None)
            over_rows = b.dim() == 2
            left = a[:, rows] if over_rows else a[rows]
            right = b[rows] if over_rows else b[expert]
            height, width = left.shape[0], right.shape[1]
            by_row = scale_a.view(len(offs), -1)[expert] if over_rows else scale_a[rows]
            by_column = scale_b.view(len(offs), -1)[expert] if over_rows else scale_b[expert]
            into = out[expert] if over_rows else out[rows, columns]
            scales = [by_row.reshape(height, 1).contiguous(), by_column.reshape(1, width).contiguous()]
            if all((each == each.flatten()[0]).all() for each in scales):
                scales = [each.flatten()[0].clone() for each in scales]
            into.copy_(
                torch._scaled_mm(left.contiguous(), right.t().contiguous().t(), *scales, out_dtype=out_dtype)
            )
        start = end
    return out


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """``torch._scaled_grouped_mm``, simulated; the shapes of its calls."""
    calls: list[str] = []

    def counted(a: Tensor, b: Tensor, *args: Any, **how: Any) -> Tensor:
        calls.append(f"{a.dim()}d x {b.dim()}d")
        return simulated(a, b, *args, **how)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", counted)
    grouped_products.has_kernel.cache_clear()
    yield calls
    grouped_products.has_kernel.cache_clear()


@pytest.mark.parametrize("role", ROLES)
def test_one_call_of_the_simulated_kernel_computes_every_expert(kernel: list[str], role: Any) -> None:
    assert grouped_products.has_kernel("cpu")
    for recipe in (PRESETS["rowwise"], PRESETS["tensorwise"]):
        product = recipe.product(role)
        for counts in COUNTS:
            sources = drawn(counts, seed=3)
            a, b = (
                quantise_groups(*sources[kind], spec, along, kernel=True)
                for kind, spec, along in zip(
                    OPERANDS[role], (product.a, product.b), CONTRACTED[role], strict=True
                )
            )
            kernel.clear()
            made = grouped_products.grouped(role, a, b, product, torch.bfloat16, products.scaled_mm)
            # Kernels know e4m3 alone: gradients in e5m2 are multiplied one by one.
            one = recipe.name == "rowwise" or role == "fprop"
            assert len(kernel) == (1 if one and sum(counts) else 0)
            into = torch.ones(made.shape)
            more = {"out": into, "accumulate": True}
            grouped_products.grouped(role, a, b, product, torch.bfloat16, products.scaled_mm, **more)
            wide = made.float()
            if recipe.name == "tensorwise":  # no rounding to bf16 in between
                wide = grouped_products.grouped(role, a, b, product, torch.float32, products.scaled_mm)
                assert (wide.bfloat16() == made).all()
            assert torch.equal(into, 1 + wide)
            for expert, (start, end) in enumerate(groups_of(counts).bounds()):
                found = made[expert] if role == "wgrad" else made[start:end]
                if end == start:
                    assert not found.any()
                    continue
                expected = products.scaled_mm(role, a.of(expert), b.of(expert), product, torch.bfloat16)
                assert torch.equal(found, expected), (recipe.name, counts, expert)


def test_a_kernel_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, kernel: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", lambda *args, **how: 2 * simulated(*args, **how))
    with caplog.at_level(logging.WARNING, "mt_megatron"):
        assert not grouped_products.has_kernel("cpu")
    assert "its results are wrong): experts are multiplied one by one" in caplog.text


def test_this_cpu_has_no_grouped_kernel(caplog: pytest.LogCaptureFixture) -> None:
    grouped_products.has_kernel.cache_clear()
    with caplog.at_level(logging.WARNING, "mt_megatron"):
        assert not grouped_products.has_kernel("cpu")
    assert "no grouped kernel on cpu" in caplog.text


class Experts:
    """A state, and one weight with all experts."""

    def __init__(self, recipe: Recipe, weight: Tensor, *, native: bool) -> None:
        self.parameter = torch.nn.Parameter(weight.clone())
        self.state = Fp8State(recipe, Options())
        self.state.kernels = "scaled_mm" if native else "reference"
        self.linear = Fp8Linear(self.state, "layers.0.experts", self.parameter)
        self.state.add(self.linear)
        self.parameter.gemm_recipe = self.linear  # type: ignore[attr-defined]


def together(side: Experts, x: Tensor, grad: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    import megatron.core  # noqa: F401 (before layers that are made for it)

    from mt_megatron.layers.moe.experts import grouped_linear

    x = x.clone().requires_grad_()
    output = grouped_linear(x, side.parameter, groups_of(counts))
    output.backward(grad)
    assert x.grad is not None and side.parameter.grad is not None
    return output.detach(), x.grad, side.parameter.grad


def one_by_one(side: Experts, x: Tensor, grad: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """Each expert with operands of its own, as ``SequentialMLP``'s linears do."""
    weight = side.parameter.detach()
    output = x.new_zeros(len(x), OUTPUTS)
    of_input, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
    for backward in (False, True):
        for expert, (start, end) in enumerate(groups_of(counts).bounds()):
            if end == start:
                continue
            reference = WeightRef(side.parameter, expert)

            def operand(kind: Any, rows: Tensor, expert: int = expert) -> Activation:
                return Activation(side.linear, kind, rows, group=None, dtype=rows.dtype, expert=expert)

            def product(role: Any, a: Any, b: Any, reference: WeightRef = reference) -> Tensor:
                return gemm(role, a, b, recipe=side.linear, weight=reference)

            rows = operand("input", x[start:end])
            if not backward:
                output[start:end] = product("fprop", rows, weight[expert])
                continue
            back = operand("grad", grad[start:end])
            of_input[start:end] = product("dgrad", back, weight[expert])
            of_weight[expert] = product("wgrad", back, rows)
    return output, of_input, of_weight


NATIVE = native_recipes(("tensor", "row"))


@pytest.mark.parametrize(
    ("name", "native"), [*((name, False) for name in PRESETS), *((name, True) for name in NATIVE)]
)
def test_a_layer_of_experts_is_the_experts_one_by_one(name: str, native: bool) -> None:
    """Draws and delayed scales included; each operand is cast once for each layout."""
    recipe, counts = PRESETS[name], [5, 0, 37, 64]
    sources = drawn(counts, seed=9)
    x, grad = sources["input"][0], sources["grad"][0]
    weight = sources["weight"][0].view(len(counts), OUTPUTS, INPUTS)
    found, seen = [], []
    for compute in (together, one_by_one):
        side = Experts(recipe, weight, native=native)
        with side.state.stepping(forward_only=False):
            found.append(compute(side, x, grad, counts))
            if recipe.scaling == "delayed":
                assert side.state._seen is not None
                seen.append(side.state._seen.clone())
            if compute is together and native:
                casts = {
                    kind: side.state.counts[f"{kind}.0"] + side.state.counts[f"{kind}.1"]
                    for kind in ("input", "weight", "grad")
                }
                # Backward computes inputs anew, and casts them anew.
                whole = recipe.wgrad.quantised
                assert casts["input"] == (2 if whole else 1)
                assert casts["weight"] == (1 if recipe.shares_weight_codes else 2)
                assert casts["grad"] == (1 if recipe.shares_grad_codes or not whole else 2)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.any()
    assert not seen or (torch.equal(*seen) and bool(seen[0].all()))


@pytest.mark.parametrize("name", NATIVE)
def test_a_whole_expert_layer_takes_all_experts_at_once(
    kernel: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """SwiGLU between two products, beside the tiles of one expert each that a CPU works on."""
    import megatron.core  # noqa: F401 (before layers that are made for it)

    from mt_megatron.layers.moe import experts

    assert grouped_products.has_kernel("cpu")
    generator, counts = torch.Generator().manual_seed(2), [16, 0, 48, 32]
    rows, width, hidden = sum(counts), 32, 64

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    first, second = tensor(4, 2 * width, hidden), tensor(4, hidden, width)
    x, grad = tensor(rows, hidden), tensor(rows, hidden)
    found = []
    for whole in (False, True):
        monkeypatch.setattr(experts, "has_grouped_kernel", lambda a, b, whole=whole: whole)
        sides = [Experts(PRESETS[name], each, native=True) for each in (first, second)]
        kernel.clear()
        with sides[0].state.stepping(forward_only=False), sides[1].state.stepping(forward_only=False):
            inputs = x.clone().requires_grad_()
            parameters = [side.parameter for side in sides]
            output = experts.experts_swiglu(inputs, None, *parameters, groups_of(counts))
            output.backward(grad)
        if whole:
            # Two products in forward, four in backward; the kernel knows e4m3 alone.
            known = {"rowwise": 6, "rowwise_gw_hp": 4}
            assert len(kernel) == known.get(name, 2)
        else:
            assert not kernel
        found.append((output.detach(), inputs.grad, *(each.grad for each in parameters)))
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        assert torch.equal(one, other) and one.any()
