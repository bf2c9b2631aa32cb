"""Every record of a run to every place that keeps records, none of which can end the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Sink(Protocol):
    """A place that keeps records. Opening one may raise; that happens before the training."""

    title: str
    """What lines about it call it."""

    def record(self, event: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Keep one record, or raise whatever hinders it."""

    def close(self) -> None:
        """Finish what was kept."""


class Records:
    """Sends each record to all ``sinks``.

    A sink that fails is reported once, loudly, by ``say``, and asked again for every later record:
    a disk that was full may have room again. That is reported too, with the number of lost records.
    """

    def __init__(self, sinks: Sequence[Sink], say: Callable[[str], None]) -> None:
        self._sinks = tuple(sinks)
        self._say = say
        self._lost = [0] * len(self._sinks)

    def record(self, event: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Keep one record in every sink."""
        for index, sink in enumerate(self._sinks):
            try:
                sink.record(event, iteration, values)
            except Exception as error:  # noqa: BLE001 - whatever a logger raises, training goes on
                self._failed(index, f"the {event!r} record of step {iteration}", error)
            else:
                lost, self._lost[index] = self._lost[index], 0
                if lost:
                    self._say(f"{sink.title}: written again; {lost} record{'s' * (lost > 1)} missing")

    def close(self) -> None:
        """Finish every sink."""
        for index, sink in enumerate(self._sinks):
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - whatever a logger raises, training goes on
                self._failed(index, "the last records", error)

    def _failed(self, index: int, what: str, error: Exception) -> None:
        self._lost[index] += 1
        if self._lost[index] == 1:
            self._say(
                f"WARNING: {self._sinks[index].title}: {what} could not be written "
                f"({type(error).__name__}: {error}); training goes on"
            )
