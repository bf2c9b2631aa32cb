"""The loss of a run over its tokens as an SVG, from the records that it wrote; needs nothing but Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_megatron.training.metrics import read_records

_WIDTH, _HEIGHT = 760, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 16, 44
_TRAIN, _VALID, _LINE, _GRID, _TEXT = "#2f6fde", "#d9480f", "#868e96", "#e9ecef", "#343a40"
_MOST_POINTS = 500
_LABEL_HEIGHT = 15


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What the picture shows; points are (tokens, nats per token)."""

    train: list[tuple[float, float]]
    valid: list[tuple[float, float]]
    unigram: float | None
    bigram: float | None


def write_picture(metrics: Path, picture: Path) -> None:
    """Draw the records of ``metrics`` into ``picture``.

    Raises ``ValueError`` when there is nothing to draw and ``OSError`` when a file cannot be used.
    """
    if not metrics.is_file():
        # A device or a pipe has no past to read, and may have no end either.
        raise ValueError(f"{metrics} is no file")
    svg = draw(read_curve(metrics))
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(svg, encoding="utf-8")


def read_curve(path: Path) -> Curve:
    """The curve of the last uninterrupted history in ``path``: a step that was made again after a
    resume counts once, as it went the last time. Raises ``ValueError`` without training records."""
    train: dict[int, dict[str, Any]] = {}
    valid: dict[int, float] = {}
    baselines: dict[str, float | None] = {"unigram": None, "bigram": None}
    for record in read_records(path):
        step = record["iteration"]
        if record["event"] == "start":
            train = {at: value for at, value in train.items() if at <= step}
            valid = {at: value for at, value in valid.items() if at <= step}
        elif record["event"] == "train" and record.get("loss") is not None:
            train[step] = record
        elif record["event"] == "valid" and record.get("loss") is not None:
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
    """The SVG text. It has a background of its own, so that it reads on a dark page too.

    Training loss is a line (of many records: means, within a band from lowest to highest), validation
    a dot each, unigrams and bigrams of the training data dashed.
    """
    return _Drawing(curve).text()


@dataclass(frozen=True, kw_only=True)
class _Bin:
    tokens: float
    mean: float
    low: float
    high: float


class _Drawing:
    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self.bins = _binned(curve.train)
        self.lines = [
            (name, value)
            for name, value in (("unigrams", curve.unigram), ("bigrams", curve.bigram))
            if value is not None
        ]
        losses = [loss for _, loss in curve.valid] + [value for _, value in self.lines]
        losses += [each.low for each in self.bins] + [each.high for each in self.bins]
        # A round step of about six lines; the loss of a long run can differ in the second decimal only.
        self.step = round_step(max(max(losses) - min(losses), 1e-3) / 6)
        self.low = math.floor(min(losses) / self.step) * self.step
        self.high = max(math.ceil(max(losses) / self.step) * self.step, self.low + self.step)
        self.most = max(1.0, *(tokens for tokens, _ in [*curve.train, *curve.valid]))

    def text(self) -> str:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="system-ui, sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#ffffff"/>',
            *self._axes(),
            *self._baselines(),
            *self._training(),
            *self._validation(),
            *self._labels(),
        ]
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _x(self, tokens: float) -> float:
        return _LEFT + tokens / self.most * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, loss: float) -> float:
        return _TOP + (self.high - loss) / (self.high - self.low) * (_HEIGHT - _TOP - _BOTTOM)

    def _axes(self) -> list[str]:
        right, parts = _WIDTH - _RIGHT, []
        for i in range(round((self.high - self.low) / self.step) + 1):
            loss = self.low + i * self.step
            parts.append(f'<path d="M{_LEFT} {self._y(loss):.1f}H{right}" stroke="{_GRID}"/>')
            parts.append(_words(_LEFT - 8, self._y(loss) + 4, f"{loss:.6g}", anchor="end"))
        size, unit = token_unit(self.most)
        tick = round_step(self.most / 5)
        for i in range(int(self.most / tick + 1e-6) + 1):
            at = self._x(i * tick)
            parts.append(_words(at, _HEIGHT - _BOTTOM + 18, f"{i * tick / size:g}", anchor="middle"))
        middle = (_LEFT + right) / 2
        parts.append(_words(middle, _HEIGHT - 8, f"{unit}tokens of training", anchor="middle"))
        parts.append(_words(right - 8, _TOP + 14, "training loss, nats per token", anchor="end", fill=_TRAIN))
        return parts

    def _baselines(self) -> list[str]:
        right = _WIDTH - _RIGHT
        return [
            f'<path d="M{_LEFT} {self._y(value):.1f}H{right}" stroke="{_LINE}" stroke-dasharray="5 4"/>'
            for _, value in self.lines
        ]

    def _training(self) -> list[str]:
        parts = []
        if len(self.bins) < len(self.curve.train):
            upper = [f"{self._x(each.tokens):.1f} {self._y(each.high):.1f}" for each in self.bins]
            lower = [f"{self._x(each.tokens):.1f} {self._y(each.low):.1f}" for each in self.bins]
            band = "L".join([*upper, *reversed(lower)])
            parts.append(f'<path d="M{band}Z" fill="{_TRAIN}" fill-opacity="0.18"/>')
        path = "L".join(f"{self._x(each.tokens):.1f} {self._y(each.mean):.1f}" for each in self.bins)
        parts.append(f'<path d="M{path}" fill="none" stroke="{_TRAIN}" stroke-width="1.6"/>')
        return parts

    def _validation(self) -> list[str]:
        return [
            f'<circle cx="{self._x(tokens):.1f}" cy="{self._y(loss):.1f}" r="3.5" fill="{_VALID}"/>'
            for tokens, loss in self.curve.valid
        ]

    def _labels(self) -> list[str]:
        """Names at the right of where lines end, moved apart where they would lie on each other."""
        labels = [(self._y(value), f"{name} {value:.3f}", _LINE) for name, value in self.lines]
        if self.curve.valid:
            last = self.curve.valid[-1][1]
            labels.append((self._y(last), f"validation {last:.3f}", _VALID))
        last = self.bins[-1].mean
        labels.append((self._y(last), f"training {last:.3f}", _TRAIN))
        labels.sort()
        parts, free = [], -math.inf
        # From the bottom up they would leave the picture: the lowest decides how far all may go down.
        lowest = _HEIGHT - _BOTTOM - (len(labels) - 1) * _LABEL_HEIGHT
        for index, (y, words, colour) in enumerate(labels):
            at = max(min(y, lowest + index * _LABEL_HEIGHT), free)
            free = at + _LABEL_HEIGHT
            parts.append(_words(_WIDTH - _RIGHT + 8, at + 4, words, fill=colour))
        return parts


def _binned(points: list[tuple[float, float]]) -> list[_Bin]:
    count = min(len(points), _MOST_POINTS)
    bins = []
    for i in range(count):
        part = points[i * len(points) // count : (i + 1) * len(points) // count]
        losses = [loss for _, loss in part]
        middle = sum(tokens for tokens, _ in part) / len(part)
        bins.append(_Bin(tokens=middle, mean=sum(losses) / len(part), low=min(losses), high=max(losses)))
    return bins


def _words(x: float, y: float, words: str, *, anchor: str = "start", fill: str = _TEXT) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


def token_unit(most: float) -> tuple[float, str]:
    """What the axis counts in, and its name, for a run of ``most`` tokens."""
    for size, name in ((1e12, "trillion "), (1e9, "billion "), (1e6, "million "), (1e3, "thousand ")):
        if most >= size:
            return size, name
    return 1.0, ""


def round_step(size: float) -> float:
    """1, 2 or 5 times a power of ten, not below ``size``."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= size * 0.999)
