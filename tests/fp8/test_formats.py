"""Codes equal those of ml_dtypes, an implementation of its own."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from mt_megatron.fp8.formats import (
    E2M1,
    FORMATS,
    Format,
    decode,
    decode_e8m0,
    encode,
    encode_e8m0,
    pack_e2m1,
    rounded,
    unpack_e2m1,
)

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes, the oracle, is not installed (extra test)")
THEIRS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
FP32 = 10_000_000 if os.environ.get("MT_MEGATRON_SOAK") == "1" else 500_000


def every_bf16() -> torch.Tensor:
    return torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)


def drawn_fp32() -> torch.Tensor:
    bits = np.random.default_rng(5).integers(0, 2**32, FP32, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


INPUTS = {"every bf16": every_bf16, "drawn fp32": drawn_fp32}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("which", INPUTS)
def test_codes_are_those_of_ml_dtypes_after_clamping(fmt: Format, which: str) -> None:
    x = INPUTS[which]()
    numbers = x[~x.isnan()]
    codes = encode(numbers, fmt).view(torch.uint8).numpy()
    clamped = np.clip(numbers.float().numpy(), -fmt.maximum, fmt.maximum)
    expected = clamped.astype(THEIRS[fmt.name])
    assert np.count_nonzero(codes != expected.view(np.uint8)) == 0
    assert np.array_equal(
        decode(encode(numbers, fmt), fmt, torch.float32).numpy(), expected.astype(np.float32)
    )
    assert np.array_equal(
        decode(encode(numbers, fmt), fmt, torch.bfloat16).float().numpy(), expected.astype(np.float32)
    ), "exact in bf16"
    if fmt is not E2M1:
        assert bool(decode(encode(x[x.isnan()], fmt), fmt).isnan().all())


@pytest.mark.parametrize("which", INPUTS)
def test_e8m0_codes_are_those_of_ml_dtypes_after_clamping(which: str) -> None:
    x = INPUTS[which]().float()
    positive = x[(x > 0) & x.isfinite()].clamp(2.0**-127, 2.0**127)
    expected = positive.numpy().astype(ml_dtypes.float8_e8m0fnu)
    assert np.count_nonzero(encode_e8m0(positive).numpy() != expected.view(np.uint8)) == 0
    assert np.array_equal(decode_e8m0(encode_e8m0(positive)).numpy(), expected.astype(np.float32))
    others = x[~((x > 0) & x.isfinite())]
    assert bool((encode_e8m0(others) == 255).all()) and bool(decode_e8m0(encode_e8m0(others)).isnan().all())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_the_mean_of_stochastic_rounding_is_the_number(fmt: Format) -> None:
    generator = torch.Generator().manual_seed(3)
    draws = 40_000
    for number in (0.3 * fmt.smallest, 1.3, -2.7, 0.61 * fmt.maximum, -fmt.maximum):
        x = torch.full((draws,), number)
        found = rounded(x, fmt, torch.rand(draws, generator=generator))
        low, high = found.min(), found.max()
        assert low <= number <= high and len(found.unique()) <= 2
        share = (number - low) / (high - low) if high > low else torch.tensor(0.0)
        sigma = float((high - low) * (share * (1 - share)).sqrt()) / draws**0.5
        assert abs(float(found.double().mean()) - number) <= 4 * sigma + 1e-6 * abs(number)


def test_without_noise_rounding_is_the_cast() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * 3
    for fmt in FORMATS.values():
        clamped = x.clamp(-fmt.maximum, fmt.maximum)
        assert torch.equal(rounded(clamped, fmt), decode(encode(clamped, fmt), fmt, torch.float32))


def test_two_codes_a_byte() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 2)
    packed = pack_e2m1(codes)
    assert packed.shape == (3, 16) and packed[0, 0] == 0x10
    assert torch.equal(unpack_e2m1(packed), codes)
