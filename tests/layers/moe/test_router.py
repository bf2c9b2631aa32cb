"""The router equals plain loops on random cases, gradients included; ties go to the lowest index."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mt_megatron.config.parse import load_config
from mt_megatron.errors import ConfigError
from mt_megatron.layers.moe.router import jittered
from mt_megatron.layers.moe.router_capacity import DROPPED, Capacity, limit
from mt_megatron.layers.moe.router_losses import balancing_scores, sequence_loss, tokens_per_sequence
from mt_megatron.layers.moe.router_topk import RouterOptions, Routing, choose_experts, lowest_index_topk
from mt_megatron.training.steps import draws_in_steps
from tests.layers.moe import router_oracle as oracle
from tests.layers.moe.router_oracle import Case, Expected
from tests.second_lane import DAILY

CASES = 10_000 if os.environ.get("MT_MEGATRON_SOAK") else 400 if DAILY else 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_jitter_has_the_type_of_its_input_and_none_in_validation(dtype: torch.dtype) -> None:
    hidden = torch.ones(64, 2, 8, dtype=dtype)
    router = SimpleNamespace(config=SimpleNamespace(moe_input_jitter_eps=0.25), training=True)
    torch.manual_seed(5)
    noisy = jittered(router, hidden)
    assert noisy.dtype is dtype and noisy.unique().numel() > 10
    assert 0.75 <= noisy.min().item() < 0.8 and 1.2 < noisy.max().item() <= 1.25
    if dtype is torch.float32:
        torch.manual_seed(5)
        upstreams = torch.distributions.Uniform(torch.tensor(0.75), torch.tensor(1.25)).rsample
        assert torch.equal(noisy, upstreams(hidden.shape))
    before = torch.get_rng_state()
    router.training = False
    copied = jittered(router, hidden)
    # A caller may change it in place, as upstream's product.
    assert torch.equal(copied, hidden) and copied is not hidden
    router.training, router.config.moe_input_jitter_eps = True, None
    assert jittered(router, hidden) is hidden
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_with_jitter_draws() -> None:
    plain = ["--family", "other", "--hidden-dropout", "0", "--attention-dropout", "0"]
    mixture = [*plain, "--num-moe-experts", "4"]
    assert not draws_in_steps(load_config(mixture))
    assert draws_in_steps(load_config([*mixture, "--moe-input-jitter-eps", "0.01"]))
    assert not draws_in_steps(load_config([*plain, "--moe-input-jitter-eps", "0.01"]))
    assert draws_in_steps(load_config([*plain, "--hidden-dropout", "0.1"]))


def options_of(case: Case) -> RouterOptions:
    return RouterOptions(
        num_experts=case.experts,
        topk=case.topk,
        score_function=case.score,
        pre_softmax=case.pre_softmax,
        num_groups=case.groups,
        group_topk=case.group_topk,
        group_score_topk=case.group_score_topk,
        topk_scaling_factor=case.factor,
    )


def draw(seed: int) -> tuple[Case, Tensor]:
    """A random case and its logits [tokens, experts], with ties in about half of them."""
    rng = random.Random(seed)
    groups = rng.choice([None, None, 2, 4, 8])
    size = rng.randint(2, 8)
    experts = rng.randint(2, 64) if groups is None else groups * size
    group_topk = None if groups is None else rng.randint(1, groups)
    if group_topk is None:
        topk = rng.randint(1, min(8, experts))
    else:
        topk = group_topk * rng.randint(1, min(4, size))
    score = rng.choice(["softmax", "sigmoid", "sigmoid"])
    biased = score == "sigmoid" and rng.random() < 0.7
    case = Case(
        experts=experts,
        topk=topk,
        score=score,
        pre_softmax=score == "softmax" and (topk == 1 or rng.random() < 0.5),
        groups=groups,
        group_topk=group_topk,
        group_score_topk=None if groups is None else rng.choice([None, 1, min(2, size)]),
        factor=rng.choice([None, 2.5, 16.0]),
        capacity_factor=rng.choice([None, None, 0.5, 1.0, 1.5, 20.0]),
        policy=rng.choice(["probs", "position"]),
    )
    generator = torch.Generator().manual_seed(seed)
    tokens = rng.randint(1, 24)
    logits = torch.randn(tokens, experts, generator=generator) * rng.choice([0.1, 1.0, 4.0])
    bias = torch.randn(experts, generator=generator) * rng.choice([0.01, 0.3, 3.0]) - rng.choice([0.0, 5.0])
    if rng.random() < 0.5:
        tie(rng, case, logits, bias)
    case.bias = bias.tolist() if biased else None
    return case, logits


def tie(rng: random.Random, case: Case, logits: Tensor, bias: Tensor) -> None:
    """Make experts, groups or tokens exactly equal.

    Only where equal inputs are what makes scores equal: numbers that are equal by arithmetic, such as
    the weights 1/3 of different tokens, are equal or not as they happen to be rounded.
    """
    by_weight = case.capacity_factor is not None and case.policy == "probs"
    kind = rng.choice(["tokens", "all"] if by_weight else ["experts", "groups", "tokens", "all", "steps"])
    if kind == "experts":
        for _ in range(case.experts // 2):
            a, b = rng.randrange(case.experts), rng.randrange(case.experts)
            logits[:, a], bias[a] = logits[:, b].clone(), bias[b]
    elif kind == "groups" and case.groups is not None:
        size = case.experts // case.groups
        for group in range(1, case.groups):
            mine, order = slice(group * size, (group + 1) * size), rng.sample(range(size), size)
            logits[:, mine], bias[mine] = logits[:, order], bias[order]
    elif kind == "tokens":
        for token in range(1, len(logits)):
            if rng.random() < 0.7:
                logits[token] = logits[rng.randrange(token)]
    elif kind == "all":
        logits.fill_(rng.choice([0.0, -3.7, 1.3]))
        bias.fill_(rng.choice([0.0, -0.2]))
    else:
        # Of one sign: the sigmoids of x and -x add up to that of 0, twice.
        logits.copy_((logits.abs() * 4).round() / 4)
        bias.fill_(-0.25)


def dense(weights: Tensor, indices: Tensor, experts: int) -> Tensor:
    there = indices != DROPPED
    found = weights.new_zeros(len(weights), experts)
    return found.scatter_add(1, indices.masked_fill(~there, 0), weights * there)


def compare(case: Case, logits: Tensor, expected: Expected) -> int:
    """Raises AssertionError on a difference; returns how many tokens were too close to call."""
    rows = logits.tolist()
    leaf = logits.clone().requires_grad_()
    bias = None if case.bias is None else torch.tensor(case.bias)
    routing = choose_experts(leaf, options_of(case), bias)
    sure = torch.tensor([t not in expected.unsure for t in range(len(rows))])
    weights = dense(routing.weights, routing.indices, case.experts)
    want = torch.tensor(expected.weights, dtype=torch.float64)
    assert torch.equal((weights > 0)[sure], (want > 0)[sure]), "other experts"
    torch.testing.assert_close(weights.double()[sure], want[sure], rtol=2e-5, atol=1e-7)
    got = weights
    if case.capacity_factor is not None:
        capacity = Capacity(factor=case.capacity_factor, policy=case.policy)
        limited = limit(routing, capacity, case.experts)
        got = dense(limited.probs, limited.indices, case.experts)
        want = want * torch.tensor(expected.kept)
        torch.testing.assert_close(got.double()[sure], want[sure], rtol=2e-5, atol=1e-7)
        kept = sum(map(sum, expected.kept))
        assert not sure.all() or int(limited.dropped) == len(rows) * case.topk - kept
        check_padded(routing, replace(capacity, pad=True), case.experts, got)
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((got * upstream).sum(), leaf)
    by_hand = torch.tensor(oracle.gradient(rows, case, expected, upstream.tolist()), dtype=torch.float64)
    atol = 1e-6 * (case.factor or 1.0)
    torch.testing.assert_close(gradient.double()[sure], by_hand[sure], rtol=1e-4, atol=atol)
    return len(expected.unsure)


def check_padded(routing: Routing, capacity: Capacity, experts: int, expected: Tensor) -> None:
    padded = limit(routing, capacity, experts)
    tokens = len(routing.indices)
    assert padded.probs.shape == (experts, capacity.tokens(tokens, routing.indices.size(1), experts))
    found = expected.new_zeros(experts, tokens).scatter_add(1, padded.indices, padded.probs)
    assert torch.equal(found.t(), expected), "padding hands on the same weights"
    assert all(len(set(row)) == len(row) for row in padded.indices.tolist()), "no token twice"


def losses(case: Case, logits: Tensor, expected: Expected, batch: int | None) -> None:
    if expected.unsure:
        return
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func, z_loss_func

    leaf = logits.clone().requires_grad_()
    bias = None if case.bias is None else torch.tensor(case.bias)
    options = options_of(case)
    indices = choose_experts(leaf, options, bias).indices
    scores = balancing_scores(leaf, options)
    if batch is None:
        counts = torch.bincount(indices.flatten(), minlength=case.experts)
        loss = switch_load_balancing_loss_func(scores, counts, case.topk, 0.02)
    else:
        loss = sequence_loss(scores, tokens_per_sequence(indices, batch, case.experts), case.topk, 0.02)
    # A logsumexp near zero is the difference of a logit and a logarithm, and as exact as the larger of them.
    sums = (leaf.logsumexp(-1).abs() * (1 + leaf.abs().amax(-1))).mean().item()
    for name, value, (want, by_hand), summed in (
        ("balancing", loss, oracle.balancing(logits.tolist(), case, expected, 0.02, batch), 0.0),
        ("z", z_loss_func(leaf, 0.001), oracle.z_loss(logits.tolist(), 0.001), 0.001 * 2 * sums),
    ):
        (gradient,) = torch.autograd.grad(value, leaf)
        assert float(value.detach()) == pytest.approx(want, rel=1e-5, abs=1e-6 * summed), name
        torch.testing.assert_close(gradient.double(), torch.tensor(by_hand).double(), rtol=2e-4, atol=1e-7)


def test_equals_plain_loops_on_random_cases(record_property: Any) -> None:
    tokens = close = ties = dropless = 0
    for seed in range(CASES):
        case, logits = draw(seed)
        expected = oracle.route(logits.tolist(), case)
        if expected.unsure and case.capacity_factor is not None:
            # Who may go elsewhere may make room for others: such a batch is compared without a capacity.
            case = replace(case, capacity_factor=None)
            expected = oracle.route(logits.tolist(), case)
            dropless += 1
        close += compare(case, logits, expected)
        tokens += len(logits)
        ties += any(len(set(row)) < len(row) for row in logits.tolist())
        batches = [b for b in (1, 2, 3, 4) if len(logits) % b == 0]
        losses(case, logits, expected, random.Random(seed).choice([None, *batches]))
    assert close <= 0.001 * tokens, f"{close} of {tokens} tokens were too close to call"
    assert dropless <= 0.01 * CASES
    assert ties > CASES // 10, "the cases hold exact ties"
    for name, value in (
        ("cases", CASES),
        ("tokens", tokens),
        ("too close to call", close),
        ("with ties", ties),
    ):
        record_property(name, value)


def failing(cases: int = 60, **change: Any) -> int:
    """How many of the first cases the oracle tells from a router that is ``change``d."""
    failures = 0
    for seed in range(cases):
        case, logits = draw(seed)
        case = replace(case, capacity_factor=None)
        expected = oracle.route(logits.tolist(), replace(case, **change))
        try:
            compare(case, logits, expected)
        except AssertionError:
            failures += 1
    return failures


def test_no_change_fails_none() -> None:
    assert failing() == 0


@pytest.mark.parametrize(
    "change",
    [{"score": "softmax"}, {"score": "sigmoid"}, {"bias": None}, {"groups": None}, {"factor": 1.1}],
    ids=str,
)
def test_another_router_fails(change: dict[str, Any]) -> None:
    """Negative controls: the comparison notices each option."""
    assert failing(**change) > 5


def test_biased_weights_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: weights of the biased scores, which choose only."""
    ours = choose_experts

    def biased(logits: Tensor, options: RouterOptions, bias: Tensor | None = None) -> Routing:
        found = ours(logits, options, bias)
        if bias is None:
            return found
        weights = (torch.sigmoid(logits) + bias).gather(1, found.indices)
        weights = weights / weights.sum(-1, keepdim=True)
        return Routing(weights=weights * (options.topk_scaling_factor or 1.0), indices=found.indices)

    monkeypatch.setitem(compare.__globals__, "choose_experts", biased)
    assert failing() > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_lowest_index_wins_exact_ties(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        n, k = 37, int(torch.randint(1, 38, (1,), generator=generator))
        x = torch.randint(-3, 3, (5, n), generator=generator).to(dtype) / 4
        x[0, ::2] = -0.0
        expected = [sorted(range(n), key=lambda i: (-row[i], i))[:k] for row in x.tolist()]
        assert lowest_index_topk(x, k).tolist() == expected
    extremes = torch.tensor([[0.0, float("inf"), -1e38, float("-inf"), 1e-45, -1e-45, 3e38]], dtype=dtype)
    order = sorted(range(7), key=lambda i: (-extremes[0, i].item(), i))
    assert lowest_index_topk(extremes, 7).tolist() == [order]


def test_torch_topk_alone_would_fail() -> None:
    """Negative control: on a CPU torch's own choice among ties is another."""
    x = torch.zeros(64, 256)
    assert torch.topk(x, 8).indices.tolist() != lowest_index_topk(x, 8).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_logits_are_equal_scores_wherever_they_stand(dtype: torch.dtype) -> None:
    """torch's sigmoid on a CPU is not that: its last bits depend on the place in memory."""
    sigmoid = RouterOptions(num_experts=37, topk=3, score_function="sigmoid")
    softmax = RouterOptions(num_experts=37, topk=3, pre_softmax=True)
    generator = torch.Generator().manual_seed(0)
    for value in (torch.randn(400, generator=generator) * 3).tolist():
        logits = torch.full((5, 37), value, dtype=dtype)
        found = choose_experts(logits, sigmoid, torch.full((37,), 0.25))
        assert found.indices.tolist() == [[0, 1, 2]] * 5
        assert choose_experts(logits, softmax).indices.tolist() == [[0, 1, 2]] * 5


@pytest.mark.parametrize("kind", ["sigmoid", "softmax of all", "softmax of the chosen"])
def test_scores_of_fp64_logits_are_fp64(kind: str) -> None:
    pre_softmax = kind == "softmax of all"
    options = RouterOptions(num_experts=4, topk=2, score_function=kind.split()[0], pre_softmax=pre_softmax)
    logits = torch.tensor([[0.5, 0.5 + 1e-10, 0.5 + 2e-10, -1.0]], dtype=torch.float64)
    scores = logits.sigmoid() if kind == "sigmoid" else logits.softmax(dim=-1)
    weights = scores[:, [2, 1]]
    if not pre_softmax:
        weights = weights / weights.sum()
    found = choose_experts(logits, options)
    assert found.indices.tolist() == [[2, 1]]
    torch.testing.assert_close(found.weights, weights, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(balancing_scores(logits, options), scores / scores.sum(), rtol=1e-14, atol=0.0)
    torch.manual_seed(0)
    apart = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda leaf: choose_experts(leaf, options).weights, apart)


def test_only_experts_of_the_best_groups() -> None:
    # Group scores: (.9 + .1), (.6 + .6), (.8 + .1); by their best expert alone: 0 and 2 win.
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6, 0.8, 0.1]])
    by_two = RouterOptions(num_experts=6, topk=2, score_function="sigmoid", num_groups=3, group_topk=1)
    logits = scores.logit()
    assert choose_experts(logits, by_two).indices.tolist() == [[2, 3]]
    by_one = replace(by_two, group_score_topk=1)
    assert choose_experts(logits, by_one).indices.tolist() == [[0, 1]]
    # A biased score below 0 in a chosen group still comes before any score of the others.
    bias = torch.tensor([-3.0, -3.0, -4.0, -4.0, -9.0, -9.0])
    assert choose_experts(logits, by_two, bias).indices.tolist() == [[0, 1]]


def test_a_capacity_keeps_the_first_or_the_likeliest() -> None:
    weights = torch.tensor([[0.5], [0.9], [0.5], [0.7]])
    routing = Routing(weights=weights, indices=torch.zeros(4, 1, dtype=torch.int64))
    kept = {}
    for policy in ("probs", "position"):
        found = limit(routing, Capacity(factor=1.0, policy=policy), 2)
        kept[policy] = (found.indices.flatten() == 0).tolist()
        assert found.indices[found.indices != 0].eq(DROPPED).all() and int(found.dropped) == 2
    assert kept == {"probs": [False, True, False, True], "position": [True, True, False, False]}
    three = limit(routing, Capacity(factor=1.5), 2)
    assert (three.indices.flatten() == 0).tolist() == [True, True, False, True], "of equals the first"
    with pytest.raises(ConfigError, match="drop_policy"):
        limit(routing, Capacity(factor=1.0, policy="last"), 2)


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="topk is 5"):
        RouterOptions(num_experts=4, topk=5).check()
    with pytest.raises(ConfigError, match="softmax or sigmoid"):
        choose_experts(torch.zeros(1, 4), RouterOptions(num_experts=4, topk=2, score_function="tanh"))


def test_one_expert_by_softmax_of_the_chosen_has_weight_one() -> None:
    """Hugging Face's Mixtral with one expert per token."""
    logits = torch.randn(9, 4)
    options = RouterOptions(num_experts=4, topk=1)
    options.check()
    routing = choose_experts(logits, options)
    assert torch.equal(routing.weights, torch.ones(9, 1))
    assert torch.equal(routing.indices[:, 0], logits.argmax(dim=1))


@pytest.mark.parametrize("version", [2, 3])
def test_equals_hugging_faces_deepseek_routers(version: int) -> None:
    """Published group rules: V2 by the best expert, V3 by the two best, in transformers' own modules."""
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    torch.manual_seed(version)
    common: dict[str, Any] = {
        "hidden_size": 24,
        "num_attention_heads": 2,
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
    }
    if version == 2:
        config = v2.DeepseekV2Config(routed_scaling_factor=16.0, topk_method="group_limited_greedy", **common)
        theirs: Any = v2.DeepseekV2TopkRouter(config)
        options = RouterOptions(
            num_experts=32, topk=6, pre_softmax=True, num_groups=8, group_topk=3, group_score_topk=1
        )
        options = replace(options, topk_scaling_factor=16.0)
        bias = None
    else:
        theirs = v3.DeepseekV3TopkRouter(
            v3.DeepseekV3Config(routed_scaling_factor=2.5, norm_topk_prob=True, **common)
        )
        options = RouterOptions(
            num_experts=32, topk=6, score_function="sigmoid", num_groups=8, group_topk=3, group_score_topk=2
        )
        options = replace(options, topk_scaling_factor=2.5)
        bias = torch.randn(32) * 0.1
        theirs.e_score_correction_bias.data.copy_(bias)
    theirs.weight.data.normal_()
    hidden = torch.randn(200, 24)
    _, weights, indices = theirs(hidden)
    found = choose_experts(torch.nn.functional.linear(hidden, theirs.weight), options, bias)
    torch.testing.assert_close(
        dense(found.weights, found.indices, 32), dense(weights, indices, 32), rtol=1e-5, atol=1e-6
    )
    wrong = replace(options, group_score_topk=4 - version)
    other = choose_experts(torch.nn.functional.linear(hidden, theirs.weight), wrong, bias)
    assert not torch.equal(other.indices.sort().values, indices.sort().values), "the rule matters"
