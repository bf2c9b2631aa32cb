"""Starts of the data-parallel reductions of stages' gradients.

Upstream reduces nothing (``no_sync``) until a chunk's last backward, during which the hooks of
``DistributedDataParallel`` start each bucket that is complete. The same holds here where a REDUCE follows the
stage's last computation of gradients at once. Where a schedule puts it elsewhere, or the configuration has a
``grad_sync_func``, all buckets of the chunk start at the REDUCE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.actions import Action, Kind


class Reduction:
    """The reductions of one rank in one training step."""

    def __init__(
        self, config: Any, model: Sequence[torch.nn.Module], stages: Sequence[int], actions: Sequence[Action]
    ) -> None:
        """``stages``: by chunk. Switches the reduction off for all chunks. Raises ConfigError as
        ``require_per_chunk`` does."""
        self._model = model
        self._chunk = {stage: chunk for chunk, stage in enumerate(stages)}
        self._start = _per_chunk(config.grad_sync_func, len(model), "grad_sync_func", shared=True)
        no_sync = _per_chunk(config.no_sync_func, len(model), "no_sync_func", shared=False)
        self._overlaps = no_sync is not None or self._start is not None
        self._switch_on = _switches(actions) if self._start is None else {}
        self._done: set[int] = set()
        self._off: dict[int, AbstractContextManager[Any]] = {}
        for chunk, switch_off in enumerate(no_sync or ()):
            context = switch_off()
            context.__enter__()
            self._off[chunk] = context

    def before(self, index: int) -> None:
        """Called before each computation, by its place in the rank's list."""
        stage = self._switch_on.get(index)
        if stage is not None:
            self._on(self._chunk[stage])

    def reduce(self, stage: int) -> None:
        """A REDUCE."""
        if not self._overlaps or stage in self._done:
            return
        self._done.add(stage)
        chunk = self._chunk[stage]
        by_hooks = stage in self._switch_on.values()
        self._on(chunk)
        if self._start is not None:
            self._start[chunk](self._model[chunk].parameters())
        elif not by_hooks:
            start = getattr(self._model[chunk], "start_grad_sync", None)
            if start is not None:
                start()

    def finish(self) -> None:
        """Start what no REDUCE has started."""
        for stage in self._chunk:
            self.reduce(stage)

    def undo(self) -> None:
        """Switch the reduction on again, after an error."""
        for chunk in list(self._off):
            self._on(chunk)

    def _on(self, chunk: int) -> None:
        context = self._off.pop(chunk, None)
        if context is not None:
            context.__exit__(None, None, None)


def require_per_chunk(config: Any, chunks: int) -> None:
    """Raise ConfigError for a ``no_sync_func``, or a list of ``grad_sync_func``, of another length."""
    _per_chunk(config.grad_sync_func, chunks, "grad_sync_func", shared=True)
    _per_chunk(config.no_sync_func, chunks, "no_sync_func", shared=False)


def _switches(actions: Sequence[Action]) -> dict[int, int]:
    """Index of the backward of a stage's last micro-batch -> the stage, where the REDUCE comes right after
    its last computation of gradients."""
    last: dict[int, int] = {}
    backward: dict[int, int] = {}
    for index, action in enumerate(actions):
        if action.kind in (Kind.B, Kind.W):
            last[action.stage] = index
        if action.kind is Kind.B:
            backward[action.stage] = index
    found = {}
    for stage, index in last.items():
        following = (each for each in actions[index + 1 :] if each.kind.computes or each.kind is Kind.REDUCE)
        after = next(following, None)
        if after is not None and after.kind is Kind.REDUCE and after.stage == stage:
            found[backward[stage]] = stage
    return found


def _per_chunk(functions: Any, chunks: int, name: str, *, shared: bool) -> list[Callable[..., Any]] | None:
    if functions is None:
        return None
    if isinstance(functions, (list, tuple)):
        found = list(functions)
    else:
        # A function that takes the parameters may serve all chunks; one that switches all off may not.
        found = [functions] * (chunks if shared else 1)
    if len(found) != chunks:
        raise ConfigError(
            f"found {len(found)} {name} for {chunks} model chunks; expected a list of one per chunk, since "
            "a pipeline schedule reduces each chunk by itself. Change the model's configuration"
        )
    return found
