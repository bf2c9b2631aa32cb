"""What the ranks of ``test_cross_entropy.py`` run: the blocked loss beside upstream's, case by case."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

S, B, H, V = 24, 2, 16, 96


def _case(dtype: torch.dtype, kind: str, seed: int = 0) -> dict[str, Any]:
    masked = kind == "masked"
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(S, B, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)
    if kind == "rising":
        # Logits of hundreds, the farther back in the vocabulary the larger.
        weight *= torch.linspace(0.1, 40.0, V)[:, None]
    labels = torch.randint(V, (S, B), generator=generator)
    mask = (torch.rand(S, B, generator=generator) > 0.3).float() if masked else torch.ones(S, B)
    gradient = mask / mask.sum() if masked else mask * 0.03
    return {"hidden": hidden.to(dtype), "weight": weight.to(dtype), "labels": labels, "gradient": gradient}


def _run(case: dict[str, Any], how: str, sequence_parallel: bool, share: bool) -> dict[str, Any]:
    """Losses and gradients; ``how``: plain, announced, wrong, twice, frozen, recomputed, fused, no_grad."""
    from megatron.core import parallel_state, tensor_parallel

    from mt_megatron.layers.linear import TensorParallelLinear
    from mt_megatron.layers.loss.cross_entropy import linear_cross_entropy

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    hidden = case["hidden"].chunk(size)[rank] if sequence_parallel else case["hidden"]
    hidden = hidden.clone().requires_grad_()
    weight = torch.nn.Parameter(case["weight"].chunk(size)[rank].clone())
    weight.main_grad = torch.full(weight.shape, 0.25)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = share
    gradient = case["gradient"]
    backward = gradient * 3 if how == "wrong" else gradient
    if how.startswith("frozen"):
        weight.requires_grad_(False)
    if how in ("plain", "frozen"):
        allreduce = size > 1 and not sequence_parallel
        logits = TensorParallelLinear.apply(
            hidden, weight, None, False, allreduce, sequence_parallel, None, 0
        )
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits.float(), case["labels"])
    else:
        announced = how in ("announced", "wrong", "twice", "frozen_announced")
        if how == "no_main_grad":
            announced = True
            del weight.main_grad
        with torch.no_grad() if how == "no_grad" else torch.enable_grad():
            losses = linear_cross_entropy(
                hidden,
                weight,
                case["labels"],
                vocab_size=case.get("vocab_size"),
                announced=gradient if announced else None,
                sequence_parallel=sequence_parallel,
                gradient_accumulation_fusion=how == "fused",
            )
    if how == "no_grad":
        return {"losses": losses}
    for _ in range(2 if how == "twice" else 1):
        losses.backward(backward, retain_graph=True)
    times = 3.0 if how == "wrong" else 2.0 if how == "twice" else 1.0
    result = {"losses": losses.detach(), "hidden": hidden.grad / times}
    if weight.requires_grad:
        into = getattr(weight, "main_grad", None)
        added = torch.zeros(weight.shape) if into is None else into - 0.25
        if how in ("plain", "recomputed", "no_main_grad"):
            assert not added.any()
            added = weight.grad.float()
        else:
            assert weight.grad_added_to_main_grad
            assert weight.grad is None, "a stand-in for the gradient is as large as the weight"
        result["weight"] = added / times
    return result


def _error(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    return {
        name: float((value.double() - expected[name].double()).norm() / expected[name].double().norm())
        for name, value in found.items()
    }


def compare(tp: int, sequence_parallel: bool) -> dict[str, dict[str, float]]:
    """Relative error of losses and gradients to upstream's path (bf16: to the same path in fp32), by case."""
    from mt_megatron.layers.loss import cross_entropy, cross_entropy_blocks
    from tests.patches import small_gpt

    small_gpt.start(tp=tp)
    found: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("all", "masked", "rising") if dtype is torch.float32 else ("all", "masked"):
            case = _case(dtype, kind)
            wide = {name: t.float() if t.is_floating_point() else t for name, t in case.items()}
            expected = _run(wide, "plain", sequence_parallel, False)
            name = f"{str(dtype)[6:]}-{kind}"
            found[f"{name}-plain"] = _error(_run(case, "plain", sequence_parallel, False), expected)
            # Blocks of 16 tokens, of which a few are widened at a time, or a few words in fp32.
            budget = {"cpu": 16 * V // tp * 7}
            with (
                mock.patch.object(cross_entropy_blocks, "_BUDGET", budget),
                mock.patch.object(cross_entropy_blocks, "_CACHED", 5 * 4 * V // tp),
                mock.patch.object(cross_entropy_blocks, "_TILE", 1),
                mock.patch.object(cross_entropy, "_PANEL", 7),
            ):
                for how in ("announced", "wrong", "twice", "recomputed", "fused", "no_grad", "no_main_grad"):
                    got = _run(case, how, sequence_parallel, how == "fused")
                    found[f"{name}-{how}"] = _error(got, expected)
                frozen = _run(wide, "frozen", sequence_parallel, False)
                for how in ("frozen_announced", "frozen_recomputed"):
                    found[f"{name}-{how}"] = _error(_frozen(case, how, sequence_parallel), frozen)
    return found


def _frozen(case: dict[str, Any], how: str, sequence_parallel: bool) -> dict[str, Any]:
    return _run(case, how if how == "frozen_announced" else "frozen_later", sequence_parallel, False)


def padded(tp: int, sequence_parallel: bool) -> dict[str, dict[str, float]]:
    """Relative error to torch's loss over the rows that are no padding; at the least size the second of
    two ranks holds nothing but padding. ``left_in`` is what it would be with the padding."""
    from megatron.core import parallel_state

    from tests.patches import small_gpt

    small_gpt.start(tp=tp)
    rank = parallel_state.get_tensor_model_parallel_rank()
    found = {}
    for size in (V // 2 - 7, V - 5, V):
        case = _case(torch.float32, "masked", seed=size)
        case["labels"] %= size
        hidden = case["hidden"].double().requires_grad_()
        weight = case["weight"].double().requires_grad_()
        losses = torch.nn.functional.cross_entropy(
            (hidden @ weight[:size].T).view(S * B, size), case["labels"].view(-1), reduction="none"
        ).view(S, B)
        losses.backward(case["gradient"].double())
        assert hidden.grad is not None and weight.grad is not None
        expected = {
            "losses": losses.detach(),
            "hidden": hidden.grad.chunk(tp)[rank] if sequence_parallel else hidden.grad,
        }
        share = weight.grad.chunk(tp)[rank]
        for how in ("announced", "wrong", "recomputed"):
            got = _run({**case, "vocab_size": size}, how, sequence_parallel, False)
            padding = max(0, min(len(share), size - rank * len(share)))
            assert not got["weight"][padding:].any(), "a row of padding has a gradient"
            found[f"{size}-{how}"] = _error({n: got[n] for n in expected}, expected)
            found[f"{size}-{how}"]["weight"] = float((got["weight"] - share).norm() / weight.grad.norm())
        if size < V:
            left_in = _run(case, "announced", sequence_parallel, False)
            found[f"{size}-left_in"] = _error({"losses": left_in["losses"]}, expected)
    return found


def extremes() -> dict[str, Any]:
    """Logits of 1e4, labels that are certain, and one token: finite, and as the formula says."""
    from mt_megatron.layers.loss.cross_entropy import linear_cross_entropy
    from tests.patches import small_gpt

    small_gpt.start()
    hidden = torch.zeros(3, 1, H)
    hidden[:, 0, 0] = 100.0
    weight = torch.zeros(V, H)
    weight[7, 0] = 100.0
    labels = torch.tensor([[7], [3], [7]])
    return {
        "losses": linear_cross_entropy(hidden, weight, labels).flatten().tolist(),
        "one": linear_cross_entropy(hidden[:1], weight, labels[:1]).tolist(),
    }


def narrow_main_grad() -> dict[str, float]:
    """Largest distance of a bf16 ``main_grad`` from an fp32 one after 32 blocks, in steps of bf16 at 8."""
    from mt_megatron.layers.loss import cross_entropy_blocks
    from mt_megatron.layers.loss.cross_entropy import linear_cross_entropy
    from tests.patches import small_gpt

    small_gpt.start()
    tokens = 512
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 1, H, generator=generator).bfloat16()
    weight = torch.randn(V, H, generator=generator).bfloat16()
    labels = torch.randint(V, (tokens, 1), generator=generator)
    gradient = torch.full((tokens, 1), 0.03)
    found = {}
    for announced in (gradient, None):
        ends = []
        for dtype in (torch.bfloat16, torch.float32):
            parameter = torch.nn.Parameter(weight.clone())
            parameter.main_grad = torch.full(weight.shape, 8.0, dtype=dtype)
            with mock.patch.object(cross_entropy_blocks, "_BUDGET", {"cpu": 0}):
                losses = linear_cross_entropy(
                    hidden, parameter, labels, announced=announced, gradient_accumulation_fusion=True
                )
                losses.backward(gradient)
            ends.append(parameter.main_grad.float())
        distance = float((ends[0] - ends[1]).abs().max()) * 16
        found["recomputed" if announced is None else "announced"] = distance
    return found


def alone() -> dict[str, Any]:
    return {"extremes": extremes(), "narrow": narrow_main_grad()}


def memory() -> dict[str, float]:
    """Largest sum of allocations of both ways, over the bytes of the fp32 logits of 2,048 tokens."""
    from torch.profiler import ProfilerActivity, profile

    from mt_megatron.layers.loss import cross_entropy, cross_entropy_blocks
    from mt_megatron.layers.loss.cross_entropy import linear_cross_entropy
    from mt_megatron.seams import onednn
    from tests.patches import small_gpt

    small_gpt.start()
    tokens, width, vocabulary = 2048, 32, 8192
    hidden = torch.randn(tokens, 1, width).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(vocabulary, width))
    weight.main_grad = torch.zeros_like(weight)
    labels = torch.randint(vocabulary, (tokens, 1))
    gradient = torch.full((tokens, 1), 1 / tokens)
    found = {}
    # As of 4,096 tokens at Llama 3's vocabulary and width: the budget is 3.2 % of the logits, a panel of them
    # a 63rd, and one of the weight's gradient 0.8 %.
    budget = 4 * tokens * vocabulary * 32 // 1000
    for way in ("announced", "recomputed", "whole"):
        with (
            mock.patch.object(
                cross_entropy_blocks, "_BUDGET", {"cpu": 1 << 30 if way == "whole" else budget}
            ),
            mock.patch.object(cross_entropy, "_PANEL", vocabulary // 63 * 64),
            mock.patch.object(onednn, "_PANEL", vocabulary * width // 125),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
        ):
            announced = None if way == "recomputed" else gradient
            losses = linear_cross_entropy(
                hidden, weight, labels, announced=announced, gradient_accumulation_fusion=True
            )
            losses.backward(gradient)
            del losses
        now = peak = 0
        events = (e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
        for event in sorted(events, key=lambda e: e.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        found[way] = peak / (4 * tokens * vocabulary)
    return found
