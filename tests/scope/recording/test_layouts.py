"""Parts of tensor, pipeline, context and expert ranks combine to what one process computes of the whole.

The oracle holds the whole arrays and uses plain numpy; ranks hold slices of them and send what a slice says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mt_megatron.scope.format.frames import VERSION, decode, encode
from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import Recording, open_recording
from mt_megatron.scope.recording.writer import Writer

TOKENS, HIDDEN, LAYERS, EXPERTS, WORDS = 32, 24, 4, 8, 40
STEP = 20


@dataclass(frozen=True, kw_only=True)
class Layout:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    nodes: int = 1

    def ranks(self) -> list[dict[str, int]]:
        """Coordinates by rank; expert ranks are data-parallel ones, each with its own sequence."""
        sizes = {"pp": self.pp, "ep": self.ep, "cp": self.cp, "tp": self.tp}
        return [
            dict(zip(sizes, at, strict=True)) for at in itertools.product(*(range(n) for n in sizes.values()))
        ]


LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(cp=2),
    Layout(ep=2),
    Layout(tp=2, pp=2, nodes=2),
    Layout(tp=2, cp=2, nodes=2),
    Layout(ep=2, tp=2, nodes=2),
    Layout(pp=2, ep=2, cp=2, tp=2, nodes=3),
]


@dataclass(kw_only=True)
class Whole:
    """One step of the whole model: arrays by layer, [sequences, tokens, ...]."""

    output: NDArray[np.float64]
    gradient: NDArray[np.float64]
    scores: NDArray[np.float64]
    logits: NDArray[np.float64]
    labels: NDArray[np.int64]


def whole_of(layout: Layout) -> Whole:
    draw = np.random.default_rng(7)
    return Whole(
        output=draw.standard_normal((LAYERS, layout.ep, TOKENS, HIDDEN)) * draw.gamma(1.0, 1.0, HIDDEN),
        gradient=draw.standard_normal((LAYERS, 10, HIDDEN)),
        scores=draw.standard_normal((LAYERS, layout.ep, TOKENS, EXPERTS)),
        logits=3 * draw.standard_normal((layout.ep, TOKENS, WORDS)),
        labels=draw.integers(0, WORDS, (layout.ep, TOKENS)),
    )


def tokens_of(layout: Layout, at: Mapping[str, int]) -> list[slice]:
    """Of context rank c of n: pieces c and 2n - 1 - c of 2n, as causal attention is balanced."""
    size = TOKENS // (2 * layout.cp)
    pieces = {at["cp"], 2 * layout.cp - 1 - at["cp"]} if layout.cp > 1 else {0, 1}
    return [slice(piece * size, (piece + 1) * size) for piece in sorted(pieces)]


def share(size: int, part: int, parts: int) -> slice:
    return slice(part * size // parts, (part + 1) * size // parts)


def layers_of(layout: Layout, at: Mapping[str, int]) -> range:
    return range(LAYERS)[share(LAYERS, at["pp"], layout.pp)]


def load_of(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.bincount(scores.argmax(-1).ravel(), minlength=EXPERTS).astype(np.float64)


def entropy_of(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    found: NDArray[np.float64] = -(chances * np.log(chances)).sum(-1)
    return found


def parts_of(whole: Whole, layout: Layout, at: Mapping[str, int]) -> list[tuple[str, str, Any]]:
    """Path, statistic and part of what one rank holds."""
    found: list[tuple[str, str, Any]] = []
    columns = share(HIDDEN, at["tp"], layout.tp)
    places = np.concatenate([np.arange(TOKENS)[piece] for piece in tokens_of(layout, at)])
    for layer in layers_of(layout, at):
        path = f"decoder.layers.{layer}"
        own = whole.output[layer, at["ep"]][places][:, columns]
        square = float((own**2).sum())
        found.append((path, "activation_rms", [square, own.size]))
        found.append((path, "activation_max", [float(np.abs(own).max())]))
        largest = np.abs(own).max(0)
        order = np.argsort(-largest)[:16]
        pairs = np.full((16, 2), (-1.0, 0.0))
        pairs[: len(order)] = np.stack([order + columns.start, largest[order]], 1)
        found.append((path, "outlier_channels", [*pairs.ravel(), square, own.size]))
        if at["cp"] == at["ep"] == 0:  # gradients are reduced over both: one of them answers
            found.append((path, "gradient_norm", [float((whole.gradient[layer][:, columns] ** 2).sum())]))
        if at["tp"] == 0:  # every tensor rank routes all tokens: one of them answers
            scores = whole.scores[layer, at["ep"]][places]
            found.append((f"{path}.mlp.router", "expert_load", load_of(scores)))
            entropies = entropy_of(scores)
            found.append((f"{path}.mlp.router", "router_entropy", [entropies.sum(), entropies.size]))
    if at["pp"] == layout.pp - 1 and at["tp"] == 0:
        loss = losses(whole)[at["ep"]][places]
        sums, counts = np.zeros(64), np.zeros(64)
        np.add.at(sums, places * 64 // TOKENS, loss)
        np.add.at(counts, places * 64 // TOKENS, 1.0)
        found.append(("output_layer", "loss_per_position", [*sums, *counts]))
    return found


def losses(whole: Whole) -> NDArray[np.float64]:
    logs = whole.logits - np.log(np.exp(whole.logits).sum(-1, keepdims=True))
    picked: NDArray[np.float64] = -np.take_along_axis(logs, whole.labels[..., None], -1)[..., 0]
    return picked


def frames_of(whole: Whole, layout: Layout, rank: int, at: Mapping[str, int]) -> list[dict[str, Any]]:
    parts = parts_of(whole, layout, at)
    values = [np.asarray(part, np.float64) for _, _, part in parts]
    entries = [[path, name, len(part)] for (path, name, _), part in zip(parts, values, strict=True)]
    frames: list[dict[str, Any]] = [
        {
            "k": "hello",
            "v": VERSION,
            "rank": rank,
            "world_size": len(layout.ranks()),
            "at": {**at},
            "layout": {},
            "host": "a",
            "pid": 1,
            "session": "s",
            "model": {},
            "modules": [],
        },
        {"k": "schema", "id": 1, "entries": entries},
        {"k": "stats", "i": STEP, "id": 1, "attempt": 0, "values": np.concatenate(values)},
    ]
    columns = share(HIDDEN, at["tp"], layout.tp)
    for layer in layers_of(layout, at):
        for piece in tokens_of(layout, at):
            data = whole.output[layer, at["ep"]][piece, columns].astype(np.float32)
            frames.append(
                {
                    "k": "tensor",
                    "i": STEP,
                    "attempt": 0,
                    "path": f"decoder.layers.{layer}",
                    "what": "activation",
                    "index": {"sample": at["ep"]},
                    "shape": [TOKENS, HIDDEN],
                    "encoding": "f32",
                    "offset": [piece.start, columns.start],
                    "data": np.ascontiguousarray(data),
                }
            )
    if at["pp"] == layout.pp - 1:
        frames += token_frames(whole, layout, at)
    return frames


def token_frames(whole: Whole, layout: Layout, at: Mapping[str, int]) -> list[dict[str, Any]]:
    """The rank's own words of its own tokens: loss, entropy and likeliest of these words alone, and the
    logarithm of their sum."""
    own = share(WORDS, at["tp"], layout.tp)
    frames = []
    for piece in tokens_of(layout, at):
        logits = whole.logits[at["ep"], piece][:, own]
        labels = whole.labels[at["ep"], piece]
        total = np.log(np.exp(logits).sum(-1))
        inside = (labels >= own.start) & (labels < own.stop)
        picked = np.take_along_axis(logits, np.where(inside, labels - own.start, 0)[:, None], -1)[:, 0]
        chances = np.exp(logits - total[:, None])
        best = np.argsort(-logits, -1)[:, :5]
        frames.append(
            {
                "k": "tokens",
                "i": STEP,
                "attempt": 0,
                "sample": at["ep"],
                "position": piece.start,
                "parts": layout.tp,
                "path": "output_layer",
                "ids": labels,
                "lse": total.astype(np.float32),
                "loss": np.where(inside, total - picked, np.inf).astype(np.float32),
                "entropy": (-(chances * np.log(chances)).sum(-1)).astype(np.float32),
                "top_ids": best + own.start,
                "top_logprobs": (np.take_along_axis(logits, best, -1) - total[:, None]).astype(np.float32),
            }
        )
    return frames


def written(run: Path, whole: Whole, layout: Layout, *, without: int = -1) -> Recording:
    """The recording of all ranks but ``without``, shuffled over the layout's nodes."""
    places = layout.ranks()
    order = np.random.default_rng(3).permutation(len(places))
    files = scope_files(run)
    files.root.mkdir(parents=True)
    for node in range(layout.nodes):
        writer = Writer(files.node(f"h{node}", node), node=node, host=f"h{node}", retain_bytes=1 << 26)
        members = [int(rank) for place, rank in enumerate(order) if place % layout.nodes == node]
        queues = [frames_of(whole, layout, rank, places[rank]) for rank in members if rank != without]
        for frames in itertools.zip_longest(*queues):  # frames of ranks arrive in turn
            sent = [decode(encode(frame)[4:]) for frame in frames if frame is not None]
            owners = [rank for rank in members if rank != without]
            writer.tick(
                [
                    (rank, frame)
                    for rank, frame in zip(
                        [r for r, f in zip(owners, frames, strict=True) if f is not None], sent, strict=True
                    )
                ]
            )
        writer.close()
        assert writer.stopped is None and not writer.lost
    return open_recording(run)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_of_every_layout_equal_the_whole(layout: Layout, tmp_path: Path) -> None:
    whole = whole_of(layout)
    with written(tmp_path, whole, layout) as recording:
        values = {(each.path, each.statistic): each for each in recording.values(STEP, vectors=True)}
        assert not any(each.partial for each in values.values())
        for layer in range(LAYERS):
            path, output, scores = f"decoder.layers.{layer}", whole.output[layer], whole.scores[layer]
            root = math.sqrt(float((output**2).mean()))
            channels = np.abs(output).max((0, 1))
            expected = {
                (path, "activation_rms"): root,
                (path, "activation_max"): float(np.abs(output).max()),
                (path, "outlier_channels"): float(channels.max()) / root,
                (path, "gradient_norm"): float(np.linalg.norm(whole.gradient[layer])),
                (f"{path}.mlp.router", "expert_load"): load_of(scores).max() / load_of(scores).mean(),
                (f"{path}.mlp.router", "dead_experts"): float((load_of(scores) == 0).sum()),
                (f"{path}.mlp.router", "router_entropy"): float(entropy_of(scores).mean()),
            }
            for key, value in expected.items():
                assert values[key].value == pytest.approx(value, rel=1e-9), key
            np.testing.assert_array_equal(values[f"{path}.mlp.router", "expert_load"].vector, load_of(scores))
            outliers = values[path, "outlier_channels"].vector
            assert outliers is not None
            best = np.argsort(-channels)[:16]
            np.testing.assert_array_equal(outliers[0::2], best)
            np.testing.assert_allclose(outliers[1::2], channels[best])
        assert values["output_layer", "loss_per_position"].value == pytest.approx(losses(whole).mean())


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[-1]], ids=str)
def test_tensors_and_tokens_are_put_together(layout: Layout, tmp_path: Path) -> None:
    whole = whole_of(layout)
    with written(tmp_path, whole, layout) as recording:
        keys = recording.tensors(step=STEP)
        assert len(keys) == LAYERS * layout.ep
        for key in keys:
            found = recording.tensor(key)
            expected = whole.output[int(key.path.rpartition(".")[2]), key.index["sample"]].astype(np.float32)
            assert found.missing == 0
            np.testing.assert_array_equal(found.values, expected)
        sequences = recording.tokens(STEP)
        assert [each.sample for each in sequences] == list(range(layout.ep))
        logs = whole.logits - np.log(np.exp(whole.logits).sum(-1, keepdims=True))
        for each in sequences:
            own = logs[each.sample]
            np.testing.assert_array_equal(each.position, np.arange(TOKENS))
            np.testing.assert_array_equal(each.ids, whole.labels[each.sample])
            np.testing.assert_allclose(each.loss, losses(whole)[each.sample], atol=2e-5)
            np.testing.assert_allclose(each.entropy, -(np.exp(own) * own).sum(-1), atol=2e-5)
            best = np.argsort(-own, -1)[:, :5]
            assert each.top_ids is not None and each.top_logprobs is not None
            np.testing.assert_array_equal(each.top_ids[:, :5], best)
            np.testing.assert_allclose(each.top_logprobs[:, :5], np.take_along_axis(own, best, -1), atol=2e-5)


def test_a_rank_that_is_missing_is_seen(tmp_path: Path) -> None:
    """The negative control: without one of the ranks sums differ, shards lack, and both are marked."""
    layout = Layout(tp=2)
    whole = whole_of(layout)
    with written(tmp_path, whole, layout, without=1) as recording:
        assert recording.facts().session.missing_ranks == 1
        values = {(each.path, each.statistic): each for each in recording.values(STEP)}
        assert all(each.partial for each in values.values())
        norm = float(np.linalg.norm(whole.gradient[0]))
        assert values["decoder.layers.0", "gradient_norm"].value < 0.95 * norm
        assert recording.tensor(recording.tensors()[0]).missing == 0.5
        (tokens,) = recording.tokens(STEP)
        assert tokens.missing_parts == 1
        # Losses of half a vocabulary would only look like some.
        assert np.isnan(tokens.loss).all() and np.isnan(tokens.entropy).all()
        assert np.isnan(tokens.top_logprobs).all()
