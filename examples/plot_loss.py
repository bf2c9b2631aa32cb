"""Draw a run's loss over its tokens as an SVG, from the metrics.jsonl that training wrote.

    python examples/plot_loss.py runs/llama3_tiny/metrics.jsonl docs/images/llama3_tiny.svg

Needs nothing but Python. Training loss is a line, validation a dot, unigrams and bigrams of the
training data (on the very validation tokens of the last evaluation) are dashed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT = 760, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 16, 44
_TRAIN, _VALID, _LINE = "#2f6fde", "#d9480f", "#868e96"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What the picture shows; points are (tokens, nats per token)."""

    train: list[tuple[float, float]]
    valid: list[tuple[float, float]]
    unigram: float | None
    bigram: float | None


def read_curve(path: Path) -> Curve:
    """The curve of the last uninterrupted history in ``path``: a step that was made again after a
    resume counts once, as it went the last time. Raises ``ValueError`` without training records."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    train: dict[int, dict[str, Any]] = {}
    valid: dict[int, float] = {}
    baselines: dict[str, float | None] = {"unigram": None, "bigram": None}
    for record in records:
        step = record["iteration"]
        if record["event"] == "start":
            train = {at: value for at, value in train.items() if at <= step}
            valid = {at: value for at, value in valid.items() if at <= step}
        elif record["event"] == "train" and record["loss"] is not None:
            train[step] = record
        elif record["event"] == "valid":
            valid[step] = record["loss"]
        elif record["event"] == "end":
            baselines = {name: record.get(name) for name in baselines}
    if not train:
        raise ValueError(f"{path} holds no training records")
    last = max(train)
    per_step = train[last]["consumed_tokens"] / last
    return Curve(
        train=[(record["consumed_tokens"], record["loss"]) for _, record in sorted(train.items())],
        valid=[(step * per_step, loss) for step, loss in sorted(valid.items())],
        unigram=baselines["unigram"],
        bigram=baselines["bigram"],
    )


def draw(curve: Curve) -> str:
    """The SVG text. It has a background of its own, so that it reads on a dark page too."""
    lines = [
        (name, value) for name, value in (("unigrams", curve.unigram), ("bigrams", curve.bigram)) if value
    ]
    losses = [loss for _, loss in curve.train + curve.valid] + [value for _, value in lines]
    low, high = math.floor(min(losses) * 2) / 2, math.ceil(max(losses) * 2) / 2
    most = max(tokens for tokens, _ in curve.train)

    def x(tokens: float) -> float:
        return _LEFT + tokens / most * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _TOP + (high - loss) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def text(at_x: float, at_y: float, words: str, *, anchor: str = "start", fill: str = "#343a40") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" fill="{fill}">{words}</text>'

    right = _WIDTH - _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#ffffff"/>',
    ]
    step = 1.0 if high - low > 3 else 0.5
    for i in range(int((high - low) / step) + 1):
        loss = low + i * step
        parts.append(f'<path d="M{_LEFT} {y(loss):.1f}H{right}" stroke="#e9ecef"/>')
        parts.append(text(_LEFT - 8, y(loss) + 4, f"{loss:g}", anchor="end"))
    tick = _round_step(most / 5)
    for i in range(int(most / tick + 1e-6) + 1):
        words = f"{i * tick / 1e6:g}"
        parts.append(text(x(i * tick), _HEIGHT - _BOTTOM + 18, words, anchor="middle"))
    parts.append(text((_LEFT + right) / 2, _HEIGHT - 8, "million tokens of training", anchor="middle"))
    for name, value in lines:
        parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{right}" stroke="{_LINE}" stroke-dasharray="5 4"/>')
        parts.append(text(right + 8, y(value) + 4, f"{name} {value:.3f}", fill=_LINE))
    path = "L".join(f"{x(tokens):.1f} {y(loss):.1f}" for tokens, loss in curve.train)
    parts.append(f'<path d="M{path}" fill="none" stroke="{_TRAIN}" stroke-width="1.6"/>')
    parts.append(text(right - 8, _TOP + 14, "training loss, nats per token", anchor="end", fill=_TRAIN))
    for tokens, loss in curve.valid:
        parts.append(f'<circle cx="{x(tokens):.1f}" cy="{y(loss):.1f}" r="3.5" fill="{_VALID}"/>')
    if curve.valid:
        parts.append(
            text(right + 8, y(curve.valid[-1][1]) + 4, f"validation {curve.valid[-1][1]:.3f}", fill=_VALID)
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _round_step(size: float) -> float:
    """1, 2 or 5 times a power of ten, not below ``size``."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= size * 0.999)


def main() -> int:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics", type=Path)
    parser.add_argument("svg", type=Path)
    args = parser.parse_args()
    try:
        picture = draw(read_curve(args.metrics))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    args.svg.parent.mkdir(parents=True, exist_ok=True)
    args.svg.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
