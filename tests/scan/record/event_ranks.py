"""The ranks' side of the tests of what the events of a training say: short runs, each heard by a listener."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from mt_megatron.seams import events
from tests.training.loop_cases import run, start

_CALLS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
    "all_to_all_single",
    "alltoall",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)
"""Methods of torch's process groups through which everything goes, by the names of several versions."""


class Heard:
    """What a listener makes of the events of one run, ready for JSON."""

    def __init__(self) -> None:
        self.collectives: list[Any] = []
        """[group, ranks, seq, op, bytes, asynchronous, peer, what it is inside of]."""
        self.transfers: list[Any] = []
        """[op, peer, seq, bytes, asynchronous]."""
        self.passes: list[Any] = []
        """[direction, chunk, micro-batch]."""
        self.checkpoints: list[Any] = []
        """[op, bytes at its end]."""
        self.work: dict[str, list[int]] = {"data": [], "module": []}
        self.silent: list[str] = []
        """Calls into a process group of several ranks, within a step, of which no event tells."""
        self.unbalanced = 0
        self._local = threading.local()

    def hear(self, phase: str, name: str, attrs: Mapping[str, Any]) -> None:
        stack = self._stack()
        if phase == "end":
            if not stack or stack.pop()[0] != name:
                self.unbalanced += 1
            if name == "data":
                self.work["data"].append(attrs["work"])
            elif name == "checkpoint" and "bytes" in attrs:
                self.checkpoints.append(["written", attrs["bytes"]])
            return
        inside = stack[-1][0] if stack else None
        stack.append((name,))
        if name == "collective":
            get = attrs.get
            asynchronous, peer = get("asynchronous"), get("peer", -1)
            self.collectives.append(
                [
                    attrs["group"],
                    list(attrs["ranks"]),
                    attrs["seq"],
                    attrs["op"],
                    attrs["bytes"],
                    asynchronous,
                    peer,
                    inside,
                ]
            )
        elif name == "p2p":
            self.transfers += [[*each, attrs.get("asynchronous")] for each in attrs["transfers"]]
        elif name in ("forward", "backward"):
            self.passes.append([name, attrs["chunk"], attrs["microbatch"]])
        elif name == "checkpoint":
            self.checkpoints.append([attrs.get("op"), attrs["iteration"]])
        elif name == "module":
            self.work["module"].append(attrs["work"])

    def called(self, group: Any, method: str) -> None:
        names = [name for (name,) in self._stack()]
        if "step" in names and group.size() > 1 and not {"collective", "p2p"} & set(names):
            self.silent.append(f"{method} in {names[-1]}")

    def _stack(self) -> list[tuple[str]]:
        found: list[tuple[str]] | None = getattr(self._local, "stack", None)
        if found is None:
            found = self._local.stack = []
        return found

    def result(self) -> dict[str, Any]:
        return {
            "collectives": self.collectives,
            "transfers": self.transfers,
            "passes": self.passes,
            "checkpoints": self.checkpoints,
            "work": self.work,
            "silent": self.silent,
            "unbalanced": self.unbalanced,
        }


@contextmanager
def heard() -> Iterator[Heard]:
    """Listen to the events, and to the process groups themselves."""
    found = Heard()
    group_type = dist.ProcessGroup
    # What the class holds binds itself; what it answers when asked does not.
    originals = {name: vars(group_type)[name] for name in _CALLS if name in vars(group_type)}

    def listened(name: str, original: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            found.called(group, name)
            return original(group, *args, **kwargs)

        return call

    for name in originals:
        setattr(group_type, name, listened(name, getattr(group_type, name)))
    stop = events.subscribe(found.hear)
    try:
        yield found
    finally:
        stop()
        for name, original in originals.items():
            setattr(group_type, name, original)


def runs(folder: str, layouts: dict[str, str]) -> dict[str, Any]:
    """Two steps under each layout; what was heard, or the error."""
    start()
    found: dict[str, Any] = {}
    for name, flags in layouts.items():
        with heard() as listener:
            outcome = run(f"--eval-iters 0 --train-iters 2 --scan off {flags}", folder, name)
        found[name] = listener.result() | {"error": outcome.get("error")}
    return found


def silence() -> list[str]:
    """A collective of which no event tells, and two outside of steps or within an event."""
    import torch

    from mt_megatron.seams import collectives

    start()
    value = torch.ones(1)
    with heard() as found:
        dist.all_reduce(value)
        with events.span("step", iteration=1):
            dist.all_reduce(value)
            with collectives.announced("all_reduce", "world", None, value):
                dist.all_reduce(value)
    return found.silent
