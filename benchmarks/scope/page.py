"""How fast the page is in a browser, on recordings: ``python benchmarks/scope/page.py --node FOLDER``.

FOLDER has ``node_modules/playwright-core``. Writes ``results/scope-page-DATE``: an attention map of 8,192
tokens until its first paint (from choosing the view on a loaded page), another head until it is painted,
replay to any of 1,000 steps, frames of a pan over 200,000 slices, the server's start, the build's size.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from mt_megatron.errors import ConfigError
from mt_megatron.scope.web.access import link_to, read_token_file
from mt_megatron.scope.web.assets import PAGE
from tests.scope.synthetic import RunShape, write_run
from tools.scan_simulator import Job, parse_layout, simulate
from tools.scope_page.build import compressed_bytes

ROOT = Path(__file__).resolve().parent.parent.parent


DRIVER = ROOT / "tests" / "scope" / "web" / "browser.mjs"

LIMITS = {
    "first_paint_ms": 1000,
    "head_switch_ms": 200,
    "seek_ms": 200,
    "pan_frame_ms": 100,
    "server_ms": 2000,
}

PAINT = """async (hash) => {
  const begun = performance.now();
  const painted = new Promise((done) => addEventListener('scope-painted', done, { once: true }));
  location.hash = hash;
  await painted;
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - begun;
}"""
"""From an address until the attention map has painted something of it, in ms."""

SEEK = """async (step) => {
  const begun = performance.now();
  location.hash = `#/replay?step=${step}`;
  const shown = () => document.querySelector('.replay .figures b')?.innerText === String(step);
  while (!shown()) {
    if (performance.now() - begun > 20000) throw new Error(`${step} is not shown`);
    await new Promise((done) => setTimeout(done, 1));
  }
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - begun;
}"""
"""From an address until the replay shows the step's numbers, in ms."""

PAN = """async (zoom) => {
  const tool = window.scopeTimeline, [from, to] = tool.span(), wide = (to - from) / zoom, gaps = [];
  tool.frames.length = 0;
  let last = null;
  for (let i = 0; i < 60; i++) {
    const start = from + ((to - from - wide) * i) / 59;
    tool.look(start, start + wide * (1 - 1e-6 * i));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    const now = performance.now();
    if (last !== null) gaps.push(now - last);
    last = now;
  }
  const middle = (list) => [...list].sort((a, b) => a - b)[list.length >> 1];
  const found = { frame: middle(gaps), worst: Math.max(...gaps), drawing: middle(tool.frames) };
  return { slices: tool.slices(), drawn: tool.frames.length, ...found };
}"""
"""Frame by frame over the whole trace: ms from one drawn frame to the next, and of drawing alone."""


def served(run: Path) -> tuple[subprocess.Popen[bytes], float]:
    """``scope open RUN`` and the milliseconds until it answered."""
    begin = time.monotonic()
    code = "import sys; from mt_megatron.cli.main import main; sys.exit(main())"
    words = [sys.executable, "-c", code, "scope", "open", str(run)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    while True:
        try:
            port = read_token_file(run / "scope" / "page.json").port
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/")
            connection.getresponse().read()
            return process, 1e3 * (time.monotonic() - begin)
        except (ConfigError, OSError):
            if process.poll() is not None or time.monotonic() - begin > 60:
                raise
            time.sleep(0.01)


def drive(node: Path, run: Path, actions: list[list[Any]]) -> list[Any]:
    """Results of ``actions`` in a new browser of 1280 x 800."""
    request = {
        "modules": str(node.resolve()),
        "chromium": shutil.which("chromium") or shutil.which("google-chrome"),
        "url": link_to(read_token_file(run / "scope" / "page.json")),
        "width": 1280,
        "height": 800,
        "actions": actions,
    }
    path = run / "request.json"
    path.write_text(json.dumps(request))
    done = subprocess.run(["node", str(DRIVER), str(path)], capture_output=True, text=True)
    found = json.loads(done.stdout or "{}")
    if done.returncode or found["failure"] or found["errors"]:
        raise SystemExit(done.stderr + json.dumps(found, indent=1))
    results: list[Any] = found["results"]
    return results


def ended(process: subprocess.Popen[bytes]) -> None:
    """End the server."""
    process.terminate()
    process.wait(20)


def attention(node: Path, run: Path) -> dict[str, Any]:
    """Maps of 8,192 x 8,192, 8 bit, in three servers and browsers."""
    shape = RunShape(
        steps=2,
        layers=2,
        interval=2,
        tensor_every=2,
        token_every=0,
        attention_tokens=8192,
        attention_heads=4,
    )
    write_run(run, shape, retain_mib=4096)
    firsts: list[float] = []
    switches: list[float] = []
    starts: list[float] = []
    for _ in range(3):
        process, milliseconds = served(run)
        starts.append(milliseconds)
        try:
            listed = drive(node, run, [["evaluate", "fetch('/api/tensors').then((r) => r.json())"]])[0]
            names = [row["id"] for row in listed["tensors"] if row["what"] == "attention"]
            actions: list[list[Any]] = [["evaluate", f"({PAINT})('#/attention')"]]
            for name in names[1:]:
                address = f"'#/attention?tensor=' + encodeURIComponent({json.dumps(name)})"
                actions += [["wait", 1500], ["evaluate", f"({PAINT})({address})"]]
            results = drive(node, run, actions)
        finally:
            ended(process)
        firsts.append(results[0])
        switches += results[2::2]
    return {
        "first_paint_ms": statistics.median(firsts),
        "first_paints_ms": firsts,
        "head_switch_ms": statistics.median(switches),
        "head_switches_ms": switches,
        "server_ms": statistics.median(starts),
        "servers_ms": starts,
    }


def replay(node: Path, run: Path) -> dict[str, Any]:
    """Seeks over 1,000 steps, of which each tenth has statistics."""
    write_run(run, RunShape(steps=1000, interval=10, tensor_every=100, token_every=0))
    process, _ = served(run)
    try:
        steps = (1, 990, 13, 500, 777, 250, 999, 42, 640, 333, 871, 5)
        actions = [["view", "#/replay?step=100", 800], *(["evaluate", f"({SEEK})({s})"] for s in steps)]
        found = drive(node, run, actions)[1:]
    finally:
        ended(process)
    return {"seek_ms": statistics.median(found), "seeks_ms": found}


def timeline(node: Path, run: Path) -> dict[str, Any]:
    """A pan at four zooms over 200,000 slices of 128 ranks."""
    write_run(run, RunShape(steps=3, tensor_every=0, token_every=0))
    simulate(run, Job(layout=parse_layout("dp=8,tp=4,pp=4"), steps=12, microbatches=16), [], seed=1)
    process, _ = served(run)
    try:
        actions: list[list[Any]] = [["view", "#/timeline?count=10", 500, True]]
        actions += [["evaluate", f"({PAN})({zoom})"] for zoom in (1, 4, 20, 200)]
        found = drive(node, run, actions)[1:]
    finally:
        ended(process)
    return {
        "slices": found[0]["slices"],
        "pan_frame_ms": max(each["frame"] for each in found),
        "pan_worst_frame_ms": max(each["worst"] for each in found),
        "pan_by_zoom": dict(zip(("1", "4", "20", "200"), found, strict=True)),
    }


def main() -> int:
    """Measure, write, and return 1 where a figure is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", type=Path, default=ROOT / "tools" / "scope_page" / "source")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the result")
    chosen = parser.parse_args()
    figures: dict[str, Any] = {"build_compressed_bytes": compressed_bytes(PAGE)}
    with tempfile.TemporaryDirectory(prefix="scope-page-") as name:
        for measure in (attention, replay, timeline):
            figures.update(measure(chosen.node, Path(name) / measure.__name__))
            print(measure.__name__, json.dumps(figures), flush=True)
    date = time.strftime("%Y-%m-%d")
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    over = {key: figures[key] for key, most in LIMITS.items() if figures[key] > most}
    facts = {"date": date, "commit": head.stdout.strip(), "limits": LIMITS, "over": over, **figures}
    (chosen.out / f"scope-page-{date}.json").write_text(json.dumps(facts, indent=1) + "\n")
    rows = "\n".join(f"| {key} | {figures[key]:.1f} | {most} |" for key, most in LIMITS.items())
    text = (
        f"# Page of MegaScope in Chromium, {date}\n\nCommit {facts['commit']}; recordings, 1280 x 800, "
        "software rendering, two cores that other processes used too. Medians; single values are in the "
        f"JSON.\n\n| figure | found | at most |\n|---|---|---|\n{rows}\n\n"
        f"Worst: head switch {max(figures['head_switches_ms']):.0f} ms, seek "
        f"{max(figures['seeks_ms']):.0f} ms, frame {figures['pan_worst_frame_ms']:.0f} ms of "
        f"{figures['slices']:,} slices. Build: {figures['build_compressed_bytes']:,} bytes compressed.\n"
    )
    (chosen.out / f"scope-page-{date}.md").write_text(text)
    print(text)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
