"""What is saved when a run ends by an error: the last sound step, where every rank met the same error.

A checkpoint needs all ranks. They find out over the store of their process group whether all of them came
here with the same error in the same step: collectives would hang with those that did not.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from mt_megatron.checkpoint.progress import Progress
from mt_megatron.checkpoint.save import SaveReport

SECONDS = 10.0
"""How long a rank waits for the others: they end a step together, so that an error that all share reaches
all within a moment."""

_SHARED, _NOT_SHARED = b"shared", b"not shared"


@dataclass(frozen=True, kw_only=True)
class Met:
    """An error as the other ranks hear of it; equal for the same error at the same place."""

    kind: str
    iteration: int
    place: str
    """File, line and function that raised it."""

    update_is_half_done: bool = False

    @staticmethod
    def by(error: BaseException, iteration: int, *, update_is_half_done: bool) -> Met:
        """What ``error`` is, in the step after ``iteration``."""
        frames = traceback.extract_tb(error.__traceback__)
        place = (
            "" if not frames else f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}"
        )
        return Met(
            kind=type(error).__name__,
            iteration=iteration,
            place=place,
            update_is_half_done=update_is_half_done,
        )


class ErrorMeeting:
    """Where the ranks of a run compare the errors that end it; once for each ``name``."""

    def __init__(
        self, name: str, *, rank: int, world_size: int, store: Any, seconds: float = SECONDS
    ) -> None:
        """``store`` is a torch store that all ranks reach."""
        self._prefix = f"mt_megatron/error/{name}"
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._seconds = seconds

    def compare(self, met: Met) -> str | None:
        """None when every rank met the same error, or why that is not so; all that come hear the same."""
        if self._world_size == 1:
            return None
        try:
            return self._compare(met)
        except (RuntimeError, OSError, ValueError) as error:
            # torch's store is gone, with the process that held it.
            return f"the ranks cannot compare their errors: {type(error).__name__}: {error}"

    def _compare(self, met: Met) -> str | None:
        self._store.set(f"{self._prefix}/{self._rank}", json.dumps(asdict(met)))
        keys = [f"{self._prefix}/{rank}" for rank in range(self._world_size)]
        absent = self._wait_for(keys)
        said = {
            rank: Met(**json.loads(self._store.get(key)))
            for rank, key in enumerate(keys)
            if rank not in absent
        }
        same = not absent and len(set(said.values())) == 1
        # Ranks may come to different views when one comes late: the first one to decide does so for all.
        decision = f"{self._prefix}/decision"
        decided = bytes(self._store.compare_set(decision, "", (_SHARED if same else _NOT_SHARED).decode()))
        if decided == _SHARED:
            return None
        others = [f"rank {rank} {_words(each)}" for rank, each in said.items() if each != met]
        if absent:
            others.append(f"ranks {absent} met none within {self._seconds:g} s")
        return f"this rank {_words(met)}, {', '.join(others) or 'the others came too late'}"

    def _wait_for(self, keys: list[str]) -> list[int]:
        """Waits until all ``keys`` are there; the indices of those that are not in time."""
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            if self._store.check(keys):
                return []
            time.sleep(0.02)
        return [index for index, key in enumerate(keys) if not self._store.check([key])]


class Saves(Protocol):
    """The part of ``checkpoint.store.CheckpointStore`` that matters here."""

    @property
    def run_name(self) -> str | None:
        """A name of the run that all ranks know; None when it saves nothing."""

    def save(self, progress: Progress, *, final: bool = False) -> list[SaveReport]:
        """Write a checkpoint; collective."""

    def is_saved(self, progress: Progress) -> bool:
        """Whether the newest complete checkpoint is the one of ``progress``."""


class Sound(Protocol):
    """The part of ``steps.Steps`` that matters here."""

    @property
    def progress(self) -> Progress:
        """How far the run is."""

    @property
    def update_is_half_done(self) -> bool:
        """Whether an update was begun and not ended."""

    def back_to_last_sound(self) -> Progress:
        """Take back what the step that failed changed; the progress of the one before."""


def save_last_sound_step(
    error: Exception, steps: Sound, saves: Saves, say: Callable[[str], None]
) -> list[SaveReport]:
    """Save the weights of the last completed step before ``error`` ends the run, where every rank met it;
    returns what became of checkpoints. Raises nothing."""
    if saves.run_name is None:
        return []
    world_size = dist.get_world_size()
    store: Any = None if world_size == 1 else dist.distributed_c10d._get_default_store()
    half = steps.update_is_half_done
    met = Met.by(error, steps.progress.iteration, update_is_half_done=half)
    meeting = ErrorMeeting(saves.run_name, rank=dist.get_rank(), world_size=world_size, store=store)
    why_not = meeting.compare(met)
    if why_not is None and half:
        why_not = "the error came in the middle of an update, so that the weights are those of no step"
    if why_not is not None:
        say(f"the run ends by an error, and the steps since the last checkpoint are not saved: {why_not}")
        return []
    try:
        progress = steps.back_to_last_sound()
        if progress.iteration == 0:
            return []
        if not saves.is_saved(progress):
            say(f"every rank met {met.kind}: step {progress.iteration}, the last sound one, is saved first")
        return saves.save(progress, final=True)
    except Exception as failure:  # noqa: BLE001 (the first error must not be hidden by this one)
        say(f"the last sound step could not be saved: {type(failure).__name__}: {failure}")
        return []


def _words(met: Met) -> str:
    half = " in the middle of an update" if met.update_is_half_done else ""
    return f"met {met.kind} after step {met.iteration}{half} ({met.place})"
