"""What a browser may say: queries, messages and commands, each with the kinds and bounds of its fields.

A field that is unknown, missing, of another kind or out of bounds refuses the whole message (``Refused``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mt_megatron.scope.recording.files import LONGEST_BOOKMARK

MOST_BYTES = 32 * 1024
"""Of one message or body."""

MOST_QUERY = 2_048
"""Characters of a query."""

MOST_GENERATED = 1_024
"""Tokens of one generation, as ``scope.control.generate`` takes them; that module needs torch."""

_DEEPEST = 6
_MOST_VALUES = 1_024


class Refused(Exception):
    """A message that is not what this server takes; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a message."""

    kind: Literal["int", "number", "text", "ints", "map"]
    least: float = -math.inf
    most: float = math.inf
    """Of a number; of a text and a list the length."""

    default: Any = None
    needed: bool = False
    among: tuple[str, ...] = ()
    """Values of a text; empty: any."""


def whole(least: int, most: int, default: int | None = None, *, needed: bool = False) -> Field:
    """An integer."""
    return Field(kind="int", least=least, most=most, default=default, needed=needed)


def number(least: float, most: float, default: float | None = None, *, needed: bool = False) -> Field:
    """A finite number."""
    return Field(kind="number", least=least, most=most, default=default, needed=needed)


def text(most: int, default: str | None = None, *, needed: bool = False, among: Sequence[str] = ()) -> Field:
    """A text without control characters but line ends and tabs."""
    return Field(kind="text", most=most, default=default, needed=needed, among=tuple(among))


_STEP = whole(0, 2**53)
_PATH = text(400)

QUERIES: Mapping[str, Mapping[str, Field]] = {
    "run": {},
    "steps": {"points": whole(16, 20_000, 4_000)},
    "series": {"path": _PATH, "statistic": text(60, needed=True), "points": whole(16, 20_000, 2_000)},
    "model": {"statistic": text(60, "activation_rms"), "points": whole(8, 400, 60)},
    "parted": {"statistic": text(60, needed=True), "other": text(200, needed=True)},
    "vectors": {
        "path": _PATH,
        "statistic": text(60, needed=True),
        "first": _STEP,
        "last": _STEP,
        "points": whole(1, 4_000, 1_000),
    },
    "tensors": {},
    "tile": {
        "tensor": text(600, needed=True),
        "step": whole(0, 2**53, needed=True),
        "level": whole(0, 24, 0),
        "row": whole(0, 2**31, 0),
        "column": whole(0, 2**31, 0),
        "by": text(4, "max", among=("max", "mean")),
    },
    "thumbs": {
        "step": whole(0, 2**53, needed=True),
        "what": text(60, "attention"),
        "side": whole(8, 128, 48),
        "path": _PATH,
    },
    "summary": {"tensor": text(600, needed=True), "step": whole(0, 2**53, needed=True)},
    "projection": {"tensor": text(600, needed=True), "step": whole(0, 2**53, needed=True)},
    "rows": {},
    "tokens": {
        "step": whole(0, 2**53, needed=True),
        "microbatch": whole(0, 2**31, 0),
        "sample": whole(0, 2**31, 0),
        "path": _PATH,
    },
    "experts": {"step": _STEP},
    "topology": {},
    "timeline": {"first": _STEP, "last": _STEP, "most": whole(1_000, 400_000, 200_000)},
    "timeline_steps": {},
    "alerts": {},
}
"""Name of a view's data -> its query. Every query also takes ``run``, the name of a neighbouring run."""

_RUN = text(200)

_PERTURBATION = Field(kind="map", most=64, needed=True)

COMMANDS: Mapping[str, Mapping[str, Field]] = {
    "pause": {},
    "resume": {},
    "step": {"n": whole(1, 100_000, 1)},
    "generate": {
        "prompt": text(20_000),
        "ids": Field(kind="ints", most=_MOST_VALUES),
        "n": whole(1, MOST_GENERATED, 32),
        "temperature": number(0.0, 100.0, 1.0),
        "top_k": whole(0, 1_000_000, 0),
        "seed": whole(0, 2**63 - 1, 0),
        "report": whole(1, 50, 10),
        "attention": Field(kind="map", most=64),
    },
    "arm": {"perturbation": _PERTURBATION},
    "preview": {"perturbation": _PERTURBATION},
    "pair": {"perturbation": _PERTURBATION},
    "status": {},
    "hold": {},
    "disarm": {"id": text(100, needed=True)},
    "undo": {"id": text(100)},
    "request": {"texts": Field(kind="map", most=64, needed=True)},
}
"""Commands to the training (scope/format/frames.py, ``command``) -> their arguments."""

BOOKMARK: Mapping[str, Field] = {
    "step": whole(0, 2**53, needed=True),
    "text": text(LONGEST_BOOKMARK, needed=True),
}

OPEN: Mapping[str, Field] = {"ticket": text(200, needed=True)}

PROOF: Mapping[str, Field] = {"challenge": text(100, needed=True)}

SOCKET: Mapping[str, Mapping[str, Field]] = {
    "session": {"token": text(100, needed=True)},
    "ping": {},
    "kinds": {"kinds": text(200, needed=True)},
}
"""Messages over the websocket: ``session``, the first one and no other; ``kinds``, a list with commas of the
events that are wanted."""


def parse_socket(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and fields of ``{"do": …, …}``. Raises ``Refused``."""
    do = value.get("do") if isinstance(value, dict) else None
    if not isinstance(do, str) or do not in SOCKET:
        raise Refused("unknown message")
    return do, checked({key: each for key, each in value.items() if key != "do"}, SOCKET[do])


def parse_query(name: str, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Fields of the query ``pairs`` of ``QUERIES[name]``. Raises ``Refused``."""
    fields = QUERIES.get(name)
    if fields is None:
        raise Refused("unknown data")
    given: dict[str, Any] = {}
    for key, value in pairs:
        if key in given:
            raise Refused(f"{_shown(key)} is given twice")
        kind = (fields[key] if key in fields else _RUN if key == "run" else _unknown(key)).kind
        given[key] = _from_text(key, value, kind)
    return checked(given, {**fields, "run": _RUN})


def parse_command(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of ``{"do": …, "arguments": {…}}``. Raises ``Refused``."""
    if not isinstance(value, dict) or not set(value) <= {"do", "arguments"}:
        raise Refused("expected a map with 'do' and 'arguments'")
    do, arguments = value.get("do"), value.get("arguments", {})
    if not isinstance(do, str) or do not in COMMANDS:
        raise Refused("unknown command")
    if do == "request":
        if not isinstance(arguments, dict) or set(arguments) != {"texts"}:
            raise Refused("expected 'texts', a list")
        return do, {"texts": _texts(arguments["texts"])}
    found = checked(arguments, COMMANDS[do])
    if do == "generate" and (found["prompt"] is None) == (found["ids"] is None):
        raise Refused("expected either 'prompt' or 'ids'")
    return do, {key: each for key, each in found.items() if each is not None}


def parse_json(body: bytes | str) -> Any:
    """JSON of at most ``MOST_BYTES``, without NaN. Raises ``Refused``."""
    if len(body) > MOST_BYTES:
        raise Refused(f"expected at most {MOST_BYTES:,} bytes")
    try:
        return json.loads(body, parse_constant=_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise Refused("expected JSON") from None


def checked(given: Any, fields: Mapping[str, Field]) -> dict[str, Any]:
    """``given`` with defaults filled in. Raises ``Refused``."""
    if not isinstance(given, dict):
        raise Refused("expected a map")
    for key in given:
        if key not in fields:
            _unknown(key)
    found = {}
    for key, field in fields.items():
        value = given.get(key)
        if value is None:
            if field.needed:
                raise Refused(f"{key} is missing")
            found[key] = field.default
        else:
            found[key] = _value(key, value, field)
    return found


def _value(key: str, value: Any, field: Field) -> Any:
    match field.kind:
        case "int":
            good = isinstance(value, int) and not isinstance(value, bool)
        case "number":
            good = isinstance(value, int | float) and not isinstance(value, bool)
            good = good and abs(value) < 1e300 and math.isfinite(value)
        case "text":
            good = isinstance(value, str) and len(value) <= field.most and _plain(value)
            if not good or (field.among and value not in field.among):
                raise Refused(f"{key} is no text that is taken here")
            return value
        case "ints":
            good = isinstance(value, list) and len(value) <= field.most
            if not good or not all(type(each) is int and 0 <= each < 2**31 for each in value):
                raise Refused(f"{key} is no list of at most {field.most:.0f} token ids")
            return value
        case "map":
            if not isinstance(value, dict) or _values(value, 0) > field.most * 16:
                raise Refused(f"{key} is no map that is taken here")
            return value
    if not good or not field.least <= value <= field.most:
        raise Refused(f"{key} is not {field.kind} from {field.least:g} to {field.most:g}")
    return value


def _values(value: Any, depth: int) -> int:
    """How many plain values; refuses what is deep, long or not plain."""
    if depth > _DEEPEST:
        raise Refused("a map is nested too deeply")
    if isinstance(value, dict):
        if not all(isinstance(key, str) and len(key) <= 60 and _plain(key) for key in value):
            raise Refused("a key is no short text")
        return len(value) + sum(_values(each, depth + 1) for each in value.values())
    if isinstance(value, list):
        return len(value) + sum(_values(each, depth + 1) for each in value)
    if isinstance(value, str):
        if len(value) > 1_000 or not _plain(value):
            raise Refused("a text is too long or has control characters")
    elif isinstance(value, float) and not math.isfinite(value):
        raise Refused("a number is not finite")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise Refused("an integer is out of bounds")
    return 1


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > 64:
        raise Refused("expected at most 64 texts")
    if not all(isinstance(each, str) and 0 < len(each) <= 300 and _plain(each) for each in value):
        raise Refused("a request is no short text")
    return value


def _from_text(key: str, value: str, kind: str) -> Any:
    if kind == "text":
        return value
    try:
        if len(value) > 40 or not value.isascii() or "_" in value:
            raise ValueError
        return int(value) if kind == "int" else float(value)
    except ValueError:
        raise Refused(f"{_shown(key)} is no number") from None


def _plain(value: str) -> bool:
    return all(character >= " " or character in "\n\t" for character in value) and not any(
        "\ud800" <= character <= "\udfff" or character == "\x7f" for character in value
    )


def _unknown(key: Any) -> Field:
    raise Refused(f"unknown field {_shown(key)}")


def _shown(key: Any) -> str:
    return repr(str(key)[:40])


def _constant(_: str) -> Any:
    raise ValueError


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError
    return found
