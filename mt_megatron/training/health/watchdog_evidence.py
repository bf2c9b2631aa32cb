"""What a rank that is stuck can say about itself, and what the words of all ranks come to."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mt_megatron.backends.distributed.flight_recorder import Waiting, waiting_collectives
from mt_megatron.host.machine import machine

_FRAMES = 8
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A rank's sign of life: who it is and where it was."""

    host: str
    pid: int
    machine: str
    """The kernel and process namespace that ``pid`` belongs to."""

    started: int
    """When the process started, in the kernel's ticks; tells it from a later one with its ``pid``."""

    where: str
    at: float
    """Seconds since the epoch."""

    def name(self) -> str:
        """The process in words."""
        return f"host {self.host}, pid {self.pid}"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Where a rank is."""

    sign: Sign
    silent_for: float
    """Seconds since it last showed progress."""

    waiting: list[Waiting]
    entered: dict[str, int] = field(default_factory=dict)
    """Group -> number of the last collective it began."""

    stack: list[str] = field(default_factory=list)
    """The main thread's innermost Python frames, innermost last."""

    def to_json(self) -> str:
        """As text that ``evidence_from`` reads."""
        return json.dumps(asdict(self))


def evidence_from(text: str | bytes) -> Evidence:
    """What ``to_json`` wrote."""
    found = json.loads(text)
    sign, waiting = Sign(**found.pop("sign")), [Waiting(**each) for each in found.pop("waiting")]
    return Evidence(sign=sign, waiting=waiting, **found)


def sign_of_life(where: str) -> Sign:
    """This process, now."""
    return Sign(
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=machine("pid"),
        started=started_at(os.getpid()),
        where=where,
        at=time.time(),
    )


def evidence(where: str, silent_for: float) -> Evidence:
    """This rank, now; from any thread."""
    stack = _main_stack()
    waiting, entered = waiting_collectives()
    innermost = next((frame for frame in reversed(stack) if _DISTRIBUTED in frame), None)
    if not waiting and innermost is not None:
        # The library keeps no record here (torch before 2.13 with Gloo): the call's name is all there is.
        op = innermost.rpartition(" in ")[2]
        waiting = [Waiting(op=op, group="", number=0, ranks=[], sizes="")]
    return Evidence(
        sign=sign_of_life(where), silent_for=silent_for, waiting=waiting, entered=entered, stack=stack
    )


def started_at(pid: int) -> int:
    """When a process of this machine started, in the kernel's ticks; 0 when there is none."""
    try:
        # The name before it may hold spaces and brackets.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def verdict(
    found: Mapping[int, Evidence], signs: Mapping[int, Sign], left: Mapping[int, str], world_size: int
) -> str:
    """Who holds up the run, and where every rank is. ``found`` are those that answered, ``signs`` the
    last signs of life of the others, ``left`` the errors of those that ended."""
    lines = [f"the run is stuck: {_culprits(found, signs, left, world_size)}"]
    for rank in range(world_size):
        if rank in found:
            each = found[rank]
            state = "; ".join(each_wait.text() for each_wait in each.waiting)
            doing = (
                f"waits for {state}" if state else f"runs {each.stack[-1] if each.stack else 'native code'}"
            )
            lines.append(
                f"  rank {rank} ({each.sign.name()}): {each.sign.where}, no progress for "
                f"{each.silent_for:.1f} s; {doing}"
            )
            lines += [f"      {frame}" for frame in each.stack]
        elif rank in left:
            lines.append(f"  rank {rank} has left: {left[rank]}")
        elif rank in signs:
            sign = signs[rank]
            lines.append(
                f"  rank {rank} ({sign.name()}): does not answer; last sign of life "
                f"{max(0.0, time.time() - sign.at):.1f} s ago: {sign.where}"
            )
        else:
            lines.append(f"  rank {rank}: was never heard of")
    return "\n".join(lines)


def _culprits(
    found: Mapping[int, Evidence], signs: Mapping[int, Sign], left: Mapping[int, str], world_size: int
) -> str:
    gone = [rank for rank in range(world_size) if rank in left and rank not in found]
    if gone:
        return f"rank {_numbers(gone)} has left it ({left[gone[0]]})"
    silent = [rank for rank in range(world_size) if rank not in found]
    if silent:
        names = {rank: f" ({signs[rank].name()})" if rank in signs else "" for rank in silent}
        return ", ".join(f"rank {rank}{names[rank]}" for rank in silent) + " does not answer"
    busy = [rank for rank, each in sorted(found.items()) if not each.waiting]
    if busy and len(busy) < world_size:
        return f"rank {_numbers(busy)} is in no collective while the others wait"
    missing = sorted(
        {
            member
            for each in found.values()
            for wait in each.waiting
            for member in wait.ranks
            if wait.number and found[member].entered.get(wait.group, 0) < wait.number
        }
    )
    if missing:
        return f"rank {_numbers(missing)} has not come to a collective that others wait in"
    return _different(found) or "no rank stands out; see where each of them is"


def _different(found: Mapping[int, Evidence]) -> str | None:
    """Ranks that are at the same point of a group and do not call the same thing."""
    called: dict[tuple[str, int], dict[str, int]] = {}
    for rank, each in sorted(found.items()):
        for wait in each.waiting:
            if wait.ranks:
                called.setdefault((wait.group, wait.number), {}).setdefault(wait.op, rank)
    for (group, number), ops in called.items():
        if len(ops) > 1:
            calls = ", ".join(f"rank {rank} is in {op}" for op, rank in ops.items())
            return f"the ranks of group {group} do different things at number {number}: {calls}"
    return None


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _main_stack() -> list[str]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return []
    frames = traceback.extract_stack(frame)[-_FRAMES:]
    return [f"{each.filename}:{each.lineno} in {each.name}" for each in frames]
