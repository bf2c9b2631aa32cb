"""The run's view in Chromium: curves of several runs, the end of a run, recordings on demand."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.scope.sidecar.process import END
from mt_megatron.scope.web.access import link_to
from tests.scope.sidecar.fake_ranks import FakeRank, start_sidecar, until
from tests.scope.synthetic import RunShape, frames_of, hello, schema, write_run
from tests.scope.web.support import Served, served
from tests.scope.web.test_browser import drive, token_file
from tests.scope.web.test_browser import pytestmark as pytestmark


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("browser") / "run"
    write_run(folder, RunShape(steps=60, tensor_every=0, token_every=0, validation_every=15))
    write_run(folder.parent / "other", RunShape(steps=60, differs_from=20, tensor_every=0, token_every=0))
    with served(folder) as one:
        yield one


def test_a_run_that_ends_leaves_its_last_state_on_the_page(tmp_path: Path) -> None:
    """With how to reopen it; other views' first pictures are there, and nothing is asked for any more."""
    run = tmp_path / "a run"
    shape = RunShape(tp=1, pp=1, interval=2, tensor_every=4, token_every=4, validation_every=4)
    path = Path("/tmp") / f"mt-ends-{os.getpid()}" / "s"
    process = start_sidecar(run, path, "--serve", "--ranks", "1", error=subprocess.DEVNULL)
    try:
        rank = FakeRank(path, hello(shape, 0), schema(shape, 0))
        for step in range(1, 13):
            rank.send(*frames_of(shape, 0, step))
        tokens = token_file(run)

        def end() -> None:
            page = Served(run=run, hub=None, tokens=tokens, said=[], loop=None)  # type: ignore[arg-type]
            session = page.enter()
            until(lambda: page.ask("/api/server", session=session).json()["sockets"] == 1, 60)
            time.sleep(3.0)
            rank.send(*frames_of(shape, 0, 13), *frames_of(shape, 0, 16), {"k": "bye"})
            rank.close()
            process.wait(30)

        ending = threading.Thread(target=end)
        ending.start()
        actions: list[Any] = [
            ["view", "#/run", 100, True],
            ["until", "document.querySelector('.notice')", 60_000],
            ["wait", 6_000],
            ["text", ".notice"],
            ["text", ".top"],
            ["view", "#/run", 100, True],
            ["text", "main"],
            ["view", "#/alerts", 100],
            ["view", "#/model", 100],
            ["view", "#/replay", 100],
        ]
        # The browser itself asks for its icon again.
        found = drive(link_to(tokens), tmp_path, actions, errors="icon.svg", language="en")["results"]
        ending.join(60)
    finally:
        if process.poll() is None:
            process.send_signal(END)
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()
    assert "Run ended at step 16" in found[3] and f"mt-megatron scope open '{run}'" in found[3]
    assert "ended" in found[4]
    assert not found[5]["empty"] and max(found[5]["canvases"]) > 3
    assert "validation" in found[6] and "Failed to fetch" not in found[6]
    for view in found[7:]:
        assert "Failed to fetch" not in view["text"] and len(view["text"]) > 10


def test_curves_on_an_axis_with_validation_zoom_csv_and_other_runs(recording: Served, tmp_path: Path) -> None:
    """Of two runs in one chart; a zoom stays when something new comes."""
    target = tmp_path / "steps.csv"
    actions: list[Any] = [
        ["view", "#/run", 100, True],
        ["text", "main"],
        ["drag", "main .u-over", 0.25, 0.5],
        ["until", "document.querySelector('main .chart .fit')", 5_000],
        ["view", "#/run?with=other", 300, True],
        ["text", "main .tools"],
        ["download", "main .tools button", str(target)],
        ["double", "main .u-over"],
        ["until", "!document.querySelector('main .chart .fit')", 5_000],
        ["evaluate", "location.hash"],
    ]
    found = drive(link_to(recording.tokens), tmp_path, actions, language="en")["results"]
    assert "nats per token" in found[1] and "validation" in found[1]
    assert "other" in found[5]
    assert found[-1] == "#/run?with=other", "the newest step is followed on"
    rows = [line.split(",") for line in target.read_text().splitlines()]
    assert rows[0][:5] == ["run", "step", "time_unix", "seconds", "loss"] and rows[0][-1] == "validation_loss"
    assert {row[0] for row in rows[1:]} == {"run", "other"}
    valued = [row[1] for row in rows[1:] if row[0] == "run" and row[-1]]
    assert valued == ["15", "30", "45", "60"]


def test_record_now_asks_for_what_an_empty_view_shows(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RunShape(steps=20, tensor_every=0, token_every=0), extras=False)
    press = "[...document.querySelectorAll('main button')].find((b) => b.innerText === 'Record now')"
    with served(tmp_path / "run", live=True) as page:
        actions = [
            ["until", "document.querySelector('[data-state=live]')", 30_000],
            *(
                step
                for view in ("attention", "tensor", "tokens")
                for step in (
                    ["view", f"#/{view}", 400],
                    ["until", f"(() => {{ const b = {press}; b?.click(); return Boolean(b); }})()"],
                    ["until", "document.querySelector('main .empty').innerText.includes('next step')"],
                    ["wait", 1_500],
                )
            ),
        ]
        drive(link_to(page.tokens), tmp_path, actions, language="en", control=page.tokens.control)
        asked = [frame["arguments"]["texts"] for frame in page.commands if frame["do"] == "request"]
    assert [texts[-1].partition(":")[0] for texts in asked] == [
        "attention@decoder.layers.*",
        "residual@decoder.layers.*",
        "logits@output_layer",
    ]
