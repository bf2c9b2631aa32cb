"""Requests for tensors and further statistics, as text: ``KIND@PATTERN[:heads=0,2][:tokens=0-255] ...``.

Options: ``heads=0,2-3`` (default all), ``tokens=0-255`` (one stretch of the sequence; default: the kind's
own sample of the whole sequence), ``samples=0,5`` (sequences of the step's global batch, in the order of the
data; default 0), ``every=10`` (steps; default the run's interval). In a pattern ``*`` stands for any text
within one part of a module path and ``**`` for any text: ``decoder.layers.*.self_attention``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mt_megatron.errors import ConfigError
from mt_megatron.near_names import near
from mt_megatron.scope.recording.files import LONGEST_REQUEST, MOST_REQUESTS

KINDS: Mapping[str, str] = {
    "activation": "a module's output",
    "gradient": "gradient of the global batch's loss by a module's output, without the loss scale",
    "qkv": "queries, keys and values as core attention gets them",
    "attention": "probabilities of attention, before dropout",
    "context": "output of core attention",
    "mlp": "output of an MLP and input of its second linear",
    "router": "logits, probabilities and choices of an expert router",
    "residual": "a layer's output: the residual stream",
    "logits": "loss, entropy and the likeliest words of each token; of a layer: the logit lens",
    "moments": "statistic: elements, sums of powers, smallest and largest of a module's output",
    "histogram": "statistic: elements of a module's output by power of two",
}
"""What can be asked for, and what it means."""

EARLY_STEPS = (1, 2, 5, 10)
"""Steps that are sampled whatever the interval, so that a run can be looked at from its first minute on."""

_LARGEST = 2**31 - 1
_MOST_NUMBERS = 4096
_OPTIONS = ("heads", "tokens", "samples", "every")
_PATTERN = re.compile(r"[A-Za-z0-9_.*]+")
_STRETCH = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One parsed request."""

    text: str
    """As it was written."""

    kind: str
    pattern: str

    heads: tuple[int, ...] | None = None
    """Numbers of heads in the whole layer; None: all."""

    tokens: tuple[int, int] | None = None
    """First and last position, both included; None: a sample of all."""

    samples: tuple[int, ...] = (0,)
    """Numbers of sequences within the step's global batch."""

    every: int | None = None
    """Steps from one to the next; None: the run's interval."""

    @cached_property
    def _pieces(self) -> list[str]:
        return [piece for piece in re.split(r"(\*\*|\*)", self.pattern) if piece]

    def matches(self, path: str) -> bool:
        """Whether the whole model's ``path`` is asked for. Time grows with the product of both lengths at
        most: a regular expression would try every way to share ``path`` out among many ``**``."""
        ends = {0}
        """Where what is left of ``path`` may begin."""

        for piece in self._pieces:
            if piece == "**":
                ends = set(range(min(ends), len(path) + 1))
            elif piece == "*":
                ends = {end for start in ends for end in range(start, _part_end(path, start) + 1)}
            else:
                ends = {start + len(piece) for start in ends if path.startswith(piece, start)}
            if not ends:
                return False
        return len(path) in ends

    def due(self, iteration: int, interval: int) -> bool:
        """Whether step ``iteration`` is one of those asked for."""
        return is_sampled(iteration, interval) if self.every is None else iteration % self.every == 0


def is_sampled(iteration: int, interval: int) -> bool:
    """True for the steps that a run with ``interval`` samples: its multiples and ``EARLY_STEPS``."""
    return iteration % interval == 0 or iteration in EARLY_STEPS


def _part_end(path: str, start: int) -> int:
    """Where the part of ``path`` ends in which ``start`` lies."""
    end = path.find(".", start)
    return len(path) if end < 0 else end


def parse(text: str) -> Request:
    """The request that ``text`` writes. Raises ``ConfigError``: what was found, what is expected."""
    if len(text) > LONGEST_REQUEST:
        raise ConfigError(f"found a request of {len(text)} characters; expected at most {LONGEST_REQUEST}")
    head, *options = text.split(":")
    kind, at, pattern = head.partition("@")
    if not at or kind not in KINDS:
        raise ConfigError(f"found the request {text!r}; expected KIND@MODULE with KIND of {', '.join(KINDS)}")
    if not _PATTERN.fullmatch(pattern):
        raise ConfigError(
            f"found the module pattern {pattern!r} in {text!r}; expected letters, digits, '_', '.', and * or "
            "** for what varies, such as decoder.layers.*.mlp"
        )
    given: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or name not in _OPTIONS or name in given:
            raise ConfigError(
                f"found the option {option!r} in {text!r}; expected each once of heads=0,2 tokens=0-255 "
                "samples=0 every=10"
            )
        given[name] = value
    heads = given.get("heads")
    return Request(
        text=text,
        kind=kind,
        pattern=pattern,
        heads=None if heads is None else _numbers(heads, "heads", text),
        tokens=_tokens(given["tokens"], text) if "tokens" in given else None,
        samples=_numbers(given.get("samples", "0"), "samples", text),
        every=_every(given["every"], text) if "every" in given else None,
    )


def parse_all(texts: Iterable[str]) -> tuple[list[Request], list[str]]:
    """The requests of ``texts``, each once, and one line for each that cannot be read or is too many."""
    found: dict[str, Request] = {}
    refused: list[str] = []
    for text in texts:
        try:
            request = parse(text)
        except ConfigError as error:
            refused.append(str(error))
            continue
        if len(found) >= MOST_REQUESTS and text not in found:
            refused.append(f"found more than {MOST_REQUESTS} requests; {text!r} is left out")
            continue
        found[text] = request
    return list(found.values()), refused


def unknown(request: Request, paths: Sequence[str]) -> str | None:
    """One line that says which of the model's ``paths`` are near, where ``request`` matches none of them."""
    if any(request.matches(path) for path in paths):
        return None
    likely = near(request.pattern.replace("*", "0"), paths) or list(dict.fromkeys(map(_general, paths)))[:8]
    return (
        f"found no module {request.pattern!r} for {request.text!r}; expected a path of this model such as "
        f"{', '.join(likely)}"
    )


def all_unknown(texts: Iterable[str], paths: Sequence[str]) -> list[str]:
    """``unknown`` of each of ``texts``; nothing while no path is known."""
    lines = [unknown(request, paths) for request in parse_all(texts)[0]] if paths else []
    return [line for line in lines if line is not None]


def _general(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _numbers(value: str, name: str, text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for piece in value.split(","):
        first, last = _stretch(piece, name, text)
        if last - first >= _MOST_NUMBERS:
            raise ConfigError(f"found {name}={value!r} in {text!r}; expected at most {_MOST_NUMBERS} numbers")
        found.update(range(first, last + 1))
    if len(found) > _MOST_NUMBERS:
        raise ConfigError(f"found {name}={value!r} in {text!r}; expected at most {_MOST_NUMBERS} numbers")
    return tuple(sorted(found))


def _tokens(value: str, text: str) -> tuple[int, int]:
    return _stretch(value, "tokens", text)


def _stretch(value: str, name: str, text: str) -> tuple[int, int]:
    match = _STRETCH.fullmatch(value)
    if match is not None:
        first = int(match.group(1))
        last = first if match.group(2) is None else int(match.group(2))
        if first <= last <= _LARGEST:
            return first, last
    raise ConfigError(f"found {name}={value!r} in {text!r}; expected numbers such as 3 or 0-255, rising")


def _every(value: str, text: str) -> int:
    if not value.isdigit() or not 1 <= int(value[:11]) <= _LARGEST:
        raise ConfigError(f"found every={value!r} in {text!r}; expected a number of steps, at least 1")
    return int(value)
