"""The page in Chromium: every view on a recording and on a run that goes on, without an error."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from mt_megatron.scope.recording.files import add_bookmark, scope_files
from mt_megatron.scope.sidecar.process import END
from mt_megatron.scope.web.access import TokenFile, link_to, read_token_file
from mt_megatron.scope.web.assets import PAGE
from mt_megatron.scope.web.live import QUEUE
from mt_megatron.scope.web.recorded import RecordedSource
from mt_megatron.scope.web.views.registry import DATA
from tests.launch import ROOT
from tests.scope.sidecar.fake_ranks import FakeRank, start_sidecar, until
from tests.scope.synthetic import RunShape, frames_of, hello, schema, write_run
from tests.scope.web.support import Served, served
from tools.scan_simulator import Job, parse_layout, simulate
from tools.scope_page.build import build_into, plain

DRIVER = Path(__file__).with_name("browser.mjs")
VIEWS = {
    "run": "#/run",
    "topology": "#/topology",
    "timeline": "#/timeline",
    "model": "#/model?module=decoder.layers.1.mlp",
    "tensor": "#/tensor",
    "attention": "#/attention",
    "tokens": "#/tokens?token=20",
    "experts": "#/experts",
    "replay": "#/replay?step=40&with=other",
    "generate": "#/generate",
    "lab": "#/lab",
}
PICTURES = {"run", "timeline", "model", "tensor", "attention", "tokens", "experts", "replay"}


def node_folder() -> Path | None:
    """Folder whose ``node_modules`` has playwright-core."""
    given = os.environ.get("MT_SCOPE_NODE")
    for folder in (Path(given) if given else None, ROOT / "tools" / "scope_page" / "source"):
        if folder is not None and (folder / "node_modules" / "playwright-core").is_dir():
            return folder
    return None


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = [
    text
    for text, there in (
        ("node (Node.js) on PATH", shutil.which("node")),
        ("chromium on PATH", CHROMIUM),
        ("playwright-core: run 'npm ci' in tools/scope_page/source, or set MT_SCOPE_NODE", node_folder()),
    )
    if not there
]
pytestmark = [
    pytest.mark.daily,
    pytest.mark.skipif(bool(MISSING), reason=f"expected {'; '.join(MISSING)}"),
]


def drive(
    link: str, folder: Path, actions: Sequence[Sequence[Any]], *, errors: str = "", **more: Any
) -> Mapping[str, Any]:
    """What the browser found. No request to elsewhere, and no error on its console without ``errors``."""
    request = {"modules": str(node_folder()), "chromium": CHROMIUM, "url": link, "actions": actions, **more}
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    done = subprocess.run(["node", str(DRIVER), str(path)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["failure"] is None, found["failure"]
    assert found["foreign"] == []
    assert [line for line in found["errors"] if not errors or errors not in line] == []
    return found


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("browser") / "run"
    shape = RunShape(
        steps=60,
        experts=4,
        tensor_every=20,
        token_every=20,
        attention_tokens=300,
        attention_layers=2,
    )
    write_run(folder, shape)
    other = RunShape(steps=60, experts=4, differs_from=20, tensor_every=0, token_every=0)
    write_run(folder.parent / "other", other)
    simulate(folder, Job(layout=parse_layout("dp=1,tp=2,pp=2"), steps=6, microbatches=4), [], seed=1)
    with served(folder) as one:
        yield one


@pytest.mark.parametrize(
    "theme,width,height,language",
    [
        ("light", 1280, 800, "en"),
        ("dark", 1280, 800, "zh"),
        ("light", 3840, 2160, "zh"),
        ("dark", 3840, 2160, "en"),
    ],
)
def test_every_view_on_a_recording(
    recording: Served, tmp_path: Path, theme: str, width: int, height: int, language: str
) -> None:
    actions: list[Any] = [["view", address, 100, name in PICTURES] for name, address in VIEWS.items()]
    actions += [["view", VIEWS["replay"], 100, True], ["text", "main button.tag.warn"]]
    link = link_to(recording.tokens)
    found = drive(link, tmp_path, actions, theme=theme, width=width, height=height, language=language)
    for name, seen in zip(VIEWS, found["results"], strict=False):
        assert not seen["wide"], f"{name} is wider than the window"
        assert len(seen["text"]) > 10, name
        if name in PICTURES:
            assert not seen["empty"] and max(seen["canvases"], default=0) > 3, (name, seen["canvases"])
    assert "20, decoder.layers.2 (" in found["results"][-1]


def test_keyboard_links_and_help(recording: Served, tmp_path: Path) -> None:
    address = "#/model?step=30&module=decoder.layers.2.mlp&statistic=activation_rms"
    whole = "[...document.querySelectorAll('tr.pick')].find((each) => each.innerText.includes('GPTModel'))"
    actions = [
        ["press", "3"],
        ["press", "?"],
        ["text", "[role=dialog]"],
        ["press", "Escape"],
        ["press", "6"],
        ["press", "["],
        ["press", "f"],
        ["press", "l"],
        ["text", "nav"],
        ["view", address],
        ["reload"],
        ["evaluate", "location.hash"],
        ["text", "main"],
        ["view", "#/model", 300],
        ["until", f"(() => {{ const row = {whole}; row?.click(); return Boolean(row); }})()"],
        ["reload"],
        ["evaluate", "location.hash"],
        ["text", ".model .side h2"],
        ["view", "#/timeline", 300],
        ["press", "w"],
    ]
    results = drive(link_to(recording.tokens), tmp_path, actions)["results"]
    assert results[0].startswith("#/timeline") and "Esc" in results[2]
    assert results[4].startswith("#/attention") and "step=" in results[5] and "step=" not in results[6]
    assert "注意力" in results[8]
    assert results[11] == address and "decoder.layers.2.mlp" in results[12]
    assert results[16] == "#/model?module=" and "整个模型" in results[17]
    assert re.search(r"timeline\?.*step=\d", results[19]), "a zoom belongs to its steps"


@pytest.fixture
def copied(recording: Served, tmp_path: Path) -> Iterator[Served]:
    """A page on a copy of the recording, for a test that adds to it."""
    folder = tmp_path / "copied" / recording.run.name
    shutil.copytree(recording.run.parent, folder.parent)
    with served(folder) as page:
        yield page


def test_exported_page_shows_the_same_without_a_server(copied: Served, tmp_path: Path) -> None:
    """And a second export of the tab shows what came after the first."""
    earlier, target = tmp_path / "earlier.html", tmp_path / "page.html"
    views = [["view", VIEWS[name], 100, True] for name in VIEWS if name in PICTURES]
    headers = {"Content-Type": "application/json", "X-Scope-Control": copied.tokens.control}
    mark = {"method": "POST", "headers": headers, "body": json.dumps({"step": 30, "text": "between"})}
    own = "{'X-Scope-Session': sessionStorage.getItem('mt-scope-session')}"
    post = f"((mark) => fetch('/api/bookmark', {{...mark, headers: {{...mark.headers, ...{own}}}}}))"
    actions = [
        *views,
        ["download", "button[title=e]", str(earlier)],
        ["evaluate", f"{post}({json.dumps(mark)}).then((answer) => answer.status)"],
        ["download", "button[title=e]", str(target)],
    ]
    assert drive(link_to(copied.tokens), tmp_path, actions, language="en")["results"][-2] == 200
    text = target.read_text()
    assert copied.tokens.view not in text and copied.tokens.control not in text
    assert "connect-src" not in text and "unsafe-eval" not in text
    before, after = (_archive(path.read_text()) for path in (earlier, target))
    assert [mark["text"] for mark in after["run"]["bookmarks"]] == ["between", "halfway"]
    assert [mark["text"] for mark in before["run"]["bookmarks"]] == ["halfway"]
    assert before.keys() <= after.keys()
    found = drive(target.as_uri(), tmp_path, views)
    for (_, address, *_), seen in zip(views, found["results"], strict=True):
        assert not seen["empty"] and max(seen["canvases"], default=0) > 3, (address, seen)


def _archive(text: str) -> dict[str, Any]:
    """Answers that an exported page has, by address: JSON as values, packed ones as bytes."""
    packed = re.search(r'id="archive">([^<]+)<', text)
    assert packed is not None
    rows = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    bodies = {url: (base64.b64decode(row["data"]), row.get("binary")) for url, row in rows.items()}
    return {url: body if binary else json.loads(body) for url, (body, binary) in bodies.items()}


HOSTILE = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


def test_hostile_texts_are_texts_on_the_page_and_in_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the run's name, of bookmarks and of tokens."""
    run = tmp_path / "a<img src=x onerror=window.hacked=1>&\"'"
    write_run(run, RunShape(steps=20, interval=5, tensor_every=0, token_every=10, tokens=16))
    add_bookmark(scope_files(run), 10, HOSTILE)
    monkeypatch.setattr(RecordedSource, "text_of", lambda self, ids: [HOSTILE for _ in ids])
    checks: list[Any] = ["evaluate", "[window.hacked, document.querySelectorAll('img[src=x]').length]"]
    actions: list[Any] = [
        ["view", "#/tokens?step=20&token=3", 300],
        ["text", "main"],
        ["view", "#/replay?step=10", 300, True],
        ["text", "main"],
        ["view", "#/run", 300, True],
        ["text", ".top"],
        checks,
    ]
    target = tmp_path / "page.html"
    with served(run) as page:
        link = link_to(page.tokens)
        download = ["download", "button[title=e]", str(target)]
        on_page = drive(link, tmp_path, [*actions, download], language="en")["results"]
    text = target.read_text()
    assert "<img src=x" not in text and text.lower().count("</script") == 2
    exported = drive(target.as_uri(), tmp_path, actions, language="en")["results"]
    for found in (on_page, exported):
        assert HOSTILE in found[1] and HOSTILE in found[3] and run.name in found[5]
        assert found[6] == [None, 0]


def test_slow_browser_is_told_what_it_missed(tmp_path: Path) -> None:
    """A page whose script stands still for seconds: the server keeps little, and the page says what is
    missing."""
    write_run(tmp_path / "run", RunShape(steps=20, tensor_every=0, token_every=0))
    with served(tmp_path / "run", live=True) as page:
        session, begun = page.enter(), threading.Event()
        grown: list[int] = []

        def floods() -> None:
            until(lambda: page.ask("/api/server", session=session).json()["sockets"] == 1, 60)
            begun.wait(60)
            before = psutil.Process().memory_info().rss
            for number in range(40_000):
                page.publish({"k": "step", "step": number, "text": "x" * 3_000})
                if number % 100 == 99:
                    time.sleep(0.01)  # the loop's turn
                    grown.append(psutil.Process().memory_info().rss - before)

        thread = threading.Thread(target=floods)
        thread.start()
        until_over = "const end = Date.now() + 12000; while (Date.now() < end);"
        actions: list[Any] = [
            ["until", "document.querySelector('[data-state=live]')", 30_000],
            ["evaluate", f"setTimeout(() => {{ {until_over} }}, 100)"],
            ["wait", 300],
            ["until", "document.querySelector('.scrub .warn')", 60_000],
            ["text", ".scrub .warn"],
        ]
        threading.Timer(8.0, begun.set).start()
        found = drive(link_to(page.tokens), tmp_path, actions, language="en")["results"]
        thread.join(60)
        assert re.fullmatch(r"\d+ notices missed", " ".join(found[-1].split())), found[-1]
        until(lambda: page.ask("/api/server", session=session).json()["browser_dropped"] > 10_000)
        assert max(grown) < 64 * 2**20


def test_answers_slower_than_the_recording_grows_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server beside busy ranks takes longer for a view's series than a step takes. Slices that are written
    after the page has asked for their step come too."""
    write_run(tmp_path / "run", RunShape(steps=40, tensor_every=0, token_every=0))
    job = Job(layout=parse_layout("dp=1,tp=2,pp=1"), steps=3, microbatches=2)
    simulate(tmp_path / "run", job, [], seed=1)
    series, timeline, asked, slices = DATA["series"], DATA["timeline"], [], []

    def slow(context: Any, query: Any) -> Any:
        asked.append(query)
        time.sleep(0.3)
        return series(context, query)

    def growing(context: Any, query: Any) -> Any:
        slices.append(query)
        return timeline(context, query if len(slices) > 1 else {**query, "most": 10})

    monkeypatch.setitem(DATA, "series", slow)
    monkeypatch.setitem(DATA, "timeline", growing)
    with served(tmp_path / "run", live=True) as page:
        ended = threading.Event()

        def steps() -> None:
            number = 0
            while not ended.wait(0.3):
                number += 1
                page.publish({"k": "step", "step": number})

        sender = threading.Thread(target=steps, daemon=True)
        sender.start()
        try:
            actions = [
                ["view", "#/model?module=decoder.layers.1", 800, True],
                ["view", "#/timeline", 300],
                ["until", "window.scopeTimeline.slices() > 10"],
            ]
            found = drive(link_to(page.tokens), tmp_path, actions, language="en", errors="503")["results"]
        finally:
            ended.set()
            sender.join()
    assert max(found[0]["canvases"], default=0) > 3, (len(asked), found[0]["text"][-400:])


def test_killed_browser_leaves_nothing_behind(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RunShape(steps=20, tensor_every=0, token_every=0))
    with served(tmp_path / "run", live=True) as page:
        session = page.enter()

        def sockets() -> int:
            return int(page.ask("/api/server", session=session).json()["sockets"])

        request = {"modules": str(node_folder()), "chromium": CHROMIUM, "url": link_to(page.tokens)}
        path = tmp_path / "request.json"
        path.write_text(json.dumps({**request, "actions": [["wait", 600_000]]}))
        driver = subprocess.Popen(
            ["node", str(DRIVER), str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        family = psutil.Process(driver.pid)
        try:
            until(lambda: sockets() == 1, 60)
            before = psutil.Process().memory_info().rss
            killed = [*family.children(recursive=True), family]
            assert len(killed) > 3
            for number, process in enumerate([*killed, *[None] * 20]):
                for step in range(500):
                    page.publish({"k": "step", "step": 500 * number + step, "text": "x" * 3_000})
                if process is not None:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                time.sleep(0.01)
        finally:
            for process in (
                psutil.Process(driver.pid).children(recursive=True) if driver.poll() is None else ()
            ):
                process.kill()
            driver.kill()
            driver.wait()
        until(lambda: sockets() == 0)
        assert not page.hub._subscriptions or len(page.hub._subscriptions) == 1  # the server's own
        assert psutil.Process().memory_info().rss - before < 64 * 2**20
        with page.connect(page.enter()) as link:
            page.publish({"k": "step", "step": 7})
            assert json.loads(link.recv(timeout=10))["step"] == 7


FIGURES = {"loss": 2.5, "grad_norm": 1.25, "skipped": False, "reason": None}
SKIPPED = {**FIGURES, "loss": None, "skipped": True, "reason": "loss is NaN"}


def _generated(frame: Mapping[str, Any]) -> Mapping[str, Any]:
    if "attention" in frame["arguments"]:
        return {"ok": False, "value": None, "error": "found attention of some 4,000,000 weights"}
    return {"value": {"step": 7, "tokens": []}}


def test_link_with_control_opens_a_tab_that_commands_and_no_second_one(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RunShape(steps=20, tensor_every=0, token_every=0))
    with served(tmp_path / "run", live=True) as page:
        link = link_to(page.tokens, controls=True)
        actions = [
            ["until", "[...document.querySelectorAll('.top button')].some((b) => b.innerText === 'Pause')"],
            ["press", "p"],
            ["evaluate", "location.href"],
            ["evaluate", "sessionStorage.clear()"],
            ["open", link],
            ["wait", 1_000],
            ["text", "body"],
        ]
        found = drive(link, tmp_path, actions, errors="status of 40", language="en")["results"]
        assert "pause" in [frame["do"] for frame in page.commands]
    assert "ticket" not in found[2] and "scope open RUN" in found[-1] and "Pause" not in found[-1]


def test_view_only_until_the_control_token_is_given(tmp_path: Path) -> None:
    """Then a pause, the lab and a generation by it, while steps go by and after ten notices were missed."""
    write_run(tmp_path / "run", RunShape(steps=20, tensor_every=0, token_every=0))
    buttons = "[...document.querySelectorAll('.top button')]"
    submit = "document.querySelector('.over form').requestSubmit()"
    click = (
        "(() => {{ const found = [...document.querySelectorAll('main button')].find((each) => "
        "each.innerText === '{}' && !each.disabled); found?.click(); return Boolean(found); }})()"
    )
    paired = {"modules": [], "first_difference": None, "baseline": FIGURES, "perturbed": SKIPPED}
    replies = {"pair": lambda frame: {"value": paired}, "generate": _generated}
    with served(tmp_path / "run", live=True, replies=replies) as page:
        actions = [
            ["evaluate", f"{buttons}.map((b) => b.innerText).join('|')"],
            ["press", "p"],
            ["fill", "input[type=password]", "wrong"],
            ["evaluate", submit],
            ["until", "document.querySelector('.over .bad')"],
            ["fill", "input[type=password]", page.tokens.control],
            ["evaluate", submit],
            ["until", f"{buttons}.some((b) => b.innerText === 'Pause')"],
            ["press", "p"],
            ["until", f"{buttons}.some((b) => b.innerText === 'Resume' && !b.disabled)"],
            # The lab asks for what is armed once, and an error stays, though facts are read every second.
            ["view", "#/lab", 300],
            ["fill", ".lab textarea", "nothing@**"],
            ["until", click.format("Send")],
            ["until", "document.querySelector('.lab p.bad')"],
            ["wait", 2_500],
            ["evaluate", "document.querySelector('.lab p.bad')?.innerText"],
            ["until", click.format("Paired run")],
            ["until", "document.querySelector('.lab .figures_')"],
            ["text", ".lab .figures_"],
            # Attention of a long prompt is refused; an empty field asks for none.
            ["view", "#/generate", 300],
            ["fill", ".generate textarea", "Once"],
            ["until", click.format("Generate")],
            ["until", "document.querySelector('.generate .bad')"],
            ["text", ".generate form"],
            ["fill", ".fields label:nth-child(4) input", ""],
            ["until", click.format("Generate")],
            ["until", "document.querySelector('.generate .out').innerText.includes('step 7')"],
            ["text", ".generate form"],
            ["text", ".scrub .warn"],
        ]
        with _steps(page):
            # The browser itself writes a line for the answers 403 and 400.
            found = drive(link_to(page.tokens), tmp_path, actions, errors="status of 40", language="en")
        commands = [frame for frame in page.commands if frame["do"] != "hold"]
    results = found["results"]
    assert "Pause" not in results[0] and "View only" in results[0]
    assert [frame["do"] for frame in commands] == ["pause", "status", "pair", "generate", "generate"]
    assert results[15] and "skipped false → true" in results[18] and "loss is NaN" in results[18]
    asked = [frame["arguments"].get("attention") for frame in commands[-2:]]
    assert asked == [{"layers": [0]}, None]
    assert "empty the field" in results[23] and "empty the field" not in results[27]
    assert " ".join(results[28].split()) == "10 notices missed"


@contextlib.contextmanager
def _steps(page: Served) -> Iterator[None]:
    """Notices of steps: first ten more at once than a browser's queue takes, then one every 0.3 s."""
    ended = threading.Event()

    def many() -> None:
        for number in range(QUEUE + 10):
            page.hub.publish({"k": "step", "step": number})

    def send() -> None:
        session = page.enter()
        until(lambda: page.ask("/api/server", session=session).json()["sockets"] == 1, 60)
        page.loop.call_soon_threadsafe(many)
        while not ended.wait(0.3):
            page.publish({"k": "step", "step": 20})

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield
    finally:
        ended.set()
        sender.join()


def test_every_view_while_ranks_send(tmp_path: Path) -> None:
    """A sidecar as training starts it, with two ranks of a made-up run: curves grow without a reload."""
    run = tmp_path / "run"
    shape = RunShape(tp=2, pp=1, experts=4, interval=2, tensor_every=4, token_every=4, attention_tokens=128)
    simulate(run, Job(layout=parse_layout("dp=1,tp=2,pp=1"), steps=6, microbatches=4), [], seed=1)
    path = Path("/tmp") / f"mt-page-{os.getpid()}" / "s"
    process = start_sidecar(run, path, "--serve", error=subprocess.DEVNULL)
    stop = threading.Event()
    try:
        ranks = [FakeRank(path, hello(shape, rank), schema(shape, rank)) for rank in range(2)]
        sender = threading.Thread(target=_send, args=(ranks, shape, stop), daemon=True)
        sender.start()
        tokens = token_file(run)
        now = "Number(document.querySelector('.scrub .now').innerText.match(/\\d+/)?.[0])"
        names = [name for name in VIEWS if name != "replay"]
        actions = [
            ["until", f"{now} > 8", 60_000],
            *(["view", VIEWS[name], 1_200, name in PICTURES] for name in names),
            ["evaluate", f"window.before = {now}"],
            ["until", f"{now} > window.before", 30_000],
        ]
        found = drive(link_to(tokens), tmp_path, actions, language="en")
        for name, seen in zip(names, found["results"][1:], strict=False):
            assert len(seen["text"]) > 10, name
            if name in PICTURES:
                assert not seen["empty"] and max(seen["canvases"], default=0) > 3, (name, seen)
    finally:
        stop.set()
        process.send_signal(END)
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def _send(ranks: Sequence[FakeRank], shape: RunShape, stop: threading.Event) -> None:
    step = 0
    while not stop.wait(0.2):
        step += 1
        for number, rank in enumerate(ranks):
            rank.send(*frames_of(shape, number, step))


def token_file(run: Path) -> TokenFile:
    path = run / "scope" / "page.json"
    until(path.exists, 30)
    return read_token_file(path)


def test_rebuild_is_what_is_committed(tmp_path: Path) -> None:
    """With the packages that the lock file names, the source becomes the committed files byte for byte."""
    folder = node_folder()
    assert folder is not None
    if not (folder / "node_modules" / "vite").is_dir():
        pytest.skip("expected vite beside playwright-core: run 'npm ci' in tools/scope_page/source")
    build_into(tmp_path / "page", modules=folder / "node_modules")
    for path in sorted(PAGE.rglob("*")):
        if path.is_file():
            made = tmp_path / "page" / path.relative_to(PAGE)
            assert plain(made) == plain(path), path.name  # what zlib makes of it may differ
