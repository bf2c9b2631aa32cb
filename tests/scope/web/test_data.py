"""Data of every view against the synthetic recording's known values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.recording.writer import Writer
from mt_megatron.scope.report.compare import difference
from mt_megatron.scope.web import recorded as recorded_source
from mt_megatron.scope.web.messages import QUERIES, parse_query
from mt_megatron.scope.web.pack import pack, unpack
from mt_megatron.scope.web.recorded import RecordedSource
from mt_megatron.scope.web.source import Module, TensorName
from mt_megatron.scope.web.tiles import INFINITE, NOT_A_NUMBER, pooled, quantised
from mt_megatron.scope.web.views import model_data
from mt_megatron.scope.web.views.context import Context
from mt_megatron.scope.web.views.registry import DATA
from tests.scope.synthetic import (
    RunShape,
    Truth,
    activation,
    frames_of,
    hello,
    modules_of,
    perturbed_at,
    schema,
    step_frame,
)
from tests.scope.web.conftest import SHAPE
from tools.scan_simulator import Job, parse_layout, simulate

Asked = Callable[..., tuple[dict[str, Any], dict[str, NDArray[Any]]]]

SAMPLED = range(SHAPE.interval, SHAPE.steps + 1, SHAPE.interval)
WITH_TENSORS = [20, 40, 60]
LAYER = "decoder.layers.1"


@pytest.fixture(scope="module")
def truth(recorded: tuple[Path, Truth]) -> Truth:
    return recorded[1]


@pytest.fixture(scope="module")
def ask(recorded: tuple[Path, Truth]) -> Iterator[Asked]:
    """Facts and arrays of an answer, after the bytes that a browser would get."""
    with open_recording(recorded[0]) as recording:
        context = Context(source=RecordedSource(recording, "run"), folder=recorded[0])
        yield lambda name, **query: answered(context, name, **query)


def answered(context: Context, name: str, **query: object) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    checked = parse_query(name, [(key, str(value)) for key, value in query.items()])
    checked.pop("run")
    answer = DATA[name](context, checked)
    body = answer.body()
    return (json.loads(body), {}) if answer.arrays is None else unpack(body)


def test_every_query_has_data_and_all_data_a_query() -> None:
    assert set(QUERIES) == set(DATA)


def test_run(ask: Asked, truth: Truth) -> None:
    found, _ = ask("run")
    facts = found["facts"]
    assert (facts["name"], facts["live"], facts["world_size"]) == ("run", False, 4)
    assert [(row["rank"], row["tp"], row["pp"], row["host"]) for row in facts["ranks"]] == [
        (rank, rank % 2, rank // 2, "node0") for rank in range(4)
    ]
    assert facts["model"]["num_layers"] == 4 and facts["model"]["hidden_size"] == 64
    assert (found["first"], found["last"], found["count"]) == (1, 60, 60)
    assert (found["dropped"]["frames"], found["dropped"]["bytes"]) == (12, 34_000)
    assert facts["requests"] == ["attention@decoder.layers.*:heads=0"]
    assert found["bookmarks"] == [{"step": 31, "text": "halfway"}]
    assert {(path, name) for path, names in found["names"].items() for name in names} == set(truth.values)
    assert found["statistics"]["activation_rms"]["meaning"]


def test_steps(ask: Asked, truth: Truth) -> None:
    _, table = ask("steps")
    steps = list(range(1, 61))
    frames = {step: [step_frame(SHAPE, rank, step) for rank in range(4)] for step in steps}
    assert table["i"].tolist() == steps
    np.testing.assert_allclose(table["loss"], [truth.loss[step] for step in steps], rtol=1e-12)
    assert np.isnan(table["loss"][49:]).all() and np.isfinite(table["loss"][:49]).all()
    for name in ("seconds", "memory_bytes"):  # of the slowest, and of the fullest rank
        np.testing.assert_allclose(table[name], [max(each[name] for each in frames[s]) for s in steps])
    for name in ("grad_norm", "lr", "tokens", "tokens_per_second"):
        np.testing.assert_allclose(table[name], [frames[step][0][name] for step in steps])
    perturbed = [step for step, mark in zip(steps, table["perturbed"], strict=True) if mark]
    assert perturbed == [step for step in steps if perturbed_at(SHAPE, step)] == list(range(30, 36))


def test_thinned_steps_keep_the_extremes(ask: Asked, truth: Truth) -> None:
    facts, table = ask("steps", points=16)
    known = {step: value for step, value in truth.loss.items() if math.isfinite(value)}
    kept = set(table["i"].astype(int).tolist())
    assert facts["count"] == 60 and len(kept) < 30
    assert {1, 60, 50, min(known, key=known.__getitem__), max(known, key=known.__getitem__)} <= kept


def test_every_series(ask: Asked, truth: Truth) -> None:
    assert len(truth.values) > 60
    for (path, statistic), values in truth.values.items():
        facts, table = ask("series", path=path, statistic=statistic)
        assert table["i"].tolist() == sorted(values) == list(SAMPLED), (path, statistic)
        expected = [values[step] for step in sorted(values)]
        np.testing.assert_allclose(table["values"], expected, rtol=1e-6, err_msg=f"{path} {statistic}")
        assert facts["count"] == len(values)
    with pytest.raises(KeyError, match="no values"):
        ask("series", path=LAYER, statistic="router_entropy")


def test_every_vector(ask: Asked, truth: Truth) -> None:
    assert {name for _, name in truth.vectors} == {"expert_load", "loss_per_position", "outlier_channels"}
    for (path, statistic), vectors in truth.vectors.items():
        _, table = ask("vectors", path=path, statistic=statistic)
        steps = [step for step in sorted(vectors) if not np.isnan(vectors[step]).all()]
        assert table["i"].tolist() == steps
        expected = np.stack([vectors[step] for step in steps])
        if statistic == "outlier_channels":  # equal sizes may stand in any order
            np.testing.assert_allclose(table["values"][:, 1::2], expected[:, 1::2], rtol=1e-6)
        else:
            np.testing.assert_allclose(table["values"], expected, rtol=1e-6)
    path = "decoder.layers.1.mlp.router"
    for query, steps in (({"first": 20, "last": 40}, [20, 30, 40]), ({"points": 1}, [60])):
        _, table = ask("vectors", path=path, statistic="expert_load", **query)
        assert table["i"].tolist() == steps


def test_model_tree_and_first_not_finite(ask: Asked, truth: Truth) -> None:
    facts, arrays = ask("model", statistic="activation_rms")
    rows = {row["path"]: row for row in facts["rows"]}
    listed = {path: (name, size) for stage in (0, 1) for path, name, size in modules_of(SHAPE, stage)}
    assert {path: (rows[path]["class"], rows[path]["parameters"]) for path in listed} == {
        path: (name, size) for path, (name, size) in listed.items()
    }
    order = [row["path"] for row in facts["rows"]]
    assert all(order.index(path) > order.index(path.rpartition(".")[0]) for path in order if "." in path[8:])
    curves = [path for path, name in truth.values if name == "activation_rms"]
    assert len(arrays["values"]) == len(curves)
    for path in curves:
        row, values = rows[path], truth.values[path, "activation_rms"]
        assert arrays["steps"][row["curve"]].tolist() == sorted(values)
        expected = [values[step] for step in sorted(values)]
        np.testing.assert_allclose(arrays["values"][row["curve"]], expected, rtol=1e-6)
    assert facts["first_not_finite"] == {"path": "decoder.layers.2", "step": 50}
    assert rows[LAYER]["first_not_finite"] is None


@dataclass(frozen=True)
class Curves:
    """The part of a ``Source`` that two runs are compared by: one statistic of some modules."""

    by_path: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]

    def modules(self) -> list[Module]:
        return [Module(path=path, class_name="", parameters=0) for path in self.by_path]

    def statistics(self) -> dict[str, list[str]]:
        return {path: ["x"] for path in self.by_path}

    def series(self, path: str, statistic: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        return self.by_path[path]


def where_parted(a: Curves, b: Curves) -> tuple[Any, ...]:
    """Step, path, both values, steps compared."""
    contexts = [Context(source=each) for each in (a, b)]  # type: ignore[arg-type]
    facts, arrays = unpack(model_data.parted(contexts[0], {"statistic": "x", "other": contexts[1]}).body())
    return facts["step"], facts["path"], arrays["values"].tolist(), facts["steps"]


@pytest.mark.parametrize("a,b", [(2.0, 2.01), (2.0, math.nan), (math.inf, 2.0), (math.inf, -math.inf)])
def test_first_difference_of_two_runs_is_found_among_all_steps(a: float, b: float) -> None:
    """Of two thousand steps one differs, which thinned curves leave out; later ones differ by more."""
    steps = np.arange(1, 2001)
    curves = [Curves({"p": (steps, np.full(2000, 2.0)), "q": (steps, np.full(2000, 2.0))}) for _ in "ab"]
    for one, value in zip(curves, (a, b), strict=True):
        one.by_path["q"][1][[776, 1500]] = value
        one.by_path["p"][1][900] = value
        one.by_path["p"][1][3] = math.nan  # in both
    values = where_parted(*curves)
    assert values[:2] == (777, "q") and values[3] == 2000
    np.testing.assert_array_equal(values[2], [a, b])
    assert where_parted(curves[0], curves[0]) == (None, "", [], 2000)
    later = Curves({"q": (steps + 2000, np.zeros(2000)), "r": (steps, np.zeros(2000))})
    assert where_parted(curves[0], later) == (None, "", [], 0)


def test_runs_differ_on_the_page_as_in_the_report() -> None:
    numbers = [0.0, 1.0, 1.0005, 1.002, -1.0, 1e-30, math.inf, -math.inf, math.nan]
    for a in numbers:
        found = model_data.differs(np.full(len(numbers), a), np.array(numbers))
        assert found.tolist() == [difference(a, b) > model_data.TOLERANCE for b in numbers], a


@pytest.mark.parametrize("step,at", [(None, 60), (60, 60), (45, 40), (10, 10)])
def test_experts(ask: Asked, truth: Truth, step: int | None, at: int) -> None:
    facts, arrays = ask("experts", **({} if step is None else {"step": step}))
    assert [row["path"] for row in facts["rows"]] == [f"decoder.layers.{n}.mlp.router" for n in range(4)]
    for row, loads in zip(facts["rows"], arrays["loads"], strict=True):
        assert row["step"] == at
        np.testing.assert_allclose(loads, truth.vectors[row["path"], "expert_load"][at], rtol=1e-6)
        for name in ("router_entropy", "dead_experts", "overloaded_experts", "expert_load"):
            assert row[name] == pytest.approx(truth.values[row["path"], name][at], rel=1e-6), name


def test_experts_before_the_first_record(ask: Asked) -> None:
    assert ask("experts", step=9)[0]["rows"] == []


# Tensors.


def tensor_id(path: str, what: str, **index: int) -> str:
    return TensorName(path=path, what=what, index=tuple(sorted({**index, "sample": 0}.items()))).text


def whole(truth: Truth, step: int, path: str, what: str, **index: int) -> NDArray[Any]:
    found: NDArray[Any] = truth.tensors[step, path, what, json.dumps({**index, "sample": 0}, sort_keys=True)]
    return found


MAP = "decoder.layers.0.self_attention"


def test_tensors_are_listed(ask: Asked) -> None:
    rows = {row["id"]: row for row in ask("tensors")[0]["tensors"]}
    expected = {tensor_id(f"decoder.layers.{n}", "activation"): [256, 64] for n in range(4)}
    for layer in (0, 1):
        for head in (0, 1):
            expected[tensor_id(f"decoder.layers.{layer}.self_attention", "attention", head=head)] = [600, 600]
        expected[tensor_id(f"decoder.layers.{layer}.self_attention", "attention_mean")] = [600, 600]
    assert {name: row["shape"] for name, row in rows.items()} == expected
    assert all(row["steps"] == WITH_TENSORS for row in rows.values())


def read(facts: dict[str, Any], codes: NDArray[Any]) -> NDArray[Any]:
    assert codes.max() < INFINITE
    return np.asarray(facts["low"] + facts["scale"] * codes.astype(np.float64))


@pytest.mark.parametrize("by", ["max", "mean"])
@pytest.mark.parametrize("level", [0, 2, 3])
def test_mean_over_heads_is_of_each_element(ask: Asked, truth: Truth, level: int, by: str) -> None:
    """Also where blocks are shown: the largest mean of a block, not the mean of the largest."""
    path = "decoder.layers.0.self_attention"
    facts, arrays = ask(
        "tile", tensor=tensor_id(path, "attention_mean"), step=40, level=level, row=0, column=0, by=by
    )
    mean = np.mean([whole(truth, 40, path, "attention", head=head) for head in (0, 1)], axis=0)
    block = 1 << level
    size = min(256 * block, 600) // block * block  # whole blocks alone
    blocks = mean[:size, :size].reshape(size // block, block, size // block, block)
    expected = blocks.max(axis=(1, 3)) if by == "max" else blocks.mean(axis=(1, 3))
    found = read(facts, arrays["codes"])[: size // block, : size // block]
    assert np.abs(found - expected).max() <= facts["error"] * (1 + 1e-5)


@pytest.mark.parametrize("layer", [0, 1])  # 0 is exact, 1 comes as 8-bit tiles
def test_tile_of_an_activation(ask: Asked, truth: Truth, layer: int) -> None:
    path = f"decoder.layers.{layer}"
    facts, arrays = ask("tile", tensor=tensor_id(path, "activation"), step=40)
    expected = whole(truth, 40, path, "activation")
    assert (facts["rows"], facts["columns"], facts["missing"]) == (256, 64, 0)
    assert np.abs(read(facts, arrays["codes"]) - expected).max() <= facts["error"] * (1 + 1e-5)
    assert facts["error"] < 0.01 * np.ptp(expected)  # a bound that says something


@pytest.mark.parametrize("by", ["max", "mean"])
@pytest.mark.parametrize("level,row,column", [(0, 0, 0), (0, 1, 2), (0, 2, 2), (1, 0, 1), (3, 0, 0)])
def test_tiles_of_a_map(ask: Asked, truth: Truth, by: str, level: int, row: int, column: int) -> None:
    name = tensor_id(MAP, "attention", head=1)
    facts, arrays = ask("tile", tensor=name, step=60, level=level, row=row, column=column, by=by)
    expected = whole(truth, 60, MAP, "attention", head=1)
    block = 2**level
    side = 256 * block
    part = expected[side * row : side * (row + 1), side * column : side * (column + 1)]
    shown = blocks(part, block, np.max if by == "max" else np.mean) if block > 1 else part
    assert facts["rows"] == facts["columns"] == -(-600 // block)
    assert arrays["codes"].shape == shown.shape
    assert np.abs(read(facts, arrays["codes"]) - shown).max() <= facts["error"] * (1 + 1e-5)
    assert facts["error"] < 0.02


def blocks(values: NDArray[Any], block: int, reduce: Callable[..., Any]) -> NDArray[Any]:
    """The definition: one value for each block, the last ones smaller."""
    rows, columns = range(0, values.shape[0], block), range(0, values.shape[1], block)
    return np.array([[reduce(values[r : r + block, c : c + block]) for c in columns] for r in rows])


def test_tiles_that_there_are_not(ask: Asked) -> None:
    name = tensor_id(MAP, "attention", head=1)
    for query in ({"row": 3}, {"column": 3}, {"level": 4, "row": 1}, {"step": 41}):
        with pytest.raises(KeyError, match="found no"):
            ask("tile", tensor=name, **{"step": 60, **query})
    with pytest.raises(KeyError, match="no tensor"):
        ask("tile", tensor=name + "x", step=60)


def test_largest_in_absolute_value_stands_for_a_block() -> None:
    values = np.array([[1, -3, 0, 2], [2, 0.5, np.nan, 1], [0, 0, 7, -9]], np.float32)
    assert np.array_equal(pooled(values, 2, "max"), [[-3, np.nan], [0, -9]], equal_nan=True)
    codes, low, scale = quantised(np.array([[0.0, 253.0, np.inf, np.nan]], np.float32))
    assert codes.tolist() == [[0, 253, INFINITE, NOT_A_NUMBER]] and (low, scale) == (0.0, 1.0)


def test_thumbnails(ask: Asked, truth: Truth) -> None:
    facts, arrays = ask("thumbs", step=20, what="attention", side=48)
    assert [(row["path"], row["index"]["head"]) for row in facts["rows"]] == [
        (f"decoder.layers.{layer}.self_attention", head) for layer in (0, 1) for head in (0, 1)
    ]
    for row, codes in zip(facts["rows"], arrays["codes"], strict=True):
        expected = blocks(whole(truth, 20, row["path"], "attention", head=row["index"]["head"]), 16, np.max)
        assert (row["rows"], row["columns"]) == expected.shape == (38, 38)
        shown = row["low"] + row["scale"] * codes[:38, :38].astype(np.float64)
        assert np.abs(shown - expected).max() < 0.02
        assert not codes[38:].any() and not codes[:, 38:].any()
    assert ask("thumbs", step=20, what="attention", path=MAP)[1]["codes"].shape[0] == 2
    assert ask("thumbs", step=21, what="attention")[0]["rows"] == []


def test_summary(ask: Asked, truth: Truth) -> None:
    facts, arrays = ask("summary", tensor=tensor_id("decoder.layers.2", "activation"), step=40)
    values = whole(truth, 40, "decoder.layers.2", "activation").astype(np.float64)
    expected = {
        "mean": values.mean(),
        "deviation": values.std(),
        "rms": math.sqrt((values**2).mean()),
        "low": values.min(),
        "high": values.max(),
    }
    assert {key: facts[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert (facts["looked_at"], facts["nan"], facts["infinite"], facts["error"]) == (256 * 64, 0, 0, 0)
    counts = [
        int(((values >= low) & (values < high)).sum())
        for low, high in zip(arrays["edges"][:-1], arrays["edges"][1:], strict=True)
    ]
    counts[-1] += int((values == arrays["edges"][-1]).sum())
    assert arrays["bins"].tolist() == counts and sum(counts) == values.size
    largest = np.abs(values).max(axis=0)
    assert {row["channel"] for row in facts["outliers"][:2]} == {3, 17}
    for row in facts["outliers"]:
        assert row["largest"] == pytest.approx(largest[row["channel"]], rel=1e-6)
        assert row["ratio"] == pytest.approx(largest[row["channel"]] / expected["rms"], rel=1e-6)


def test_projection_keeps_its_basis(ask: Asked, truth: Truth) -> None:
    path = "decoder.layers.0"
    first = whole(truth, 20, path, "activation").astype(np.float64)
    centre = first.mean(axis=0)
    directions = np.linalg.svd(first - centre, full_matrices=False)[2][:2]
    directions *= np.sign(directions[np.arange(2), np.abs(directions).argmax(axis=1)])[:, None]
    for step in (60, 20, 40):  # whatever is asked for first
        facts, arrays = ask("projection", tensor=tensor_id(path, "activation"), step=step)
        values = whole(truth, step, path, "activation") - centre
        assert facts["basis_step"] == 20
        np.testing.assert_allclose(arrays["points"], values @ directions.T, atol=1e-3)
        share = ((values @ directions.T) ** 2).sum(axis=0) / (values**2).sum()
        assert facts["explained"] == pytest.approx(share.tolist(), rel=1e-4)


@pytest.mark.parametrize("wrong", [10, 20], ids=["first step", "another step"])
def test_projection_of_infinite_tiles(wrong: int, tmp_path: Path) -> None:
    """Rows of a tile with an infinite element, which reads as infinite, lie at the centre."""
    shape = RunShape(steps=20, tp=1, pp=1, tokens=128, tensor_every=10, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 28)
    writer.tick([(0, hello(shape, 0)), (0, schema(shape, 0))])
    for step in (10, 20):
        frames = list(frames_of(shape, 0, step))
        for frame in frames:
            if frame.get("encoding") == "q8" and step == wrong:
                frame["low"][1] = np.inf
        writer.tick([(0, frame) for frame in frames])
    writer.close()
    with open_recording(tmp_path) as recording:
        context = Context(source=RecordedSource(recording, "run"), folder=tmp_path)
        for step in (10, 20):
            query = {"tensor": tensor_id(LAYER, "activation"), "step": step}
            facts, arrays = answered(context, "projection", **query)
            points = arrays["points"]
            assert np.isfinite(points).all() and facts["basis_step"] == 10
            assert all(0 < each < 1 for each in facts["explained"])
            assert (points[32:64] == 0).all() == (step == wrong) and points[:32].std() > 1


# Tokens, alerts, topology, timeline.


def test_tokens(ask: Asked, truth: Truth) -> None:
    facts, arrays = ask("rows")
    assert facts["paths"] == ["output_layer"] and arrays["rows"].tolist() == [
        [step, 0, 0, 0] for step in WITH_TENSORS
    ]
    for step in WITH_TENSORS:
        _, row = ask("tokens", step=step)
        expected = truth.tokens[step, 0]
        assert row["position"].tolist() == list(range(256))
        assert np.array_equal(row["ids"], expected["ids"])
        assert np.array_equal(row["top_ids"], expected["top_ids"])
        for name in ("loss", "entropy", "top_logprobs"):
            np.testing.assert_allclose(row[name], expected[name], rtol=2e-3, atol=2e-3, err_msg=name)
    with pytest.raises(KeyError, match="no tokens"):
        ask("tokens", step=20, sample=1)


def test_alerts(ask: Asked) -> None:
    facts, _ = ask("alerts")
    assert facts["count"] == 2
    assert [(row["step"], row["value"], row["low"], row["high"], row["path"]) for row in facts["alerts"]] == [
        (40, 91.0, 0.8, 1.6, LAYER),
        (50, 97.5, 0.8, 1.6, LAYER),
    ]


def test_topology_and_timeline_without_a_trace(ask: Asked) -> None:
    facts, _ = ask("topology")
    assert facts["world_size"] == 4 and not facts["trace"] and facts["findings"] == []
    assert [(row["rank"], row["tp"], row["pp"]) for row in facts["ranks"]] == [
        (rank, rank % 2, rank // 2) for rank in range(4)
    ]
    assert ask("timeline")[0] == {"trace": False, "names": [], "ranks": []}
    facts, arrays = ask("timeline_steps")
    assert facts == {"trace": False} and not len(arrays["i"])


def test_timeline_has_what_the_simulated_ranks_did(recorded: tuple[Path, Truth], tmp_path: Path) -> None:
    simulate(tmp_path, Job(layout=parse_layout("dp=1,tp=2,pp=1"), steps=5, microbatches=2), [], seed=3)
    with open_recording(recorded[0]) as recording:
        context = Context(source=RecordedSource(recording, "run"), folder=tmp_path)
        facts, table = answered(context, "timeline_steps")
        assert facts["ranks"] == [0, 1] and facts["missing"] == []
        steps = table["i"].astype(int).tolist()
        assert steps == list(range(steps[0], steps[0] + 5))
        facts, slices = answered(context, "timeline", first=steps[0], last=steps[-1])
        assert facts["left_out"] == 0 and [row["rank"] for row in facts["ranks"]] == [0, 1]
        kinds = [facts["kinds"][kind] for kind in slices["kind"]]
        for rank in (0, 1):
            mine = slices["rank"] == rank
            of = {
                kind: sum(1 for here, each in zip(mine, kinds, strict=True) if here and each == kind)
                for kind in ("step", "forward", "backward", "optimizer")
            }
            assert of == {"step": 5, "forward": 10, "backward": 10, "optimizer": 5}, rank
        # A step's slice lies where the table says, and holds the rank's other slices of that step.
        for number, begin, ms in zip(steps, table["begin"], table["ms"], strict=True):
            own = (slices["step"] == number) & (slices["rank"] == 0) & (slices["lane"] < 4)
            start = slices["begin"][own].min() / 1e3
            assert (slices["begin"] + slices["us"])[own].max() / 1e3 - start == pytest.approx(ms, rel=1e-3)
            shift = start - slices["begin"][(slices["step"] == steps[0]) & (slices["rank"] == 0)].min() / 1e3
            assert begin - table["begin"][0] == pytest.approx(shift, abs=0.01)
        fewer, kept = answered(context, "timeline", first=steps[0], last=steps[-1], most=1000)
        assert fewer["left_out"] == max(0, len(kinds) - 1000) and len(kept["begin"]) == min(1000, len(kinds))
        # The newest steps without being asked for some.
        assert answered(context, "timeline")[0]["first"] == steps[-1] - 2
        assert answered(context, "topology")[0]["trace"]


def test_packed_arrays_come_back() -> None:
    arrays = {
        "a": np.arange(6, dtype=np.int64).reshape(2, 3),
        "b": np.array([True, False, True]),
        "c": np.zeros((0, 4), np.float32),
        "d": np.array([1.5, np.nan], np.float16),
    }
    facts, found = unpack(pack({"x": float("nan"), "y": np.float64(2)}, arrays))
    assert facts == {"x": None, "y": 2}
    for name, array in arrays.items():
        assert np.array_equal(found[name], array, equal_nan=name == "d")
    with pytest.raises(TypeError, match="complex128"):
        pack({}, {"x": np.zeros(1, complex)})


def test_what_came_late_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a tensor's columns, of the tokens and of the statistics comes after the page has asked."""
    monkeypatch.setattr(recorded_source, "LOOK_S", 0.0)
    monkeypatch.setattr(recorded_source, "REST", 0.0)
    shape = RunShape(steps=20, tp=2, pp=1, nodes=2, tokens=512, hidden=512, tensor_every=20, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    writers = [Writer(files.node("a", node), node=node, host="a", retain_bytes=1 << 28) for node in (0, 1)]

    def write(rank: int, step: int) -> None:
        writers[rank].tick([(rank, frame) for frame in frames_of(shape, rank, step)])

    for rank, writer in enumerate(writers):
        writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
    for step in (10, 20):
        write(0, step)
    write(1, 10)
    path = "decoder.layers.1"
    with open_recording(tmp_path) as recording:
        context = Context(source=RecordedSource(recording, "run"), folder=tmp_path)

        def seen() -> tuple[Any, ...]:
            facts, _ = answered(context, "tensors")
            (tensor,) = [each for each in facts["tensors"] if each["path"] == path]
            query = {"tensor": tensor["id"], "step": 20}
            tile, arrays = answered(context, "tile", **query, level=3, row=0, column=0, by="max")
            pictures, thumbs = answered(context, "thumbs", step=20, what="activation", side=64)
            row = [each["path"] for each in pictures["rows"]].index(path)
            points = answered(context, "projection", **query)[1]["points"]
            series = answered(context, "series", path=path, statistic="gradient_norm", points=16)[1]
            return tensor["stamps"], tile["missing"], arrays["codes"], thumbs["codes"][row], points, series

        stamps, missing, codes, picture, points, series = seen()
        assert missing == 0.5 and (codes[:, 32:] == NOT_A_NUMBER).all() and (codes[:, :32] < INFINITE).all()
        assert (picture[:, 32:] == NOT_A_NUMBER).all()
        assert series["i"].tolist() == [10], "half a sum is no value of the curve"
        write(1, 20)
        later = seen()
        assert later[0] != stamps and later[1] == 0.0
        assert (later[2] < INFINITE).all() and (later[3] < INFINITE).all()
        whole = activation(shape, 20, 1).astype(np.float64)
        basis = np.linalg.svd(whole - whole.mean(axis=0), full_matrices=False)[2][:2]
        spread = np.abs((whole - whole.mean(axis=0)) @ basis.T).max()
        assert np.abs(later[4]).max() == pytest.approx(spread, rel=0.5) and not np.array_equal(
            later[4], points
        )
        assert later[5]["i"].tolist() == [10, 20]
    for writer in writers:
        writer.close()
