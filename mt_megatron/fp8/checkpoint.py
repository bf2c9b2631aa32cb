"""FP8 state in checkpoints: one row for each linear, and scales that are each rank's own; the step that draws
depend on is the run's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from mt_megatron.errors import CheckpointError
from mt_megatron.fp8.attach import recipe_of_config
from mt_megatron.fp8.layers import run_recipe
from mt_megatron.fp8.state import states_of

KEY = "fp8"
_SCALES = "fp8_gathered_scales"
_ROWS = "fp8_rows"


def sharded_state(chunks: Any) -> dict[str, Any]:
    """Of the models in ``chunks``, for Megatron-Core's distributed checkpoints: a ``ShardedTensor`` of fp64
    for each linear, by its global name, so that it finds its place under any layout. Empty without FP8."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    replica = (
        0,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return {
        name: ShardedTensor.from_rank_offsets(f"{KEY}.{name}", state.row(name), replica_id=replica)
        for state in states_of(chunks)
        for name in state.linears
    }


def rank_state(chunks: Any) -> dict[str, Any]:
    """State of each rank's own, for its file of random states: the scales with which weights were gathered in
    FP8, by linear, and rows that differ between data-parallel ranks. Empty without them."""
    scales = {
        name: [None if each.gathered_scale is None else each.gathered_scale.cpu() for each in linears]
        for state in states_of(chunks)
        for name, linears in state.linears.items()
        if any(each.gathered_scale is not None for each in linears)
    }
    rows = {
        name: state.row(name)
        for state in states_of(chunks)
        if state.recipe.scaling == "delayed" and state.recipe.amax_group != "tp-cp-dp"
        for name in state.linears
    }
    return {key: value for key, value in ((_SCALES, scales), (_ROWS, rows)) if value}


def load_rank_state(chunks: Any, loaded: Mapping[str, Any]) -> None:
    """Put what ``rank_state`` returned back; for the same layout only. What it has no scale for is gathered
    with a new one."""
    scales: Mapping[str, Any] = loaded.get(_SCALES, {})
    rows: Mapping[str, Any] = loaded.get(_ROWS, {})
    for state in states_of(chunks):
        for name in state.linears:
            # Where all data-parallel ranks have magnitudes in common, what each had of its own is no state.
            if name in rows and state.recipe.amax_group != "tp-cp-dp":
                state.load_row(name, rows[name])
        for name, linears in state.linears.items():
            for linear, scale in zip(linears, scales.get(name, [None] * len(linears)), strict=True):
                linear.gathered_scale = None if scale is None else scale.to(linear.parameter.device)


def begin_at(chunks: Any, iteration: int) -> None:
    """``iteration`` steps were made: what draws and telemetry count on from."""
    for state in states_of(chunks):
        state.step = iteration


def reset(chunks: Any, *, but: Collection[str] = ()) -> None:
    """Start the state of all linears anew that are not named in ``but``."""
    for state in states_of(chunks):
        for name in state.linears:
            if name not in but:
                state.reset_row(name)


def load(chunks: Any, loaded: Mapping[str, Any]) -> None:
    """Put what ``sharded_state`` described, with loaded tensors, back."""
    for state in states_of(chunks):
        for name in state.linears:
            if name in loaded:
                state.load_row(name, loaded[name])


def keep_saved(folder: Any, wanted: dict[str, Any]) -> tuple[bool, list[str]]:
    """Take the linears that the checkpoint in ``folder`` has no state of out of ``wanted[KEY]``; collective.

    They compute in FP8 since, or have other names. Returns whether all that is in the file is continued, and
    one line for each kind of what is not.
    """
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import load_tensors_metadata

    saved = {key.removeprefix(f"{KEY}.") for key in load_tensors_metadata(str(folder)) if _is_ours(key)}
    mine: dict[str, Any] = wanted.get(KEY, {})
    every: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, set(mine))
    now = set().union(*every)
    wanted[KEY] = {name: value for name, value in mine.items() if name in saved}
    lines = []
    if new := sorted(now - saved):
        lines.append(
            f"FP8 state of {len(new)} linear(s) starts anew, which had none in {folder}: {_few(new)}"
        )
    if left := sorted(saved - now):
        lines.append(f"FP8 state of {len(left)} linear(s) that stay in bf16 now is left: {_few(left)}")
    return not left, lines


def _is_ours(key: str) -> bool:
    return key.startswith(f"{KEY}.")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def saved_recipe(model: Mapping[str, Any]) -> str | None:
    """The recipe of a run whose configuration's section ``model`` is given."""
    names = ("fp8_recipe", "fp8", "transformer_impl")
    return run_recipe(SimpleNamespace(**{name: model.get(name) for name in names}))


def continues(folder: Any, saved: Mapping[str, Any], config: Any) -> tuple[bool, list[str]]:
    """Decision whether the state in a checkpoint is continued, and one line for what is not. The same on
    every rank: ``config``, the ``TransformerConfig``, decides.

    Raises CheckpointError where it holds magnitudes that this run's recipe has another use for.
    """
    before = saved_recipe(saved)
    now = recipe_of_config(config)
    if before is None or now is None:
        if before is None and now is not None:
            return False, [f"FP8 state starts anew: {folder} was trained without fp8_recipe"]
        return False, []
    if "delayed" in (before, now.name):
        history = int(saved.get("fp8_amax_history_len", 1))
        if before != now.name or history != now.history:
            raise CheckpointError(
                f"{folder} was saved with fp8_recipe {before}"
                f"{f' and fp8_amax_history_len {history}' if before == 'delayed' else ''}, this run has "
                f"{now.name}{f' and {now.history}' if now.name == 'delayed' else ''}: magnitudes of the one "
                "are no state of the other. Set --fp8-recipe and --fp8-amax-history-len as they were, or "
                "start from the weights alone with --load"
            )
    if before != now.name:
        return True, [f"fp8_recipe is {now.name} instead of {before}"]
    return True, []
