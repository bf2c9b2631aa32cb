"""Other local users' connections and floods keep the owner neither from the page nor from the metrics."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mt_megatron.host import peers
from tests.launch import ROOT
from tests.scope.web.support import Served

SECONDS = 60.0 if os.environ.get("MT_MEGATRON_DAILY") else 3.0
ASKED = 50
ATTACK = Path(__file__).parents[2] / "host" / "attack.py"
OTHER = 65534
WATCHER = f"""
import sys, time
from mt_megatron.host import peers
from mt_megatron.scan.monitor.metrics_endpoint import Endpoint, Metrics
known = peers.uid_of_peer
if sys.argv[1]:
    peers.uid_of_peer = lambda peer, own: {OTHER} if peer[0] == sys.argv[1] else known(peer, own)
metrics = Metrics()
metrics.declare("mt_step", "gauge", "Step")
metrics.set("mt_step", 7.0)
print(Endpoint(metrics, 0).port, flush=True)
time.sleep(600)
"""
"""As in a run: in a process beside the one that serves the page."""


def scraped(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.status if b"mt_step 7.0" in answer.read() else 0
    finally:
        connection.close()


@pytest.mark.parametrize(
    "uid,source",
    [
        pytest.param(-1, "127.0.0.2", id="faked peers"),
        pytest.param(
            OTHER,
            "127.0.0.1",
            id="another user",
            marks=pytest.mark.skipif(
                os.geteuid() != 0, reason="expected root, which may become another user"
            ),
        ),
    ],
)
def test_owner_is_answered_throughout_an_attack(
    page: Served,
    uid: int,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    if uid < 0:
        known = peers.uid_of_peer
        monkeypatch.setattr(
            peers, "uid_of_peer", lambda peer, own: OTHER if peer[0] == source else known(peer, own)
        )
    watcher = subprocess.Popen(
        [sys.executable, "-c", WATCHER, source if uid < 0 else ""],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout is not None
    port = int(watcher.stdout.readline())
    words = [
        sys.executable,
        "-I",
        str(ATTACK),
        str(uid),
        source,
        str(SECONDS),
        str(page.port),
        str(port),
    ]
    found: Counter[tuple[str, int]] = Counter()
    slowest = 0.0
    session = page.enter()
    attackers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for one in attackers:
            assert one.stdout is not None and one.stdout.readline() == "begun\n"
        begun = time.monotonic()
        with page.connect(session) as live:
            for number in range(ASKED):
                time.sleep(max(0.0, begun + number * SECONDS / ASKED - time.monotonic()))
                at = time.monotonic()
                found["page", page.ask("/api/run", session=session).status] += 1
                found["metrics", scraped(port)] += 1
                if number % 10 == 0:
                    found["link", page.ask("/api/run", session=page.enter()).status] += 1
                page.publish({"k": "step", "step": number})
                assert json.loads(live.recv(timeout=10))["step"] == number
                slowest = max(slowest, time.monotonic() - at)
                links = psutil.Process().net_connections(kind="inet")
                held = sum(bool(each.raddr) and each.laddr.port == page.port for each in links)
                # Those of this test as well, which this process counts once as the server's.
                assert held <= peers.MOST_OF_OTHERS + 8, held
        did = [json.loads(one.communicate(timeout=SECONDS + 30)[0]) for one in attackers]
    finally:
        for one in (*attackers, watcher):
            one.kill()
            one.wait()
    record_property("slowest seconds", round(slowest, 2))
    record_property("attack", did)
    assert found == {("page", 200): ASKED, ("metrics", 200): ASKED, ("link", 200): ASKED // 10}
    # A control: it was one.
    assert sum(each["silent"] for each in did) > 140 and all(
        each["flood"] > 5 < each["half"] for each in did
    ), did
