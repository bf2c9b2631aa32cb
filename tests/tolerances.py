"""A recorder of comparisons of floats that use more than half of their tolerance.

A test whose result lies close under its tolerance passes on one processor and fails on another, whose
products sum in another order. ``MT_MEGATRON_TEST_TOLERANCES=FOLDER bash tests/run.sh`` records every
``torch.allclose``, ``torch.testing.assert_close``, ``numpy.allclose``, ``numpy.testing.assert_allclose`` and
``pytest.approx`` of the tests and of the ranks that they start, and lists at the end those that came within
a factor of two. A comparison that did not hold is a failure, which pytest reports, or a negative control:
neither is recorded.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "MT_MEGATRON_TEST_TOLERANCES"
"""Environment variable; the folder of the records, one file per process. Unset: nothing is recorded."""

USED = 0.5
"""Part of a tolerance beyond which a comparison is recorded: the other half is left to other processors."""

_TESTS = str(Path(__file__).resolve().parent) + os.sep


def install() -> None:
    """Wrap the functions in this process, if ``FOLDER`` asks for it."""
    if FOLDER not in os.environ:
        return
    import numpy as np
    import pytest
    import torch

    def wrap(owner: Any, name: str, parts: Callable[..., Iterator[tuple[Any, Any, float, float]]]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            _record(parts(*args, **kwargs))
            return original(*args, **kwargs)

        setattr(owner, name, recorded)

    wrap(torch, "allclose", _allclose)
    wrap(torch.Tensor, "allclose", _allclose)
    wrap(torch.testing, "assert_close", _assert_close)
    wrap(np, "allclose", _allclose)
    wrap(np.testing, "assert_allclose", _assert_allclose)
    for kind in (1.0, [1.0], {"a": 1.0}, np.ones(1)):
        wrap(type(pytest.approx(kind)), "__eq__", _approx)


def _allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    yield a, b, rtol, atol


def _assert_allclose(
    actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0.0, *_: Any, **__: Any
) -> Any:
    yield actual, desired, rtol, atol


def _assert_close(actual: Any, expected: Any, **options: Any) -> Any:
    from torch.testing._comparison import default_tolerances

    for a, b in _leaves(actual, expected):
        rtol, atol = options.get("rtol"), options.get("atol")
        if rtol is None:
            import torch

            tensors = [each if isinstance(each, torch.Tensor) else torch.as_tensor(each) for each in (a, b)]
            rtol, atol = default_tolerances(*tensors)
        yield a, b, rtol, atol


def _leaves(actual: Any, expected: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(expected, Mapping):
        for key in expected:
            if key in actual:
                yield from _leaves(actual[key], expected[key])
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        for a, b in zip(actual, expected, strict=False):
            yield from _leaves(a, b)
    else:
        yield actual, expected


def _approx(self: Any, actual: Any) -> Any:
    relative = 1e-6 if self.rel is None else self.rel
    absolute = 1e-12 if self.abs is None else self.abs
    for a, b in _leaves(actual, self.expected):
        if isinstance(b, (int, float)) and isinstance(a, (int, float)) and abs(relative * b) > absolute:
            yield a, b, relative, 0.0
        else:
            yield a, b, 0.0, absolute


def _record(comparisons: Iterator[tuple[Any, Any, float, float]]) -> None:
    frame: Any = sys._getframe(2)
    places = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TESTS) and name != __file__:
            places.append(f"{name[len(_TESTS) :]}:{frame.f_lineno}")
        frame = frame.f_back
    if not places:
        return
    for a, b, rtol, atol in comparisons:
        found = _used(a, b, rtol, atol)
        if found is not None and USED < found["used"] <= 1:
            line = json.dumps({"at": places[:3], "test": os.environ.get("PYTEST_CURRENT_TEST", ""), **found})
            folder = Path(os.environ[FOLDER])
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                file.write(line + "\n")


def _used(a: Any, b: Any, rtol: float, atol: float) -> dict[str, float] | None:
    """The largest part of its tolerance that an element uses, its difference and the largest value; None
    where the two are no numbers of one shape."""
    import numpy as np
    import torch

    try:
        x, y = (
            each.detach().to("cpu", torch.float64).numpy()
            if isinstance(each, torch.Tensor)
            else np.asarray(each, dtype=np.float64)
            for each in (a, b)
        )
        x, y = np.broadcast_arrays(x, y)
    except (TypeError, ValueError, RuntimeError):
        return None
    finite = np.isfinite(x) & np.isfinite(y)
    if not finite.any():
        return None
    difference = np.abs(x - y)[finite]
    allowed = (atol + rtol * np.abs(y))[finite]
    with np.errstate(divide="ignore", invalid="ignore"):
        used = np.where(difference == 0, 0.0, difference / allowed)
    return {
        "used": float(used.max()),
        "difference": float(difference[used.argmax()]),
        "largest": float(np.abs(y[finite]).max()),
        "rtol": float(rtol),
        "atol": float(atol),
    }


def summary() -> list[str]:
    """Lines for the end of a session: each place once, with the largest part that it used."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(Path(os.environ[FOLDER]).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            place = entry["at"][0]
            if place not in found or entry["used"] > found[place]["used"]:
                found[place] = entry
    return [
        f"{place}: {entry['used']:.2f} of the tolerance (difference {entry['difference']:.3g}, largest value "
        f"{entry['largest']:.3g}, rtol {entry['rtol']:g}, atol {entry['atol']:g}; {entry['test']})"
        for place, entry in sorted(found.items())
    ]
