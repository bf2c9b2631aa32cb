"""Callers of a device's casts, with a stand-in of ``triton_casts`` on the host.

The kernels themselves run on a GPU alone (``tests/device``). The stand-in shows that callers ask for the
right magnitudes, scales and layouts, and that products read codes of either layout.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mt_megatron.fp8 import products
from mt_megatron.fp8.device import casts as device_casts
from mt_megatron.fp8.formats import Format, encode
from mt_megatron.fp8.grouped import quantise_groups
from mt_megatron.fp8.quantise import quantise
from mt_megatron.fp8.recipe import CONTRACTED, OPERANDS, PRESETS, ROLES, Cast, Recipe, Role
from tests.fp8.test_grouped import COUNTS, drawn, same, seeded

WHOLE, ROWS, COLUMNS, BLOCKS = "whole", "rows", "columns", "blocks"
EVERY = [pytest.param(each, id=each.name) for each in PRESETS.values()]


def amax(x: Tensor, kind: str) -> Tensor:
    if kind == WHOLE:
        return x.abs().amax().float() if x.numel() else torch.zeros(())
    dim = {ROWS: 1, COLUMNS: 0}[kind]
    return x.abs().amax(dim=dim, keepdim=True).float()


def cast(
    x: Tensor, scale: Tensor, fmt: Format, kind: str, *, turned: bool, block: tuple[int, int] = (1, 1)
) -> Tensor:
    rows, columns = x.shape
    shapes = {WHOLE: None, ROWS: (rows, 1), COLUMNS: (1, columns)}
    if kind == BLOCKS:
        scale = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    elif shapes[kind] is not None:
        assert scale.shape == shapes[kind]
    codes = encode(x.float() * scale, fmt)
    return codes.t().contiguous().t() if turned else codes


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on the stand-in casts all matrices; returned are the kinds of casts that it was asked for."""
    kinds: list[str] = []

    def counted(x: Tensor, scale: Tensor, fmt: Format, kind: str, **how: Any) -> Tensor:
        kinds.append(kind)
        return cast(x, scale, fmt, kind, **how)

    names = {"WHOLE": WHOLE, "ROWS": ROWS, "COLUMNS": COLUMNS, "BLOCKS": BLOCKS}
    module = SimpleNamespace(**names, amax=amax, cast=counted)
    monkeypatch.setattr(device_casts, "kernels_for", lambda x: module)
    return kinds


def operands(recipe: Recipe, role: Role) -> list[tuple[Tensor, Cast, int]]:
    generator = torch.Generator().manual_seed(3)
    product, along = recipe.product(role), CONTRACTED[role]
    sizes = ((48, 80), (96, 80)) if role == "fprop" else ((48, 80), (80, 96))
    if role == "wgrad":
        sizes = ((80, 48), (80, 96))
    return [
        (torch.randn(size, generator=generator).bfloat16(), spec, dim)
        for size, spec, dim in zip(sizes, (product.a, product.b), along, strict=True)
    ]


@pytest.mark.parametrize("recipe", EVERY)
def test_codes_scales_and_products_are_the_same(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ROLES:
        product = recipe.product(role)
        if not product.quantised or product.a.stochastic or product.b.stochastic:
            continue
        sources = operands(recipe, role)
        plain = [quantise(x, spec, dim) for x, spec, dim in sources]
        with monkeypatch.context() as patched:
            stand_in(patched)
            made = [quantise(x, spec, dim) for x, spec, dim in sources]
        for one, other in zip(made, plain, strict=True):
            same(one, other)
            assert torch.equal(one.laid().view(torch.uint8), other.laid().view(torch.uint8))
            assert one.laid().is_contiguous() and one.laid() is one.laid()
            if one.cast.granularity != "block" and one.format.dtype is not None:
                # Stored as a kernel reads it: no copy.
                assert one.laid().data_ptr() == one.codes.data_ptr()
            assert torch.equal(one.turned().laid().view(torch.uint8), other.laid().view(torch.uint8).t())
        expected = products.reference(role, plain[0], plain[1], product, torch.bfloat16)
        assert torch.equal(products.reference(role, made[0], made[1], product, torch.bfloat16), expected)
        if all(each.cast.granularity == "tensor" for each in made):
            found = products.scaled_mm(role, made[0], made[1], product, torch.bfloat16)
            assert torch.equal(found, products.scaled_mm(role, plain[0], plain[1], product, torch.bfloat16))


@pytest.mark.parametrize("recipe", EVERY)
def test_experts_rows_are_the_same(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    for counts in COUNTS:
        sources = drawn(counts)
        if sum(counts) > 5:
            sources["input"][0][3, 2] = float("nan")
        for role in ROLES:
            product = recipe.product(role)
            if not product.quantised:
                continue
            for kind, spec, along in zip(
                OPERANDS[role], (product.a, product.b), CONTRACTED[role], strict=True
            ):
                source, groups = sources[kind]
                plain = quantise_groups(source, groups, spec, along, generators=seeded, kernel=True)
                with monkeypatch.context() as patched:
                    stand_in(patched)
                    made = quantise_groups(source, groups, spec, along, generators=seeded, kernel=True)
                for expert, (start, end) in enumerate(groups.bounds()):
                    if end > start:
                        same(made.of(expert), plain.of(expert))


def test_the_stand_in_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch)
    x = torch.randn(8, 32).bfloat16()
    cases: tuple[tuple[str, Role], ...] = (
        ("tensorwise", "fprop"),
        ("rowwise", "fprop"),
        ("rowwise", "wgrad"),
    )
    for recipe, role in cases:
        quantise(x, PRESETS[recipe].product(role).a, CONTRACTED[role][0])
    assert asked == [WHOLE, ROWS, COLUMNS]


def test_the_self_check_tells_right_kernels_from_wrong_ones() -> None:
    names = {"WHOLE": WHOLE, "ROWS": ROWS, "COLUMNS": COLUMNS, "BLOCKS": BLOCKS}
    right = SimpleNamespace(**names, amax=amax, cast=cast, transposed=lambda codes: codes.t().contiguous())
    host = torch.device("cpu")

    def other(kind: str, change: Callable[[Tensor], Tensor]) -> Any:
        def made(x: Tensor, scale: Tensor, fmt: Format, asked: str, **how: Any) -> Tensor:
            codes = cast(x, scale, fmt, asked, **how)
            return change(codes.float()).to(codes.dtype) if asked == kind else codes

        return SimpleNamespace(**{**vars(right), "cast": made})

    before = torch.get_rng_state()
    assert device_casts._agrees(right, host)
    assert torch.equal(torch.get_rng_state(), before)
    wrongs: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda codes: codes.nan_to_num(0.0),
        lambda codes: codes.where(codes.abs() > 0.1, 0),
    )
    for kind in names.values():
        for change in wrongs:
            assert not device_casts._agrees(other(kind, change), host), kind
    for name, wrong in (("amax", lambda x, kind: amax(x, kind) * 1.01), ("transposed", lambda codes: codes)):
        assert not device_casts._agrees(SimpleNamespace(**{**vars(right), name: wrong}), host), name


def test_a_device_without_triton_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "mt_megatron.fp8.device.triton_casts", raising=False)
    device_casts._kernels.cache_clear()
    with caplog.at_level(logging.WARNING, "mt_megatron"):
        assert device_casts._kernels("cuda") is None and device_casts._kernels("cuda") is None
    device_casts._kernels.cache_clear()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "casts by PyTorch's operations" in line and "Triton cannot be imported" in line
    assert device_casts._kernels("musa") is None
