"""Bounds: how much one client may ask, how much a cache keeps."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Rate:
    """A bucket of ``burst`` permits that ``per_second`` refill."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._left = burst
        self._last = clock()

    def take(self, permits: float = 1.0) -> bool:
        """Whether ``permits`` were left; they are gone then."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._last) * self._per_second)
        self._last = now
        if self._left < permits:
            return False
        self._left -= permits
        return True


class Recent(Generic[Key, Value]):
    """A map that forgets what was used longest ago once its weights exceed ``most``. Not thread-safe."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._weight = 0.0
        self._kept: OrderedDict[Key, tuple[Value, float]] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """The value, now the one used last; None if it was forgotten."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: Key, value: Value, weight: float = 1.0) -> None:
        """Keep ``value``, and give up others for it. What alone weighs more than ``most`` is not kept."""
        self.drop(key)
        if weight > self._most:
            return
        self._kept[key] = (value, weight)
        self._weight += weight
        while self._weight > self._most:
            _, (_, lighter) = self._kept.popitem(last=False)
            self._weight -= lighter

    def drop(self, key: Key) -> None:
        """Forget ``key`` if it is there."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._weight -= found[1]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self._weight = 0.0

    def __len__(self) -> int:
        return len(self._kept)
