"""Starting and stopping of the page: ports, builds, second servers, recordings that grow, real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from mt_megatron.cli.main import main
from mt_megatron.cli.scope.open import _server_of
from mt_megatron.errors import ConfigError, ScopeError
from mt_megatron.host import peers
from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.recording.writer import Writer
from mt_megatron.scope.sidecar import sidecar
from mt_megatron.scope.sidecar.hub import Hub, ServeOptions
from mt_megatron.scope.sidecar.process import END
from mt_megatron.scope.web import serve, serving
from mt_megatron.scope.web.access import TokenFile, read_token_file, write_token_file
from mt_megatron.scope.web.assets import assets, built_from
from mt_megatron.scope.web.server import Page
from tests.launch import ROOT
from tests.scope.sidecar.fake_ranks import FakeRank, until
from tests.scope.synthetic import RunShape, Truth, frames_of, hello, schema, write_run
from tests.scope.web.support import Served, served

SMALL = RunShape(steps=4, interval=2, tensor_every=0, token_every=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving") / "run"
    write_run(folder, SMALL)
    return folder


def refusal(run: Path, **options: Any) -> str:
    """Why ``serve`` does not serve ``run``."""

    async def main() -> None:
        hub = Hub(scope_files(run), live=False)
        given = ServeOptions(run=run, **{"port": 0, "say": lambda text: None, **options})
        await asyncio.wait_for(serve(hub, lambda: open_recording(run), given), 30)

    with pytest.raises((ConfigError, ScopeError)) as raised:
        asyncio.run(main())
    return str(raised.value)


def listening() -> set[int]:
    """Ports on which this process listens."""
    links = psutil.Process().net_connections(kind="inet")
    return {each.laddr.port for each in links if each.status == psutil.CONN_LISTEN}


def test_says_where_it_listens_and_stops_without_a_trace(run: Path) -> None:
    before = listening(), threading.active_count()
    with served(run) as page:
        assert len(page.said) == 1 and f"127.0.0.1:{page.port}" in page.said[0], page.said
        link = next(word for word in page.said[0].split() if word.startswith("http://"))
        assert page.redeem(link.rstrip(";").partition("#ticket=")[2]).status == 200
        assert page.port in listening() - before[0]
        session = page.enter()
        assert page.ask("/api/run", session=session).json()["count"] == 4
        assert page.ask("/api/server", session=session).json()["live"] is False
        reply = page.post("/api/command", {"do": "pause"}, session, control=page.tokens.control)
        assert reply.status == 409 and "no training" in reply.json()["error"]
        assert (run / "scope" / "page.json").exists()
    assert not (run / "scope" / "page.json").exists()
    assert (listening(), threading.active_count()) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", page.port), timeout=5)


def test_line_of_a_training_names_no_secret(run: Path) -> None:
    with served(run, live=True) as page:
        (line,) = page.said
        assert "ticket" not in line and f"scope open {run}" in line and f"127.0.0.1:{page.port}" in line


def test_taken_port_is_replaced_and_said(run: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said: list[str] = []
        with started(run, said, port=taken.getsockname()[1]):
            assert f"port {taken.getsockname()[1]} could not be had" in said[0]
            assert read_token_file(run / "scope" / "page.json").port != taken.getsockname()[1]


class started:
    """``serve`` in a thread, with options of the test's own."""

    def __init__(self, run: Path, said: list[str], **options: Any) -> None:
        self._ready = threading.Event()

        def say(text: str) -> None:
            said.append(text)
            self._ready.set()

        async def main() -> None:
            hub = Hub(scope_files(run), live=False)
            given = ServeOptions(run=run, **{"port": 0, "say": say, **options})
            self._task = asyncio.ensure_future(serve(hub, lambda: open_recording(run), given))
            self._loop = asyncio.get_running_loop()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

        self._thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(20)
        assert not self._thread.is_alive()


def test_second_server_keeps_its_token_file_when_the_first_ends(run: Path) -> None:
    path = run / "scope" / "page.json"
    said: list[str] = []
    with contextlib.ExitStack() as until_first_ends:
        first = until_first_ends.enter_context(served(run))
        with started(run, said):
            second = read_token_file(path)
            assert second.port != first.port and second.view != first.tokens.view
            # Secrets of the one open nothing at the other.
            session = first.enter()
            other = Served(run=run, hub=first.hub, tokens=second, said=said, loop=first.loop)
            assert other.ask("/api/run", session=session).status == 401
            until_first_ends.close()
            assert first.port not in listening() and read_token_file(path) == second
            assert other.ask("/api/run", session=other.enter()).status == 200
    assert not path.exists()


@pytest.mark.parametrize("port", [-1, 65_536])
def test_impossible_port(run: Path, port: int) -> None:
    assert "0 (any free one) to 65535" in refusal(run, port=port)


def test_missing_build_is_told(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.css").write_text("a{}")
    monkeypatch.setattr(serving, "assets", lambda: assets(tmp_path))
    before = listening()
    assert "Install mt_megatron again" in refusal(run)
    assert listening() == before and not (run / "scope" / "page.json").exists()
    assert built_from(tmp_path) == ""


def test_folder_that_cannot_be_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mt_megatron.scope.web.server.write_token_file", full)
    before = listening()
    assert "page.json cannot be written" in refusal(run) and listening() == before


def test_recording_that_there_is_not(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "error,line",
    [
        (ImportError("No module named 'uvicorn'"), "pip install 'mt_megatron[scope]'"),
        (ConfigError("no port"), "no live page: no port"),
        (RuntimeError("broken"), "the live page has ended (RuntimeError: broken)"),
        (SystemExit(3), "the live page has ended (SystemExit: 3)"),
    ],
)
def test_sidecar_goes_on_without_a_page(
    run: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, line: str
) -> None:
    async def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("mt_megatron.scope.web.serve", fails)
    said: list[str] = []
    options = ServeOptions(run=run, port=0, say=said.append)
    asyncio.run(sidecar.served(Hub(scope_files(run), live=True), options))
    assert len(said) == 1 and line in said[0], said


def test_recording_that_comes_later_and_grows(tmp_path: Path) -> None:
    """As a sidecar writes it: the page waits for the file, and shows what is written while it serves."""
    run = tmp_path / "run"
    files = scope_files(run)
    files.root.mkdir(parents=True)
    writers: list[Writer] = []

    def begins() -> None:
        time.sleep(0.5)
        writers.append(
            Writer(files.node("node0", 0), node=0, host="node0", retain_bytes=64 << 20, say=lambda _: None)
        )

    beginner = threading.Thread(target=begins)
    beginner.start()
    with served(run, live=True) as page:
        beginner.join()
        writer, session = writers[0], page.enter()
        # No rank has come: nothing is shown, and nothing fails.
        first = page.ask("/api/run", session=session).json()
        assert first["count"] == 0 and first["facts"]["world_size"] == 0
        for name in ("steps", "model", "tensors", "rows", "experts", "alerts", "topology", "timeline"):
            assert page.ask(f"/api/{name}", session=session).status == 200, name
        writer.tick(
            [(rank, frame) for rank in range(4) for frame in (hello(SMALL, rank), schema(SMALL, rank))]
        )
        for step in (1, 2, 3, 4):
            writer.tick([(rank, frame) for rank in range(4) for frame in frames_of(SMALL, rank, step)])

            def grown(step: int = step) -> bool:
                _, table = page.ask("/api/steps", session=session).unpacked()
                return bool(table["i"].tolist() == list(range(1, step + 1)))

            until(grown)
        query = "/api/series?path=decoder.layers.1&statistic=activation_rms"
        until(lambda: page.ask(query, session=session).status == 200)
        until(lambda: page.ask(query, session=session).unpacked()[1]["i"].tolist() == [2, 4])
        assert page.ask("/api/run", session=session).json()["revision"] > first["revision"]
    writer.close()


def test_neighbours_are_those_with_a_recording(recorded: tuple[Path, Truth]) -> None:
    run, _ = recorded
    (run.parent / "empty").mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (run.parent / "link").symlink_to(run.parent / "other")
    assert set(serving.neighbours(run)) == {"other"}
    with served(run) as page:
        session = page.enter()
        assert page.ask("/api/runs", session=session).json() == {"runs": ["other"], "compared": []}
        _, table = page.ask("/api/steps?run=other", session=session).unpacked()
        assert len(table["i"]) == 20 and page.ask("/api/run", session=session).json()["count"] == 60
        query = "/api/parted?statistic=activation_rms&other="
        found, arrays = page.ask(f"{query}other", session=session).unpacked()
        assert (found["step"], found["path"], found["steps"]) == (20, "decoder.layers.2", 2)
        assert arrays["values"][1] == pytest.approx(1.01 * arrays["values"][0])
        assert page.ask(f"{query}link", session=session).status == 404


def test_runs_that_are_named_come_first_and_keep_apart(recorded: tuple[Path, Truth], tmp_path: Path) -> None:
    run, _ = recorded
    for folder in (tmp_path / "a" / "other", tmp_path / "b" / "run"):
        shutil.copytree(run.parent / "other", folder)
    given = (tmp_path / "a" / "other", run.parent / "other", tmp_path / "b" / "run")
    found = serving.neighbours(run, given)
    assert list(found) == ["other", "other (2)", "run (2)"]
    assert found["run (2)"]().folder == tmp_path / "b" / "run"


def test_page_does_not_start_twice_on_a_socket(run: Path) -> None:
    """``Page`` frees its port where the token file cannot be written."""
    before = listening()
    site: Any = type("Site", (), {"access": type("Access", (), {"view": "a", "control": "b"})()})()
    with pytest.raises(OSError):
        Page(site, token_file=run / "nowhere" / "page.json")
    assert listening() == before


def test_start_imports_what_it_needs() -> None:
    """Neither torch nor Megatron-Core, and no analysis of traces before somebody looks at one."""
    code = (
        "import sys, mt_megatron.scope.sidecar.__main__, mt_megatron.scope.web.serving; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "uvicorn" in loaded and "mt_megatron.scope.web.views.timeline" in loaded
    late = (
        "torch",
        "megatron",
        "pydantic",
        "tokenizers",
        "mt_megatron.scan.analysis",
        "mt_megatron.scan.clock",
    )
    found = [name for name in loaded for each in late if name == each or name.startswith(f"{each}.")]
    assert found == []


def test_sidecar_process_listens_on_loopback_alone_and_leaves_nothing(tmp_path: Path) -> None:
    """The process that training starts, by the sockets that it really has."""
    run, path = tmp_path / "run", Path("/tmp") / f"mt-serving-{os.getpid()}" / "s"
    command = [sys.executable, "-m", "mt_megatron.scope.sidecar", "--run", str(run), "--socket", str(path)]
    command += ["--node", "0", "--parent", str(os.getpid()), "--serve"]
    command += ["--token-file", str(tmp_path / "link")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True)
    token_file = run / "scope" / "page.json"
    try:
        until(lambda: token_file.exists() or process.poll() is not None, 60)
        rank = FakeRank(path, hello(SMALL, 0), schema(SMALL, 0))
        found = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        links = [each for one in found for each in one.net_connections(kind="inet")]
        tokens = read_token_file(token_file)
        assert [(each.status, each.laddr.ip, each.laddr.port) for each in links] == [
            (psutil.CONN_LISTEN, "127.0.0.1", tokens.port)
        ]
        assert inodes_of_listeners(process.pid) == {("tcp", "0100007F", tokens.port)}
        until((tmp_path / "link").exists)
        link = (tmp_path / "link").read_text().strip()
        assert (tmp_path / "link").stat().st_mode & 0o077 == 0
        page = Served(run=run, hub=None, tokens=tokens, said=[], loop=None)  # type: ignore[arg-type]
        until(lambda: page.ask("/").status == 200)
        reply = page.redeem(link.partition("#ticket=")[2])
        assert reply.status == 200
        session = reply.json()["session"]
        until(lambda: page.ask("/api/run", session=session).json()["facts"]["world_size"] == 4)
        rank.close()
        assert json.loads(token_file.read_text())["pid"] == process.pid
    finally:
        process.send_signal(END)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0 and b"Traceback" not in said, said.decode()
    assert not token_file.exists()


def inodes_of_listeners(pid: int) -> set[tuple[str, str, int]]:
    """Listening sockets of a process as the kernel tells them: table, address in hex, port."""
    held = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            held.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        lines = Path(f"/proc/{pid}/net/{table}")
        for row in lines.read_text().splitlines()[1:] if lines.exists() else ():
            columns = row.split()
            address, port = columns[1].split(":")
            if f"socket:[{columns[9]}]" in held and (not table.startswith("tcp") or columns[3] == "0A"):
                found.add((table, address, int(port, 16)))
    return found


def test_a_page_whose_process_cannot_be_seen_is_known_by_its_tokens(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a container that has the host's network and numbers of its own."""
    with served(run) as page:
        known = read_token_file(run / "scope" / "page.json")
        elsewhere = replace(known, pid=2**22 + 1)
        assert _server_of(known) == _server_of(elsewhere) == "own"
        # Another run's page at the port of a killed one; a process that says it is the page, and is not.
        assert _server_of(replace(elsewhere, view="x" * 43)) == "other"
        assert _server_of(replace(known, view="x" * 43)) == "unproven"
        assert page.port == known.port
        # The end of a tunnel to another machine: another user's server could pass the question on.
        tunnelled = replace(known, host="elsewhere")
        assert _server_of(tunnelled) == "own"
        monkeypatch.setattr(peers, "uid_of_peer", lambda *_: os.geteuid() + 1)
        assert _server_of(tunnelled) == "unproven" and _server_of(known) == "own"
    assert _server_of(elsewhere) == "none"


def test_a_server_that_cannot_prove_itself_gets_no_secret(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process of another user that has taken the port: it answers anything, with a cookie, too."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.requestline + str(self.headers))
            self.send_response(200)
            self.send_header("Set-Cookie", "mt_scope=1")
            self.end_headers()
            self.wfile.write(b"0" * 64)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.01)
        port, host = server.server_address[1], socket.gethostname()
        tokens = TokenFile(host=host, port=port, pid=os.getpid(), view="v" * 43, control="c" * 43)
        (tmp_path / "scope").mkdir()
        write_token_file(tmp_path / "scope" / "page.json", tokens)
        try:
            for more in ([], ["--control"]):
                assert main(["scope", "open", str(tmp_path), *more]) == 2
        finally:
            server.shutdown()
    out, said = capsys.readouterr()
    assert "does not prove" in said and len(asked) == 2
    assert not any(word in out + said + "".join(asked) for word in ("ticket", tokens.view, tokens.control))
