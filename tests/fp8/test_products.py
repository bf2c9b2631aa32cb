"""Products of quantised operands: within the stated bound, and as torchao computes them."""

from __future__ import annotations

import logging
import math
import os
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mt_megatron.fp8 import products
from mt_megatron.fp8.activation import Activation
from mt_megatron.fp8.bounds import operand_error, product_bound
from mt_megatron.fp8.formats import FORMATS
from mt_megatron.fp8.linear import Fp8Linear
from mt_megatron.fp8.products import reference, scaled_mm
from mt_megatron.fp8.quantise import Quantised, quantise, rotated
from mt_megatron.fp8.recipe import CONTRACTED, PRESETS, Recipe, Role, native_recipes
from mt_megatron.fp8.state import Draw, Fp8State, Options
from tests.fp8.drawn import KINDS, cases

COUNT = 2000 if os.environ.get("MT_MEGATRON_SOAK") == "1" else 160
EVERY = [pytest.param(each, id=each.name) for each in PRESETS.values()]


def cast(recipe: Recipe, role: Role, a: Tensor, b: Tensor, seed: int = 0) -> tuple[Quantised, Quantised]:
    product, generator = recipe.product(role), torch.Generator().manual_seed(seed)
    left, right = CONTRACTED[role]
    return quantise(a, product.a, left, generator=generator), quantise(
        b, product.b, right, generator=generator
    )


def exact(role: Role, a: Tensor, b: Tensor) -> Tensor:
    left, right = CONTRACTED[role]
    return (a.double() if left else a.double().t()) @ (b.double().t() if right else b.double())


@pytest.mark.parametrize("recipe", EVERY)
def test_products_are_within_the_stated_bound(recipe: Recipe, record_property: Any) -> None:
    """In acceptance runs on cases that were never seen: with ``nvfp4`` some three million drawn elements, of
    which one may pass its bound in one run of 300."""
    seed = random.SystemRandom().randrange(1 << 30) if COUNT == 2000 else 11
    record_property("seed", seed)
    worst, noticed, total = dict.fromkeys(KINDS, 0.0), 0, 0
    for index, (kind, role, a, b) in enumerate(cases(recipe, COUNT, seed=seed)):
        qa, qb = cast(recipe, role, a, b, seed=index)
        output = reference(role, qa, qb, recipe.product(role), torch.bfloat16)
        if width := recipe.product(role).a.hadamard:
            a, b = (rotated(x, 0, width) for x in (a, b))
        bound, truth = product_bound(role, a, b, qa, qb, output), exact(role, a, b)
        ratio = float(((output.double() - truth).abs() / bound.clamp_min(1e-300)).max())
        assert ratio <= 1, (kind, role, tuple(a.shape), tuple(b.shape), ratio)
        worst[kind] = max(worst[kind], ratio)
        # The same product with the scale of one operand off by one power of two.
        qa.inverse, qa._values = qa.inverse * 2, None
        off = reference(role, qa, qb, recipe.product(role), torch.bfloat16)
        noticed += bool(((off.double() - truth).abs() > bound).any())
        total += 1
    for kind, ratio in worst.items():
        record_property(f"worst share of the bound, {kind}", round(ratio, 4))
    record_property("wrong scales noticed", f"{noticed} of {total}")
    assert max(worst.values()) >= 0.25, "a bound that nothing comes near says little"
    assert noticed >= 0.99 * total


def test_scales_of_mxfp8_are_those_of_rceil() -> None:
    """Of torchao, to the bit; the rule of OCP MX 1.0, the floor, halves those of amaxes above 1.75 x 2^n."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(-20, 20, (20480, 1), generator=generator)
    x = torch.randn(20480, 32, generator=generator) * torch.exp2(sizes.float())
    ours = quantise(x, PRESETS["mxfp8"].fprop.a, 1).inverse.flatten()
    rceil, floor = (
        to_mx(x, torch.float8_e4m3fn, 32, mode)[0].float().flatten()
        for mode in (ScaleCalculationMode.RCEIL, ScaleCalculationMode.FLOOR)
    )
    assert torch.equal(ours, rceil)
    mantissa = torch.frexp(x.abs().amax(1)).mantissa
    assert torch.equal(ours / floor, torch.where(mantissa > 0.875, 2.0, 1.0))


def test_sums_of_draws_are_as_seldom_far_off_as_the_bound_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a probability that can be counted. What is no draw, always downwards, is farther off."""
    gradient = PRESETS["nvfp4"].dgrad.a
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    factors = torch.rand(256, 16, generator=generator, dtype=torch.float64)

    def beyond(failure: float, draws: int) -> float:
        shares = []
        for _ in range(draws):
            made = quantise(x, gradient, 1, generator=generator)
            error = operand_error(x, made)
            assert error.variance is not None
            spread = (error.variance @ factors.square()).sqrt()
            allowed = math.sqrt(2 * math.log(2 / failure)) * spread + error.sure @ factors
            off = (made.dequantised().double() - x.double()) @ factors
            shares.append(float((off.abs() > allowed).double().mean()))
        return sum(shares) / draws

    # Of 100,000 sums; the proxies are larger than the variances, most of all for small elements.
    assert 0.0002 < beyond(0.05, 100) <= 0.05
    draw = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *shape, **how: torch.zeros_like(draw(*shape, **how)))
    assert beyond(1e-9, 1) > 0.5


def ulps(found: Tensor, expected: Tensor, a: Tensor, b: Tensor) -> float:
    """The largest distance in units of the last place of bf16, beyond what the order of fp32 additions of the
    products of ``a`` and ``b`` (float64, as they are multiplied) may change."""
    x, y = found.double(), expected.double()
    unit = torch.ldexp(torch.ones_like(y), torch.frexp(torch.maximum(x.abs(), y.abs())).exponent - 8)
    noise = a.shape[1] * 2.0**-23 * (a.abs() @ b.abs())
    return float((((x - y).abs() - noise).clamp_min(0) / unit.clamp_min(1e-300)).max())


def factors(role: Role, qa: Quantised, qb: Quantised) -> tuple[Tensor, Tensor]:
    """What both operands stand for, as the product reads them, float64."""
    left, right = CONTRACTED[role]
    a, b = (each.values(torch.float32).double() * each.inverse.double() for each in (qa, qb))
    return (a if left else a.t()), (b.t() if right else b)


AO = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp"}


@pytest.mark.parametrize("name", AO)
def test_codes_scales_and_products_are_torchaos(name: str) -> None:
    pytest.importorskip("torchao", reason="torchao, the oracle, is not installed (extra test)")
    from torchao.float8.config import Float8LinearConfig, ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, ScaledMMConfig

    theirs, recipe = Float8LinearConfig.from_recipe_name(AO[name]), PRESETS[name]
    configs: dict[tuple[Role, str], Any] = {
        ("fprop", "a"): theirs.cast_config_input,
        ("fprop", "b"): theirs.cast_config_weight,
        ("dgrad", "a"): theirs.cast_config_grad_output,
        ("dgrad", "b"): theirs.cast_config_weight_for_grad_input,
        ("wgrad", "a"): theirs.cast_config_grad_output_for_grad_weight,
        ("wgrad", "b"): theirs.cast_config_input_for_grad_weight,
    }
    emulated = LinearMMConfig(*(ScaledMMConfig(True, False, False, False),) * 3)
    for kind, role, a, b in cases(recipe, COUNT // 4, seed=17):
        quantised, made = cast(recipe, role, a, b), []
        for side, x, mine, along in zip("ab", (a, b), quantised, CONTRACTED[role], strict=True):
            config = configs[role, side]
            by_row = config.scaling_granularity is ScalingGranularity.AXISWISE
            # Theirs lie along the last dimension, or the first.
            each = hp_tensor_to_float8_dynamic(
                x,
                config.target_dtype,
                emulated,
                gemm_input_role=GemmInputRole.INPUT if side == "a" else GemmInputRole.WEIGHT,
                scaling_granularity=config.scaling_granularity,
                axiswise_dim=(0 if along == 0 else -1) if by_row else None,
                round_scales_to_power_of_2=theirs.round_scales_to_power_of_2,
            )
            assert mine.codes.dtype is config.target_dtype
            assert torch.equal(mine.codes.view(torch.uint8), each._data.view(torch.uint8)), (kind, role, side)
            assert torch.equal(mine.inverse, each._scale.reciprocal().reshape(mine.inverse.shape))
            made.append(each if along == (1 if side == "a" else 0) else each.t())
        output = reference(role, *quantised, recipe.product(role), torch.bfloat16)
        expected = torch.mm(*made)
        assert expected.dtype is torch.bfloat16
        assert ulps(output, expected, *factors(role, *quantised)) <= 1, (kind, role)


def test_the_kernels_call_computes_what_the_reference_does() -> None:
    """``torch._scaled_mm`` on the cpu, for the recipes that devices have kernels for. It rounds twice there,
    as the reference does where scales are no powers of two."""
    for name in native_recipes(("tensor", "row")):
        recipe = PRESETS[name]
        for index, (_, role, a, b) in enumerate(cases(recipe, 60, seed=23)):
            qa, qb = cast(recipe, role, a, b, seed=index)
            product, sides = recipe.product(role), factors(role, qa, qb)
            found = scaled_mm(role, qa, qb, product, torch.bfloat16)
            expected = reference(role, qa, qb, product, torch.bfloat16)
            assert ulps(found, expected, *sides) <= (1 if product.a.power_of_2 else 2), (name, role)
            by_row = "row" in (product.a.granularity, product.b.granularity)
            wide = found.float() if by_row else scaled_mm(role, qa, qb, product, torch.float32)
            into = torch.ones(found.shape)
            scaled_mm(role, qa, qb, product, torch.bfloat16, out=into, accumulate=True)
            assert torch.equal(into, 1 + wide)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weight_gradients_are_accumulated_in_fp32(
    recipe: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 micro-batches against fp64 sums of the same codes. With scales per row each is rounded to bf16
    first, the only result that the kernels have: that is said, and seen in the sum."""
    monkeypatch.setattr(products, "say_rounded", products.say_rounded.__wrapped__)
    product = PRESETS[recipe].product("wgrad")
    torch.manual_seed(5)
    out, exact = torch.zeros(32, 48), torch.zeros(32, 48, dtype=torch.float64)
    for number in range(64):
        grad, x = torch.randn(64, 32).bfloat16(), torch.randn(64, 48).bfloat16()
        a, b = cast(PRESETS[recipe], "wgrad", grad, x, seed=number)
        with caplog.at_level(logging.WARNING, "mt_megatron"):
            scaled_mm("wgrad", a, b, product, torch.bfloat16, out=out, accumulate=True)
        reference("wgrad", a, b, product, torch.float32, out=(part := torch.zeros(32, 48)))
        exact += part
    off = float((out - exact).abs().max() / exact.abs().max())
    if recipe == "rowwise":
        assert off > 1e-4 and "rounded to bfloat16 before they are accumulated" in caplog.text
    else:
        # 64 sums and 64 products of 64 terms, each rounded to fp32.
        assert off < 128 * 2**-24 and not caplog.text


def test_scales_of_one_expert_are_aligned() -> None:
    """cuBLAS has no kernel for a scale at another address."""
    scales = torch.arange(1.0, 9.0)
    seen = []

    def kernel(a: Any, b: Any, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.extend((scale_a, scale_b))
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)

    recipe = PRESETS["tensorwise"]
    a, b = torch.randn(39, 64).bfloat16(), torch.randn(64, 48).bfloat16()
    left, right = cast(recipe, "dgrad", a, b, seed=0)
    with mock.patch.object(torch, "_scaled_mm", kernel):
        for index in range(8):
            operands = (replace(each, inverse=scales[index]) for each in (left, right))
            scaled_mm("dgrad", *operands, recipe.product("dgrad"), torch.bfloat16)
    assert [each.item() for each in seen[::2]] == list(range(1, 9))
    assert all(each.data_ptr() % 16 == 0 for each in seen) and scales[2].data_ptr() % 16


def test_what_is_not_finite_shows() -> None:
    x = torch.randn(32, 256).bfloat16()
    for recipe in PRESETS.values():
        for wrong in (float("nan"), float("inf")):
            x[3, 5] = wrong
            made = quantise(
                x, recipe.fprop.a, 1, scale=torch.tensor(1.0) if recipe.scaling == "delayed" else None
            )
            found = made.dequantised()
            if recipe.scaling == "delayed" and wrong == float("inf"):
                assert found[3, 5] == 448, "a known scale clamps"
            else:
                assert found[3, 5].isnan(), recipe.name


def test_zeros_stay_zeros_and_partial_blocks_count() -> None:
    for recipe in PRESETS.values():
        for role in ("fprop", "dgrad", "wgrad"):
            product = recipe.product(role)  # type: ignore[arg-type]
            for spec, along in zip((product.a, product.b), CONTRACTED[role], strict=True):  # type: ignore[index]
                if not spec.quantised:
                    continue
                generator = torch.Generator().manual_seed(0)
                assert not quantise(torch.zeros(5, 7), spec, along, generator=generator).dequantised().any()
                x = torch.randn(200, 576)
                found = quantise(x, spec, along, generator=generator).dequantised()
                assert found.shape == x.shape
                limit = 0.2 if spec.format == "e2m1" else 0.08
                assert float((found - x).norm() / x.norm()) < limit


def test_bytes_of_codes_and_scales() -> None:
    x = torch.randn(256, 512).bfloat16()
    sizes = {name: quantise(x, recipe.fprop.a, 1).nbytes for name, recipe in PRESETS.items()}
    assert sizes["tensorwise"] == x.numel() + 4
    assert sizes["rowwise"] == x.numel() + 4 * 256
    assert sizes["blockwise"] == x.numel() + 4 * 256 * 4
    assert sizes["mxfp8"] == x.numel() + 256 * 16
    assert sizes["nvfp4"] == x.numel() // 2 + 256 * 32 + 4
    assert all(FORMATS[recipe.fprop.a.format].bits <= 8 for recipe in PRESETS.values())


@pytest.mark.parametrize(("name", "block"), [("blockwise", 128), ("mxfp8", 32), ("nvfp4", 16)])
def test_codes_of_a_part_of_a_block_are_not_kept_for_a_gathering(name: str, block: int) -> None:
    """The block would have to go on with another rank's rows, and codes of its padding would be gathered."""
    state = Fp8State(PRESETS[name], Options(save_activations=True))
    linear = Fp8Linear(state, "layers.0.linear", torch.nn.Parameter(torch.randn(64, 64).bfloat16()))
    state.add(linear)
    two: Any = SimpleNamespace(size=lambda: 2)
    for rows, group, kept in ((block, two, True), (block - 4, two, False), (block - 4, None, True)):
        x = torch.randn(rows, 64).bfloat16()
        made = Activation(linear, "input", x, group=group, dtype=x.dtype, keep=True)
        with mock.patch.object(
            Fp8Linear, "cast", lambda self, role, kind, x, along, **others: _cast(name, x)
        ):
            saved = made.saved()
        assert (len(saved) > 1) == kept, (rows, group)
        assert kept or saved[0] is x


def _cast(name: str, x: Tensor) -> Quantised:
    return quantise(x, PRESETS[name].cast("wgrad", "input"), 0)


def test_products_of_one_gradient_draw_for_themselves() -> None:
    state = Fp8State(PRESETS["nvfp4"], Options())
    cpu = torch.device("cpu")

    def noise(role: Role, draw: int = 1) -> Tensor:
        made = state.generator("linear", None, role, "grad", Draw(3, draw), cpu)
        return torch.rand(10_000, generator=made) - 0.5

    one = noise("dgrad")
    assert torch.equal(one, noise("dgrad"))
    for other in (noise("wgrad"), noise("dgrad", 2)):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.05


@pytest.mark.parametrize(("role", "shapes"), [("fprop", ((0, 64), (32, 64))), ("wgrad", ((0, 32), (0, 64)))])
def test_experts_without_tokens_have_empty_and_zero_products(
    role: Role, shapes: tuple[tuple[int, int], ...]
) -> None:
    product = PRESETS["rowwise"].product(role)
    operands = []
    for shape, each, along in zip(shapes, (product.a, product.b), CONTRACTED[role], strict=True):
        codes = torch.zeros(shape).to(torch.float8_e4m3fn)
        scales = torch.ones(shape[1 - along])
        operands.append(Quantised(cast=each, along=along, shape=shape, codes=codes, inverse=scales))
    with mock.patch.object(torch, "_scaled_mm", side_effect=RuntimeError("devices refuse empty operands")):
        found = scaled_mm(role, *operands, product, torch.bfloat16)
    assert found.shape == ((0, 32) if role == "fprop" else (32, 64)) and not found.any()


def test_bytes_that_backward_keeps_of_an_input() -> None:
    """Half of bf16's and the scales, where inputs are kept in FP8; everything that autograd saves."""
    import megatron.core  # noqa: F401 (before layers that are made for it)

    from mt_megatron.layers.linear import TensorParallelLinear

    rows, inputs, outputs = 256, 512, 128
    x = torch.randn(rows, inputs).bfloat16().requires_grad_()

    def kept(name: str | None, save_activations: bool) -> int:
        weight = torch.nn.Parameter(torch.randn(outputs, inputs).bfloat16())
        if name is not None:
            state = Fp8State(PRESETS[name], Options(save_activations=save_activations))
            linear = Fp8Linear(state, "layers.0.linear", weight)
            state.add(linear)
            weight.gemm_recipe = linear  # type: ignore[attr-defined]
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            TensorParallelLinear.apply(x, weight, None, False, False, False, None, 0)  # type: ignore[no-untyped-call]
        return sum(sizes.values())

    count = rows * inputs
    assert kept(None, False) == 2 * count
    for name in ("delayed", "tensorwise"):
        assert kept(name, False) == count + 4, "the codes that fprop reads"
    for name in ("rowwise", "blockwise", "mxfp8", "nvfp4"):
        assert kept(name, False) == 2 * count, "wgrad needs other codes"
    # Scales are fp32 in memory, of 512 columns or of blocks of 128, 32 and 16 rows; a code of 4 bits takes a
    # byte there.
    assert kept("rowwise", True) == count + 4 * inputs
    assert kept("blockwise", True) == count + 4 * count // 128
    assert kept("mxfp8", True) == count + 4 * count // 32
    assert kept("nvfp4", True) == count + 4 * count // 16 + 4
