"""The report: one file that fetches nothing, says what is wrong first, and lets no name become markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mt_megatron.scope.recording.files import add_bookmark, scope_files
from mt_megatron.scope.recording.reader import Recording, open_recording
from mt_megatron.scope.recording.writer import Alert, Writer
from mt_megatron.scope.report.gather import gathered
from mt_megatron.scope.report.html import page, write_report
from tests.scope.synthetic import RunShape, hello, schema, stats_frame, step_frame, write_run

SHAPE = RunShape(
    steps=60,
    interval=5,
    experts=8,
    nan_at=45,
    dead_expert_from=30,
    perturbed=(20, 24),
    validation_every=15,
)
HOSTILE = "<script>alert('x')</script>\"&'<img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Elements, addresses and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br", "img", "link", "input"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "srcset", "data", "action", "poster", "xlink:href"):
                self.addresses.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    run = tmp_path_factory.mktemp("run")
    write_run(run, SHAPE)
    with open_recording(run) as found:
        yield found


@pytest.fixture(scope="module")
def text(recording: Recording) -> str:
    return page(gathered(recording))


def test_it_fetches_nothing(text: str) -> None:
    found = Page(text)
    assert found.addresses and all(each.startswith("data:image/png;base64,") for each in found.addresses)
    plain = re.sub(r"""(data:image/png;base64,|data-[a-z]+=")[A-Za-z0-9+/=]*""", "", text)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", plain)
    assert "default-src 'none'" in text
    assert found.open == [] and found.handlers == []


def test_it_says_what_is_wrong_first(text: str) -> None:
    words = " ".join(Page(text).words)
    order = [
        words.index("First value that is not finite: step 45, decoder.layers.2"),
        words.index("2 alerts"),
        words.index("Run"),
        words.index("Layers by step"),
        words.index("Experts"),
        words.index("Loss by position"),
        words.index("Modules"),
        words.index("What limits this report"),
    ]
    assert order == sorted(order)
    assert "Perturbed, steps 20-24: noise on decoder.layers.1.mlp" in words
    assert "halfway" in words and "12 frames" in words


def test_validation_loss_stands_beside_the_loss(recording: Recording, text: str) -> None:
    values = recording.series("", "validation_loss").value
    last = values[np.isfinite(values)][-1]
    assert f"Loss; dashed: validation loss, last {last:.4g} nats per token" in " ".join(Page(text).words)
    assert text.count('class="also"') == np.isfinite(values).sum() >= 2


def test_a_run_without_trouble_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, RunShape(steps=20, interval=5, tensor_every=0), extras=False)
    with open_recording(tmp_path) as recording:
        words = " ".join(Page(page(gathered(recording))).words)
    assert "No alerts" in words and "not finite:" not in words and "What limits" not in words
    assert "from its 17th sample on; the run has 4" in words  # nothing is said to be in a band that is none


def test_gathered_values_are_those_of_the_recording(recording: Recording) -> None:
    data = gathered(recording)
    map_ = next(each for each in data.maps if each.title == "gradient_norm")
    assert map_.rows == ("0", "1", "2", "3") and map_.first.tolist() == list(range(5, 61, 5))
    series = recording.series("decoder.layers.1", "gradient_norm")
    assert map_.values[1].tolist() == series.value.tolist()
    assert data.experts is not None and data.experts.share.shape == (4, 8)
    vector = recording.series(data.experts.paths[1], "expert_load", vectors=True).vector
    assert vector is not None
    assert data.experts.share[1] == pytest.approx(vector[-1] / vector[-1].mean())
    assert data.experts.share[1][3] == 0.0
    assert [step for step, _ in data.positions] == [5, 60]


def test_a_stretch_of_steps(recording: Recording) -> None:
    data = gathered(recording, first=20, last=40)
    assert (data.steps.step[0], data.steps.step[-1]) == (20, 40)
    assert data.not_finite is None and all(20 <= each.step <= 40 for each in data.alerts)
    assert data.maps[0].first.tolist() == [20, 25, 30, 35, 40]
    nothing = page(gathered(recording, first=1000))
    assert "no steps" in nothing and Page(nothing).open == []


def test_no_name_becomes_markup(tmp_path: Path) -> None:
    run = tmp_path / HOSTILE.replace("/", "")
    files = scope_files(run)
    files.root.mkdir(parents=True)
    shape = RunShape(steps=20, interval=5, tp=1, pp=1)
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    greeting = hello(shape, 0)
    greeting["model"] = {HOSTILE: HOSTILE}
    greeting["layout"] = {HOSTILE: 2}
    greeting["modules"] = [[HOSTILE, HOSTILE, 1], [f"decoder.layers.0.{HOSTILE}", HOSTILE, 1]]
    entries = schema(shape, 0)
    more = [[HOSTILE, "gradient_norm", 1]]
    more += [[f"decoder.layers.{layer}.{HOSTILE}", "gradient_norm", 1] for layer in (0, 1)]
    writer.tick([(0, greeting), (0, entries), (0, {"k": "schema", "id": 2, "entries": more})])
    for step in range(1, 21):
        frames = [{**step_frame(shape, 0, step), "perturbed": HOSTILE}]
        if step % 5 == 0:
            frames += [stats_frame(shape, 0, step)]
            values = stats_frame(shape, 0, step)["values"][:3]
            frames += [{"k": "stats", "i": step, "id": 2, "attempt": 0, "values": values}]
        writer.tick([(0, frame) for frame in frames])
    alert = Alert(
        step=10, kind=HOSTILE, path=HOSTILE, statistic=HOSTILE, value=1.0, low=0.0, high=0.5, text=HOSTILE
    )
    writer.alert(alert, (shape.session, 0))
    writer.close()
    add_bookmark(files, 5, HOSTILE)
    with open_recording(run) as recording:
        text = page(gathered(recording))
    found = Page(text)
    assert found.open == [] and found.handlers == []
    assert found.tags.count("script") == 1 and "x" not in found.addresses
    assert "".join(found.words).count("<script>alert('x')</script>") >= 5  # as text


def test_the_file_appears_whole_or_not_at_all(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "made" / "report.html"
    data = gathered(recording)
    write_report(data, path)
    before = path.read_text()
    assert before.startswith("<!doctype html>") and before.endswith("</html>\n")
    assert path.stat().st_mode & 0o077 == 0

    def broken(_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mt_megatron.scope.report.html.page", broken)
    with pytest.raises(OSError, match="No space left"):
        write_report(data, path)
    assert path.read_text() == before and [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_prediction_depths_have_labels_of_their_own(tmp_path: Path) -> None:
    files = scope_files(tmp_path)
    files.root.mkdir()
    shape = RunShape(tp=1, pp=1)
    routers = [f"decoder.layers.{layer}.mlp.router" for layer in (0, 1)]
    routers += [f"mtp.layers.{depth}.transformer_layer.mlp.router" for depth in (0, 1)]
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    writer.tick([(0, {**hello(shape, 0), "modules": [[path, "TopKRouter", 1] for path in routers]})])
    writer.tick([(0, {"k": "schema", "id": 1, "entries": [[path, "expert_load", 4] for path in routers]})])
    for step in (1, 2):
        values = np.ones(4 * len(routers))
        frame = {"k": "stats", "i": step, "id": 1, "attempt": 0, "values": values}
        writer.tick([(0, step_frame(shape, 0, step)), (0, frame)])
    writer.close()
    with open_recording(tmp_path) as recording:
        data = gathered(recording)
    assert [each.rows for each in data.maps] == [("0", "1"), ("MTP 0", "MTP 1")]
    text = page(data)
    assert 'data-labels="0,1,MTP 0,MTP 1"' in text and "2 modules within layers" not in text
    assert "4 modules within layers" in text
