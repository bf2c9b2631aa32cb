"""The checks of a single device, run in a process of their own: numbers are compared with the host's."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F

import mt_megatron
from mt_megatron.fp8 import grouped_products, products
from mt_megatron.fp8.device import casts as device_casts
from mt_megatron.fp8.formats import FORMATS, decode, decode_e8m0, encode, encode_e8m0, rounded
from mt_megatron.fp8.grouped import quantise_groups
from mt_megatron.fp8.products import reference, scaled_mm
from mt_megatron.fp8.quantise import quantise
from mt_megatron.fp8.recipe import CONTRACTED, OPERANDS, PRESETS, ROLES, native_recipes
from mt_megatron.seams.grouped_gemm import groups_from
from tests.device.result import Unsupported, checked

CHECKS: dict[str, Callable[[Any], dict[str, Any]]] = {}
MIB = 2**20


def check(function: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Register a check; it takes the backend and returns figures."""
    CHECKS[function.__name__] = function
    return function


def run() -> list[dict[str, Any]]:
    """Every check, on device 0."""
    return run_some(list(CHECKS))


def run_some(names: list[str]) -> list[dict[str, Any]]:
    """The checks ``names``."""
    mt_megatron.patch(os.environ["MT_MEGATRON_TEST_BACKEND"])
    backend = mt_megatron.backend()
    backend.set_device(0)
    return [asdict(checked("device", name, lambda f=CHECKS[name]: f(backend))) for name in names]


def cuda_of(backend: Any) -> Any:
    """What Megatron sees as ``torch.cuda`` on this backend."""
    import megatron.core.tensor_parallel.random as megatron_random

    return megatron_random.torch.cuda


def _close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> float:
    scale = max(expected.abs().max().item(), 1e-30)
    worst = (found.detach().cpu().double() - expected.detach().double()).abs().max().item() / scale
    assert worst <= bound, f"deviates by {worst:.3g} of the largest element, allowed {bound:g}"
    return worst


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.GELU(), torch.nn.Linear(128, 64)
    )


@check
def what_it_is(backend: Any) -> dict[str, Any]:
    reading = backend.telemetry(backend.current_device())
    telemetry = {name: str(value) for name, value in asdict(reading).items()}
    return {
        "name": backend.device_name(0),
        "devices": backend.device_count(),
        "memory_bytes": backend.total_memory(),
        "bf16": backend.bf16_supported(),
        "fp8_granularities": list(backend.fp8_granularities()),
        "telemetry": telemetry,
    }


@check
def backward_equals_the_host(backend: Any) -> dict[str, Any]:
    host = _model(1)
    device = copy.deepcopy(host).to(backend.device(backend.current_device()))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    host(x).square().mean().backward()
    device(x.to(backend.device(backend.current_device()))).square().mean().backward()
    pairs = zip(host.parameters(), device.parameters(), strict=True)
    return {"largest_deviation": max(_close(d.grad, h.grad, 1e-4) for h, d in pairs)}


@check
def attention_equals_the_host(backend: Any) -> dict[str, Any]:
    q, k, v = (torch.randn(2, 4, 96, 32, generator=torch.Generator().manual_seed(s)) for s in (1, 2, 3))
    figures = {}
    for name, dtype, bound in (("fp32", torch.float32, 1e-4), ("bf16", torch.bfloat16, 3e-2)):
        host = [t.to(dtype).float().clone().requires_grad_() for t in (q, k, v)]
        device = [
            t.detach().to(backend.device(backend.current_device()), dtype).requires_grad_() for t in host
        ]
        expected = F.scaled_dot_product_attention(*host, is_causal=True)
        found = F.scaled_dot_product_attention(*device, is_causal=True)
        expected.sum().backward()
        found.sum().backward()
        figures[name] = _close(found, expected, bound)
        figures[f"{name}_gradient"] = _close(device[0].grad, host[0].grad, 2 * bound)
    return figures


@check
def optimizer_steps_equal_the_host(backend: Any) -> dict[str, Any]:
    host = _model(3)
    device = copy.deepcopy(host).to(backend.device(backend.current_device()))
    reference = torch.optim.AdamW(host.parameters(), lr=1e-2, weight_decay=0.1)
    fused = backend.adamw(list(device.parameters()), lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(4)
    for _ in range(5):
        for h, d in zip(host.parameters(), device.parameters(), strict=True):
            h.grad = torch.randn(h.shape, generator=generator)
            d.grad = h.grad.to(backend.device(backend.current_device()))
        reference.step()
        fused.step()
    pairs = zip(host.parameters(), device.parameters(), strict=True)
    return {"optimizer": type(fused).__name__, "largest_deviation": max(_close(d, h, 1e-5) for h, d in pairs)}


def _drawn_on_device() -> torch.Tensor:
    """As Megatron's modules draw: on cpu the device's stream is not the one that this file draws from."""
    from megatron.core.tensor_parallel import random

    drawn: torch.Tensor = random.torch.rand(4096, device="cuda")
    return drawn.cpu()


@check
def random_state_is_kept_and_restored(backend: Any) -> dict[str, Any]:
    def draw() -> torch.Tensor:
        return _drawn_on_device()

    backend.manual_seed(7)
    first = draw()
    backend.manual_seed(7)
    state = backend.get_rng_state()
    assert state.device.type == "cpu" and state.dtype is torch.uint8
    assert torch.equal(draw(), first), "one seed gave two draws"
    assert not torch.equal(draw(), first), "the state does not move"
    backend.set_rng_state(state)
    assert torch.equal(draw(), first), "a restored state gave another draw"
    return {"mean": float(first.mean())}


@check
def trackers_fork_and_return(backend: Any) -> dict[str, Any]:
    """Megatron's tracker, through what it calls ``torch.cuda``: lazy calls must have run."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    def draw() -> torch.Tensor:
        return _drawn_on_device()

    tracker = CudaRNGStatesTracker()
    backend.manual_seed(1)
    tracker.add("tensor", 2)
    tracker.add("expert", 3)
    outside = draw()
    states = tracker.get_states()
    with tracker.fork("tensor"):
        tensor = draw()
    with tracker.fork("expert"):
        expert = draw()
    backend.manual_seed(1)
    tracker.set_states(states)
    with tracker.fork("tensor"):
        assert torch.equal(draw(), tensor), "a restored tracker gave another draw"
    assert torch.equal(draw(), outside), "a fork moved the state outside"
    assert not torch.equal(tensor, expert) and not torch.equal(tensor, outside)
    return {}


@check
def events_and_streams_order_work(backend: Any) -> dict[str, Any]:
    cuda = cuda_of(backend)
    a = torch.randn(1024, 1024, device=backend.device(backend.current_device()))
    side, start, end = cuda.Stream(), cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        b = a @ a
    end.record()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        c = b + 1
    cuda.current_stream().wait_stream(side)
    total = (c - b).sum().item()
    cuda.synchronize()
    assert abs(total - 1024 * 1024) < 1e-3 * 1024 * 1024, "work on a side stream was not waited for"
    milliseconds = start.elapsed_time(end)
    assert milliseconds > 0
    return {"ten_products_ms": milliseconds}


@check
def memory_counters_follow_allocations(backend: Any) -> dict[str, Any]:
    backend.synchronize()
    before, peak = backend.memory_allocated(), backend.max_memory_allocated()
    if before is None or peak is None:
        raise Unsupported("the backend has no memory counters")
    block = torch.ones(64 * MIB, dtype=torch.uint8, device=backend.device(backend.current_device()))
    during = backend.memory_allocated()
    assert during - before >= 60 * MIB, (before, during)
    assert backend.max_memory_allocated() >= during - 8 * MIB
    del block
    after = backend.memory_allocated()
    if backend.device_type != "cpu":
        # The host counts the process's resident memory, which need not shrink.
        assert after <= before + 4 * MIB, (before, after)
    return {"before": before, "with_64_MiB": during, "after": after, "peak": backend.max_memory_allocated()}


@check
def bf16_products_are_right(backend: Any) -> dict[str, Any]:
    if not backend.bf16_supported():
        raise Unsupported("the device has no bf16 arithmetic")
    a, b = (torch.randn(256, 256, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    found = a.to(backend.device(backend.current_device())) @ b.to(backend.device(backend.current_device()))
    return {"largest_deviation": _close(found.float(), a.double() @ b.double(), 1e-2)}


@check
def fp8_scalings_that_are_claimed_work(backend: Any) -> dict[str, Any]:
    claimed = backend.fp8_granularities()
    if not claimed:
        raise Unsupported("the backend claims no FP8 GEMM for this device")
    a, b = (torch.randn(64, 64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    figures = {}
    for granularity in claimed:
        dim = None if granularity == "tensor" else 1
        pairs = []
        for value in (a, b.t().contiguous()):
            top = value.abs().amax() if dim is None else value.abs().amax(dim=dim, keepdim=True)
            scale = (top / 448.0).float()
            pairs.append(
                (
                    (value / scale).to(torch.float8_e4m3fn).to(backend.device(backend.current_device())),
                    scale.to(backend.device(backend.current_device())),
                )
            )
        (x, x_scale), (y, y_scale) = pairs
        found = torch._scaled_mm(
            x,
            y.t(),
            scale_a=x_scale,
            scale_b=y_scale if dim is None else y_scale.t(),
            out_dtype=torch.bfloat16,
        )
        figures[granularity] = _close(found.float(), a.double() @ b.double(), 0.1)
    return figures


def _fp32(millions: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(millions):
        bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator)
        yield bits.to(torch.int32).view(torch.float32)


@check
def fp8_codes_equal_the_hosts(backend: Any) -> dict[str, Any]:
    """Every bf16 number and 10,000,000 fp32 ones (a tenth of them in a dry run on the cpu), clamped and cast
    here and there; the host's equal ml_dtypes'."""
    bf16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    figures: Counter[str] = Counter()
    for numbers in (bf16, *_fp32(1 if backend.name == "cpu" else 10)):
        name, device = str(numbers.dtype).removeprefix("torch."), backend.device(backend.current_device())
        for fmt in FORMATS.values():
            x = numbers[~numbers.isnan()]
            there = encode(x.to(device), fmt)
            different = int((there.cpu().view(torch.uint8) != encode(x, fmt).view(torch.uint8)).sum())
            assert not different, f"{different} of {len(x)} codes of {fmt.name} from {name} differ"
            back = decode(there, fmt, torch.float32).cpu()
            assert torch.equal(back, decode(encode(x, fmt), fmt, torch.float32)), fmt.name
            figures[f"{fmt.name} from {name}"] += len(x)
        scales = encode_e8m0(numbers.to(device))
        different = int((scales.cpu() != encode_e8m0(numbers)).sum())
        assert not different, f"{different} of {len(numbers)} codes of e8m0 from {name} differ"
        here = decode_e8m0(encode_e8m0(numbers))
        assert torch.equal(decode_e8m0(scales).cpu().nan_to_num(-1.0), here.nan_to_num(-1.0)), "e8m0"
        figures[f"e8m0 from {name}"] += len(numbers)
    return dict(figures)


@check
def fp8_stochastic_rounding_has_the_numbers_mean(backend: Any) -> dict[str, Any]:
    """Within four standard deviations, with draws of the device's own generator."""
    draws, device, figures = 40_000, backend.device(backend.current_device()), {}
    generator = torch.Generator(device=device).manual_seed(3)
    for fmt in FORMATS.values():
        worst = 0.0
        for number in (0.3 * fmt.smallest, 1.3, -2.7, 0.61 * fmt.maximum, -fmt.maximum):
            x = torch.full((draws,), number, device=device)
            found = rounded(x, fmt, torch.rand(draws, generator=generator, device=device)).cpu()
            low, high = float(found.min()), float(found.max())
            assert low <= number <= high and len(found.unique()) <= 2, (fmt.name, number, low, high)
            share = (number - low) / (high - low) if high > low else 0.0
            sigma = (high - low) * (share * (1 - share) / draws) ** 0.5
            deviation = abs(float(found.double().mean()) - number)
            assert deviation <= 4 * sigma + 1e-6 * abs(number), (fmt.name, number, deviation, sigma)
            worst = max(worst, deviation / sigma if sigma else 0.0)
        figures[f"{fmt.name}, standard deviations"] = worst
    return figures


@check
def fp8_casts_of_matrices_equal_the_hosts(backend: Any) -> dict[str, Any]:
    """Codes, scales and layouts, for sizes that fill no tile, NaN, infinity and zeros."""
    names = native_recipes(backend.fp8_granularities())
    if not names:
        raise Unsupported("the backend claims no FP8 GEMM for this device")
    generator, compared = torch.Generator().manual_seed(6), 0
    of = [*names, "blockwise", "mxfp8"]  # blocks are cast on any device
    casts = {PRESETS[name].cast(role, kind) for name in of for role in ROLES for kind in OPERANDS[role]}
    for rows, columns in ((1, 16), (5, 7), (130, 257), (1024, 4096), (4099, 48)):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(rows, columns, generator=generator)
            x = x.mul_(torch.randn(rows, columns, generator=generator).mul_(3).exp_()).to(dtype)
            odd = x.clone()
            odd[0], odd[rows // 2, 3], odd[-1, columns // 2] = 0.0, torch.nan, torch.inf
            for source in (x, odd, x.t().contiguous().t()):
                for cast in filter(lambda each: each.quantised, casts):
                    for along in (0, 1):
                        here = quantise(source, cast, along)
                        there = quantise(source.to(backend.device(backend.current_device())), cast, along)
                        assert torch.equal(here.inverse.nan_to_num(-1), there.inverse.cpu().nan_to_num(-1))
                        known = ~here.codes.float().isnan()
                        assert torch.equal(known, ~there.codes.cpu().float().isnan()), (cast, along)
                        codes = there.codes.cpu().contiguous().view(torch.uint8)
                        assert torch.equal(codes[known], here.codes.view(torch.uint8)[known]), (cast, along)
                        laid = here.codes if along == 1 else here.codes.t()
                        assert there.laid().is_contiguous()
                        laid_there = there.laid().cpu().view(torch.uint8)
                        kept = known if along == 1 else known.t()
                        assert torch.equal(laid_there[kept], laid.contiguous().view(torch.uint8)[kept])
                        compared += 1
    found = device_casts.kernels_for(torch.empty(1, 1, device=backend.device(backend.current_device())))
    assert found is not None or backend.name != "cuda", "the device's kernels do not cast: a warning says why"
    return {"casts": compared, "by": "PyTorch's operations" if found is None else "Triton"}


@check
def fp8_experts_equal_the_hosts(backend: Any) -> dict[str, Any]:
    """Codes and scales of all experts' rows, one expert without any, and products of fast accumulation."""
    names = native_recipes(backend.fp8_granularities())
    if not names:
        raise Unsupported("the backend claims no FP8 GEMM for this device")
    counts, generator, figures = [24, 0, 130, 5], torch.Generator().manual_seed(7), {}
    rows, experts, inputs, outputs = sum(counts), len(counts), 128, 96
    sizes = {"input": (rows, inputs), "grad": (rows, outputs), "weight": (experts * outputs, inputs)}
    sources = {kind: torch.randn(size, generator=generator).bfloat16() for kind, size in sizes.items()}
    for name in names:
        for role in ROLES:
            product = PRESETS[name].product(role)
            if not product.quantised:
                continue
            made = []
            for kind, cast, along in zip(
                OPERANDS[role], (product.a, product.b), CONTRACTED[role], strict=True
            ):
                of = counts if kind != "weight" else [outputs] * experts
                pair = []
                for device in (torch.device("cpu"), backend.device(backend.current_device())):
                    groups = groups_from(of, sum(of), device)
                    pair.append(quantise_groups(sources[kind].to(device), groups, cast, along, kernel=True))
                here, there = pair
                assert torch.equal(here.inverse, there.inverse.cpu()), (name, role, kind)
                codes = there.codes.cpu().contiguous().view(torch.uint8)
                assert torch.equal(codes, here.codes.view(torch.uint8)), (name, role, kind)
                made.append(pair)
            (a, a_there), (b, b_there) = made
            compute = products.reference
            expected = grouped_products.grouped(role, a, b, product, torch.bfloat16, compute)
            compute = products.scaled_mm
            found = grouped_products.grouped(role, a_there, b_there, product, torch.bfloat16, compute)
            figures[f"{name} {role}"] = _close(found.float(), expected.float(), 2e-2)
    figures["grouped kernel"] = grouped_products.has_kernel(backend.device_type)
    return figures


@check
def fp8_products_equal_the_reference(backend: Any) -> dict[str, Any]:
    """The recipes that this device has kernels for."""
    names = native_recipes(backend.fp8_granularities())
    if not names:
        raise Unsupported("the backend claims no FP8 GEMM for this device")
    generator = torch.Generator().manual_seed(1)
    figures = {}
    for name in names:
        for role in ROLES:
            product = PRESETS[name].product(role)
            if not product.quantised:
                continue
            left, right = CONTRACTED[role]
            a = torch.randn((96, 128) if left else (128, 96), generator=generator).bfloat16()
            b = torch.randn((64, 128) if right else (128, 64), generator=generator).bfloat16()
            casts = [
                (
                    quantise(x, cast, along),
                    quantise(x.to(backend.device(backend.current_device())), cast, along),
                )
                for x, cast, along in ((a, product.a, left), (b, product.b, right))
            ]
            for here, there in casts:
                codes = there.codes.cpu().contiguous().view(torch.uint8)
                assert torch.equal(here.codes.view(torch.uint8), codes), name
                assert torch.equal(here.inverse, there.inverse.cpu()), name
            expected = reference(role, casts[0][0], casts[1][0], product, torch.bfloat16)
            found = scaled_mm(role, casts[0][1], casts[1][1], product, torch.bfloat16)
            # Fast accumulation keeps fewer bits of partial sums.
            bound = 2e-2 if product.fast_accumulate else 1e-2
            figures[f"{name} {role}"] = _close(found.float(), expected.float(), bound)
    return figures


@check
def the_host_sees_a_planted_error(backend: Any) -> dict[str, Any]:
    """Negative control of the comparison that the others use."""
    wrong = torch.ones(8, device=backend.device(backend.current_device())) * 1.01
    try:
        _close(wrong, torch.ones(8), 1e-4)
    except AssertionError:
        return {}
    raise AssertionError("a deviation of 1 % was not noticed")
