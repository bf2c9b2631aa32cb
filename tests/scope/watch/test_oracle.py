"""Watched values of every layout against a float64 decoder of one process that shares no line with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from mt_megatron.scope.format.tokens import combined
from tests.launch import run_ranks
from tests.parity.case import MICRO_BATCH
from tests.scope.watch.layouts import CHECKED, Layout
from tests.scope.watch.oracle import Oracle
from tests.scope.watch.ranks import STEPS, frames_of
from tests.scope.watch.reader import values_of, vectors_of

SEED = 11
RELATIVE = 1e-3

Frames = dict[int, list[dict[str, Any]]]
Sent = Callable[[Layout], tuple[Frames, dict[str, Any]]]


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Sent:
    """What the ranks of a layout sent, and what was said; all layouts of a size run together."""
    folder = tmp_path_factory.mktemp("oracle")

    @cache
    def run(world: int) -> None:
        if world > 1:
            run(1)
        names = [layout.name for layout in CHECKED if layout.world == world]
        run_ranks(
            world,
            "tests.scope.watch.ranks:run_layouts",
            names,
            str(folder),
            SEED,
            timeout=60 + 30 * len(names),
        )

    def get(layout: Layout) -> tuple[Frames, dict[str, Any]]:
        run(layout.world)
        return frames_of(folder / f"{layout.name}.frames")

    get.folder = folder  # type: ignore[attr-defined]
    return get


@pytest.fixture(scope="module")
def oracles(sent: Sent) -> Callable[[Layout], list[tuple[Oracle, dict[str, Any]]]]:
    """The oracle after each step, and its statistics, of a layout's model and loss."""

    @cache
    def train(model: str, token_loss: bool) -> list[tuple[Oracle, dict[str, Any]]]:
        weights = torch.load(sent.folder / f"{model}.pt", weights_only=True)  # type: ignore[attr-defined]
        found = []
        oracle = Oracle(weights, SEED, STEPS, token_loss=token_loss)
        for _ in range(STEPS):
            values = oracle.step()
            kept = Oracle.__new__(Oracle)
            vars(kept).update(vars(oracle))
            # The next step's update writes over them.
            kept.weights = {name: each.detach().clone() for name, each in oracle.weights.items()}
            found.append((kept, values))
        return found

    return lambda layout: train(layout.model, layout.token_loss)


@pytest.fixture(params=CHECKED, ids=lambda layout: layout.name, scope="module")
def layout(request: pytest.FixtureRequest) -> Layout:
    chosen: Layout = request.param
    return chosen


def test_statistics_equal_the_oracle(sent: Sent, oracles: Any, layout: Layout) -> None:
    frames, told = sent(layout)
    found = {f"{step}|{path}|{name}": value for (step, path, name), value in values_of(frames).items()}
    vectors = {f"{step}|{path}|{name}": value for (step, path, name), value in vectors_of(frames).items()}
    wrong, compared = [], 0
    for step, (oracle, values) in enumerate(oracles(layout), 1):
        expected = {f"{step}|{name}": value for name, value in values.items()}
        for index in range(oracle.layers):
            path = f"decoder.layers.{index}"
            for each in (path, f"{path}.self_attention.linear_qkv"):
                expected[f"{step}|{each}|moments|vector"] = oracle.moments_of(each)
            expected[f"{step}|{path}.mlp|histogram|vector"] = oracle.histogram_of(f"{path}.mlp")
        for name, value in expected.items():
            got = vectors.get(name.removesuffix("|vector")) if name.endswith("|vector") else found.get(name)
            compared += 1
            if got is None or not _alike(name, got, value):
                wrong.append((name, got, value))
    assert not wrong, f"{len(wrong)} of {compared}: {wrong[:8]}"
    assert compared > 250
    names = {name.split("|")[2] for name in found}
    assert set(found) <= {name for name in found if _known(name, oracles(layout))}, names


def _known(name: str, steps: list[tuple[Oracle, dict[str, Any]]]) -> bool:
    step, rest = name.split("|", 1)
    if rest.endswith(("|moments", "|histogram")):
        return True
    if rest.endswith("|not_finite") and rest in steps[0][1]:
        return True
    return rest in steps[int(step) - 1][1]


def _alike(name: str, got: Any, expected: Any) -> bool:
    if "|outlier_channels|vector" in name:
        pairs = dict(zip(got[::2], got[1::2], strict=True))
        wanted = dict(zip(expected[::2], expected[1::2], strict=True))
        # The last of them may change places with one that is as large.
        return len(set(pairs) & set(wanted)) >= len(wanted) - 1 and all(
            math.isclose(pairs[channel], wanted[channel], rel_tol=RELATIVE)
            for channel in set(pairs) & set(wanted)
        )
    if "|histogram|" in name:
        # An element at the border of two bins may fall into either.
        return bool(np.abs(np.asarray(got) - expected).sum() <= 0.002 * sum(expected))
    if "|moments|" in name:
        # Odd powers cancel out: their error is that of the sum of absolute values.
        scale = np.asarray([expected[0], *(math.sqrt(expected[0] * expected[2]) for _ in "1"), expected[2]])
        got, expected = np.asarray(got), np.asarray(expected)
        third = math.sqrt(expected[2] * expected[4])
        scale = np.asarray([*scale, third, expected[4], abs(expected[5]), abs(expected[6])])
        return bool((np.abs(got - expected) <= RELATIVE * scale).all())
    if isinstance(expected, list):
        return len(got) == len(expected) and all(
            (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=RELATIVE)
            for a, b in zip(got, expected, strict=True)
        )
    return math.isclose(got, expected, rel_tol=RELATIVE, abs_tol=1e-12)


def test_training_is_the_oracles(sent: Sent, oracles: Any, layout: Layout) -> None:
    """Else equal statistics would say little."""
    frames, told = sent(layout)
    for step, (oracle, _) in enumerate(oracles(layout)):
        assert math.isclose(told["losses"][step], oracle.loss, rel_tol=1e-4)
        assert math.isclose(told["norms"][step], oracle.norm, rel_tol=1e-4)


def test_what_is_asked_for_equals_the_oracle(sent: Sent, oracles: Any, layout: Layout) -> None:
    frames, told = sent(layout)
    seen = 0
    for (step, path, what, index), (values, error, covered) in _assembled(frames).items():
        oracle, _ = oracles(layout)[step - 1]
        expected = _expected(oracle, path, what, dict(index))
        assert expected.shape == values.shape, (path, what, dict(index), expected.shape, values.shape)
        assert covered.all(), f"a part of {what} of {path} is missing: {dict(index)}"
        scale = max(float(np.abs(expected).max()), 1e-9)
        assert np.abs(values - expected).max() <= error * (1 + 1e-5) + RELATIVE * scale, (
            path,
            what,
            dict(index),
        )
        seen += 1
    kinds = {what for _, _, what, _ in _assembled(frames)}
    assert {
        "activation",
        "residual",
        "gradient",
        "query",
        "key",
        "value",
        "context",
        "attention",
        "mlp",
    } <= kinds
    assert ({"router_logits", "router_probabilities", "routing"} <= kinds) == layout.experts
    assert ("mlp_hidden" in kinds) != layout.experts
    # Per step: embedding 2, residual 4 x 2, qkv 4 x (2 + 2 + 2), context 4, attention 4 x 2 and 4, mlp 1 ...
    # The input of the second linear, and two samples of the first one's output, are of dense layers alone.
    assert seen == STEPS * (2 + 8 + 24 + 4 + 8 + 4 + 1) + 4 + STEPS * (24 if layout.experts else 3)


def _assembled(frames: Frames) -> dict[Any, tuple[np.ndarray[Any, Any], float, np.ndarray[Any, Any]]]:
    found: dict[Any, Any] = {}
    for _, frame in ((rank, each) for rank, sent in frames.items() for each in sent if each["k"] == "tensor"):
        key = (frame["i"], frame["path"], frame["what"], tuple(sorted(frame["index"].items())))
        if key not in found:
            shape = tuple(frame["shape"])
            found[key] = [np.zeros(shape), 0.0, np.zeros(shape, bool)]
        data = np.asarray(frame["data"], np.float64)
        if frame["encoding"] == "q8":
            width = -(-data.shape[1] // frame["scale"].shape[1])
            scale, low = (
                np.repeat(frame[name], width, axis=1)[:, : data.shape[1]] for name in ("scale", "low")
            )
            data = low + scale * data
        at = tuple(slice(o, o + n) for o, n in zip(frame["offset"], data.shape, strict=True))
        assert not found[key][2][at].any(), f"two ranks sent the same of {key}"
        found[key][0][at], found[key][2][at] = data, True
        found[key][1] = max(found[key][1], float(frame["error"]))
    return found


def _expected(oracle: Oracle, path: str, what: str, index: dict[str, int]) -> np.ndarray[Any, Any]:
    """The oracle's, [rows, columns]."""
    microbatch, row = divmod(index["sample"], MICRO_BATCH)
    layer = index["layer"]
    if what in ("query", "key", "value", "attention", "context"):
        query, key, value, _, weights, context = oracle.attention[layer][microbatch]
        source = {"query": query, "key": key, "value": value, "attention": weights, "context": context}[what]
        matrix = source[row, index["head"]]
        rows = slice(5, 13) if what == "attention" and index["query_first"] == 5 else slice(None)
        return matrix[rows].numpy()
    if what in ("router_logits", "router_probabilities", "routing"):
        logits, chosen = oracle.routing[layer][microbatch]
        source = {"router_logits": logits, "router_probabilities": logits.softmax(-1), "routing": chosen}[
            what
        ]
        return source.view(MICRO_BATCH, -1, logits.size(-1))[row].double().numpy()
    name = f"{path}.hidden" if what == "mlp_hidden" else path
    output = oracle.outputs[name][microbatch]
    matrix = output.grad if what == "gradient" else output.detach()  # type: ignore[assignment]
    assert matrix is not None
    rows = slice(3, 21) if what == "activation" else slice(None)
    return matrix[row, rows].numpy()


def test_tokens_equal_the_oracle(sent: Sent, oracles: Any, layout: Layout) -> None:
    frames, told = sent(layout)
    groups: dict[Any, list[dict[str, Any]]] = {}
    for each in frames.values():
        for frame in each:
            if frame["k"] == "tokens":
                key = (frame["i"], frame["path"], frame["sample"], frame["position"])
                groups.setdefault(key, []).append(frame)
    covered: dict[Any, set[int]] = {}
    for (step, path, sample, first), parts in groups.items():
        whole = combined(parts)
        assert whole["parts"] == 1 and len(parts) == parts[0]["parts"]
        microbatch, row = divmod(sample, MICRO_BATCH)
        logits, labels = _logits(oracles(layout), step, path, microbatch, row)
        at = slice(first, first + len(whole["ids"]))
        covered.setdefault((step, path, sample), set()).update(range(at.start, at.stop))
        logprobs = logits[at].log_softmax(-1)
        assert whole["ids"].tolist() == labels[at].tolist()
        losses = -logprobs.gather(1, labels[at][:, None])[:, 0]
        np.testing.assert_allclose(whole["loss"], losses.numpy(), rtol=RELATIVE, atol=1e-5)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        np.testing.assert_allclose(whole["entropy"], entropy.numpy(), rtol=RELATIVE)
        best = logprobs.topk(10, dim=-1)
        np.testing.assert_allclose(whole["top_logprobs"], best.values.numpy(), rtol=RELATIVE, atol=1e-5)
        assert (whole["top_ids"] == best.indices.numpy()).mean() > 0.95
    wanted = {("output_layer", 0): range(4, 31), ("output_layer", 7): range(4, 31)}
    if "--sequence-parallel" not in layout.flags:
        wanted["decoder.layers.3", 4] = range(10)
        if "--pipeline" not in layout.flags or "--virtual-pipeline" in layout.flags:
            # Virtual stages: it is in the first chunk of the rank whose second one has the head.
            wanted |= {("decoder.layers.1", sample): range(10) for sample in (0, 5)}
    expected = {(step, *key): set(rows) for step in range(1, STEPS + 1) for key, rows in wanted.items()}
    assert covered == expected


def _logits(
    steps: list[tuple[Oracle, dict[str, Any]]], step: int, path: str, microbatch: int, row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    oracle = steps[step - 1][0]
    first = (step - 1) * 8 + microbatch * MICRO_BATCH + row
    labels = oracle.data[first]["labels"]
    if path == "output_layer":
        return oracle.losses[microbatch][0][row], labels
    return oracle.lenses[path][microbatch][row], labels


def test_a_wrong_value_is_noticed(sent: Sent, oracles: Any) -> None:
    layout = CHECKED[0]
    frames, _ = sent(layout)
    name = "2|decoder.layers.1|gradient_norm"
    found = {f"{step}|{path}|{name}": value for (step, path, name), value in values_of(frames).items()}
    expected = oracles(layout)[1][1]["decoder.layers.1|gradient_norm"]
    assert _alike(name, found[name], expected)
    assert not _alike(name, found[name] * 1.002, expected)
    vector = vectors_of(frames)[1, "decoder.layers.0", "moments"]
    assert not _alike("|moments|", [vector[0], vector[1], vector[2] * 1.002, *vector[3:]], vector)
