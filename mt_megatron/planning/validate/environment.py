"""Checks of the variables by which torchrun tells a process who it is."""

from __future__ import annotations

from collections.abc import Mapping

from mt_megatron.errors import ConfigError

_START = "Start the processes with torchrun, or unset {name} to run one process alone."
_LARGEST_PORT = 65535


def check_environment(environment: Mapping[str, str]) -> int:
    """The number of processes in the run: ``WORLD_SIZE``, or 1 when the process was started alone.

    Raises ``ConfigError`` when the variables are no numbers or contradict each other; with them a
    process would wait for others that never come, or crash while it joins them.
    """
    found = environment_problems(environment)
    if found:
        raise ConfigError("\n".join(found))
    return int(environment.get("WORLD_SIZE", "1"))


def environment_problems(environment: Mapping[str, str]) -> list[str]:
    """One line per problem: found, expected, what to change."""
    numbers: dict[str, int] = {}
    for name, least in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("LOCAL_RANK", 0)):
        text = environment.get(name)
        if text is None:
            continue
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            kind = "a number above 0" if least else "0 or a number above it"
            return [f"the variable {name} is {text!r}; expected {kind}. {_START.format(name=name)}"]
        numbers[name] = int(text)
    return [*_pairs(numbers), *_meeting_point(environment, numbers)]


def _pairs(numbers: Mapping[str, int]) -> list[str]:
    world, found = numbers.get("WORLD_SIZE"), []
    if "RANK" in numbers and world is None:
        found.append(
            f"the variable RANK is {numbers['RANK']} and WORLD_SIZE is not set; expected both. "
            + _START.format(name="RANK")
        )
    if "RANK" not in numbers and world is not None and world > 1:
        found.append(
            f"the variable WORLD_SIZE is {world} and RANK is not set; expected both. "
            + _START.format(name="WORLD_SIZE")
        )
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in numbers and size in numbers and numbers[rank] >= numbers[size]:
            found.append(
                f"the variable {rank} is {numbers[rank]}; expected less than {size} = {numbers[size]}. "
                + _START.format(name=rank)
            )
    if world is not None and numbers.get("LOCAL_WORLD_SIZE", 1) > world:
        found.append(
            f"the variable LOCAL_WORLD_SIZE is {numbers['LOCAL_WORLD_SIZE']}; expected at most WORLD_SIZE = "
            f"{world}. " + _START.format(name="LOCAL_WORLD_SIZE")
        )
    return found


def _meeting_point(environment: Mapping[str, str], numbers: Mapping[str, int]) -> list[str]:
    if "RANK" not in numbers or "WORLD_SIZE" not in numbers:
        return []
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        return [
            f"the variables RANK and WORLD_SIZE are set and {' and '.join(missing)} not; expected them: the "
            f"processes meet there. {_START.format(name='RANK')}"
        ]
    port = environment["MASTER_PORT"]
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= _LARGEST_PORT):
        return [
            f"the variable MASTER_PORT is {port!r}; expected 1 to {_LARGEST_PORT}. "
            + _START.format(name="MASTER_PORT")
        ]
    return []
