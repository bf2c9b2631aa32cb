"""Traces a training from beginning to end: recorder, clock pings, attendant and watcher, in one context.

    with mt_megatron.scan.session.session("runs/first"):
        train()

Works with any program that calls Megatron-Core under ``mt_megatron.patch()``; our own trainer uses
``Session``. What fails in it is said once and switches the tracing off, on all ranks; training goes on.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.backends.base import Backend
from mt_megatron.errors import ConfigError, PatchError
from mt_megatron.parallel.rank_layout import (
    Coordinates,
    RankLayout,
    layout_of_groups,
    place_in_groups,
    rank_of_world,
)
from mt_megatron.scan.clock.machine import boot_id
from mt_megatron.scan.clock.pings import ClockPings
from mt_megatron.scan.clock.store_messages import StoreBoard
from mt_megatron.scan.format.permissions import set_group_readable
from mt_megatron.scan.format.run_files import belongs_to, run_files, write_run
from mt_megatron.scan.format.segments import sessions
from mt_megatron.scan.monitor.watcher_process import Alerting, WatcherProcess
from mt_megatron.scan.record.instrumentation import Depth
from mt_megatron.scan.record.levels import Level, Window, level_of
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.scan.respond.agent import Attendant
from mt_megatron.scan.respond.straggler_policy import OnStraggler
from mt_megatron.seams import collectives

logger = logging.getLogger("mt_megatron")

# Of this process, begun and not closed. Who traces within another's block goes on with its numbers.
_traced: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """One rank's tracing. ``start``, ``measure`` and ``close`` belong to the training thread."""

    def __init__(
        self,
        run: Path | str,
        *,
        rank: int,
        layout: RankLayout,
        backend: Backend,
        level: Level = "base",
        window: Window | None = None,
        alerting: Alerting | None = None,
        on_straggler: OnStraggler = "continue",
        group_readable: bool = False,
        retain_mib: int = 1024,
        facts: Mapping[str, Any] | None = None,
        modules: Sequence[Any] = (),
        samples: Mapping[str, Callable[[], float | None]] | None = None,
        say: Callable[[str], None] = logger.warning,
        place: Coordinates | None = None,
    ) -> None:
        """Nothing happens before ``start``.

        ``alerting`` None: no process watches. ``group_readable``: the trace, and what is made of it later, is
        for the folder's group too. ``retain_mib``: bound of this rank's files, in MiB. ``facts`` go into
        ``run.json`` (``num_microbatches``, the model ...), ``modules`` are the model's chunks, whose
        submodules level ``full`` records;
        ``samples`` are read at every flush, in the background, as counters of these names.
        ``say`` gets a line where something is worth one. ``place``: of this rank, where its groups are not
        in the order of ``layout``.
        """
        self.files = run_files(run)
        level_of(level)
        self.recorder: Recorder | None = None
        """While it records."""
        self._rank = rank
        self._layout = layout
        self._place = place or layout.coordinates(rank)
        self._backend = backend
        self._level: Level = level
        self._window = window
        self._alerting = alerting
        self._on_straggler: OnStraggler = on_straggler
        self._group_readable = group_readable
        self._retain_mib = retain_mib
        self._facts = dict(facts or {})
        self._modules = tuple(modules)
        self._samples = dict(samples or {})
        self._say = say
        self._pings: ClockPings | None = None
        self._attendant: Attendant | None = None
        self._watcher: WatcherProcess | None = None
        self._closing: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin. Collective; must come at the same point of the program on every rank, since collectives
        are numbered from here on."""
        everyone = _gather(
            {
                "host": socket.gethostname(),
                "boot": boot_id(),
                "place": {**asdict(self._place), **_part_of(self._modules)},
                "session": self._next_session(),
                "board": secrets.token_hex(8),
                "alone": not _traced,
            }
        )
        problem: str | None = None
        # Some may have listened for figures of their own, or longer than others at the last one's end.
        if all(each["alone"] for each in everyone):
            collectives.restart_numbers()
        _traced.add(self)
        try:
            self._begin(everyone)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            problem = f"rank {self._rank}: {type(error).__name__}: {error}"
        problems = [each for each in _gather(problem) if each is not None]
        if problems:
            self.close()
            if self._rank == 0:
                self._say(f"scan: nothing is traced, training goes on: {problems[0]}")

    @property
    def wants_measurement(self) -> bool:
        """Whether a measurement should follow the next step (rank 0's word counts)."""
        return self._attendant is not None and self._attendant.wants_measurement

    @property
    def wants_to_leave(self) -> bool:
        """Whether the run should save and end because of a confirmed straggler (rank 0's word counts)."""
        return self._attendant is not None and self._attendant.wants_to_leave

    def measure(self) -> None:
        """Measure what was asked for; collective, between two steps, about a second."""
        if self._attendant is not None:
            self._attendant.measure()

    def close(self) -> None:
        """End everything, the recorder last. No collective; further calls do nothing."""
        closing, self._closing = self._closing, []
        for close in reversed(closing):
            try:
                close()
            except Exception as error:  # noqa: BLE001 - the others are to be closed as well
                logger.warning("scan: %s: %s", type(error).__name__, error)
        self.recorder = self._pings = self._attendant = self._watcher = None
        _traced.discard(self)

    def _next_session(self) -> int:
        try:
            earlier = sessions(self.files.rank_folder(self._rank))
        except Exception:  # noqa: BLE001 - files that are no segments; the recorder says what is wrong
            return 0
        return earlier[-1] + 1 if earlier else 0

    def _begin(self, everyone: list[dict[str, Any]]) -> None:
        machines = list(dict.fromkeys(each["boot"] for each in everyone))
        coordinates = asdict(self._place)
        opened = set_group_readable(
            self.files.root,
            self._group_readable,
            lambda name: belongs_to(name, self._rank, self._layout.world_size),
        )
        if self._rank == 0:
            if self._group_readable and not opened:
                self._say(f"scan: the file system does not let the group read {self.files.root}")
            write_run(self.files, self._run_facts(everyone, machines))
            # Asked of an earlier session; the next change would carry it along.
            self.files.control.unlink(missing_ok=True)
        recorder = Recorder(
            self.files.root,
            rank=self._rank,
            level=self._level,
            window=self._window,
            meta={
                **coordinates,
                "node": machines.index(everyone[self._rank]["boot"]),
                "boot_id": everyone[self._rank]["boot"],
                "session": max(each["session"] for each in everyone),
                "backend": self._backend.name,
                "device_type": self._backend.device_type,
            },
            telemetry=partial(self._backend.telemetry, self._backend.current_device()),
            most_bytes=self._retain_mib << 20,
        )
        self.recorder = recorder
        depth = Depth(recorder, self._backend, self._modules)
        self._closing += [recorder.close, depth.close]
        recorder.start()
        for name, read in self._samples.items() if recorder.failed is None else ():
            recorder.sample(name, read)
        self._attendant = Attendant(
            self.files,
            rank=self._rank,
            hosts={rank: each["host"] for rank, each in enumerate(everyone)},
            backend=self._backend,
            progress=lambda: recorder.heard,
            note=lambda note: recorder.note(**note),
            on_straggler=self._on_straggler,
            say=self._say,
        )
        self._closing.append(self._attendant.close)
        recorder.on_look(self._attendant.look)
        self._attendant.start()
        if self._layout.world_size > 1:
            self._pings = ClockPings(
                StoreBoard(everyone[0]["board"]),
                self._record_pings,
                rank=self._rank,
                world_size=self._layout.world_size,
            )
            self._closing.append(self._pings.close)
            self._pings.start()
        if self._rank == 0 and self._alerting is not None:
            self._watcher = WatcherProcess(self.files.root, self._alerting, say=self._say)
            self._closing.append(self._watcher.close)
            self._watcher.start()

    def _record_pings(self, pings: np.ndarray) -> None:
        if self.recorder is None:
            return
        for row in pings.tolist():
            sent, received, answered, returned, peer, _ = row
            self.recorder.ping(peer, sent=sent, received=received, answered=answered, returned=returned)

    def _run_facts(self, everyone: list[dict[str, Any]], machines: list[str]) -> dict[str, Any]:
        layout = self._layout
        return {
            "world_size": layout.world_size,
            "layout": {
                "tp": layout.tp,
                "pp": layout.pp,
                "dp": layout.dp,
                "cp": layout.cp,
                "ep": layout.ep,
                "vpp": layout.vpp or 1,
            },
            "ranks": [
                {
                    "rank": rank,
                    "host": each["host"],
                    "node": machines.index(each["boot"]),
                    **each["place"],
                }
                for rank, each in enumerate(everyone)
            ],
            "started_unix_ns": time.time_ns(),
            "backend": self._backend.name,
            **self._facts,
        }


@contextmanager
def session(
    run: Path | str,
    *,
    level: Level = "base",
    window: Window | None = None,
    watch: bool = True,
    alerting: Alerting | None = None,
    group_readable: bool = False,
    retain_mib: int = 1024,
    modules: Sequence[Any] = (),
) -> Iterator[Session]:
    """Trace the block, on every rank of the job; the trace lies in ``run``/scan.

    Enter it at the same point of the program on every rank, after the process group and Megatron's
    groups exist (if they ever will) and with ``mt_megatron.patch()`` done, without which there are no
    events but one's own. ``modules``: the model's chunks, for level ``full``. ``watch``: whether a
    process beside rank 0 says who holds the run up. ``group_readable``, ``retain_mib``: as of
    ``Session``. Raises ``ConfigError`` for a level or window that does not exist, and nothing else.
    """
    rank, layout, place = _this_rank()
    traced = Session(
        run,
        rank=rank,
        layout=layout,
        place=place,
        backend=_backend(),
        level=level,
        window=window,
        alerting=(alerting or Alerting()) if watch else None,
        group_readable=group_readable,
        retain_mib=retain_mib,
        modules=modules,
    )
    traced.start()
    try:
        yield traced
    finally:
        traced.close()


def _gather(own: Any) -> list[Any]:
    """``own`` of every rank."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _this_rank() -> tuple[int, RankLayout, Coordinates | None]:
    """Rank, layout and place in the groups; without groups, and where their sizes have no layout, everything
    is data-parallel."""
    place = place_in_groups()
    try:
        return rank_of_world()[0], layout_of_groups(), place
    except ConfigError as error:
        logger.warning("scan: the layout's sizes are left out of the trace: %s", error)
    rank, world_size = rank_of_world()
    return rank, RankLayout(world_size=world_size), place


def _part_of(chunks: Sequence[Any]) -> dict[str, Any]:
    """How many of the model's layers ``chunks`` hold, and whether its head; empty where they do not say."""
    layers, has_head = 0, False
    for chunk in chunks:
        while not hasattr(chunk, "post_process") and hasattr(chunk, "module"):
            chunk = chunk.module
        stack = getattr(chunk, "decoder", None) or getattr(chunk, "encoder", None)
        found = getattr(stack, "layers", None)
        if found is None or not hasattr(chunk, "post_process"):
            return {}
        layers, has_head = layers + len(found), has_head or bool(chunk.post_process)
    return {"layers": layers, "has_head": has_head} if chunks else {}


def _backend() -> Backend:
    import mt_megatron
    from mt_megatron.backends import registry

    try:
        return mt_megatron.backend()
    except PatchError:
        logger.warning("scan: mt_megatron.patch() was not called: Megatron-Core emits no events to record")
        return registry.select("auto")[0]
