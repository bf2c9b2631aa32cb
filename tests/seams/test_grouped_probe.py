"""torch's grouped kernel is believed about experts without rows only after a look at its numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mt_megatron.seams import grouped_gemm as seam

Kernel = Callable[..., Tensor]
DTYPES = (torch.float32, torch.bfloat16)


def right(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """What the kernel promises, as a loop."""
    return _computed(a, b, offs, 0.0)


def leaves_garbage(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Weight gradients of experts without rows are what the memory held."""
    return _computed(a, b, offs, None)


def shifts_rows(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Gives an expert without rows the next one's first row."""
    if b.dim() == 3 and bool((offs.diff(prepend=offs.new_zeros(1)) == 0).any()):
        return right(a, b.roll(1, 0), offs)
    return right(a, b, offs)


def knows_no_empty_groups(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    if bool((offs.diff(prepend=offs.new_zeros(1)) == 0).any()):
        raise RuntimeError("group of size 0\nmore of it")
    return right(a, b, offs)


def _computed(a: Tensor, b: Tensor, offs: Tensor, empty: float | None) -> Tensor:
    bounds = list(pairwise([0, *offs.tolist()]))
    if b.dim() == 3:
        return torch.cat([a[start:end] @ b[expert] for expert, (start, end) in enumerate(bounds)])
    out = torch.empty(len(bounds), a.shape[0], b.shape[1], dtype=a.dtype)
    for expert, (start, end) in enumerate(bounds):
        if end > start:
            out[expert] = a[:, start:end] @ b[start:end]
        elif empty is not None:
            out[expert] = empty
    return out


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Kernel], None]]:
    """Let a kernel be torch's; nothing of another one is remembered before or afterwards."""

    def take(kernel: Kernel) -> None:
        monkeypatch.setattr(torch, "_grouped_mm", kernel, raising=False)
        seam.verdict.cache_clear()

    verdict = seam.verdict  # Tests put other functions in its place.
    verdict.cache_clear()
    yield take
    verdict.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "expected", "said"),
    [
        (right, "whole", ""),
        (leaves_garbage, "mask", "unwritten; they are set to zero"),
        (shifts_rows, "none", "one by one are used: its results are wrong"),
        (knows_no_empty_groups, "none", "one by one are used: group of size 0"),
    ],
)
def test_the_verdict_is_by_the_numbers_and_said_once(
    use: Any, kernel: Kernel, expected: str, said: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    use(kernel)
    with caplog.at_level(logging.WARNING, logger="mt_megatron"):
        assert {seam.verdict("cpu", None, dtype) for _ in range(3)} == {expected}
    lines = [record.getMessage() for record in caplog.records if record.name == "mt_megatron"]
    assert (
        len(lines) == (1 if said else 0) and said in " ".join(lines) and "more of it" not in " ".join(lines)
    )
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped kernel")
@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_own_kernel_on_the_cpu(dtype: torch.dtype) -> None:
    seam.verdict.cache_clear()
    try:
        torch._grouped_mm(torch.ones(4, 8), torch.ones(1, 8, 8), offs=torch.tensor([4], dtype=torch.int32))
    except (RuntimeError, NotImplementedError):
        pytest.skip("this torch has no grouped kernel for a CPU")
    assert seam.verdict("cpu", None, dtype) == "whole"


@pytest.mark.parametrize("counts", [(0, 3, 2, 4), (3, 0, 2, 4), (3, 2, 4, 0), (0, 0, 9, 0), (0, 0, 0, 0)])
def test_gradients_of_experts_without_rows_are_zero_whatever_the_kernel_leaves(
    use: Any, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(leaves_garbage)
    monkeypatch.setattr(seam, "has_grouped_kernel", lambda a, b: True)
    rows = sum(counts)
    groups = seam.groups_from(torch.tensor(counts), rows, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    input, grad = (torch.randn(rows, 8, generator=generator) for _ in range(2))
    weights = torch.randn(4, 8, 8, generator=generator)
    wgrad = seam.grouped_gemm("wgrad", grad, input, groups)
    expected = [y.t() @ x for x, y in zip(input.split(counts), grad.split(counts), strict=True)]
    torch.testing.assert_close(wgrad, torch.stack(expected))
    held = torch.ones(4, 8, 8)
    seam.grouped_gemm("wgrad", grad, input, groups, out=held, accumulate=True)
    torch.testing.assert_close(held, 1 + torch.stack(expected))
    for role, transposed in (("fprop", weights.transpose(1, 2)), ("dgrad", weights)):
        given = input if role == "fprop" else grad
        found = seam.grouped_gemm(role, given, weights, groups)  # type: ignore[arg-type]
        products = [x @ w for x, w in zip(given.split(counts), transposed, strict=True)]
        torch.testing.assert_close(found, torch.cat(products))


def test_without_the_probe_garbage_would_be_a_gradient(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same kernel, believed."""
    use(leaves_garbage)
    monkeypatch.setattr(seam, "has_grouped_kernel", lambda a, b: True)
    monkeypatch.setattr(seam, "verdict", lambda *key: "whole")
    groups = seam.groups_from(torch.tensor([2, 0]), 2, torch.device("cpu"))
    # Memory that nobody writes holds NaN in this mode.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        wgrad = seam.grouped_gemm("wgrad", torch.ones(2, 8), torch.ones(2, 8), groups)
    finally:
        torch.use_deterministic_algorithms(False)
    assert wgrad[1].isnan().all() and wgrad[0].eq(2).all()
