"""A user's choice of a schedule, as text: ``NAME``, ``NAME:NUMBER``, ``FILE.csv`` or ``auto``.

``1f1b`` and ``interleaved`` without a number are Megatron-Core's own, untouched. Reading the text imports
neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..near_names import hint
from .actions import Placement, Schedule, Style
from .csv_form import read_csv
from .forward_only import forward_only
from .generate.catalogue import NAMES, SHORT_NAMES, V_SHAPED, generate
from .validate import validate

AUTO = "auto"
"""The choice that is left to ``mt_megatron.pipeline.policy``; with a number, activations (micro-batches of
one chunk) that a rank may keep at most."""

AUTO_IF_PIPELINE = "auto_if_pipeline"
"""A value for scripts that know no layout: ``auto`` where there is a pipeline, nothing otherwise."""

UPSTREAM = ("1f1b", "interleaved")
"""Names that, without a number, are Megatron-Core's own schedules."""

NUMBERED = {"hybrid": "K, micro-batches of a group", "memory_capped": "N, activations that a rank may keep"}
"""Names that need a number, and which."""

_POLICY = f"{__package__}.policy.automatic"

Choose = Callable[[int, int, bool], "Schedule | None"]
"""``mt_megatron.pipeline.execute.source.Choose``."""


@dataclass(frozen=True)
class ScheduleChoice:
    """Value of ``--pipeline-schedule``, parsed."""

    text: str
    name: str
    number: int | None = None
    """Micro-batches of a group, or for memory_capped activations that a rank keeps."""

    file: Schedule | None = None
    """Schedule in a FILE.csv."""

    is_default: bool = False
    """Nobody asked for it: without a pipeline it means nothing."""

    @property
    def is_upstream(self) -> bool:
        """True where Megatron-Core's own schedule is meant, which then runs untouched."""
        return self.file is None and self.name in UPSTREAM and self.number is None

    @property
    def is_v(self) -> bool:
        """True where stages are laid out as a V."""
        if self.file is not None:
            return self.file.placement.style is Style.V
        return self.name in V_SHAPED

    def schedule(self, ranks: int, chunks: int, microbatches: int) -> Schedule:
        """The schedule of a training step. Raises ConfigError where the choice does not fit the sizes."""
        if self.name == AUTO:
            raise ConfigError(
                "found pipeline schedule auto; expected a name or a file: auto has no one schedule"
            )
        if self.file is not None:
            return _fitting(self.file, self.text, ranks, chunks, microbatches)
        if self.number is None and self.name in NUMBERED:
            raise ConfigError(
                f"found {self.name} without a number; expected {self.name}:{NUMBERED[self.name]}"
            )
        options: dict[str, Any] = {}
        if self.number is not None:
            options["cap" if self.name == "memory_capped" else "group"] = self.number
        return generate(self.name, ranks=ranks, chunks=chunks, microbatches=microbatches, **options)

    def problems(self, ranks: int, chunks: int, microbatches: int) -> list[str]:
        """One line per problem of running this with ``ranks`` pipeline ranks of ``chunks`` chunks each and
        ``microbatches`` per step: found, expected, what to change."""
        if ranks == 1 and self.is_default:
            return []
        if ranks == 1:
            return [
                f"pipeline_schedule is {self.text} with pipeline_model_parallel_size 1; expected a size "
                "above 1, since one rank has nothing to schedule. Leave --pipeline-schedule out or raise "
                "--pipeline-model-parallel-size."
            ]
        if self.name == AUTO:
            return self._auto_problems(ranks, chunks, microbatches)
        if self.is_v and chunks != 2:
            return [
                f"pipeline_schedule is {self.text} with {chunks} model chunk(s) per rank; expected 2, a way "
                "there and a way back. Set --virtual-pipeline-model-parallel-size 2 or change "
                "--pipeline-schedule."
            ]
        try:
            made = self.schedule(ranks, chunks, microbatches)
        except ConfigError as error:
            return [f"pipeline_schedule is {self.text}: {error}. Change --pipeline-schedule or the sizes."]
        return [f"pipeline_schedule is {self.text}: {problem}." for problem in validate(made)]

    def source(self, ranks: int, chunks: int) -> Choose | None:
        """What ``set_pipeline_schedule`` takes; None for Megatron-Core's own schedule."""
        if self.is_upstream or (self.is_default and ranks == 1):
            return None
        if self.name == AUTO:
            made: Choose = _policy().automatic(ranks=ranks, chunks=chunks, cap=self.number)
            return made

        @lru_cache(maxsize=64)
        def schedule(microbatches: int, only_forward: bool) -> Schedule:
            if only_forward:
                return forward_only(
                    Placement(ranks, chunks, Style.V if self.is_v else Style.LOOP), microbatches
                )
            return self.schedule(ranks, chunks, microbatches)

        return lambda step, microbatches, only_forward: schedule(microbatches, only_forward)

    def _auto_problems(self, ranks: int, chunks: int, microbatches: int) -> list[str]:
        if self.number is None:
            # Some schedule takes any sizes, and its memory is what the cap is made of. To make them all takes
            # seconds where stages and micro-batches are many.
            return []
        try:
            _policy().controller(Placement(ranks, chunks), microbatches, self.number)
        except ConfigError as error:
            return [f"pipeline_schedule is {self.text}: {error}. Change --pipeline-schedule or the sizes."]
        return []

    def for_any_layout(self) -> Choose:
        """``source`` for a script, whose sizes are known once it has made its process groups. Every step
        raises ConfigError where they do not fit, also without a pipeline."""
        return _ForAnyLayout(self)


class _ForAnyLayout:
    """A source that asks Megatron-Core for the sizes."""

    def __init__(self, choice: ScheduleChoice) -> None:
        self._choice = choice
        self._sources: dict[tuple[int, int], Choose | None] = {}
        self._latest: Choose | None = None

    @property
    def is_upstream(self) -> bool:
        """True where Megatron-Core's own schedule is meant."""
        return self._choice.is_upstream

    def require_pipeline(self) -> None:
        """Raise ConfigError if somebody asked for a schedule: there is one pipeline rank."""
        for problem in self._choice.problems(1, 1, 1):
            raise ConfigError(problem)

    # What an automatic source wants to know; others want nothing.

    def begin_step(self, schedule: Schedule) -> Any:
        """See ``execute.source.Watches``."""
        begin_step = getattr(self._latest, "begin_step", None)
        return None if begin_step is None else begin_step(schedule)

    def end_step(self, schedule: Schedule, times: Any) -> None:
        """See ``execute.source.Watches``."""
        self._latest.end_step(schedule, times)  # type: ignore[union-attr]

    def leaves_to_upstream(self, error: ConfigError) -> bool:
        """See ``execute.source.Watches``."""
        leaves = getattr(self._latest, "leaves_to_upstream", None)
        return leaves is not None and leaves(error)

    def __call__(self, step: int, microbatches: int, only_forward: bool) -> Schedule | None:
        from megatron.core import parallel_state

        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        if (ranks, chunks) not in self._sources:
            self._sources[ranks, chunks] = self._choice.source(ranks, chunks)
        source = self._latest = self._sources[ranks, chunks]
        if source is not None and not only_forward and (found := self._checked(ranks, chunks, microbatches)):
            raise ConfigError("; ".join(found))
        return None if source is None else source(step, microbatches, only_forward)

    @lru_cache(maxsize=64)  # noqa: B019 - one object for the life of the process
    def _checked(self, ranks: int, chunks: int, microbatches: int) -> list[str]:
        return self._choice.problems(ranks, chunks, microbatches)


@lru_cache(maxsize=16)
def parse(text: str) -> ScheduleChoice:
    """The choice that ``text`` makes. Raises ConfigError for an unknown name, a number that is none, and a
    file that cannot be read or holds no schedule."""
    if text.endswith(".csv"):
        try:
            return ScheduleChoice(text, Path(text).stem, file=read_csv(text))
        except ConfigError as error:
            raise ConfigError(
                f"found pipeline_schedule {text!r}: {error}. Change --pipeline-schedule"
            ) from error
    name, colon, number = text.partition(":")
    name = name.strip().lower().replace("-", "_")
    name = SHORT_NAMES.get(name, name)
    if name == AUTO_IF_PIPELINE and not colon:
        return ScheduleChoice(text, AUTO, is_default=True)
    if name not in (AUTO, *NAMES):
        known = [AUTO, *NAMES]
        raise ConfigError(
            f"found pipeline_schedule {text!r}; expected one of {', '.join(known)}, or a FILE.csv."
            f"{hint(name, known)} Change --pipeline-schedule"
        )
    if not colon:
        return ScheduleChoice(text, name)
    if not number.strip().isdecimal() or int(number) < 1:
        raise ConfigError(
            f"found pipeline_schedule {text!r}; expected {name}:NUMBER with a whole number of at least 1. "
            "Change --pipeline-schedule"
        )
    return ScheduleChoice(text, name, int(number))


def _fitting(file: Schedule, text: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    placement = file.placement
    if (placement.ranks, placement.chunks, file.microbatches) != (ranks, chunks, microbatches):
        raise ConfigError(
            f"{text} has {placement.ranks} ranks of {placement.chunks} chunk(s) and {file.microbatches} "
            f"micro-batches; expected {ranks} ranks of {chunks} chunk(s) and {microbatches} micro-batches, "
            "as the run has"
        )
    if file.forward_only:
        raise ConfigError(f"{text} has forwards only; expected the backwards of a training step as well")
    return file


def _policy() -> Any:
    return import_module(_POLICY)
