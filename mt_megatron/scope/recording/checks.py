"""Frames from ranks, checked before anything is kept: kinds, keys, types, sizes.

Whatever passes can be written: integers fit SQLite, texts are bounded, arrays have the shape that their keys
say. Ranks do not know the bounds of texts: a text that is only shown is cut, a module path keeps a digest of
what is cut. Unknown keys are dropped, so that a newer rank can send more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scope.format.frames import VERSION, FrameError

from .tensors import matrix_tiles

LONGEST_TEXT = 4096
LONGEST_PATH = 512
MOST_DIMENSIONS = 8
MOST_RANKS = 2**20
MOST_ELEMENTS = 2**31
"""Of a whole tensor: a reader assembles it from its shards."""

_LARGEST = 2**62

Frame = Mapping[str, Any]
_Check = Callable[[Any], Any]


def checked(frame: Frame) -> dict[str, Any]:
    """``frame`` with known keys only, of the types that ``scope.format.frames`` says.

    Raises ``FrameError``.
    """
    kind = frame.get("k")
    keys = _KINDS.get(kind) if isinstance(kind, str) else None
    if keys is None:
        raise FrameError(f"found a frame of kind {str(kind)[:40]!r}; expected one of {', '.join(_KINDS)}")
    found: dict[str, Any] = {"k": kind}
    for key, check in keys.items():
        try:
            found[key] = check(frame.get(key))
        except (TypeError, ValueError, OverflowError) as error:
            raise FrameError(f"a {kind} frame's {key}: {str(error)[:200]}") from None
    if found["k"] in _WHOLE:
        _WHOLE[found["k"]](found)
    return found


def _integer(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LARGEST:
        raise ValueError(f"found {_short(value)}, expected an integer from {least} to 2^62")
    return value


def _optional_integer(value: Any) -> int | None:
    if isinstance(value, float) and (math.isnan(value) or value.is_integer()):
        value = None if math.isnan(value) else int(value)
    return None if value is None else _integer(value)


def _number(value: Any) -> float | None:
    """None for absent and NaN, which SQLite keeps as one."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"found {_short(value)}, expected a number")
    return None if math.isnan(value) else float(value)


def _text(value: Any, most: int = LONGEST_TEXT) -> str:
    if not isinstance(value, str) or len(value) > most or "\0" in value:
        raise ValueError(f"found {_short(value)}, expected text of at most {most} characters")
    value.encode()  # a lone surrogate raises a ValueError
    return value


def _shown(value: Any, most: int = LONGEST_TEXT) -> str:
    """A text that is read by people alone, cut to ``most`` characters."""
    if isinstance(value, str):
        value = value.replace("\0", "?")
        value = value if len(value) <= most else f"{value[: most - 4]} ..."
    return _text(value, most)


def _path(value: Any) -> str:
    if isinstance(value, str) and len(value) > LONGEST_PATH:
        # Modules stay apart: their paths differ in their ends.
        digest = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:16]
        value = f"{value[: LONGEST_PATH - 20]}...~{digest}"
    return _text(value, LONGEST_PATH)


def _optional_text(value: Any) -> str | None:
    return None if value is None or value == "" else _shown(value)


def _session(value: Any) -> str:
    return str(_integer(value)) if isinstance(value, int) else _text(value, 200)


def _plain(value: Any) -> dict[str, Any]:
    """A map of plain values that JSON can hold."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > 1000:
        raise ValueError(f"found {_short(value)}, expected a map")
    return {_shown(key, 200): _plain_value(each, 4) for key, each in value.items()}


def _plain_value(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _integer(value, -_LARGEST)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return _shown(value)
    if depth and isinstance(value, list | tuple) and len(value) <= 10_000:
        return [_plain_value(each, depth - 1) for each in value]
    if depth and isinstance(value, Mapping) and len(value) <= 1000:
        return {_shown(key, 200): _plain_value(each, depth - 1) for key, each in value.items()}
    raise ValueError(f"found {_short(value)}, expected plain values")


def _modules(value: Any) -> list[tuple[str, str, int]]:
    found = []
    for each in _list(value or [], 2**18):
        if not isinstance(each, list | tuple) or len(each) != 3:
            raise ValueError(f"found {_short(each)}, expected path, class name and parameters")
        found.append((_path(each[0]), _shown(each[1], 200), _integer(each[2])))
    return found


def _entries(value: Any) -> list[tuple[str, str, int]]:
    found = []
    for each in _list(value, 2**18):
        if not isinstance(each, list | tuple) or len(each) != 3:
            raise ValueError(f"found {_short(each)}, expected path, statistic and length")
        found.append((_path(each[0]), _shown(each[1], 100), _integer(each[2], 1)))
    return found


def _list(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list | tuple) or len(value) > most:
        raise ValueError(f"found {_short(value)}, expected a list of at most {most}")
    return list(value)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(_integer(each) for each in _list(value, MOST_DIMENSIONS))


def _index(value: Any) -> dict[str, int]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > 16:
        raise ValueError(f"found {_short(value)}, expected a map of integers")
    return {_text(key, 40): _integer(each, -_LARGEST) for key, each in sorted(value.items())}


def _array(value: Any) -> NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise ValueError(f"found {_short(value)}, expected an array")
    return value


def _optional_array(value: Any) -> NDArray[Any] | None:
    return None if value is None else _array(value)


def _floats(value: Any) -> NDArray[np.float64]:
    array = _array(value)
    if array.ndim != 1 or array.dtype.kind != "f":
        raise ValueError(f"found {array.dtype} of shape {array.shape}, expected a vector of floating point")
    return array.astype(np.float64)


def _ids(value: Any) -> NDArray[np.int64]:
    array = _array(value)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"found {array.dtype} of shape {array.shape}, expected a vector of integers")
    return array.astype(np.int64)


def _world(value: Any) -> int:
    found = _integer(value, 1)
    if found > MOST_RANKS:
        raise ValueError(f"found {found}, expected {MOST_RANKS} at most")
    return found


_KINDS: Mapping[str, Mapping[str, _Check]] = {
    "hello": {
        "v": _integer,
        "rank": _integer,
        "world_size": _world,
        "at": _plain,
        "layout": _plain,
        "host": lambda value: _shown(value, 200),
        "pid": _integer,
        "session": _session,
        "model": _plain,
        "modules": _modules,
    },
    "step": {
        "i": _integer,
        "t": _integer,
        "seconds": _number,
        "loss": _number,
        "grad_norm": _number,
        "lr": _number,
        "tokens": _optional_integer,
        "tokens_per_second": _number,
        "memory_bytes": _optional_integer,
        "skipped": bool,
        "perturbed": _optional_text,
        "attempt": _integer,
    },
    "schema": {"id": _integer, "entries": _entries},
    "stats": {
        "i": _integer,
        "id": _integer,
        "values": _floats,
        "perturbed": _optional_text,
        "attempt": _integer,
        "beside": bool,
    },
    "tensor": {
        "i": _integer,
        "path": _path,
        "what": lambda value: _text(value, 100),
        "microbatch": lambda value: 0 if value is None else _integer(value),
        "index": _index,
        "shape": _shape,
        "offset": _shape,
        "encoding": lambda value: _text(value, 10),
        "data": _array,
        "scale": _optional_array,
        "low": _optional_array,
        "error": _number,
        "perturbed": _optional_text,
        "attempt": _integer,
    },
    "tokens": {
        "i": _integer,
        "attempt": _integer,
        "microbatch": lambda value: 0 if value is None else _integer(value),
        "sample": lambda value: 0 if value is None else _integer(value),
        "path": lambda value: "output_layer" if value is None else _path(value),
        "parts": lambda value: 1 if value is None else _integer(value, 1),
        "ids": _ids,
        "lse": _optional_array,
        "loss": _optional_array,
        "entropy": _optional_array,
        "top_ids": _optional_array,
        "top_logprobs": _optional_array,
        "position": lambda value: 0 if value is None else _integer(value),
    },
    "back": {"first": _integer, "attempt": _integer},
    "dropped": {"frames": _integer, "bytes": _integer},
    "result": {
        "id": lambda value: _text(value, 100) if isinstance(value, str) else _integer(value),
        "ok": bool,
        "value": lambda value: value,
        "error": _optional_text,
    },
    "bye": {},
}


def _hello(frame: dict[str, Any]) -> None:
    if frame["v"] != VERSION:
        raise FrameError(f"found version {frame['v']} of the frames; expected {VERSION}")
    if frame["rank"] >= frame["world_size"]:
        raise FrameError(f"found rank {frame['rank']} of {frame['world_size']}")


def _tensor(frame: dict[str, Any]) -> None:
    whole, offset, data = frame["shape"], frame["offset"], frame["data"]
    if not len(whole) == len(offset) == data.ndim:
        raise FrameError(f"found data of shape {data.shape} at {offset} within {whole}")
    if math.prod(whole) > MOST_ELEMENTS:
        raise FrameError(f"found a tensor of shape {whole}; expected {MOST_ELEMENTS:,} elements at most")
    if any(at + size > full for at, size, full in zip(offset, data.shape, whole, strict=True)):
        raise FrameError(f"found data of shape {data.shape} at {offset} within {whole}")
    dtype = {"f32": "float32", "f16": "float16", "q8": "uint8"}.get(frame["encoding"])
    if dtype is None or data.dtype.name != dtype:
        raise FrameError(f"found {data.dtype} in encoding {frame['encoding'][:10]!r}")
    if frame["encoding"] != "q8":
        frame["scale"] = frame["low"] = None
        return
    scale, low = frame["scale"], frame["low"]
    if scale is None or low is None or scale.dtype.kind != "f" or low.dtype.kind != "f":
        raise FrameError("found 8-bit tiles without a scale and a low value for each")
    if data.size:
        matrix_tiles(scale, low, data.shape)


def _tokens(frame: dict[str, Any]) -> None:
    count = len(frame["ids"])
    for key in ("loss", "entropy", "lse"):
        array = frame[key]
        if array is not None and (array.shape != (count,) or array.dtype.kind != "f"):
            raise FrameError(f"found {key} of shape {array.shape} for {count} tokens")
    ids, logprobs = frame["top_ids"], frame["top_logprobs"]
    if frame["parts"] > 1 and any(frame[key] is None for key in ("loss", "entropy", "lse", "top_ids")):
        raise FrameError("found a part of tokens without loss, entropy, lse or top_ids")
    if (ids is None) != (logprobs is None):
        raise FrameError("found top_ids or top_logprobs without the other")
    if ids is None or logprobs is None:
        return
    if ids.ndim != 2 or ids.shape[0] != count or ids.shape != logprobs.shape:
        raise FrameError(
            f"found top_ids of shape {ids.shape}, top_logprobs of {logprobs.shape}, {count} tokens"
        )
    if ids.dtype.kind not in "iu" or logprobs.dtype.kind != "f":
        raise FrameError(f"found top_ids of {ids.dtype}, top_logprobs of {logprobs.dtype}")


_WHOLE: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "hello": _hello,
    "tensor": _tensor,
    "tokens": _tokens,
}


def _short(value: Any) -> str:
    """At most a few words about ``value``; an array's or a map's contents may be large."""
    if isinstance(value, str):
        return repr(value[:40])
    if value is None or isinstance(value, bool | int | float):
        return str(value)[:40]
    return type(value).__name__
