"""The ranks' side of the context parallelism tests: every case in one start of the processes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

S, B, HEADS, D = 32, 2, 4, 8


def start(world: int) -> None:
    import mt_megatron
    from mt_megatron.parallel import rank_layout as layout

    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    dist.init_process_group("gloo")
    layout.initialize(layout.RankLayout(world_size=world, cp=world), mt_megatron.backend())
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(7)


def config(**overrides: Any) -> Any:
    values = {
        "context_parallel_size": dist.get_world_size(),
        "cp_comm_type": "all_gather",
        "window_size": None,
        "kv_channels": D,
        "attention_dropout": 0.0,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**{**values, **overrides})


def module(kind: str = "causal", attention_type: str = "self", **overrides: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from mt_megatron.layers.attention.core import DotProductAttention

    return DotProductAttention(config(**overrides), 1, AttnMaskType[kind], attention_type)


def mine(whole: Tensor, dim: int = 0) -> Tensor:
    """This rank's two chunks, by index: written apart from the code under test."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunk = whole.size(dim) // (2 * size)
    index = [*range(rank * chunk, (rank + 1) * chunk)]
    index += range((2 * size - 1 - rank) * chunk, (2 * size - rank) * chunk)
    return whole.index_select(dim, torch.tensor(index))


def qkv(groups: int, dv: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((S, B, HEADS, D), (S, B, groups, D), (S, B, groups, dv))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def naive(q: Tensor, k: Tensor, v: Tensor, forbidden: Tensor | None) -> Tensor:
    """Softmax attention of the whole sequence by the definition, in fp64."""
    q, k, v = (t.double().permute(1, 2, 0, 3) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * D**-0.5
    if forbidden is not None:
        scores = scores.masked_fill(forbidden, -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1), nan=0.0)
    return (weights @ v).permute(2, 0, 1, 3).flatten(2)


def differences(
    layer: Any, given: Tensor | None, forbidden: Tensor | None, *, groups: int = 2, dv: int = D,
    dtype: torch.dtype = torch.float32,
) -> list[float]:  # fmt: skip
    """Largest differences of the output and of the gradients of q, k and v, relative to the largest
    value, between this rank's part and one process's."""
    whole = [t.double().requires_grad_() for t in qkv(groups, dv, dtype)]
    parts = [mine(t).requires_grad_() for t in qkv(groups, dv, dtype)]
    expected = naive(*whole, forbidden)
    found = layer(*parts, given)
    assert found.is_contiguous() and found.dtype == dtype
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    theirs = torch.autograd.grad(expected, whole, grad.double())
    ours = torch.autograd.grad(found, parts, mine(grad))
    pairs = [(found, expected), *zip(ours, theirs, strict=True)]
    return [float((a.double() - mine(b)).abs().max() / b.abs().max()) for a, b in pairs]


def future() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).triu(1)


def documents() -> Tensor:
    """Causal, and two documents that do not see each other; another border in each sequence."""
    mask = future().expand(B, 1, S, S).clone()
    mask[0, :, 13:, :13] = True
    mask[1, :, 22:, :22] = True
    return mask


def padding() -> Tensor:
    mask = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    mask[0, ..., 27:] = True
    return mask


def band(left: int, right: int) -> Tensor:
    distance = torch.arange(S) - torch.arange(S)[:, None]
    return (distance < -left) | (distance > right)


def everything(world: int) -> dict[str, Any]:
    """All cases below, by the name of their function."""
    start(world)
    cases = (against_one_process, later_tokens, dropout, what_runs, refusals)
    return {case.__name__: case() for case in cases}


def only_against_one_process(world: int) -> dict[str, Any]:
    start(world)
    return {"against_one_process": against_one_process()}


def against_one_process() -> dict[str, list[float]]:
    """``differences`` of every case, by name."""
    found: dict[str, list[float]] = {}
    unseen = padding().expand(B, 1, S, S).clone()
    unseen[1, 0, 5] = True
    for exchange in ("all_gather", "p2p"):

        def case(name: str, layer: Any, given: Tensor | None, forbidden: Tensor | None, **more: Any) -> None:
            found[f"{name}, {exchange}"] = differences(layer, given, forbidden, **more)  # noqa: B023

        make: Callable[..., Any] = lambda kind="causal", **o: module(kind, cp_comm_type=exchange, **o)  # noqa: B023, E731
        for groups in (HEADS, 2, 1):
            case(f"{groups} groups", make(), None, future(), groups=groups)
        case("bf16", make(), None, future(), dtype=torch.bfloat16)
        case("value size", make(), None, future(), dv=2 * D)
        case("causal mask given", make(), mine(future()), future())
        case("documents", make(), mine(documents(), 2), documents())
        case("padding and causal", make(), padding(), padding() | future())
        case("padding", make("padding"), padding(), padding())
        case("rows without keys", make("padding"), mine(unseen, 2), unseen)
        case("no mask", make("no_mask"), None, None)
        case("window", make(window_size=(5, 0)), None, band(5, 0))
        case("window to both sides", make("no_mask", window_size=(3, 6)), None, band(3, 6))
    found["leak: mask off by one"] = differences(module(), None, torch.ones(S, S, dtype=torch.bool).triu(2))
    with leaking():
        found["leak: shards of ranks behind are seen"] = differences(module(), None, future())
    with contiguous_chunks():
        found["leak: chunks in a row"] = differences(module(window_size=(5, 0)), None, band(5, 0))
    return found


@contextmanager
def leaking() -> Any:
    """Sabotage: all queries see the keys of the ranks behind, the future among them."""
    from mt_megatron.layers.attention import context_parallel

    original = context_parallel._block

    def block(how: Any, group: Any, source: int, q: Tensor, forbidden: Any) -> Any:
        rows, keys, scores = original(how, group, source, q, forbidden)
        return (slice(0, q.size(2)) if source > group.rank() else rows), keys, scores

    context_parallel._block = block
    try:
        yield
    finally:
        context_parallel._block = original


@contextmanager
def contiguous_chunks() -> Any:
    """Sabotage: rank r takes itself for the holder of chunks 2r and 2r + 1."""
    from mt_megatron.layers.attention import context_parallel

    original = context_parallel.positions
    context_parallel.positions = lambda rank, size, length, device=None: torch.arange(length) + rank * length
    try:
        yield
    finally:
        context_parallel.positions = original


def later_tokens() -> dict[str, bool]:
    """Change one token of the whole sequence at a time: does anything before it change, and the token?"""
    found = {"before": False, "at": True}
    place = mine(torch.arange(S))
    for exchange in ("all_gather", "p2p"):
        layer = module(cp_comm_type=exchange)
        plain = layer(*(mine(t) for t in qkv(2, D, torch.float32)), None)
        for position in (0, 3, 7, 8, 15, 16, 24, S - 1):
            whole = qkv(2, D, torch.float32)
            for t in whole:
                t[position] += 1.0
            changed = (layer(*(mine(t) for t in whole), None) != plain).flatten(1).any(1)
            found["before"] |= bool(changed[place < position].any())
            found["at"] &= bool(changed[place == position].all())
    return found


def dropout() -> dict[str, Any]:
    """What dropout does on this rank, by weights of 1 / n: its output tells which were dropped."""
    from megatron.core import tensor_parallel

    world = dist.get_world_size()
    zeros = torch.zeros(S // world, B, HEADS, D)
    # Column j of the values tells key j apart from the others.
    values = torch.zeros(S // world, B, HEADS, S)
    place = mine(torch.arange(S))
    values[torch.arange(S // world), :, :, place] = 1.0
    layer = module("no_mask", attention_dropout=0.25).train()
    default = torch.get_rng_state()
    first, second = (layer(zeros, zeros, values, None) for _ in range(2))
    kept = (first.view(S // world, B, HEADS, S) * S).round(decimals=3)
    q = torch.randn(zeros.shape, generator=torch.Generator().manual_seed(dist.get_rank()), requires_grad=True)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    state = tracker.get_states()
    plain = torch.autograd.grad(layer(q, q, q, None).square().sum(), q)[0]
    tracker.set_states(state)

    def run(x: Tensor) -> Tensor:
        output: Tensor = layer(x, x, x, None)
        return output

    tensor_parallel.checkpoint(run, False, q).square().sum().backward()
    layer.eval()
    return {
        "values": sorted(set(kept.flatten().tolist())),
        "share": float((kept > 0).float().mean()),
        "pattern": (kept > 0).flatten().int().tolist(),
        "moves": not torch.equal(first, second),
        "default_moves": not torch.equal(default, torch.get_rng_state()),
        "tracker": tracker.get_states()["model-parallel-rng"].tolist()[:64],
        "recompute": torch.equal(plain, q.grad),
        "off_in_eval": bool((layer(zeros, zeros, values, None) * S - 1).abs().max() < 1e-5),
    }


def what_runs() -> dict[str, Any]:
    """Kernels, collectives and what is kept for the backward pass of plain causal attention."""
    from mt_megatron.layers.attention import context_parallel
    from mt_megatron.layers.attention.context_parallel import kernel_of
    from mt_megatron.seams import events

    found: dict[str, Any] = {"own keys": mine(qkv(2, D, torch.float32)[1]).numel()}
    forward = context_parallel.block_forward
    for exchange in ("all_gather", "p2p"):
        kernels, collectives, kept = set(), [], []

        def spy(q: Tensor, k: Tensor, v: Tensor, scores: Any) -> Any:
            kernels.add(kernel_of(q, scores))  # noqa: B023
            return forward(q, k, v, scores)

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.numel())  # noqa: B023
            return tensor

        def listen(phase: str, name: str, attrs: Any) -> None:
            if (phase, name) == ("begin", "collective"):
                assert attrs["group"] == "cp" and attrs["bytes"] > 0
                if attrs.get("asynchronous") != "start":
                    collectives.append(attrs["op"])  # noqa: B023

        context_parallel.block_forward = spy
        stop = events.subscribe(listen)
        parts = [mine(t).requires_grad_() for t in qkv(2, D, torch.float32)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            output = module(cp_comm_type=exchange)(*parts, mine(future()))
        output.sum().backward()
        stop()
        context_parallel.block_forward = forward
        found[exchange] = {
            "kernels": sorted(kernels),
            "collectives": collectives,
            "largest kept": max(kept),
        }
    return found


def refusals() -> dict[str, str]:
    """What is said to what cannot be right."""
    import mt_megatron
    from tests.patches import small_gpt

    found: dict[str, str] = {}

    def refused(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except mt_megatron.errors.ConfigError as error:
            found[name] = str(error)

    world = dist.get_world_size()
    q = torch.zeros(S // world, B, HEADS, D)
    refused("other size", lambda: module(context_parallel_size=2 * world))
    refused("no size", lambda: module(context_parallel_size=1))
    refused("cross", lambda: module("no_mask", "cross"))
    refused("exchange", lambda: module(cp_comm_type="a2a"))
    refused("exchange per layer", lambda: module(cp_comm_type=["p2p", "p2p"]))
    refused("packed", lambda: module()(q, q, q, None, packed_seq_params=object()))
    refused("rows", lambda: module()(q, q, q, future()))
    refused("odd", lambda: module()(q[:3], q[:3], q[:3], None))
    refused("cache", lambda: module()(q[:2], q, q, None))
    kind = type(module().attn_mask_type).no_mask
    refused("step", lambda: module()(q, q, q, None, attn_mask_type=kind))
    model = small_gpt.build(small_gpt.transformer_config(context_parallel_size=world))
    layer = model.decoder.layers[0].self_attention
    hidden = torch.zeros(4, B, 32)
    layer.linear_qkv.forward = None  # nothing may be computed before
    refused("packed sequences", lambda: layer(hidden, None, packed_seq_params=object()))
    refused("prompt", lambda: layer(hidden, None, None, object()))
    return found
