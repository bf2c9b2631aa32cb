"""Core attention against a naive fp64 softmax: masks, grouping, windows, caches, sizes, dropout."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mt_megatron.errors import ConfigError

S, B, HEADS, D = 12, 2, 4, 8


def config(**overrides):
    values = {
        "context_parallel_size": 1,
        "window_size": None,
        "kv_channels": D,
        "attention_dropout": 0.0,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**{**values, **overrides})


def module(kind="causal", **overrides):
    from megatron.core.transformer.enums import AttnMaskType

    from mt_megatron.layers.attention.core import DotProductAttention

    scale = overrides.pop("softmax_scale", None)
    return DotProductAttention(config(**overrides), 1, AttnMaskType[kind], "self", softmax_scale=scale)


def qkv(sq=S, sk=S, heads=HEADS, groups=HEADS, d=D, dv=D, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sq, B, heads, d), (sk, B, groups, d), (sk, B, groups, dv))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def naive(q, k, v, forbidden=None, scale=D**-0.5):
    """Softmax attention by the definition, in fp64. A row without any key gives zeros."""
    q, k, v = (t.double().permute(1, 2, 0, 3) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if forbidden is not None:
        scores = scores.masked_fill(forbidden, -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1), nan=0.0)
    return (weights @ v).permute(2, 0, 1, 3).flatten(2)


def future(sq=S, sk=S):
    return torch.ones(sq, sk, dtype=torch.bool).triu(1 + sk - sq)


def check(layer, q, k, v, mask, forbidden, scale=D**-0.5, **kwargs):
    found, expected = layer(q, k, v, mask, **kwargs), naive(q, k, v, forbidden, scale)
    assert found.shape == expected.shape and found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    dy = torch.randn(found.shape, generator=torch.Generator().manual_seed(9))
    mine = torch.autograd.grad(found, (q, k, v), dy)
    theirs = torch.autograd.grad(expected, (q, k, v), dy.double())
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture
def masks(monkeypatch):
    """What reaches torch: (mask given, is_causal) of every call."""
    import torch.nn.functional as F

    seen, original = [], F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        mask = kwargs["attn_mask"]
        seen.append((None if mask is None else tuple(mask.shape), kwargs["is_causal"]))
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
def test_causal_without_a_mask_builds_none(groups, masks):
    check(module(), *qkv(groups=groups), None, future())
    assert masks == [(None, True)]


def test_exactly_causal_mask_is_recognised_once_and_not_needed(masks):
    layer, mask = module(), future().expand(B, 1, S, S).contiguous()
    check(layer, *qkv(), mask, future())
    layer(*qkv(), mask)
    assert masks == [(None, True)] * 2
    mask[0, 0, 5, 3] = True  # changed in place: looked at again
    check(layer, *qkv(), mask, mask)
    assert masks[-1] == ((B, 1, S, S), False)


def test_mask_that_differs_is_honoured_together_with_causality(masks):
    documents = future().clone()
    documents[7:, :7] = True
    check(module(), *qkv(), documents[None, None], documents)
    padding = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    padding[0, ..., 9:] = True
    check(module(), *qkv(), padding, padding | future())
    assert all(mask is not None and not causal for mask, causal in masks)


def test_mask_shifted_by_one_is_another_result():
    """Negative control: the comparison above can fail."""
    shifted = torch.ones(S, S, dtype=torch.bool).triu(2)
    for mask, forbidden in ((shifted[None, None], shifted), (None, shifted)):
        with pytest.raises(AssertionError):
            check(module(), *qkv(), mask, forbidden)


@pytest.mark.parametrize("kind", ["padding", "no_mask", "arbitrary"])
def test_kinds_that_are_not_causal(kind):
    check(module(kind), *qkv(), None, None)
    check(module(kind), *qkv(sq=5), None, None)
    mask = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(3)) < 0.4
    check(module(kind), *qkv(groups=2), mask, mask)


def test_kind_given_to_forward_replaces_the_layers():
    from megatron.core.transformer.enums import AttnMaskType

    check(module(), *qkv(), None, None, attn_mask_type=AttnMaskType.no_mask)
    check(module("padding"), *qkv(), None, future(), attn_mask_type=AttnMaskType.causal)
    check(module("padding_causal"), *qkv(), None, future())


@pytest.mark.parametrize("kind", [None, "no_mask"])
@pytest.mark.parametrize("sq", [1, 5])
def test_key_value_cache_aligns_the_last_query_with_the_last_key(sq, kind):
    from megatron.core.transformer.enums import AttnMaskType

    check(module(), *qkv(sq=sq), None, future(sq), attn_mask_type=AttnMaskType[kind] if kind else None)


def test_decoding_step_by_step_equals_the_whole_sequence():
    layer, (q, k, v) = module(), qkv(groups=2)
    whole = layer(q, k, v, None)
    steps = [layer(q[i : i + 1], k[: i + 1], v[: i + 1], None) for i in range(S)]
    torch.testing.assert_close(torch.cat(steps), whole)


@pytest.mark.parametrize("kind", ["causal", "no_mask"])
@pytest.mark.parametrize("window", [(3, 0), (2, 4), (-1, 2), (-1, -1), (S, S), (0, 0)])
@pytest.mark.parametrize("sq", [S, 5])
def test_sliding_window(window, kind, sq):
    i = torch.arange(S - sq, S)[:, None]
    j = torch.arange(S)
    left, right = window
    forbidden = (j < i - left) & (left >= 0) | (j > i + right) & (right >= 0)
    if kind == "causal":
        forbidden |= j > i
    check(module(kind, window_size=window), *qkv(sq=sq), None, forbidden)


@pytest.mark.parametrize("dv", [4, 16])
def test_value_head_size_of_its_own(dv):
    check(module(softmax_scale=0.3), *qkv(dv=dv, groups=2), None, future(), scale=0.3)


def test_row_that_sees_nothing_gives_zeros_and_finite_gradients():
    mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    mask[1, 0, 4] = True
    check(module("padding"), *qkv(), mask, mask)


def test_bf16_is_as_good_as_bf16_gets():
    q, k, v = qkv(dtype=torch.bfloat16)
    found = module()(q, k, v, None)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), naive(q, k, v, future()), rtol=2e-2, atol=2e-2)


def test_later_tokens_change_nothing_before_them():
    layer, (q, k, v) = module(), qkv()
    before = layer(q, k, v, None)
    with torch.no_grad():
        for t in (q, k, v):
            t[7] += 1.0
    assert torch.equal(layer(q, k, v, None)[:7], before[:7])


def test_dropout_drops_and_keeps_the_mean(monkeypatch):
    from megatron.core import tensor_parallel

    # Without patches the tracker's streams are CUDA's.
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=nullcontext))
    layer = module(attention_dropout=0.5, sequence_parallel=True)
    q, k, v = qkv()
    torch.manual_seed(0)
    drawn = torch.stack([layer(q, k, v, None).detach() for _ in range(400)])
    assert not torch.equal(drawn[0], drawn[1])
    expected = naive(q, k, v, future()).detach()
    error = (drawn.double().mean(0) - expected).abs() / (drawn.double().std(0) / 20 + 1e-9)
    assert error.mean() < 1.5  # standard errors of the mean
    layer.eval()
    torch.testing.assert_close(layer(q, k, v, None).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(S, S), "torch.float32"),
        (torch.zeros(B, 1, S, S + 1, dtype=torch.bool), r"\(2, 1, 12, 13\)"),
        (torch.zeros(1, B, 1, S, S, dtype=torch.bool), "broadcastable"),
    ],
)
def test_masks_that_cannot_be_meant_are_refused(mask, message):
    with pytest.raises(ConfigError, match=message):
        module()(*qkv(), mask)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="context_parallel_size is 2"):
        module(context_parallel_size=2)
    with pytest.raises(ConfigError, match="12 queries to 5 keys"):
        module()(*qkv(sk=5), None)


def test_causal_path_keeps_no_score_matrix():
    sizes = []
    q, k, v = qkv(sq=64, sk=64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        module()(q, k, v, None)
    assert sizes and max(sizes) < B * HEADS * 64 * 64


def test_masks_made_in_inference_mode():
    layer, (q, k, v) = module(), qkv()
    with torch.inference_mode():
        mask = future()[None, None].clone()
        torch.testing.assert_close(layer(q, k, v, mask), layer(q, k, v, None))
        mask[..., 5, 3] = True
        found = layer(q, k, v, mask)
    torch.testing.assert_close(found.double(), naive(q, k, v, mask.clone()).detach(), rtol=1e-5, atol=1e-5)
    # What was cached there does for training afterwards.
    window = module(window_size=(2, 0))
    with torch.inference_mode():
        window(q, k, v, None)
    outside = torch.ones(S, S, dtype=torch.bool).tril(-3) | future()
    check(window, q, k, v, None, outside)


def test_it_is_shown_with_its_module_since_megatron_has_a_class_of_that_name():
    assert repr(module()).startswith("mt_megatron.layers.attention.core:DotProductAttention(")
