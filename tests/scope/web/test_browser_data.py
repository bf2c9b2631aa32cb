"""What the page in Chromium makes of data: exports, points, NaN, what was recorded while it was cut off."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.web.access import link_to
from tests.scope.synthetic import RunShape, write_run
from tests.scope.web.support import Served, served
from tests.scope.web.test_browser import PICTURES, VIEWS, drive, pytestmark, recording
from tests.scope.web.test_recorded import tensor_frame, write

__all__ = ["pytestmark", "recording"]


def test_export_fetches_what_views_ask_for_that_nobody_has_seen(recording: Served, tmp_path: Path) -> None:
    """Exported from the first view: every view opens at the newest step, vectors and projection with it."""
    target = tmp_path / "page.html"
    drive(link_to(recording.tokens), tmp_path, [["download", "button[title=e]", str(target)]])
    views = {
        **{name: VIEWS[name] for name in ("run", "topology", "timeline", "tensor", "attention", "tokens")},
        "model": "#/model?module=decoder.layers.1.mlp.router",
        "experts": "#/experts",
        "replay": "#/replay",
    }
    actions: list[Any] = [["view", address, 100, name in PICTURES] for name, address in views.items()]
    bars = "document.querySelectorAll('.side .bars').length"
    actions += [["view", views["model"], 100], ["evaluate", bars]]
    actions += [["view", "#/run?step=7", 100], ["view", "#/experts?step=7", 100]]
    found = drive(target.as_uri(), tmp_path, actions, language="zh")["results"]
    for name, seen in zip(views, found, strict=False):
        assert not seen["empty"] and "此导出页面中没有" not in seen["text"], (name, seen["text"])
        if name in PICTURES:
            assert max(seen["canvases"], default=0) > 3, (name, seen["canvases"])
    # Beside the maps and curves of each a colour bar: loads, loads over the steps; projection; two curves.
    counts = {name: len(seen["canvases"]) for name, seen in zip(views, found, strict=False)}
    assert (counts["experts"], counts["tokens"], counts["replay"]) == (3, 2, 2)
    assert found[len(views) + 1] == 1, "tokens of each expert at the newest step"
    assert "此导出页面中没有" in found[-1]["text"]


SCAN = """(async () => {
  const canvas = document.querySelector('.scatter canvas'), box = canvas.getBoundingClientRect();
  const found = new Set();
  for (let y = 4; y < box.height; y += 6) for (let x = 4; x < box.width; x += 6) {
    const at = { clientX: box.left + x, clientY: box.top + y, bubbles: true };
    canvas.dispatchEvent(new MouseEvent('mousemove', at));
    await Promise.resolve();
    const tip = document.querySelector('.scatter .tip');
    if (tip) found.add(tip.innerText);
  }
  return [...found];
})()"""


def test_points_of_the_projection_have_their_own_tokens(recording: Served, tmp_path: Path) -> None:
    """The token at a position stands one place before it among those to be predicted."""
    with open_recording(recording.run) as run:
        (row,) = run.tokens(60, path="output_layer")
    ids = dict(zip(row.position.tolist(), row.ids.tolist(), strict=True))
    actions = [["view", "#/tokens?step=60", 300], ["evaluate", SCAN]]
    tips = drive(link_to(recording.tokens), tmp_path, actions, language="en")["results"][1]
    seen = dict(re.fullmatch(r"token (\d+)(.*)", tip).groups() for tip in tips)  # type: ignore[union-attr]
    assert len(seen) > 20
    for position, text in seen.items():
        before = ids.get(int(position) - 1)
        assert text == (f" (to be predicted: {ids[0]})" if before is None else f": {before}"), position


def test_nan_that_lasts_is_marked_and_told(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RunShape(steps=60, nan_at=50, tensor_every=0, token_every=0))
    rows = "[...document.querySelectorAll('tr.pick')].filter((row) => row.querySelector('path.bad'))"
    actions = [["view", "#/model", 300], ["evaluate", f"{rows}.map((row) => row.innerText)"]]
    with served(tmp_path / "run") as page:
        marked = drive(link_to(page.tokens), tmp_path, actions, language="en")["results"][1]
    assert marked and all("NaN" in text.split("\t") for text in marked), marked


LINKS = """(() => {
  const Own = WebSocket;
  window.links = [];
  window.WebSocket = class extends Own { constructor(...all) { super(...all); window.links.push(this); } };
})()"""


def test_lost_connection_is_made_good_and_an_ended_session_is_told(tmp_path: Path) -> None:
    """What was recorded while no notice came is shown once the connection is back."""
    write_run(tmp_path / "run", RunShape(steps=20, tensor_every=0, token_every=0))
    with served(tmp_path / "run", live=True) as page:
        headers = (
            f"{{'Content-Type': 'application/json', 'X-Scope-Control': '{page.tokens.control}', "
            "'X-Scope-Session': sessionStorage['mt-scope-session']}"
        )
        post = (
            f"((path, body) => fetch(path, {{method: 'POST', headers: {headers}, "
            "body: JSON.stringify(body)}).then((answer) => answer.status))"
        )
        lose = ["evaluate", "window.links.at(-1).close()"]
        actions: list[Any] = [
            ["until", "document.querySelector('[data-state=live]')", 30_000],
            ["wait", 2_500],
            lose,
            ["until", "document.querySelector('[data-state=off]')", 5_000],
            ["evaluate", f"{post}('/api/bookmark', {{step: 3, text: 'meanwhile'}})"],
            ["until", "document.querySelector('.track').textContent.includes('meanwhile')", 20_000],
            ["evaluate", f"{post}('/api/leave', {{}})"],
            lose,
            ["until", "document.querySelector('.toast code')", 10_000],
            ["wait", 4_000],
            ["text", ".toast"],
            ["evaluate", "window.links.length"],
        ]
        link = link_to(page.tokens)
        found = drive(link, tmp_path, actions, script=LINKS, language="en", errors="status of 401")["results"]
    assert (found[4], found[6], found[-1]) == (200, 200, 2), "it does not connect again"
    assert "the session has ended" in found[-2] and "mt-megatron scope open RUN" in found[-2]


def test_tensor_of_other_tokens_is_shown_at_each_step(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    values = {step: draw.standard_normal((rows, 8)).astype(np.float32) for step, rows in ((1, 300), (2, 40))}
    write(tmp_path / "run", [tensor_frame(step, each) for step, each in values.items()])
    actions = [["view", f"#/tensor?step={step}", 100, True] for step in values]
    with served(tmp_path / "run") as page:
        found = drive(link_to(page.tokens), tmp_path, actions, language="en")["results"]
    for seen, each in zip(found, values.values(), strict=True):
        assert f"{len(each)} × 8" in seen["text"] and max(seen["canvases"]) > 3 and not seen["empty"]
        assert "found no" not in seen["text"]
