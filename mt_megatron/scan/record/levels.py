"""How much is recorded: the levels, and windows of steps with a higher one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mt_megatron.errors import ConfigError

Level = Literal["off", "base", "full", "kernel"]

LEVELS: tuple[Level, ...] = ("off", "base", "full", "kernel")
"""``off`` nothing; ``base`` steps, micro-batches, collectives, transfers, data, optimizer, checkpoints and
host facts; ``full`` also layers and their submodules; ``kernel`` also every kernel, by torch's profiler."""


def level_of(value: object) -> Level:
    """``value`` as a level. Raises ``ConfigError``."""
    if value not in LEVELS:
        raise ConfigError(f"found level {value!r}, expected one of {', '.join(LEVELS)}")
    return value


@dataclass(frozen=True, kw_only=True)
class Window:
    """The first ``steps`` of every ``every`` steps are recorded at ``level``."""

    every: int
    steps: int = 1
    level: Level = "full"

    def __post_init__(self) -> None:
        level_of(self.level)
        for name in ("every", "steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"found a window with {name}={value!r}, expected a whole number from 1 on")
        if self.steps > self.every:
            raise ConfigError(
                f"found a window of {self.steps} steps every {self.every} steps; expected no more steps than "
                "there are between two windows. To record all steps set the level itself"
            )

    def covers(self, iteration: int) -> bool:
        """Whether step ``iteration`` belongs to a window; steps count from 1."""
        return (iteration - 1) % self.every < self.steps

    @classmethod
    def parse(cls, text: str) -> Window:
        """``EVERY``, ``EVERY:STEPS`` or ``EVERY:STEPS:LEVEL``. Raises ``ConfigError``."""
        parts = text.split(":")
        try:
            numbers = [int(part) for part in parts[:2]]
        except ValueError:
            numbers = []
        if not numbers or len(parts) > 3:
            raise ConfigError(
                f"found a window {text!r}, expected EVERY:STEPS:LEVEL, such as 100:2:full for 2 steps in "
                "every 100 at level full"
            )
        level = level_of(parts[2]) if len(parts) == 3 else "full"
        return cls(every=numbers[0], steps=numbers[1] if len(numbers) > 1 else 1, level=level)

    @classmethod
    def from_dict(cls, value: Any) -> Window:
        """From JSON. Raises ``ConfigError``."""
        if not isinstance(value, dict) or not {"every"} <= set(value) <= {"every", "steps", "level"}:
            raise ConfigError(f"found a window {value!r}, expected every, steps and level")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"every": self.every, "steps": self.steps, "level": self.level}


def level_at(level: Level, window: Window | None, iteration: int) -> Level:
    """The level of step ``iteration``: the window's within it, where that is the higher one."""
    if window is not None and window.covers(iteration):
        return max(level, window.level, key=LEVELS.index)
    return level
