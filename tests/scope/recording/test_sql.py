"""Questions in SQL: views equal what the reader gives, one node or several, and nothing can be changed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.scope.recording import sql
from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import Recording, open_recording
from mt_megatron.scope.recording.sql import VIEWS, query
from mt_megatron.scope.recording.writer import Writer
from tests.scope.synthetic import RunShape, Truth, hello, write_run

REFUSED = (
    "attach database '{other}' as other",
    "insert into bookmarks values (1, 'x', 0)",
    "delete from steps",
    "update node0.step set loss = 0",
    "drop view steps",
    "create table mine(x)",
    "create temp trigger t after insert on bookmarks begin select 1; end",
    "pragma query_only = off",
    "pragma writable_schema = on",
    "vacuum into '{other}'",
    "begin immediate",
    "detach database node0",
    "select load_extension('{other}')",
    "select 1; delete from steps",
)


@pytest.fixture(scope="module", params=[1, 2], ids=["one node", "two nodes"])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Recording, Truth]]:
    run = tmp_path_factory.mktemp("run")
    shape = RunShape(steps=20, nodes=request.param, experts=4, tensor_every=20, token_every=20, tokens=64)
    shape = replace(shape, validation_every=4)
    truth = write_run(run, shape)
    with open_recording(run) as recording:
        yield recording, truth


def test_statistics_equal_the_truth(written: tuple[Recording, Truth]) -> None:
    recording, truth = written
    found = query(recording, "select step, path, statistic, value, partial, current, perturbed from stats")
    assert len(found.rows) == sum(len(values) for values in truth.values.values())
    for step, path, statistic, value, *flags in found.rows:
        assert value == pytest.approx(truth.values[path, statistic][step], rel=1e-9), (path, statistic)
        assert flags == [0, 1, 0]


def test_validation_has_a_view(written: tuple[Recording, Truth]) -> None:
    recording, truth = written
    found = query(recording, "select step, loss from validation where current order by step").rows
    assert [step for step, _ in found] == [4, 8, 12, 16, 20]
    assert dict(found) == pytest.approx(truth.values["", "validation_loss"])


def test_vectors_equal_the_truth(written: tuple[Recording, Truth]) -> None:
    recording, truth = written
    rows = query(recording, "select step, path, statistic, vector from vectors where step = 20").rows
    named = {(path, name): json.loads(vector) for _, path, name, vector in rows}
    assert set(named) == {key for key, each in truth.vectors.items() if 20 in each}
    for key, vector in named.items():
        np.testing.assert_allclose(vector, truth.vectors[key][20], rtol=1e-9)


def test_steps_and_everything_else(written: tuple[Recording, Truth]) -> None:
    recording, truth = written
    steps = query(recording, "select step, loss from steps where current order by step").rows
    assert [step for step, _ in steps] == sorted(truth.loss)
    assert [loss for _, loss in steps] == pytest.approx([truth.loss[step] for step, _ in steps])
    counts = {view: query(recording, f"select count(*) from {view}").rows[0][0] for view in VIEWS}
    world = truth.shape.world_size
    assert (counts["ranks"], counts["rank_steps"]) == (world, 20 * world)
    assert (counts["alerts"], counts["bookmarks"], counts["requests"]) == (2, 1, 1)
    assert (counts["tensors"], counts["tokens"]) == (len(recording.tensors()), 64)
    assert query(recording, "select min(current) from tensors").rows == [(1,)]
    assert counts["dropped"] == truth.shape.nodes and counts["modules"] == len(recording.modules())


def test_documented_columns_are_those_of_the_views(written: tuple[Recording, Truth]) -> None:
    page = Path(__file__).parents[3] / "docs" / "31-scope-recording.md"
    rows = [line.split("|")[1:3] for line in page.read_text().splitlines() if line.startswith("| `")]
    named = {name.strip(" `"): columns for name, columns in rows}
    for view in VIEWS:
        columns = query(written[0], f"select * from {view} limit 0").columns
        assert ", ".join(columns) == named[view].replace(" (JSON)", "").strip(), view


def test_many_nodes_are_read_from_memory(
    written: tuple[Recording, Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More files than SQLite attaches: the same answers."""
    statement = "select step, path, statistic, value from stats order by 1, 2, 3"
    attached = query(written[0], statement).rows
    monkeypatch.setattr(sql, "MOST_ATTACHED", 0)
    assert query(written[0], statement).rows == attached


@pytest.mark.parametrize("statement", REFUSED)
def test_nothing_else_than_reading_is_allowed(
    statement: str, written: tuple[Recording, Truth], tmp_path: Path
) -> None:
    recording, truth = written
    other = tmp_path / "other.sqlite"
    before = [path.read_bytes() for path in recording.files.nodes()]
    with pytest.raises(ConfigError, match="the statement cannot be run") as caught:
        query(recording, statement.format(other=other))
    assert "Views: sessions" in str(caught.value) or "statement" in str(caught.value)
    assert not other.exists() and [path.read_bytes() for path in recording.files.nodes()] == before
    assert query(recording, "select count(*) from steps").rows == [(len(truth.loss),)]


@pytest.mark.parametrize("statement", ["", "select", "select nothing from steps", "select * from nowhere"])
def test_wrong_statements_name_the_views(statement: str, written: tuple[Recording, Truth]) -> None:
    if not statement:
        assert query(written[0], statement).rows == []
        return
    with pytest.raises(ConfigError, match="select \\* from VIEW limit 1"):
        query(written[0], statement)


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    write_run(tmp_path, RunShape(steps=20, nan_at=10, tensor_every=0, token_every=0))
    with open_recording(tmp_path) as recording:
        rows = query(recording, "select step from steps where loss is null order by 1").rows
        assert [step for (step,) in rows] == list(range(10, 21))
        found = query(recording, "select min(step) from stats where statistic='not_finite' and value>0")
        assert found.rows == [(10,)]
        assert math.isnan(recording.steps().loss[-1])


def test_a_run_that_was_replaced_is_marked(tmp_path: Path) -> None:
    write_run(tmp_path, RunShape(steps=20, tensor_every=0, token_every=0), extras=False)
    again = RunShape(steps=10, first_step=15, session="second", tensor_every=0, token_every=0)
    write_run(tmp_path, again, extras=False)
    with open_recording(scope_files(tmp_path).root) as recording:
        rows = query(recording, "select session, step from steps where not current order by 2").rows
        assert rows == [(0, step) for step in range(15, 21)]
        current = query(recording, "select step from steps where current order by 1").rows
        assert [step for (step,) in current] == list(range(1, 25))


@pytest.mark.parametrize("nodes", [1, 2])
def test_prediction_depths_are_no_layers(tmp_path: Path, nodes: int) -> None:
    """Otherwise ``group by layer`` adds the first of them to the first decoder layer."""
    shape = RunShape(steps=4, interval=2, tp=2, pp=1, tensor_every=0, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    paths = ["decoder.layers.0", "mtp.layers.0", "mtp.layers.0.transformer_layer.mlp"]
    for node in range(nodes):
        writer = Writer(files.node("a", node), node=node, host="a", retain_bytes=1 << 26)
        for rank in range(node, 2, nodes):
            entries = [*([path, "activation_rms", 2] for path in paths), ["mtp.layers.0", "expert_load", 4]]
            listed = [[path, "TransformerLayer", 1] for path in paths]
            writer.tick([(rank, {**hello(shape, rank), "modules": listed})])
            writer.tick([(rank, {"k": "schema", "id": 1, "entries": entries})])
            values = np.array([4.0, 1.0, 9.0, 1.0, 16.0, 1.0, *[1.0] * 4])
            writer.tick([(rank, {"k": "stats", "i": 2, "id": 1, "attempt": 0, "values": values})])
        writer.close()
    with open_recording(tmp_path) as recording:
        for view in ("modules", "stats"):
            rows = query(recording, f"select distinct path, layer from {view} order by path").rows
            assert rows == [(paths[0], 0), (paths[1], None), (paths[2], None)]
        assert set(query(recording, "select path, layer from vectors").rows) == {(paths[1], None)}
        assert {each.path: each.layer for each in recording.names()}[paths[1]] is None
