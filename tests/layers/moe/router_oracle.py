"""Routing in plain Python loops over floats, by the definitions, with its gradients worked out by hand.

Shares no line with the package. Numbers are float64; the package computes in float32, so a token whose
choice hangs on less than ``MARGIN``, and is not exactly tied, may rightly be chosen otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MARGIN = 2e-6
"""Smallest difference that decides, relative to the larger score. float32 knows them to about 1e-6."""

Matrix = list[list[float]]


@dataclass(kw_only=True)
class Case:
    """What a router is given, beside its logits."""

    experts: int
    topk: int
    score: str = "softmax"
    pre_softmax: bool = False
    groups: int | None = None
    group_topk: int | None = None
    group_score_topk: int | None = None
    factor: float | None = None
    bias: list[float] | None = None
    capacity_factor: float | None = None
    policy: str = "probs"


@dataclass(kw_only=True)
class Expected:
    """Of every token: experts by falling score, then what each expert gives it."""

    chosen: list[list[int]]
    weights: Matrix
    """[tokens][experts], 0 for experts not chosen, before any capacity."""

    kept: list[list[bool]]
    """[tokens][experts]: chosen and not dropped."""

    unsure: set[int] = field(default_factory=set)
    """Tokens whose choice, or dropping, is within the margin."""


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    powers = [math.exp(x - top) for x in row]
    total = math.fsum(powers)
    return [p / total for p in powers]


def near(value: float, border: float, scale: float) -> bool:
    """Whether ``value`` is not ``border`` and yet within ``MARGIN`` of it, or of ``scale`` if larger."""
    return value != border and abs(value - border) < MARGIN * max(abs(border), scale)


def first_best(scores: list[float], k: int, among: list[int], scale: float) -> tuple[list[int], bool]:
    """The k best of ``among``, the lowest index first among equals, and whether that was close."""
    order = sorted(among, key=lambda i: (-scores[i], i))
    borders = [scores[i] for i in order[k - 1 : k + 1]] if k < len(order) else []
    return order[:k], any(near(scores[i], border, scale) for border in borders for i in order)


def route(logits: Matrix, case: Case) -> Expected:
    found = Expected(chosen=[], weights=[], kept=[])
    for token, row in enumerate(logits):
        if case.score == "sigmoid":
            scores = [sigmoid(x) for x in row]
            judges = scores if case.bias is None else [s + b for s, b in zip(scores, case.bias, strict=True)]
        elif case.pre_softmax:
            scores = judges = softmax(row)
        else:
            scores = judges = row
        # A score and a bias may cancel out, and a logit be 0: they are known to the size of their parts.
        scale = 1e-300 if case.score == "softmax" and case.pre_softmax else 0.25
        among = list(range(case.experts))
        if case.groups is not None and case.group_topk is not None:
            size = case.experts // case.groups
            best = case.group_score_topk or case.topk // case.group_topk
            totals = [
                math.fsum(sorted(judges[g * size : (g + 1) * size], reverse=True)[:best])
                for g in range(case.groups)
            ]
            groups, close = first_best(totals, case.group_topk, list(range(case.groups)), scale)
            if close:
                found.unsure.add(token)
            among = [e for e in among if e // size in groups]
        chosen, close = first_best(judges, case.topk, among, scale)
        if close:
            found.unsure.add(token)
        weights = [0.0] * case.experts
        if case.score == "sigmoid":
            total = math.fsum(scores[e] for e in chosen) + 1e-20 if case.topk > 1 else 1.0
            for e in chosen:
                weights[e] = scores[e] / total
        elif case.pre_softmax:
            for e in chosen:
                weights[e] = scores[e]
        else:
            for e, weight in zip(chosen, softmax([row[e] for e in chosen]), strict=True):
                weights[e] = weight
        found.chosen.append(chosen)
        found.weights.append([w * (1.0 if case.factor is None else case.factor) for w in weights])
        found.kept.append([e in chosen for e in range(case.experts)])
    if case.capacity_factor is not None:
        _drop(found, case)
    return found


def _drop(found: Expected, case: Case) -> None:
    tokens = len(found.chosen)
    size = min(tokens, math.ceil((tokens * case.topk / case.experts) * case.capacity_factor))
    for expert in range(case.experts):
        queue = [t for t in range(tokens) if expert in found.chosen[t]]
        if case.policy == "probs":
            queue.sort(key=lambda t: (-found.weights[t][expert], t))
            given = [found.weights[t][expert] for t in queue]
            borders = given[size - 1 : size + 1] if size < len(queue) else []
            found.unsure.update(
                t for t, w in zip(queue, given, strict=True) if any(near(w, b, 0.0) for b in borders)
            )
        for token in queue[size:]:
            found.kept[token][expert] = False
    if found.unsure:
        # Who goes elsewhere makes room for others: nothing about them is certain.
        found.unsure.update(range(tokens))


def gradient(logits: Matrix, case: Case, found: Expected, upstream: Matrix) -> Matrix:
    """d/dlogits of the sum over tokens and kept experts of upstream * weight."""
    factor = 1.0 if case.factor is None else case.factor
    result = []
    for token, row in enumerate(logits):
        chosen = found.chosen[token]
        g = [upstream[token][e] * factor if found.kept[token][e] else 0.0 for e in range(case.experts)]
        out = [0.0] * case.experts
        if case.score == "sigmoid":
            s = {e: sigmoid(row[e]) for e in chosen}
            total = math.fsum(s.values()) + 1e-20
            mixed = math.fsum(g[e] * s[e] for e in chosen)
            for e in chosen:
                slope = g[e] / total - mixed / total**2 if case.topk > 1 else g[e]
                out[e] = slope * s[e] * (1.0 - s[e])
        else:
            members = list(range(case.experts)) if case.pre_softmax else chosen
            p = dict(zip(members, softmax([row[e] for e in members]), strict=True))
            mean = math.fsum(g[e] * p[e] for e in chosen)
            for e in members:
                out[e] = p[e] * (g[e] - mean)
        result.append(out)
    return result


def balancing(
    logits: Matrix, case: Case, found: Expected, coefficient: float, batch: int | None
) -> tuple[float, Matrix]:
    """The balancing loss and its gradient: per sequence with ``batch`` sequences whose tokens take turns,
    over all tokens at once without."""
    groups = [list(range(len(logits)))] if batch is None else []
    groups = groups or [list(range(b, len(logits), batch or 1)) for b in range(batch or 1)]
    loss, result = 0.0, [[0.0] * case.experts for _ in logits]
    for tokens in groups:
        length = len(tokens)
        load = [sum(e in found.chosen[t] for t in tokens) for e in range(case.experts)]
        share = [case.experts * n / (case.topk * length) for n in load]
        for t in tokens:
            scale = coefficient / (length * len(groups))
            if case.score == "softmax":
                p = softmax(logits[t])
                mean = math.fsum(f * x for f, x in zip(share, p, strict=True))
                loss += scale * mean
                for e in range(case.experts):
                    result[t][e] = scale * p[e] * (share[e] - mean)
                continue
            s = [sigmoid(x) for x in logits[t]]
            total = math.fsum(s) + 1e-20 if case.topk > 1 else 1.0
            mean = math.fsum(f * x for f, x in zip(share, s, strict=True)) / total
            loss += scale * mean
            for e in range(case.experts):
                slope = (share[e] - mean) / total if case.topk > 1 else share[e]
                result[t][e] = scale * slope * s[e] * (1.0 - s[e])
    return loss, result


def z_loss(logits: Matrix, coefficient: float) -> tuple[float, Matrix]:
    loss, result = 0.0, []
    for row in logits:
        top = max(row)
        total = top + math.log(math.fsum(math.exp(x - top) for x in row))
        loss += coefficient * total**2 / len(logits)
        result.append([coefficient * 2 * total * p / len(logits) for p in softmax(row)])
    return loss, result
