"""Sums, tiles, parts, requests and combined tokens, each against a plain computation."""

from __future__ import annotations

import math
import re
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mt_megatron.errors import ConfigError
from mt_megatron.parallel.rank_layout import Coordinates, RankLayout
from mt_megatron.scope.format.statistics import HISTOGRAM_BINS, OUTLIERS, STATISTICS
from mt_megatron.scope.format.tokens import combined
from mt_megatron.scope.watch.asked import Target, _Maps, _statistic, _Take
from mt_megatron.scope.watch.attention_rows import row_statistics
from mt_megatron.scope.watch.defaults import Defaults, _activation
from mt_megatron.scope.watch.head import Head
from mt_megatron.scope.watch.parts import Parts
from mt_megatron.scope.watch.requests import KINDS, MOST_REQUESTS, parse, parse_all, unknown
from mt_megatron.scope.watch.shares import Place, own_modules, spread_of
from mt_megatron.scope.watch.sums import (
    channel_maxima,
    histogram,
    moments,
    not_finite,
    outliers_of,
    square_sum,
)
from mt_megatron.scope.watch.tensors import Tensors
from mt_megatron.scope.watch.tiles import tiles_of
from mt_megatron.seams.taps import Call


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_norms_of_heads_are_spread_and_norms_of_latents_are_not() -> None:
    place = Place(
        layout=RankLayout(world_size=2, tp=2),
        at=Coordinates(tp=1, cp=0, ep=0, edp=0, dp=0, pp=0),
        sequence_parallel=True,
        micro_batch_size=1,
        seq_length=8,
    )
    norm, heads, latent = torch.nn.LayerNorm(8), torch.nn.Module(), torch.nn.Module()
    latent.add_module("kv_layernorm", torch.nn.LayerNorm(8))
    path = "decoder.layers.0.self_attention.q_layernorm"
    assert spread_of(norm, path, place, owner=heads) == "columns"
    assert spread_of(norm, path, place, owner=latent) == "tokens"


class Table(torch.nn.Module):
    """Megatron's table of embeddings as far as it matters: its output is [sequences, tokens, features]."""

    vocab_start_index = 0
    reduce_scatter_embeddings = False


@pytest.mark.parametrize("asked", ["activation", "gradient"])
def test_tables_of_embeddings_have_sequences_first(asked: str) -> None:
    layout = RankLayout(world_size=1)
    place = Place(
        layout=layout, at=layout.coordinates(0), sequence_parallel=False, micro_batch_size=2, seq_length=8
    )
    path, sequences_first = "embedding.word_embeddings", torch.arange(64.0).view(2, 8, 4)
    modules = ((Table(), sequences_first), (torch.nn.Identity(), sequences_first.transpose(0, 1)))
    for module, output in modules:
        kept = Tensors()
        target = Target(path=path, module=module, spread=spread_of(module, path, place))
        take = _Take(parse(f"{asked}@{path}:tokens=0-7:samples=1"), target, kept, place)
        call = Call(module, 0, 0, 0, False)
        if asked == "activation":
            take.output("activation", call, output)
        else:
            take.gradient(lambda: None, call, output, 0)
        (held,) = kept.held
        assert torch.equal(held.data, sequences_first[1])


@pytest.mark.parametrize(("length", "rows"), [(3, [0, 1, 2]), (32, list(range(1, 32, 2))), (64, None)])
def test_rows_of_a_decoder_are_spread_over_its_own_length(length: int, rows: list[int] | None) -> None:
    """An encoder's sequences have 64 tokens, and so say the sizes of the step."""
    layout = RankLayout(world_size=1)
    place = Place(
        layout=layout, at=layout.coordinates(0), sequence_parallel=False, micro_batch_size=2, seq_length=64
    )
    query: Any = SimpleNamespace(query=torch.empty(length, 2, 1, 4), context_rank=0, context_size=1)
    (found,) = Defaults([], place, heads=1, told=lambda text: None)._rows_of(query)
    assert found.places.tolist() == (rows or list(range(3, 64, 4)))


def _head() -> Head:
    layout = RankLayout(world_size=1)
    place = Place(
        layout=layout, at=layout.coordinates(0), sequence_parallel=False, micro_batch_size=2, seq_length=8
    )
    return Head([], place, told=lambda text: None)


WORDS = 30
"""Of a rank without padding of the vocabulary."""


def test_logits_are_looked_at_in_pieces_and_no_more_than_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = random(10, 30), torch.arange(10)
    whole = _head()
    whole.add("output_layer", 0, 0, 5, logits, labels, 0, words=WORDS)
    monkeypatch.setattr("mt_megatron.scope.watch.head.MOST_WORDS", 100)
    pieces = _head()
    pieces.add("output_layer", 0, 0, 5, logits, labels, 0, words=WORDS)
    assert [(each.position, len(each.tensors[0])) for each in pieces.seen] == [
        (5, 3),
        (8, 3),
        (11, 3),
        (14, 1),
    ]
    for index, expected in enumerate(whole.seen[0].tensors):
        assert torch.equal(torch.cat([each.tensors[index] for each in pieces.seen]), expected)
    monkeypatch.setattr("mt_megatron.scope.watch.head.MOST_SEEN", 1000)
    pieces.taken()
    pieces.add("output_layer", 0, 0, 5, logits, labels, 0, words=WORDS)
    seen, left_out = pieces.taken()
    assert len(seen) == 3 and left_out == 3 * 140
    assert pieces.taken() == ([], 0)


def test_ranks_with_fewer_words_look_at_the_same_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's last words may be padding. Pieces that differ are no parts of one another: their losses would
    be NaN."""
    monkeypatch.setattr("mt_megatron.scope.watch.head.MOST_WORDS", 100)
    logits, labels, found = random(10, WORDS), torch.arange(10), []
    for words in (WORDS, 10, 0):
        head = _head()
        head.add("output_layer", 0, 0, 5, logits[:, :words], labels, 0, words=WORDS)
        found.append([(each.position, len(each.tensors[0])) for each in head.seen])
    assert found[0] == found[1] == found[2] and len(found[0]) == 4


def test_a_rank_without_words_of_the_vocabulary_changes_nothing() -> None:
    """Nothing but padding: of a vocabulary of 257 padded to 512, the last of four ranks has none."""
    head = _head()
    logits, labels = random(3, 8), torch.tensor([1, 2, 3])
    head.add("output_layer", 0, 0, 0, logits, labels, 0, words=WORDS)
    head.add("output_layer", 0, 0, 0, logits[:, :0], labels, 384, words=WORDS)
    names = ("ids", "loss", "entropy", "top_ids", "top_logprobs", "lse")
    alone, none = (
        {name: each.numpy() for name, each in zip(names, seen.tensors, strict=True)} | {"parts": 2}
        for seen in head.seen
    )
    with np.errstate(all="raise"):
        whole = combined([alone, none])
    for name in names:
        np.testing.assert_allclose(whole[name], alone[name], rtol=1e-6)
    assert np.isinf(none["loss"]).all() and whole["parts"] == 1


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 2**22 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_square_sums_stay_exact_however_many_elements(count: int, dtype: torch.dtype) -> None:
    values = random(count).to(dtype)
    expected = float(values.double().square().sum())
    assert math.isclose(float(square_sum(values)), expected, rel_tol=1e-5, abs_tol=1e-30)


def test_a_plain_norm_would_not_do() -> None:
    values = random(2**24)
    plain = float(torch.linalg.vector_norm(values)) ** 2
    exact = float(values.double().square().sum())
    assert abs(float(square_sum(values)) / exact - 1) < 1e-7 < abs(plain / exact - 1)


def test_what_is_not_finite_is_counted() -> None:
    values = random(8, 8)
    assert not_finite(values, square_sum(values)).tolist() == [0, 0]
    values[0, :3] = float("nan")
    values[1, 0], values[1, 1] = float("inf"), -float("inf")
    assert not_finite(values, square_sum(values)).tolist() == [3, 2]


def test_outlier_channels_are_the_largest() -> None:
    values = random(5, 7, 40)
    values[2, 3, 11], values[0, 0, 30] = -90.0, 50.0
    pairs = outliers_of(channel_maxima(values)).view(-1, 2)
    largest = values.abs().amax(dim=(0, 1))
    assert pairs[:, 0].long().tolist() == largest.argsort(descending=True)[:OUTLIERS].tolist()
    assert pairs[0].tolist() == [11, 90]
    few = outliers_of(channel_maxima(values[..., :3])).view(-1, 2)
    assert sorted(few[:3, 0].tolist()) == [0, 1, 2] and few[3:, 0].tolist() == [-1] * (OUTLIERS - 3)
    values[0, 0, 5] = float("nan")
    assert outliers_of(channel_maxima(values))[:2].tolist() == [5, float("inf")]


def test_histograms_count_by_power_of_two() -> None:
    values = torch.tensor(
        [0.0, 1.0, -1.5, 2.0, 2.0**-40, 2.0**-50, 2.0**23, 1e30, float("inf"), float("nan")]
    )
    counts = histogram(values).tolist()
    assert counts[40] == 2 and counts[41] == 1 and counts[0] == 3 and counts[63] == 3
    assert sum(counts) == 9 and len(counts) == HISTOGRAM_BINS


def test_moments_are_sums_of_powers() -> None:
    values = random(6, 9).double()
    powers, ends = moments(values)
    assert powers.tolist() == pytest.approx([float((values**n).sum()) for n in (1, 2, 3, 4)])
    assert ends.tolist() == [float(values.min()), float(values.max())]


@given(st.integers(1, 9), st.integers(1, 300), st.integers(0, 2**31), st.sampled_from([1e-30, 1.0, 1e30]))
def test_tiles_state_their_error(rows: int, columns: int, seed: int, scale: float) -> None:
    values = random(rows, columns, seed=seed) * scale
    tiles = tiles_of(values)
    count = tiles.scale.shape[1]
    width = -(-columns // count)
    at = torch.arange(columns) // width
    back = tiles.low[:, at] + tiles.scale[:, at] * tiles.codes.float()
    worst = float((back - values).abs().max())
    assert worst <= float(tiles.error) * (1 + 1e-6)
    span = float((tiles.scale * 255).max())
    assert float(tiles.error) <= span / 255 * 0.51 + 1e-6 * float(values.abs().max())


def test_tiles_of_equal_elements_are_exact() -> None:
    tiles = tiles_of(torch.full((3, 100), -7.25))
    assert float(tiles.error) == 0.0 and tiles.low.unique().tolist() == [-7.25]


def test_what_is_not_finite_makes_the_error_infinite() -> None:
    values = random(2, 70)
    values[1, 3] = float("nan")
    tiles = tiles_of(values)
    assert math.isinf(float(tiles.error))
    # Two tiles of 35 columns each; the others keep their values.
    assert tiles.low.isnan().tolist() == [[False, False], [True, False]]
    whole = tiles_of(random(2, 70))
    assert torch.equal(tiles.codes[0], whole.codes[0]) and torch.equal(tiles.low[0], whole.low[0])


def test_finite_tiles_are_those_beside_what_is_not_finite() -> None:
    values = random(2, 9, 150)
    values[0, 4, :75] *= 1e37
    beside = values.clone()
    beside[1, 0, 3] = math.inf
    plain, general = tiles_of(values), tiles_of(beside)
    for name in ("codes", "scale", "low"):
        assert torch.equal(getattr(plain, name)[:9], getattr(general, name)[:9]), name
    assert plain.error[0] == general.error[0] and math.isinf(general.error[1])


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_element_is_read_as_one(sign: int) -> None:
    values = random(1, 64)
    values[0, 5] = sign * math.inf
    tiles = tiles_of(values)
    assert tiles.low.tolist() == [[sign * math.inf]] and bool(tiles.scale.isfinite().all())
    values[0, 6] = -sign * math.inf
    assert bool(tiles_of(values).low.isnan().all())


def test_rows_of_attention_tell_nan_from_nothing_to_attend_to() -> None:
    logits = random(3, 8)
    logits[1] = -math.inf
    largest, entropies, rows = row_statistics(logits)
    probabilities = torch.softmax(logits[[0, 2]].double(), dim=-1)
    assert rows == 3 and float(largest) == float(logits.max())
    assert float(entropies) == pytest.approx(float(torch.special.entr(probabilities).sum()))
    logits[2, 3] = math.nan
    largest, entropies, _ = row_statistics(logits)
    assert math.isnan(float(largest)) and math.isnan(float(entropies))


def test_parts_add_up_over_micro_batches() -> None:
    parts = Parts(torch.device("cpu"))
    one, other = random(4, 20, seed=1), random(6, 20, seed=2)
    for values in (one, other):
        parts.add("a", "activation_rms", [square_sum(values), float(values.numel())])
        parts.largest("a", "activation_max", values.abs().max())
        parts.outliers("a", channel_maxima(values), square_sum(values), values.numel())
        parts.moments("a", values.numel(), *moments(values))
        parts.add("a", "histogram", histogram(values))
        parts.add("b", "known", [3.0, 4.0])
    layout, vector, values_of = parts.taken()
    values, at, found = values_of(vector.numpy()), 0, {}
    for path, name, length in layout:
        found[path, name] = values[at : at + length]
        at += length
    assert at == len(values)
    both = torch.cat((one, other))
    assert STATISTICS["activation_rms"].value(found["a", "activation_rms"]) == pytest.approx(
        float(both.square().mean().sqrt()), rel=1e-6
    )
    assert found["a", "activation_max"][0] == float(both.abs().max())
    assert found["a", "moments"][0] == 200 and found["a", "moments"][6] == float(both.max())
    assert found["a", "moments"][2] == pytest.approx(float(both.double().square().sum()), rel=1e-6)
    assert found["a", "histogram"].sum() == 200
    assert found["a", "outlier_channels"][1] == float(both.abs().max())
    assert found["a", "outlier_channels"][-1] == 200
    assert found["b", "known"].tolist() == [6.0, 8.0]
    assert Parts(torch.device("cpu")).taken()[0] == ()


def test_requests_are_read() -> None:
    request = parse("attention@decoder.layers.*:heads=0,2-4:tokens=3-9:samples=1:every=10")
    assert (request.kind, request.heads, request.tokens) == ("attention", (0, 2, 3, 4), (3, 9))
    assert request.samples == (1,) and request.due(20, 7) and not request.due(21, 7)
    assert request.matches("decoder.layers.7") and not request.matches("decoder.layers.7.mlp")
    plain = parse("mlp@decoder.**")
    assert plain.heads is None and plain.tokens is None and plain.samples == (0,)
    assert plain.matches("decoder.layers.7.mlp") and plain.due(14, 7)
    assert parse("qkv@a.b").matches("a.b") and not parse("qkv@a.b").matches("aXb")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mlp",
        "mlp@",
        "nothing@a",
        "mlp@a:b",
        "mlp@a:heads=",
        "mlp@a:heads=x",
        "mlp@a:tokens=5-2",
        "mlp@a:tokens=1,2",
        "mlp@a:every=0",
        "mlp@a:every=1:every=1",
        "mlp@a/b",
        "mlp@" + "a" * 600,
        "mlp@a:heads=0-4096",
        "mlp@a:every=99999999999999999999",
    ],
)
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="found"):
        parse(text)


@given(st.text(max_size=80) | st.from_regex(r"[a-z]{1,12}@[a-z.*0-9]{1,20}(:[a-z]{1,8}=[0-9,-]{1,12}){0,3}"))
def test_any_text_is_a_request_or_refused(text: str) -> None:
    try:
        assert parse(text).kind in KINDS
    except ConfigError as error:
        assert str(error).startswith("found")


@given(
    st.lists(st.sampled_from(["*", "**", ".", "a", "ab", "b.a"]), min_size=1, max_size=7).map("".join),
    st.text(alphabet="ab.", max_size=10),
)
def test_patterns_match_as_regular_expressions_do(pattern: str, path: str) -> None:
    parts = re.split(r"(\*\*|\*)", pattern)
    expression = "".join({"**": ".*", "*": "[^.]*"}.get(part, re.escape(part)) for part in parts)
    assert parse(f"mlp@{pattern}").matches(path) == (re.fullmatch(expression, path) is not None)


def test_many_wildcards_take_no_time() -> None:
    """A regular expression of twelve ``.*`` would not end on a path of sixty characters."""
    request = parse("activation@" + "*" * 280)
    began = time.process_time()
    assert request.matches("decoder.layers.17.self_attention.linear_qkv.layer_norm_weight")
    assert not parse("activation@" + "**a" * 90 + "x").matches("a" * 60)
    assert not parse("activation@" + "*" * 24 + "x").matches("decoder.layers.17.mlp." + "a" * 60)
    assert time.process_time() - began < 1.0


def test_each_path_is_one_stages() -> None:
    def chunk(first: bool, last: bool) -> torch.nn.Module:
        model = torch.nn.Module()
        model.pre_process, model.post_process = first, last
        for name in ("embedding", "rotary_pos_emb", "decoder"):
            model.add_module(name, torch.nn.Module())
        return model

    first, middle, last = chunk(True, False), chunk(False, False), chunk(False, True)
    found = {path: module for path, module in own_modules([first, middle, last]) if path}
    assert found["embedding"] is first.embedding and found["decoder"] is last.decoder
    assert found["rotary_pos_emb"] is first.rotary_pos_emb
    assert [path for path, _ in own_modules([middle]) if path] == []
    assert {path for path, _ in own_modules([chunk(True, True)]) if path} == set(found)


def test_calls_for_prediction_depths_tokens_are_no_output_of_the_embedding() -> None:
    layout = RankLayout(world_size=1)
    place = Place(
        layout=layout, at=layout.coordinates(0), sequence_parallel=False, micro_batch_size=2, seq_length=8
    )
    module, kept, parts = torch.nn.Identity(), Tensors(), Parts(torch.device("cpu"))
    target = Target(path="embedding", module=module, spread="same")
    take = _Take(parse("activation@embedding:tokens=0-7"), target, kept, place)
    for ordinal in range(3):
        call = Call(module, 0, 0, ordinal, False)
        output = torch.full((8, 2, 4), 1.0 + ordinal)
        take.output("activation", call, output)
        _activation(parts, place, "embedding", call, output)
        _statistic("moments", parts, place, target, call, output)
    (held,) = kept.held
    assert held.data.eq(1).all()
    layout_of, vector, values_of = parts.taken()
    values = values_of(vector.numpy())
    ends = np.cumsum([length for _, _, length in layout_of])
    found = {name: values[end - n : end].tolist() for (_, name, n), end in zip(layout_of, ends, strict=True)}
    assert found["activation_rms"] == [64.0, 64.0] and found["activation_max"] == [1.0]


def test_rows_of_heads_far_apart_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = RankLayout(world_size=1)
    place = Place(
        layout=layout, at=layout.coordinates(0), sequence_parallel=False, micro_batch_size=1, seq_length=64
    )
    most = 32 * 64 * 4
    monkeypatch.setattr("mt_megatron.scope.watch.asked.MOST_LOGITS", most)
    target = Target(path="decoder.layers.0.self_attention", module=torch.nn.Identity(), spread="same")
    request = parse("attention@decoder.layers.0:heads=0,31:tokens=0-63")
    maps = _Maps(_Take(request, target, Tensors(), place), cells=256, told=lambda text: None)
    inputs: Any = SimpleNamespace(
        call=Call(target.module, 0, 0, 0, False),
        heads=range(32),
        query=torch.zeros(64, 1, 32, 2),
        context_size=1,
    )
    rows = maps.wanted(inputs)
    assert sum(len(each.places) for each in rows) == 64
    assert all(len(each.places) * (each.heads.stop - each.heads.start) * 64 <= most for each in rows)


def test_too_many_requests_are_refused() -> None:
    requests, refused = parse_all([f"mlp@layers.{index}" for index in range(MOST_REQUESTS + 3)] + ["bad"])
    assert len(requests) == MOST_REQUESTS and len(refused) == 4


def test_an_unknown_module_is_told_what_is_near() -> None:
    paths = ["embedding", "decoder.layers.0", "decoder.layers.0.self_attention", "decoder.layers.1"]
    assert unknown(parse("mlp@decoder.layers.*"), paths) is None
    line = unknown(parse("mlp@decoder.layer.0.self_attention"), paths)
    assert line is not None and "decoder.layers.0.self_attention" in line
    line = unknown(parse("mlp@zzz"), paths)
    assert line is not None and "decoder.layers.*" in line


def test_tokens_of_parts_of_the_vocabulary_are_those_of_all() -> None:
    logits, labels = random(5, 30).double() * 3, torch.tensor([0, 14, 15, 29, 7])
    frames = []
    for first in (0, 15):
        mine = logits[:, first : first + 15]
        logprobs = mine.log_softmax(-1)
        column = labels - first
        inside = (column >= 0) & (column < 15)
        own = -logprobs.gather(1, column.clamp(0, 14)[:, None])[:, 0]
        best = logprobs.topk(4, dim=-1)
        frames.append(
            {
                "ids": labels.numpy(),
                "loss": torch.where(inside, own, math.inf).numpy(),
                "entropy": -(logprobs.exp() * logprobs).sum(-1).numpy(),
                "top_ids": (best.indices + first).numpy(),
                "top_logprobs": best.values.numpy(),
                "lse": mine.logsumexp(-1).numpy(),
                "parts": 2,
            }
        )
    whole, logprobs = combined(frames), logits.log_softmax(-1)
    assert whole["parts"] == 1 and combined(frames[:1])["parts"] == 2
    np.testing.assert_allclose(whole["loss"], -logprobs.gather(1, labels[:, None])[:, 0], rtol=1e-6)
    np.testing.assert_allclose(whole["entropy"], -(logprobs.exp() * logprobs).sum(-1), rtol=1e-6)
    np.testing.assert_allclose(whole["top_logprobs"], logprobs.topk(4).values, rtol=1e-6)
    assert (whole["top_ids"] == logprobs.topk(4).indices.numpy()).all()
    with pytest.raises(ValueError, match="no tokens frame"):
        combined([])
