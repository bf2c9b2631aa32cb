"""Alerts reach the log, alerts.jsonl, a webhook and Prometheus, each only as often as is useful."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.host import peers
from mt_megatron.host.peers import is_loopback
from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.format.run_files import append_record
from mt_megatron.scan.monitor.alerts import Alerts, Webhook
from mt_megatron.scan.monitor.metrics_endpoint import Metrics

REPOSITORY = Path(__file__).parents[3]

SLOW = Finding(
    cause="slow_compute",
    lateness="late_arrival",
    ranks=(5,),
    host="node-1",
    first_step=40,
    last_step=44,
    lost_fraction=0.123,
    confidence=0.9,
    evidence=("84 ms instead of 60 ms",),
)


class _Receiver:
    def __init__(self, answers: list[int]) -> None:
        self.answers, self.bodies = answers, list[dict[str, Any]]()
        self.got = threading.Semaphore(0)
        self.url = ""


@contextmanager
def receiver(*answers: int) -> Iterator[_Receiver]:
    """An HTTP server that answers with these codes in turn, then 200."""
    state = _Receiver(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.bodies.append(json.loads(body))
            self.send_response(state.answers.pop(0) if state.answers else 200)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()
            state.got.release()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}/hook/secret-token"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "alerts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_finding_is_told_on_every_way_with_the_culprit_first(tmp_path: Path) -> None:
    said: list[str] = []
    with receiver() as there, Alerts(tmp_path, webhook=there.url, say=said.append) as alerts:
        assert alerts.finding(SLOW, named_at_step=45, time_unix=1000.0)
        assert there.got.acquire(timeout=10)
    (record,) = lines(tmp_path)
    assert there.bodies == [record]
    assert record["text"].startswith("Rank 5 (node-1) computes slowly: 12.3 % of the time of steps 40-44")
    assert record["finding"]["ranks"] == [5] and record["named_at_step"] == 45
    assert said == [f"scan: {record['text']}"]
    assert (tmp_path / "alerts.jsonl").stat().st_mode & 0o777 == 0o600


def test_the_same_culprit_is_told_once_an_hour_and_another_cause_at_once(tmp_path: Path) -> None:
    with Alerts(tmp_path, say=lambda _: None) as alerts:
        told = [
            alerts.finding(finding, named_at_step=1, time_unix=time)
            for finding, time in (
                (SLOW, 0.0),
                (replace(SLOW, last_step=90, lost_fraction=0.2), 1800.0),
                (replace(SLOW, cause="slow_data"), 1800.0),
                (SLOW, 3600.0),
            )
        ]
    assert told == [True, False, True, True]
    assert len(lines(tmp_path)) == 3


def test_nobody_is_woken_for_a_guess_but_for_a_hang(tmp_path: Path) -> None:
    with Alerts(tmp_path, say=lambda _: None) as alerts:
        assert not alerts.finding(replace(SLOW, cause="unknown", confidence=0.3), named_at_step=1)
        assert alerts.finding(replace(SLOW, cause="hang", confidence=0.3), named_at_step=1)
        assert 'confidence_ratio{cause="unknown"' in alerts.metrics.text()


def test_a_server_in_trouble_is_asked_again_and_one_that_refuses_is_not() -> None:
    said: list[str] = []
    with receiver(500, 429, 200) as there:
        hook = Webhook(there.url, say=said.append, pause=0.01)
        hook.post({"n": 1})
        for _ in range(3):
            assert there.got.acquire(timeout=10)
        hook.close()
        assert (hook.delivered, hook.lost, said) == (1, 0, [])
    with receiver(404, 200) as there:
        hook = Webhook(there.url, say=said.append, pause=0.01)
        hook.post({"n": 1})
        hook.close()
        assert len(there.bodies) == 1 and (hook.delivered, hook.lost) == (0, 1)
    assert said == ["scan: an alert did not reach the webhook at 127.0.0.1: it answered 404"]


def test_a_redirect_is_not_followed() -> None:
    said: list[str] = []
    with receiver(302) as there:
        hook = Webhook(there.url, say=said.append, pause=0.01)
        hook.post({"n": 1})
        hook.close()
        assert len(there.bodies) == 1 and hook.lost == 1


def test_a_dead_address_is_said_without_its_secret_and_blocks_nobody() -> None:
    said: list[str] = []
    with receiver() as there:
        url = there.url
    hook = Webhook(url, say=said.append, pause=0.01, attempts=2)
    hook.post({"n": 1})
    hook.close()
    assert hook.lost == 1 and "127.0.0.1" in said[0] and "secret" not in said[0]


@pytest.mark.parametrize("url", ["ftp://host/x", "hooks.example/x", "file:///etc/passwd", "https://"])
def test_what_is_no_web_address_is_refused_before_anything_starts(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="Expected http"):
        Alerts(tmp_path, webhook=url)


def test_prometheus_text_is_served_on_loopback_only(tmp_path: Path) -> None:
    with Alerts(tmp_path, prometheus_port=0, say=lambda _: None) as alerts:
        assert alerts.endpoint is not None
        alerts.progress(step=45, step_seconds=0.25, ranks_seen=8)
        alerts.finding(SLOW, named_at_step=45)
        address = f"http://127.0.0.1:{alerts.endpoint.port}"
        with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(address, timeout=10)
        assert alerts.endpoint._server.server_address[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match="prometheus-port"):
            Alerts(tmp_path, prometheus_port=alerts.endpoint.port)
    assert "mt_megatron_scan_step 45.0\n" in text
    assert 'mt_megatron_scan_alerts_total{cause="slow_compute"} 1.0\n' in text
    assert 'finding_lost_ratio{cause="slow_compute",ranks="5",host="node-1"} 0.123\n' in text


def asked(port: int, *hosts: str, address: str = "127.0.0.1") -> int:
    """The status of a request with these ``Host`` headers."""
    connection = http.client.HTTPConnection(address, port, timeout=10)
    try:
        connection.putrequest("GET", "/metrics", skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_request_for_another_host_is_refused(tmp_path: Path) -> None:
    """DNS rebinding: the attacker's name points here, and the browser sends that name."""
    own = socket.gethostname()
    said: list[str] = []
    with Alerts(
        tmp_path, prometheus_port=0, prometheus_hosts=("Trainer.example",), say=said.append
    ) as alerts:
        assert alerts.endpoint is not None
        port = alerts.endpoint.port
        good = ["localhost", f"localhost:{port}", "127.0.0.1:1", "LOCALHOST.", "[::1]:9", own, f"{own}:80"]
        for host in [*good, "trainer.example", "trainer.example:9400"]:
            assert asked(port, host) == 200, host
        for host in ["rebound.example", f"rebound.example:{port}", "127.0.0.2", "localhost.evil.example"]:
            assert asked(port, host) == 403, host
        for wrong in [
            "",
            "localhost:80:80",
            "[::1",
            "[::1]x",
            "localhost@evil",
            "0.0.0.0",
            "a.trainer.example",
        ]:
            assert asked(port, wrong) == 403, wrong
        assert asked(port) == 403 and asked(port, "localhost", "evil.example") == 403
    assert said == [], "loopback is nothing to warn of"


def test_a_request_that_is_slow_long_or_absent_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.Listener.cut_off, "__defaults__", (1.0,))
    before = threading.active_count()
    with Alerts(tmp_path, prometheus_port=0, say=lambda _: None) as alerts:
        assert alerts.endpoint is not None
        port = alerts.endpoint.port
        begun = time.monotonic()
        with ExitStack() as stack:
            links = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(60)
            ]
            for link in links[::2]:
                link.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-")
            while time.monotonic() < begun + 3.0 and not all(has_ended(link) for link in links):
                with suppress(OSError):
                    links[0].send(b"x")  # a byte at a time puts nothing off
                assert asked(port, "localhost") == 200
            assert all(has_ended(link) for link in links)
        with socket.create_connection(("127.0.0.1", port), 10) as link, suppress(ConnectionError):
            link.sendall(
                b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + b"X: yyyyyyyy\r\n" * 100_000 + b"\r\n"
            )
            assert link.recv(100).startswith(b"HTTP/1.0 200")
        # Handlers of connections that ended have ended.
        while threading.active_count() > before + 1 and time.monotonic() < begun + 10.0:
            time.sleep(0.01)
        assert threading.active_count() == before + 1


def has_ended(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        return not link.recv(65536)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_another_address_is_said_and_asked_for_by_that_address(tmp_path: Path) -> None:
    said: list[str] = []
    with Alerts(tmp_path, prometheus_port=0, prometheus_address="0.0.0.0", say=said.append) as alerts:
        assert alerts.endpoint is not None
        port = alerts.endpoint.port
        # Of all of a machine's addresses, that at which the request came in.
        assert asked(port, f"127.0.0.3:{port}", address="127.0.0.3") == 200
        assert asked(port, "evil.example", address="127.0.0.3") == 403
        assert asked(port, "127.0.0.4", address="127.0.0.3") == 403
    (line,) = said
    assert f"http://0.0.0.0:{port}/metrics" in line and "every machine" in line
    with pytest.raises(ConfigError, match="scan-prometheus-address"):
        Alerts(tmp_path, prometheus_port=0, prometheus_address="192.0.2.1")
    assert is_loopback("127.8.0.1") and is_loopback("::1") and not is_loopback("10.0.3.4")


def test_every_figure_of_the_dashboard_is_served(tmp_path: Path) -> None:
    dashboard = json.loads((REPOSITORY / "docs" / "dashboards" / "megascan.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())] + [
        annotation["expr"] for annotation in dashboard["annotations"]["list"]
    ]
    with Alerts(tmp_path, say=lambda _: None) as alerts:
        served = set(re.findall(r"^# TYPE (\S+)", alerts.metrics.text(), flags=re.MULTILINE))
        shown = {name for query in queries for name in re.findall(r"mt_megatron_\w+", query)}
    assert queries and all("mt_megatron_scan_" in query for query in queries)
    assert shown == served
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(?!__)(\w+)", json.dumps(dashboard)))
    assert used == variables


def test_the_figures_of_a_finding_end_with_it(tmp_path: Path) -> None:
    other = replace(SLOW, cause="slow_data", ranks=(2,))
    with Alerts(tmp_path, say=lambda _: None) as alerts:
        alerts.finding(SLOW, named_at_step=45)
        alerts.finding(other, named_at_step=45)
        assert shown(alerts) == {"slow_compute", "slow_data"}
        alerts.standing([SLOW, replace(other, last_step=50)], step=54)
        assert shown(alerts) == {"slow_compute", "slow_data"}
        # Both are still in the steps looked at; one was over 11 steps ago.
        alerts.standing([SLOW, replace(other, last_step=55)], step=55)
        assert shown(alerts) == {"slow_data"}
        alerts.standing([], step=56)
        assert shown(alerts) == set()
        assert alerts.metrics.text().count("mt_megatron_scan_alerts_total{") == 2, "counters only count up"


def shown(alerts: Alerts) -> set[str]:
    lines = [line for line in alerts.metrics.text().splitlines() if "finding_" in line and line[0] != "#"]
    causes = {re.search('cause="([a-z_]+)"', line)[1] for line in lines}  # type: ignore[index]
    assert len(lines) == 2 * len(causes), "share and confidence of each"
    return causes


def test_names_and_figures_are_as_prometheus_wants_them(tmp_path: Path) -> None:
    """https://prometheus.io/docs/practices/naming: base units, ``_total`` for what counts and no other."""
    with Alerts(tmp_path, say=lambda _: None) as alerts:
        alerts.progress(step=3, step_seconds=float("nan"), ranks_seen=4)
        text = alerts.metrics.text()
    kinds = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert kinds and all(re.fullmatch("mt_megatron_scan_[a-z_]+", name) for name in kinds)
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())
    assert not [name for name in kinds if re.search("(_ms|_us|_percent|_fraction|_minutes)$", name)]
    assert "mt_megatron_scan_step_seconds NaN\n" in text


def test_what_waits_for_the_webhook_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_megatron.scan.monitor.alerts._WAITING_BYTES", 1000)
    said: list[str] = []
    with receiver() as there:
        hook = Webhook(there.url, say=said.append, pause=0.01)
        hook.post({"n": "x" * 2000})
        assert hook.lost == 1 and "more than 1000 would wait" in said[0]
        for number in range(20):
            hook.post({"n": number, "text": "x" * 500})
            assert there.got.acquire(timeout=10)
            until = time.monotonic() + 10
            while hook.delivered <= number and time.monotonic() < until:
                time.sleep(0.001)
        hook.close()
    assert (hook.delivered, hook.lost) == (20, 1), "what is delivered makes room"


def test_labels_are_escaped() -> None:
    metrics = Metrics()
    metrics.declare("a", "gauge", "about")
    metrics.set("a", 1.0, host='x"y\\z\nw')
    assert metrics.text().splitlines()[-1] == 'a{host="x\\"y\\\\z\\nw"} 1.0'


def test_a_file_that_cannot_be_written_is_said_once_and_the_rest_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    with Alerts(tmp_path / "gone", say=said.append) as alerts:
        assert alerts.finding(SLOW, named_at_step=1)
        assert alerts.finding(replace(SLOW, ranks=(6,)), named_at_step=1)
    assert sum("no longer kept" in line for line in said) == 1 and len(said) == 3


def test_a_record_that_is_written_in_parts_leaves_the_next_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    shortened: list[int] = []

    def half_at_first(handle: int, data: Any) -> int:
        shortened.append(handle)
        return write(handle, data[: len(data) // 2] if len(shortened) == 1 else data)

    with Alerts(tmp_path, say=lambda _: None) as alerts:
        monkeypatch.setattr(os, "write", half_at_first)
        alerts.finding(SLOW, named_at_step=1)
        alerts.finding(replace(SLOW, ranks=(6,)), named_at_step=2)
        monkeypatch.undo()
    assert [record["named_at_step"] for record in lines(tmp_path)] == [1, 2]


def test_a_record_that_the_disk_takes_half_of_is_not_there_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    path = tmp_path / "findings.jsonl"
    append_record(path, {"number": 0})

    def fills_up(handle: int, data: Any) -> int:
        if len(data) < len('{"number": 1}\n'):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data[:5])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fills_up)
        with pytest.raises(OSError, match="No space left"):
            append_record(path, {"number": 1})
    append_record(path, {"number": 2})
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 2]
