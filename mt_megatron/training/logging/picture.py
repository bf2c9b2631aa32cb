"""A run over its tokens as an SVG: loss, learning rate and throughput, from the records that it wrote."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from mt_megatron.training.logging.metrics import read_records

GRID, TEXT = "#e9ecef", "#343a40"
_LABELS = 56
_HEADING = 22
_FOOT = 22
_MOST_DRAWN = 400


@dataclass(frozen=True, kw_only=True)
class Box:
    """Where a panel lies, its labels included."""

    left: float
    top: float
    width: float
    height: float


def panel(
    points: Sequence[tuple[float, float]], box: Box, *, name: str, most: float, colour: str
) -> list[str]:
    """SVG elements: ``points`` are (tokens, value), the axis reaches ``most`` tokens."""
    ceiling = max((value for _, value in points), default=0.0) or 1.0
    step = round_step(ceiling / 3)
    high = math.ceil(ceiling / step - 1e-9) * step
    left, right = box.left + _LABELS, box.left + box.width
    top, bottom = box.top + _HEADING, box.top + box.height - _FOOT

    def x(tokens: float) -> float:
        return left + tokens / most * (right - left)

    def y(value: float) -> float:
        return bottom - value / high * (bottom - top)

    parts = [words(left, box.top + 10, name, fill=colour)]
    for index in range(round(high / step) + 1):
        value = index * step
        parts.append(f'<path d="M{left:.1f} {y(value):.1f}H{right:.1f}" stroke="{GRID}"/>')
        parts.append(words(left - 8, y(value) + 4, short(value), anchor="end"))
    parts += token_ticks(x, bottom + 16, most, count=3)
    # Every so many-th of many: a line of this width shows no more.
    shown = points[:: math.ceil(len(points) / _MOST_DRAWN) or 1]
    return parts + line([(x(tokens), y(value)) for tokens, value in shown], colour)


def line(points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    """A line through places; where there are few, each is marked, so that nobody takes it for more."""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    parts = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>']
    if len(points) <= 12:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]
    return parts


def token_ticks(x: Callable[[float], float], y: float, most: float, *, count: int) -> list[str]:
    """Numbers below an axis of tokens."""
    size, _ = token_unit(most)
    tick = round_step(most / count)
    return [
        words(x(index * tick), y, f"{index * tick / size:g}", anchor="middle")
        for index in range(int(most / tick + 1e-6) + 1)
    ]


def words(x: float, y: float, text: str, *, anchor: str = "start", fill: str = TEXT) -> str:
    """One line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'


def short(value: float) -> str:
    """A number for an axis: 12k instead of 12000, 0.00002 as 2e-5."""
    if value >= 1e3:
        for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= size:
                return f"{value / size:g}{sign}"
    if 0.0 < value < 1e-4:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


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


_WIDTH, _HEIGHT = 760, 384
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 138, 44, 44
_BELOW = 150
"""Height of the panels under the loss."""

_TRAIN, _VALID, _LINE, _RATE, _SPEED = "#2f6fde", "#d9480f", "#868e96", "#7048e8", "#2b8a3e"
_MOST_POINTS = 500
_LABEL_HEIGHT = 15


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What the picture shows; points are (tokens, nats per token)."""

    train: list[tuple[float, float]]
    valid: list[tuple[float, float]]
    unigram: float | None
    bigram: float | None
    lr: list[tuple[float, float]] = field(default_factory=list)
    speed: list[tuple[float, float]] = field(default_factory=list)
    """Tokens per second."""


def write_picture(metrics: Path, picture: Path, title: str | None = None) -> None:
    """Draw the records of ``metrics`` into ``picture``; without a ``title`` their folder's name is it.

    Raises ``ValueError`` when there is nothing to draw and ``OSError`` when a file cannot be used.
    """
    if not metrics.is_file():
        # A device or a pipe has no past to read, and may have no end either.
        raise ValueError(f"{metrics} is no file")
    svg = draw(read_curve(metrics), metrics.absolute().parent.name if title is None else title)
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
    steps = sorted(train)
    # Batches may grow: a step has its tokens from the records around it, beyond them as the nearest has.
    tokens = [float(train[step]["consumed_tokens"]) for step in steps]
    return Curve(
        train=[(record["consumed_tokens"], record["loss"]) for _, record in sorted(train.items())],
        valid=[(_tokens_at(step, steps, tokens), loss) for step, loss in sorted(valid.items())],
        unigram=baselines["unigram"],
        bigram=baselines["bigram"],
        lr=_over_tokens(train, "lr"),
        speed=_over_tokens(train, "tokens_per_second"),
    )


def _tokens_at(step: int, steps: list[int], tokens: list[float]) -> float:
    if step < steps[0]:
        return step * tokens[0] / steps[0]
    if step > steps[-1]:
        return step * tokens[-1] / steps[-1]
    at = bisect_left(steps, step)
    if steps[at] == step:
        return tokens[at]
    share = (step - steps[at - 1]) / (steps[at] - steps[at - 1])
    return tokens[at - 1] + share * (tokens[at] - tokens[at - 1])


def _over_tokens(train: dict[int, dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        (record["consumed_tokens"], record[name])
        for _, record in sorted(train.items())
        if record.get(name) is not None
    ]


def draw(curve: Curve, title: str = "") -> str:
    """The SVG text. It has a background of its own, so that it reads on a dark page too.

    Training loss is a line (of many records: means, within a band from lowest to highest), validation
    a dot each, unigrams and bigrams of the training data dashed. Below are the learning rate and the
    throughput, where they are known.
    """
    return _Drawing(curve, title).text()


@dataclass(frozen=True, kw_only=True)
class _Bin:
    tokens: float
    mean: float
    low: float
    high: float


class _Drawing:
    def __init__(self, curve: Curve, title: str) -> None:
        self.curve = curve
        self.title = title
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
        below = self._below()
        height = _HEIGHT + _BELOW * bool(below)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            'font-family="system-ui, sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
            f'<g font-size="14" font-weight="600">{words(_LEFT, 24, self.title)}</g>',
            *self._axes(),
            *self._baselines(),
            *self._training(),
            *self._validation(),
            *self._labels(),
            *below,
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
            parts.append(f'<path d="M{_LEFT} {self._y(loss):.1f}H{right}" stroke="{GRID}"/>')
            parts.append(words(_LEFT - 8, self._y(loss) + 4, f"{loss:.6g}", anchor="end"))
        parts += token_ticks(self._x, _HEIGHT - _BOTTOM + 18, self.most, count=5)
        _, unit = token_unit(self.most)
        parts.append(words((_LEFT + right) / 2, _HEIGHT - 8, f"{unit}tokens of training", anchor="middle"))
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        upright = words(0, 0, "loss, nats per token", anchor="middle")
        parts.append(f'<g transform="translate(18 {middle:.1f}) rotate(-90)">{upright}</g>')
        return parts

    def _below(self) -> list[str]:
        parts: list[str] = []
        panels = (("learning rate", self.curve.lr, _RATE), ("tokens per second", self.curve.speed, _SPEED))
        width = (_WIDTH - 40) / 2
        for index, (name, points, colour) in enumerate(panels):
            finite = [(tokens, value) for tokens, value in points if math.isfinite(value) and value >= 0]
            if finite:
                box = Box(left=12 + index * (width + 8), top=_HEIGHT + 4, width=width, height=_BELOW - 12)
                parts += panel(finite, box, name=name, most=self.most, colour=colour)
        return parts

    def _baselines(self) -> list[str]:
        right = _WIDTH - _RIGHT
        return [
            f'<path d="M{_LEFT} {self._y(value):.1f}H{right}" stroke="{_LINE}" stroke-dasharray="5 4"/>'
            for _, value in self.lines
        ]

    def _training(self) -> list[str]:
        parts: list[str] = []
        if len(self.bins) < len(self.curve.train):
            upper = [f"{self._x(each.tokens):.1f} {self._y(each.high):.1f}" for each in self.bins]
            lower = [f"{self._x(each.tokens):.1f} {self._y(each.low):.1f}" for each in self.bins]
            band = "L".join([*upper, *reversed(lower)])
            parts.append(f'<path d="M{band}Z" fill="{_TRAIN}" fill-opacity="0.18"/>')
        places = [(self._x(each.tokens), self._y(each.mean)) for each in self.bins]
        return parts + line(places, _TRAIN)

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
        for index, (y, text, colour) in enumerate(labels):
            at = max(min(y, lowest + index * _LABEL_HEIGHT), free)
            free = at + _LABEL_HEIGHT
            parts.append(words(_WIDTH - _RIGHT + 8, at + 4, text, fill=colour))
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
