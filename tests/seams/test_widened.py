"""bf16 products by fp32 kernels: torch's own numbers, and only where torch has no bf16 kernels."""

from __future__ import annotations

from collections.abc import Callable

import megatron.core  # noqa: F401 (before layers that are made for it)
import pytest
import torch
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.fp8.products import reference
from mt_megatron.fp8.quantise import quantise
from mt_megatron.fp8.recipe import CONTRACTED, PRESETS, ROLES, Role
from mt_megatron.layers.attention.core import causal_attention
from mt_megatron.seams import widened
from mt_megatron.seams.gemm import torch_gemm
from tests.fp8.cases import ROUNDS
from tests.launch import run_ranks

T, N, K = 96, 80, 64
SHAPES: dict[Role, tuple[tuple[int, int], tuple[int, int]]] = {
    "fprop": ((T, K), (N, K)),
    "dgrad": ((T, N), (N, K)),
    "wgrad": ((T, N), (T, K)),
}


@pytest.fixture(autouse=True)
def no_bf16_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "serves_processor", lambda: True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The results' dtypes of ``widened.matmul``."""
    made: list[torch.dtype] = []
    original = widened.matmul

    def counted(*operands: Tensor, **how: object) -> Tensor:
        result = original(*operands, **how)  # type: ignore[arg-type]
        made.append(result.dtype)
        return result

    monkeypatch.setattr(widened, "matmul", counted)
    return made


def drawn(role: Role, number: Callable[[tuple[int, int]], Tensor]) -> tuple[Tensor, Tensor]:
    a, b = (number(shape).bfloat16() for shape in SHAPES[role])
    return a, b


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("into", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [False, True])
def test_exact_sums_give_torchs_bits(
    role: Role, into: torch.dtype | None, accumulate: bool, calls: list[torch.dtype]
) -> None:
    """Whole numbers have the same sum in every order, above 256 one that bf16 rounds."""
    generator = torch.Generator().manual_seed(1)
    a, b = drawn(role, lambda shape: torch.randint(-20, 21, shape, generator=generator))
    found = []
    for widen in (False, True):
        out = None
        if into is not None:
            size = torch_gemm(role, a, b).shape
            out = torch.arange(size.numel()).view(size).remainder(701).to(into)
        result = torch_gemm(role, a, b, out=out, accumulate=accumulate and into is not None, widen=widen)
        assert out is None or result is out
        found.append(result)
    assert found[0].dtype is found[1].dtype
    assert torch.equal(*found) and float(found[0].abs().max()) > 256
    assert calls == [into or torch.bfloat16]


@pytest.mark.parametrize("role", ROLES)
def test_sums_are_fp32_and_rounded_once(role: Role, calls: list[torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = drawn(role, lambda shape: torch.randn(shape, generator=generator))
    left, right = (a.t() if role == "wgrad" else a), (b.t() if role == "fprop" else b)
    truth, terms = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    found = torch_gemm(role, a, b, widen=True).double()
    # Half a unit of bf16's 8 bits, and the rounding of the fp32 sums.
    allowed = truth.abs() * 2.0**-8 + left.shape[1] * 2.0**-24 * terms
    assert bool(((found - truth).abs() <= allowed).all()) and calls
    # A sum in bf16 breaks that bound.
    kept = torch.zeros_like(truth).bfloat16()
    for index in range(left.shape[1]):
        kept += left[:, index, None] * right[None, index]
    assert not bool(((kept.double() - truth).abs() <= allowed).all())


def test_only_bf16_products_of_some_size_on_such_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(T, K).bfloat16(), torch.ones(K, N).bfloat16()
    assert widened.suits(a, b)
    assert not widened.suits(a[:8], b)
    assert not widened.suits(a.to("meta"), b.to("meta"))
    for left, right in ((a.float(), b.float()), (a.half(), b.half()), (a, b.float()), (a.float(), b)):
        assert not widened.suits(left, right)
    monkeypatch.setattr(widened, "serves_processor", lambda: False)
    assert not widened.suits(a, b)


def test_plain_products_stay_torchs_unless_asked_for(calls: list[torch.dtype]) -> None:
    a, b = drawn("fprop", torch.ones)
    torch_gemm("fprop", a, b)
    assert not calls
    with widened.chosen("fp32"):
        torch_gemm("fprop", a, b)
    assert len(calls) == 1
    torch_gemm("fprop", a, b)
    assert len(calls) == 1
    with pytest.raises(ConfigError, match="'fp23'; expected one of torch, fp32. Did you mean fp32"):
        widened.choose("fp23")


def test_a_run_says_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert widened.note("torch", "cpu") is None
    assert "torch has none for bf16 on this processor" in str(widened.note("fp32", "cpu"))
    assert widened.note("fp32", "cuda") == "cpu_bf16_products fp32 changes nothing on a cuda device"
    monkeypatch.setattr(widened, "serves_processor", lambda: False)
    assert "changes nothing here: torch has bf16 kernels" in str(widened.note("fp32", "cpu"))


def test_attention_multiplies_values_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, 160, 32, generator=generator).bfloat16() for _ in range(3))
    dtypes: set[torch.dtype] = set()
    bmm = torch.bmm

    def seen(a: Tensor, b: Tensor) -> Tensor:
        dtypes.add(a.dtype)
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", seen)
    found = []
    for products in ("torch", "fp32"):
        dtypes.clear()
        with widened.chosen(products):
            found.append(causal_attention(q, k, v, 32**-0.5))
        assert (torch.bfloat16 in dtypes) == (products == "torch")
    torch.testing.assert_close(*found)


def test_a_run_asks_for_it() -> None:
    """All linears of its steps; the next run of the process has torch's again. FP8's reference needs no
    asking."""
    flags = {
        "torch": "",
        "fp32": "--cpu-bf16-products fp32",
        "tensorwise": "--fp8-recipe tensorwise",
    }
    [found] = run_ranks(1, "tests.seams.widened_ranks:trained", flags, 2)
    torchs, fp32s = found["torch"], found["fp32"]
    assert torchs["products"] == 0 and torchs["notes"] == []
    # Forward, input gradient and weight gradient of four linears in each of four layers, and the output layer
    # with the loss: at least; of every micro-batch of two steps.
    assert fp32s["products"] >= 2 * ROUNDS * 3 * 4 * 4
    assert "torch has none for bf16" in fp32s["notes"][0]
    assert found["tensorwise"]["products"] > 0
    assert not any(each["afterwards"] for each in found.values())
    assert fp32s["losses"] == pytest.approx(torchs["losses"], rel=2e-3)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "nvfp4"])
def test_the_fp8_reference_takes_them(
    name: str, calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And computes what it does by torch's kernels, up to the order of sums."""
    recipe, generator = PRESETS[name], torch.Generator().manual_seed(3)
    for role in ROLES:
        product = recipe.product(role)
        operands = drawn(role, lambda shape: torch.randn(shape, generator=generator))
        a, b = (
            quantise(x, spec, along, generator=generator)
            for x, spec, along in zip(operands, (product.a, product.b), CONTRACTED[role], strict=True)
        )
        by_fp32 = reference(role, a, b, product, torch.bfloat16)
        assert calls and not calls.clear()
        with monkeypatch.context() as processor:
            processor.setattr(widened, "serves_processor", lambda: False)
            by_torch = reference(role, a, b, product, torch.bfloat16)
        assert not calls
        torch.testing.assert_close(by_fp32, by_torch, rtol=2.0**-7, atol=1e-4)
