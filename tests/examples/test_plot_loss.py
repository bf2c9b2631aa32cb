"""The picture of a run: what it reads out of the metrics, and that it is a well-formed SVG."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "plot_loss.py"


def _record(event: str, iteration: int, **values: float | None) -> str:
    return json.dumps({"event": event, "time": 0.0, "iteration": iteration, **values})


def _draw(tmp_path: Path, lines: list[str]) -> subprocess.CompletedProcess[str]:
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "metrics.jsonl"), str(tmp_path / "new" / "a.svg")]
    return subprocess.run(command, capture_output=True, text=True)


def test_draws_training_validation_and_both_baselines(tmp_path: Path) -> None:
    history = [
        _record("start", 0),
        *(_record("train", i, loss=8 - i / 10, consumed_tokens=i * 2048) for i in range(10, 40, 10)),
        # A step that was lost in a crash and made again after the resume: the later one counts.
        _record("start", 20),
        _record("train", 30, loss=4.9, consumed_tokens=30 * 2048),
        _record("valid", 30, loss=4.5),
        _record("end", 30, unigram=6.5, bigram=4.2),
    ]
    drawn = _draw(tmp_path, history)
    assert drawn.returncode == 0, drawn.stderr
    root = ElementTree.parse(tmp_path / "new" / "a.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{name}text")]
    assert {"unigrams 6.500", "bigrams 4.200", "validation 4.500"} <= set(texts)
    circles = [circle.get("r") for circle in root.iter(f"{name}circle")]
    assert sorted(circles) == ["2.5", "2.5", "2.5", "3.5"], "few points are marked, validation is larger"
    (curve,) = [p.get("d") for p in root.iter(f"{name}path") if p.get("fill") == "none"]
    points = [tuple(map(float, point.split())) for point in curve[1:].split("L")]
    assert len(points) == 3
    assert points == sorted(points), "to the right, and down"


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    drawn = _draw(tmp_path, [_record("start", 0)])
    assert drawn.returncode == 1
    assert "no training records" in drawn.stderr
    assert not (tmp_path / "new").exists()
