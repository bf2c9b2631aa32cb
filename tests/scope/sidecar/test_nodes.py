"""Two nodes' sidecars of one run: two files that are read as one, requests for the ranks of both."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.recording.sql import query
from mt_megatron.scope.sidecar import sidecar as process
from tests.scope.sidecar.beside import Beside, beside
from tests.scope.synthetic import RunShape, frames_of, hello, schema, truth_of

SHAPE = RunShape(steps=30, interval=1, tp=2, pp=1, nodes=2, layers=2, tensor_every=10, token_every=0)


async def steps_of(sidecar: Beside, most: int) -> list[dict[str, Any]]:
    """The first ``most`` steps that the page is told."""
    found: list[dict[str, Any]] = []
    async for event in sidecar.hub.subscribe(4096):
        if event["k"] == "step":
            found.append(dict(event))
        if len(found) == most:
            break
    return found


def test_two_nodes_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "POLL_SECONDS", 0.05)
    with beside(tmp_path, node=0) as first, beside(tmp_path, node=1) as second:
        told = asyncio.run_coroutine_threadsafe(steps_of(first, SHAPE.steps), first.loop)
        ranks = [
            sidecar.rank(hello(SHAPE, rank), schema(SHAPE, rank))
            for rank, sidecar in enumerate((first, second))
        ]

        async def asked() -> None:
            first.hub.set_requests(["mlp@decoder.layers.1"])

        first.ask(asked())
        for rank in ranks:  # the second node's sidecar finds them in the folder
            assert rank.hear("watch")["requests"] == ["mlp@decoder.layers.1"]
        for step in range(1, SHAPE.steps + 1):
            shape = replace(SHAPE, scale=20.0) if step == 25 else SHAPE
            for number, rank in enumerate(ranks):
                rank.send(*frames_of(shape, number, step))
        events = told.result(30)
        assert first.said == second.said == []
    assert [each["step"] for each in events] == list(range(1, SHAPE.steps + 1))
    truth = truth_of(SHAPE)
    assert [each["loss"] for each in events] == [truth.loss[each["step"]] for each in events]
    with open_recording(tmp_path) as recording:
        assert [node.node for node in recording.nodes()] == [0, 1]
        for (path, name), values in truth.values.items():
            found = recording.series(path, name)
            assert not found.partial.any() and (found.parts == 2).all()
            index = found.step.tolist().index(24)
            assert found.value[index] == pytest.approx(values[24], rel=1e-9)
        assert all(recording.tensor(key).missing == 0 for key in recording.tensors())
        # The follower of node 0 alone judges: each alert is there once.
        alerts = recording.alerts()
        assert {each.step for each in alerts} == {25}
        texts = [each.text for each in alerts]
        assert len(set(texts)) == len(texts) == query(recording, "select count(*) from alerts").rows[0][0]
    lines = scope_files(tmp_path).alerts.read_text().splitlines()
    assert len(lines) == len(alerts)
