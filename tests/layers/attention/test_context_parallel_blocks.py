"""Blocks of attention, merged, equal one softmax over all keys; fused kernel and tiles agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mt_megatron.layers.attention import context_parallel
from mt_megatron.layers.attention.context_parallel import (
    Merged,
    Scores,
    block_backward,
    block_forward,
    kernel_of,
)

B, HEADS, S, D = 2, 4, 12, 8
EVERYTHING = slice(0, S)


def qkv(groups: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, heads, S, D, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (HEADS, groups, groups)
    ]


def naive(q: Tensor, k: Tensor, v: Tensor, forbidden: Tensor, factor: Any = 1.0) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the definition, in fp64. ``factor`` multiplies the weights (dropout)."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (t.repeat_interleave(HEADS // t.size(1), dim=1) for t in (k, v))
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(forbidden, -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1), nan=0.0)
    return (weights * factor) @ v, scores.logsumexp(-1)


def future() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).triu(1)


@pytest.fixture(params=["fused", "tiles", "small tiles"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "fused":
        monkeypatch.setattr(context_parallel, "_fused_kernel", lambda q, scores: None)
    if request.param == "small tiles":
        monkeypatch.setattr(context_parallel, "_LARGEST_TILE", B * HEADS * S * 5)  # rows of 5, 5 and 2
    return str(request.param)


def causal_in_three_blocks(
    groups: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """Causal attention over 12 keys: two squares on the diagonal and the full one below."""
    q, k, v = (t.to(device) for t in qkv(groups, dtype))
    scale, half = 1 / math.sqrt(D), slice(0, S // 2)
    other = slice(S // 2, S)
    cut = ((half, half, True), (other, other, True), (other, half, False))
    merged = Merged(q, D)
    done = []
    for rows, keys, causal in cut:
        scores = Scores(scale=scale, causal=causal)
        output, lse, kept = block_forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], scores)
        merged.add(rows, output, lse)
        done.append((rows, keys, scores, kept))
    output = merged.output.to(dtype)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v))
    for rows, keys, scores, kept in done:
        parts = block_backward(
            grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], output[:, :, rows],
            merged.lse[:, :, rows], scores, kept,
        )  # fmt: skip
        dq[:, :, rows] += parts[0]
        dk[:, :, keys] += parts[1]
        dv[:, :, keys] += parts[2]
    return [t.cpu() for t in (merged.output, merged.lse, dq, dk, dv)]


def expected(groups: int, forbidden: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    q, k, v = (t.double().requires_grad_() for t in qkv(groups, dtype))
    output, lse = naive(q, k, v, forbidden)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype).double()
    return [output, lse, *torch.autograd.grad(output, (q, k, v), grad)]


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
def test_three_blocks_equal_one_softmax(kernel: str, groups: int) -> None:
    for a, b in zip(causal_in_three_blocks(groups), expected(groups, future()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_a_mask_off_by_one_is_another_result(kernel: str) -> None:
    """Negative control: the comparison above can fail."""
    off_by_one = torch.ones(S, S, dtype=torch.bool).triu(2)
    for a, b in zip(causal_in_three_blocks(2), expected(2, off_by_one), strict=True):
        assert (a.double() - b).abs().max() > 1e-2


def test_bf16_is_as_good_as_bf16_gets(kernel: str) -> None:
    dtype = torch.bfloat16
    for a, b in zip(causal_in_three_blocks(2, dtype), expected(2, future(), dtype), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=3e-2, atol=3e-2)


def test_rows_that_see_nothing_give_zeros_and_minus_infinity() -> None:
    q, k, v = qkv(2)
    forbidden = torch.zeros(1, 1, S, S, dtype=torch.bool)
    forbidden[..., 3, :] = True
    scores = Scores(scale=1 / math.sqrt(D), forbidden=forbidden)
    output, lse, kept = block_forward(q, k, v, scores)
    assert torch.isneginf(lse[:, :, 3]).all() and not output[:, :, 3].any()
    for other in (output, torch.zeros_like(output)):  # merged with itself, and alone
        merged = Merged(q, D)
        merged.add(EVERYTHING, other, lse)
        merged.add(EVERYTHING, other, lse)
        assert torch.isfinite(merged.output).all() and not merged.output[:, :, 3].any()
    grads = block_backward(torch.ones_like(output), q, k, v, output, lse, scores, kept)
    assert all(torch.isfinite(grad).all() for grad in grads) and not grads[0][:, :, 3].any()


@pytest.mark.parametrize("tile", [2**22, B * HEADS * S * 5])
def test_dropout_multiplies_the_weights_by_what_it_keeps(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_parallel, "_LARGEST_TILE", tile)
    q, k, v = (t.requires_grad_() for t in qkv(2))
    torch.manual_seed(3)
    scores = Scores(scale=1 / math.sqrt(D), causal=True, dropout=0.4)
    with torch.no_grad():
        output, lse, kept = block_forward(q, k, v, scores)
    whole = torch.cat(kept, dim=2)
    assert 0.5 < whole.float().mean() < 0.7
    reference, reference_lse = naive(q, k, v, future(), whole / 0.6)
    torch.testing.assert_close(output.double(), reference.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), reference_lse.detach(), rtol=1e-5, atol=1e-5)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine = block_backward(grad, q, k, v, output, lse, scores, kept)
    for a, b in zip(mine, torch.autograd.grad(reference, (q, k, v), grad.double()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_tiles_hold_no_more_scores_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [], context_parallel._tile_scores

    def spy(*args: Any) -> Tensor:
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(context_parallel, "_fused_kernel", lambda q, scores: None)
    monkeypatch.setattr(context_parallel, "_tile_scores", spy)
    monkeypatch.setattr(context_parallel, "_LARGEST_TILE", B * HEADS * S * 3)
    causal_in_three_blocks(2)
    assert seen and max(t.numel() for t in seen) <= B * HEADS * S * 3


def test_which_kernel_is_taken() -> None:
    q, plain = torch.zeros(1, 1, 2, 8), Scores(scale=1.0)
    assert kernel_of(q, plain) == "cpu"
    assert kernel_of(q, Scores(scale=1.0, dropout=0.1)) == "tiles"
    assert kernel_of(q, Scores(scale=1.0, forbidden=torch.zeros(2, 2, dtype=torch.bool))) == "tiles"
    assert kernel_of(q.to("meta"), plain) == "tiles"


def test_tiles_are_taken_with_one_line_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    context_parallel._say_tiled.cache_clear()
    for _ in range(2):
        kernel_of(torch.zeros(1, 1, 2, 8, device="meta"), Scores(scale=1.0))
        kernel_of(torch.zeros(1, 1, 2, 8), Scores(scale=1.0, dropout=0.1))
        kernel_of(torch.zeros(1, 1, 2, 8), Scores(scale=1.0))
    assert len(caplog.records) == 2
    assert "on meta" in caplog.text and "there is none for this device" in caplog.text
    assert "on cpu" in caplog.text and "there is none for dropout" in caplog.text


@pytest.mark.backend("cuda")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_three_blocks_equal_one_softmax_on_cuda(groups: int, dtype: torch.dtype) -> None:
    q = torch.zeros(1, 1, 2, D, dtype=dtype, device="cuda")
    assert kernel_of(q, Scores(scale=1.0)) == ("tiles" if dtype is torch.float32 else "cuda")
    bound = 1e-4 if dtype is torch.float32 else 3e-2
    found = causal_in_three_blocks(groups, dtype, "cuda")
    for a, b in zip(found, expected(groups, future(), dtype), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound)


def test_cudas_kernel_takes_what_is_passed() -> None:
    """Shapes and arguments alone, by torch's own description of the kernel on fake tensors: nothing is
    computed, and numbers are only seen on a device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 2, 16, 64, dtype=torch.bfloat16, device="cuda")
        scores = Scores(scale=0.1, causal=True)
        assert kernel_of(q, scores) == "cuda" and kernel_of(q.float(), scores) == "tiles"
        odd = torch.empty(2, 4, 16, 60, dtype=torch.bfloat16, device="cuda")
        assert kernel_of(odd, scores) == "tiles"
        output, lse, kept = block_forward(q, k, k, scores)
        assert output.shape == q.shape and lse.shape == (2, 4, 16) and lse.dtype == torch.float32
        found = block_backward(output, q, k, k, output, lse, scores, kept)
        assert [t.shape for t in found] == [q.shape, k.shape, k.shape]
