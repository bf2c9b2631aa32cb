"""The page in Chromium beside a real training of two processes: each view shows what that training does."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.scope.web.access import TokenFile, link_to, read_token_file
from tests.launch import run_ranks
from tests.scope.sidecar.fake_ranks import until
from tests.scope.web.test_browser import MISSING, drive
from tests.scope.web.training_ranks import (
    BATCH,
    EXPERTS,
    HEADS,
    INTERVAL,
    LAYERS,
    SEQUENCE,
    TOP_K,
    WATCHED,
)

pytestmark = [
    pytest.mark.daily,
    pytest.mark.skipif(bool(MISSING), reason=f"expected {'; '.join(MISSING)}"),
]

NOW = "Number(document.querySelector('.scrub .now').innerText.match(/\\d+/)?.[0])"
STEP = 4 * INTERVAL
"""A sampled step that is looked at."""


@dataclass(kw_only=True)
class Training:
    """A training that goes on."""

    run: Path
    tokens: TokenFile
    shots: Path
    """Where pictures go: MT_SCOPE_SHOTS, or the test's folder."""

    results: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def metrics(self) -> dict[int, dict[str, Any]]:
        """The trainer's own records by step."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return {each["iteration"]: each for each in records if each["event"] == "train"}

    def drive(self, folder: Path, actions: list[Any], **more: Any) -> list[Any]:
        assert not self.problems, self.problems
        given = {"language": "en", **more}
        return list(drive(link_to(self.tokens), folder, actions, **given)["results"])


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    folder = tmp_path_factory.mktemp("training")
    shots = Path(os.environ.get("MT_SCOPE_SHOTS") or folder / "shots")
    shots.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    problems: list[str] = []

    def trains() -> None:
        try:
            target = "tests.scope.web.training_ranks:trained_until_told"
            results.extend(run_ranks(2, target, str(folder), timeout=1800))
        except Exception as error:  # noqa: BLE001 - told by the test
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=trains)
    thread.start()
    page = folder / "run" / "scope" / "page.json"
    try:
        until(lambda: page.exists() or problems, 400)
        assert not problems, problems
        found = Training(
            run=folder / "run",
            tokens=read_token_file(page),
            shots=shots,
            results=results,
            problems=problems,
        )
        until(lambda: len(found.metrics()) > STEP if (found.run / "metrics.jsonl").exists() else False, 400)
        yield found
    finally:
        (folder / "enough").touch()
        thread.join(240)
    assert not thread.is_alive() and not problems, problems
    # What was done to it by the browser has not broken it.
    assert len(results) == 2 and results[0] == results[1] and not page.exists()


def api(path: str) -> list[str]:
    return ["evaluate", f"fetch('/api/{path}').then((answer) => answer.json())"]


UNPACK = """async (path) => {
  const buffer = await (await fetch('/api/' + path)).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const types = { float32: Float32Array, float64: Float64Array, uint8: Uint8Array };
  for (const row of header.arrays) {
    const count = row.shape.reduce((a, b) => a * b, 1);
    header[row.name] = Array.from(new types[row.dtype](buffer, 4 + length + row.offset, count));
  }
  return header;
}"""


def table(path: str) -> list[str]:
    return ["evaluate", f"({UNPACK})('{path}')"]


def test_every_view_shows_the_training(training: Training, tmp_path: Path) -> None:
    picture = [["shot", str(training.shots / "X.png")]]

    def view(name: str, address: str, canvases: bool = False) -> list[list[Any]]:
        shot = [[*each] for each in picture]
        shot[0][1] = shot[0][1].replace("X", f"light-{name}")
        return [["view", address, 1_000, canvases], *shot]

    word = "[...document.querySelectorAll('.text .word')].map((each) => each.textContent)"
    steps: dict[str, list[Any]] = {
        "start": [["until", f"{NOW} > {STEP}", 240_000]],
        "run": view("run", "#/run", True),
        "left": [["text", ".top"]],
        "ranks": [["view", "#/topology", 1_000], ["click", ".ranks button.rank"], ["text", ".facts"]],
        "topology": view("topology", "#/topology"),
        "timeline": [
            *view("timeline", "#/timeline", True),
            ["evaluate", "window.scopeTimeline.slices()"],
        ],
        "model": [
            *view("model", f"#/model?step={STEP}&statistic=update_ratio&module=decoder.layers.1", True),
            ["text", ".model table"],
        ],
        "tensor": view("tensor", f"#/tensor?step={STEP}", True),
        "attention": [
            *view("attention", f"#/attention?step={STEP}", True),
            ["evaluate", "document.querySelectorAll('.thumbs canvas').length"],
        ],
        "tokens": [
            *view("tokens", f"#/tokens?step={STEP}&token=5&sample=1", True),
            ["evaluate", "document.querySelectorAll('.tokens .side section:nth-child(2) tbody tr').length"],
            ["evaluate", word],
            table(f"tokens?step={STEP}&sample=1&microbatch=0&path=output_layer"),
        ],
        "experts": [*view("experts", f"#/experts?step={STEP}", True), ["text", "main"]],
        "replay": [*view("replay", f"#/replay?step={STEP}", True), ["text", ".replay .figures"]],
        "lab": view("lab", "#/lab"),
        "data": [api("run"), table("steps?points=4000"), table("series?path=&statistic=gradient_norm")],
        "loads": [
            table(f"vectors?path=decoder.layers.{layer}.mlp.router&statistic=expert_load")
            for layer in range(LAYERS)
        ],
        "grows": [["evaluate", f"window.before = {NOW}"], ["view", "#/run", 200, True]]
        + [["until", f"{NOW} > window.before", 240_000]],
    }
    actions = [action for group in steps.values() for action in group]
    results = iter(training.drive(tmp_path, actions))
    found = {name: [next(results) for _ in group] for name, group in steps.items()}
    metrics = training.metrics()

    for name in (
        "run",
        "topology",
        "timeline",
        "model",
        "tensor",
        "attention",
        "tokens",
        "experts",
        "replay",
    ):
        assert not found[name][0]["wide"] and not found[name][0]["empty"], (name, found[name][0])
    # Steps: what the trainer itself wrote into its metrics.
    facts, table_, norms = found["data"]
    at = {int(step): place for place, step in enumerate(table_["i"])}
    for step in (1, 2, STEP):
        for key in ("loss", "grad_norm", "lr"):
            ours, theirs = table_[key][at[step]], metrics[step][key]
            assert ours == pytest.approx(theirs, rel=1e-5), (step, key)
    assert facts["facts"]["steps_total"] == 200_000 and "Time left" in found["left"][0]
    assert facts["facts"]["live"] and facts["facts"]["world_size"] == 2
    assert facts["facts"]["requests"] == [] or set(facts["facts"]["requests"]) <= set(WATCHED)
    # The whole model's gradient norm, summed up from the layers', is the one that clipping has computed.
    for step, norm in zip(norms["i"], norms["values"], strict=True):
        assert norm == pytest.approx(metrics[int(step)]["grad_norm"], rel=2e-3), step
    shown = figures(found["replay"][-1])
    assert shown["step"] == str(STEP)
    assert float(shown["Loss"]) == pytest.approx(metrics[STEP]["loss"], rel=1e-4)
    assert float(shown["Gradient norm"]) == pytest.approx(metrics[STEP]["grad_norm"], rel=1e-3)
    # Places.
    assert socket.gethostname() in found["ranks"][-1]
    assert found["timeline"][-1] > 100
    for name in ("TransformerLayer", "SelfAttention", "TopKRouter"):
        assert found["model"][-1].count(name) == LAYERS, name
    assert found["attention"][-1] == LAYERS * HEADS
    # Tokens: their bytes as text, and what they lost.
    words, tokens = found["tokens"][-2:]
    assert len(words) == SEQUENCE == len(tokens["ids"])
    expected = [spelled(int(index)) for index in tokens["ids"]]
    assert words == expected
    assert all(loss > 0 for loss in tokens["loss"])
    assert found["tokens"][-3] == LAYERS  # what each layer's output would predict
    # Experts: every token goes to as many as the router chooses.
    for each in found["loads"]:
        assert len(each["i"]) >= STEP // INTERVAL
        for row in range(len(each["i"])):
            loads = each["values"][EXPERTS * row : EXPERTS * (row + 1)]
            assert sum(loads) == BATCH * SEQUENCE * TOP_K
    assert f"Layer {LAYERS - 1}" in found["experts"][-1]


def spelled(index: int) -> str:
    """A byte as the page shows it: line ends and tabs as signs, what is no character as U+FFFD."""
    if index == 256:
        return "<|endoftext|>"
    if index > 256:
        return f"#{index}"
    text = bytes([index]).decode(errors="replace")
    return {"\n": "⏎", "\t": "⇥", " ": "␣"}.get(text, text)


def figures(text: str) -> dict[str, str]:
    """Name -> text of the figures on top of a view."""
    names = ("step", "Loss", "Gradient norm", "Learning rate", "Tokens per second", "Step time")
    pattern = "|".join(names)
    return dict(re.findall(rf"({pattern})\s*([^\s]+)", text))


def test_pause_step_generate_perturb_and_resume(training: Training, tmp_path: Path) -> None:
    button = "[...document.querySelectorAll('.top button')].find((each) => each.innerText === '{}')"
    able = f"{button} && !{button}.disabled"
    lab = "[...document.querySelectorAll('.lab button')].find((each) => each.innerText === '{}').click()"
    actions = [
        ["view", "#/run", 500, True],
        ["press", "p"],
        ["until", able.format("Resume", "Resume"), 240_000],
        ["wait", 1_500],
        ["evaluate", NOW],
        ["wait", 1_500],
        ["evaluate", NOW],
        ["press", "n"],
        ["until", f"{NOW} > 0 && " + able.format("Resume", "Resume"), 240_000],
        ["wait", 3_000],
        ["evaluate", NOW],
        ["view", "#/generate", 500],
        ["fill", "textarea", "Once upon a time"],
        ["fill", ".fields input", "6"],
        ["click", "form button.primary"],
        ["until", "document.querySelectorAll('.out .word').length === 6", 240_000],
        ["click", ".out .word", 2],
        ["wait", 300],
        ["shot", str(training.shots / "light-generate.png")],
        ["evaluate", "document.querySelectorAll('.generate table tr').length"],
        ["view", "#/lab", 500],
        ["evaluate", lab.format("Preview")],
        ["until", "document.querySelector('.lab .wide table')", 240_000],
        ["text", ".lab .wide"],
        ["shot", str(training.shots / "light-preview.png")],
        ["press", "r"],
        ["until", able.format("Pause", "Pause"), 240_000],
        ["evaluate", f"window.before = {NOW}"],
        ["view", "#/run", 200, True],
        ["until", f"{NOW} > window.before", 240_000],
    ]
    found = training.drive(tmp_path, actions, control=training.tokens.control)
    assert found[4] == found[6]  # nothing went on
    assert found[10] == found[6] + 1
    assert found[19] > 3  # what else was likely for the chosen word
    assert "decoder.layers.0.mlp" in found[23]


@pytest.mark.parametrize("theme,width,height", [("dark", 1280, 800), ("light", 3840, 2160)])
def test_every_view_in_other_sizes_and_colours(
    training: Training, tmp_path: Path, theme: str, width: int, height: int
) -> None:
    addresses = {
        "run": "#/run",
        "topology": "#/topology",
        "timeline": "#/timeline",
        "model": f"#/model?step={STEP}&module=decoder.layers.1",
        "tensor": f"#/tensor?step={STEP}",
        "attention": f"#/attention?step={STEP}",
        "tokens": f"#/tokens?step={STEP}&token=5",
        "experts": "#/experts",
        "generate": "#/generate",
        "replay": f"#/replay?step={STEP}",
        "lab": "#/lab",
    }
    flat = {"topology", "generate", "lab"}
    actions: list[Any] = []
    for name, address in addresses.items():
        actions += [["view", address, 800, name not in flat]]
        actions += [["shot", str(training.shots / f"{theme}-{width}-{name}.png")]]
    found = training.drive(tmp_path, actions, theme=theme, width=width, height=height)
    for name, seen in zip(addresses, found[::2], strict=True):
        assert not seen["wide"] and len(seen["text"]) > 10, name
        if name not in flat:
            assert not seen["empty"] and max(seen["canvases"], default=0) > 3, (name, seen)
