"""Rows of tokens grouped by expert and back: against plain loops, gradients included."""

from __future__ import annotations

import pytest
import torch

TOKENS, TOPK, EXPERTS, HIDDEN = 23, 3, 7, 8


@pytest.fixture(scope="module")
def permutation():
    import megatron.core  # noqa: F401 (before layers that are made for it)

    from mt_megatron.layers.moe import permutation

    return permutation


def case(dropped=0.0, dtype=torch.float64, tokens=TOKENS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)
    indices = order[:, :TOPK].contiguous()
    lost = torch.rand(tokens, TOPK, generator=generator) < dropped
    indices = indices.masked_fill(lost, torch.iinfo(torch.long).max)
    probs = torch.rand(tokens, TOPK, generator=generator, dtype=torch.float64) * ~lost
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), probs.to(dtype).requires_grad_(), indices


def naive_rows(indices, first, experts):
    """(token, choice) of every row, by a loop over experts."""
    return [
        (token, choice)
        for expert in range(first, first + experts)
        for token in range(indices.shape[0])
        for choice in range(indices.shape[1])
        if indices[token, choice] == expert
    ]


@pytest.mark.parametrize("first,experts", [(0, EXPERTS), (2, 3), (6, 1), (0, 1)])
@pytest.mark.parametrize("dropped", [0.0, 0.4, 1.0])
def test_a_routing_is_the_loops(permutation, first, experts, dropped):
    hidden, probs, indices = case(dropped)
    everything = experts == EXPERTS and not dropped
    routing = permutation.route(indices, first, experts, all_local=everything)
    expected = naive_rows(indices, first, experts)
    assert [(int(o) // TOPK, int(o) % TOPK) for o in routing.order] == expected
    counts = [end - start for start, end in routing.groups.bounds()]
    assert counts == [int((indices == e).sum()) for e in range(first, first + experts)]
    assert routing.groups.empty() == [i for i, count in enumerate(counts) if not count]

    rows = routing.take(hidden)
    assert torch.equal(rows, torch.stack([hidden[t] for t, _ in expected]) if expected else rows[:0])
    combined = routing.combine(rows * 2, probs)
    naive = torch.zeros_like(hidden)
    for row, (token, choice) in enumerate(expected):
        naive = naive.index_add(0, torch.tensor([token]), (2 * rows[row] * probs[token, choice])[None])
    torch.testing.assert_close(combined, naive)


@pytest.mark.parametrize("dropped", [0.0, 0.4])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients(permutation, dropped, weighted):
    hidden, probs, indices = case(dropped, tokens=5)
    routing = permutation.route(indices, 0, EXPERTS, all_local=not dropped)

    def there_and_back(hidden, probs):
        return routing.combine(routing.take(hidden).tanh(), probs if weighted else None)

    assert torch.autograd.gradcheck(there_and_back, (hidden, probs))


def test_what_torch_sorts_and_what_numpy_sorts_are_one(permutation, monkeypatch):
    _, _, indices = case(0.3)
    found = permutation.route(indices, 1, 4, all_local=False)
    monkeypatch.setattr(permutation, "_sorted", lambda keys, first, experts: tuple(keys.sort(stable=True)))
    expected = permutation.route(indices, 1, 4, all_local=False)
    assert torch.equal(found.order, expected.order) and torch.equal(found.inverse, expected.inverse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_fp32_and_the_same_bits_every_time(permutation, dtype):
    hidden, probs, indices = case(dtype=dtype, tokens=400)
    routing = permutation.route(indices, 0, EXPERTS, all_local=True)
    rows = torch.randn(400 * TOPK, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = [routing.combine(rows, probs.detach()) for _ in range(3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    weights = routing.probs_of_rows(probs.detach()).double()
    exact = torch.zeros(400, HIDDEN, dtype=torch.float64)
    exact.index_add_(0, routing.tokens, rows.double() * weights[:, None])
    error = (found[0].double() - exact).abs()
    # One rounding of the sum, not one for each addition.
    assert (error <= exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-6).all()


def test_weights_of_another_dtype_keep_the_rows_dtype(permutation):
    hidden, probs, indices = case(dtype=torch.float32)
    routing = permutation.route(indices, 0, EXPERTS, all_local=True)
    rows = routing.take(hidden.bfloat16())
    combined = routing.combine(rows, probs)
    assert combined.dtype is torch.bfloat16
    combined.float().sum().backward()
    assert probs.grad.dtype is torch.float32 and hidden.grad is not None


@pytest.mark.parametrize("dropped", [0.0, 0.4])
def test_upstreams_functions_keep_their_meaning(permutation, dropped):
    hidden, probs, indices = case(dropped)
    kept = int((indices < EXPERTS).sum())
    rows, order = permutation.permute(hidden, indices, kept if dropped else None)
    expected = naive_rows(indices, 0, EXPERTS)
    assert torch.equal(rows, torch.stack([hidden[t] for t, _ in expected]))
    merged = permutation.unpermute(rows, order, probs)
    torch.testing.assert_close(merged, hidden * probs.sum(1, keepdim=True))
    if not dropped:
        alone = permutation.unpermute(rows, order)
        torch.testing.assert_close(alone, hidden.repeat_interleave(TOPK, 0))


def test_padded_slots_are_added_where_they_came_from(permutation):
    hidden, _, _ = case()
    slots = torch.tensor([[3, 1, 3], [0, 3, 5]])
    probs = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    rows, kept = permutation.permute(hidden, slots, padded_mode=True)
    merged = permutation.unpermute(rows, kept, probs, padded_mode=True, restore_shape=hidden.shape)
    expected = torch.zeros_like(hidden)
    for expert in range(2):
        for slot in range(3):
            token = int(slots[expert, slot])
            expected[token] = expected[token] + hidden[token] * probs[expert, slot]
    torch.testing.assert_close(merged, expected)


def test_a_routing_of_other_experts_is_noticed(permutation):
    """The control: were experts numbered otherwise, the loops would say so."""
    _, _, indices = case()
    routing = permutation.route((indices + 1) % EXPERTS, 0, EXPERTS, all_local=True)
    found = [(int(o) // TOPK, int(o) % TOPK) for o in routing.order]
    assert found != naive_rows(indices, 0, EXPERTS)
