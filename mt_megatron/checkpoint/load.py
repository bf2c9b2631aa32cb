"""What a checkpoint holds of a run in Megatron-Core's terms, and how it gets back into one under any layout.

The folder and its files are the business of ``files``, saving that of ``store``.
Megatron-Core reads parts of the format with pickle: load only checkpoints that you trust.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.checkpoint.files import (
    LATEST,
    MANIFEST,
    damaged_files,
    latest_checkpoint,
    read_manifest,
    resolve_checkpoint,
    write_durably,
)
from mt_megatron.checkpoint.progress import Progress, progress_from
from mt_megatron.checkpoint.retention import in_use
from mt_megatron.checkpoint.rng import load_rng
from mt_megatron.checkpoint.run_parts import Job, Trainable, synchronised_parameters
from mt_megatron.errors import CheckpointError
from mt_megatron.fp8 import checkpoint as fp8
from mt_megatron.fp8.extra_state import without_extra_state


def complete(optimizer: Any) -> None:
    """Give every parameter of a Megatron optimizer the state of no update, where it has none yet.

    The next update is the same with it and without it, to the bit.
    """
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = part.optimizer
        # Megatron-Core calls this before it loads, and has None there for SGD.
        part.init_state_fn = _complete
        _complete(inner)


def _complete(inner: torch.optim.Optimizer) -> None:
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state.get(parameter):
                initial = _initial(inner, group, parameter)
                if initial:
                    inner.state[parameter] = initial
    if not any(group["params"] for group in inner.param_groups):
        # It has no state to count updates in, and its groups do so instead.
        for group in inner.param_groups:
            group.setdefault("step", 0.0)
    count_alike(inner.param_groups)


def count_alike(groups: list[dict[str, Any]]) -> None:
    """Updates of groups without parameters, set to those of the others: FusedAdam of Apex and Transformer
    Engine leaves them uncounted, and another stage, for which they are saved, may have parameters there."""
    counted = [group["step"] for group in groups if group["params"] and "step" in group]
    if counted:
        for group in groups:
            if not group["params"]:
                group["step"] = counted[0]


def _initial(inner: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    from megatron.core.optimizer import distrib_optimizer

    if isinstance(inner, torch.optim.SGD):
        # A first update makes the buffer a copy of the gradient, which is what momentum * 0 + gradient is.
        return {"momentum_buffer": torch.zeros_like(parameter.data)} if group["momentum"] else {}
    state: dict[str, Any] = {
        "exp_avg": torch.zeros_like(parameter.data),
        "exp_avg_sq": torch.zeros_like(parameter.data),
    }
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        # Apex and Transformer Engine count in the groups. Fused kernels count on the device.
        on = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=on)
    return state


__all__ = [
    "LATEST",
    "MANIFEST",
    "Progress",
    "damage",
    "latest_checkpoint",
    "load_checkpoint",
    "load_weights",
    "read_manifest",
    "resolve_checkpoint",
    "run_state",
    "write_durably",
]

_SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")


def damage(folder: Path) -> list[str]:
    """One line for each file of ``folder`` that is not what its manifest says, or for the manifest
    itself; collective: each rank reads a share, and all get all lines."""
    mine = []
    try:
        document = read_manifest(folder)
    except CheckpointError as error:
        mine.append(str(error))
    else:
        mine.extend(damaged_files(folder, document, reader=dist.get_rank(), readers=dist.get_world_size()))
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return list(dict.fromkeys(line for lines in everyone for line in lines))


def load_checkpoint(
    folder: Path, trainable: Trainable, job: Job, *, verify: bool = True
) -> tuple[Progress, list[str]]:
    """Continue from ``folder``: weights, optimizer, schedule, random states, progress; collective.

    The parallel layout may differ from the one that saved; random states are then left as seeded.
    Returns the progress and one line for everything that is not continued exactly. Raises
    ``CheckpointError`` when the checkpoint does not fit the model, or with ``verify`` when a file is
    not what was written.
    """
    with in_use(folder):
        return _load_all(folder, trainable, job, verify)


def _load_all(folder: Path, trainable: Trainable, job: Job, verify: bool) -> tuple[Progress, list[str]]:
    from megatron.core.dist_checkpointing.validation import StrictHandling

    document = _verified(folder, verify)
    if document.get("weights_only"):
        raise CheckpointError(
            f"{folder} holds weights and no state of a run, so that none can be continued from it; start "
            f"from its weights with --load {folder.parent}"
        )
    _require_same_optimizer(folder, document, trainable)
    notes = _padding_notes(folder, document, trainable)
    fp8_continues, fp8_notes = fp8.continues(
        folder, document.get("config", {}).get("model", {}), trainable.core
    )
    notes += fp8_notes
    with synchronised_parameters(trainable):
        wanted = run_state(trainable, Progress(), is_loading=True)
        if not fp8_continues:
            wanted.pop(fp8.KEY, None)
        settings = _group_settings(wanted["optimizer"])
        all_continues = fp8.saved_recipe(document.get("config", {}).get("model", {})) is None
        if fp8_continues:
            all_continues, lines = fp8.keep_saved(folder, wanted)
            notes += lines
        # FP8 state of a run that this one does not continue may stay in the file, nothing else.
        strict = StrictHandling.RAISE_ALL if all_continues else StrictHandling.RAISE_UNEXPECTED
        state = _load(folder, wanted, document, strict)
        _load_chunks(trainable, state)
        # Steps are counted by the run, whatever it trained with before.
        fp8.begin_at(trainable.chunks, document["progress"]["iteration"])
        found = state.get(fp8.KEY, {}) if fp8_continues else {}
        fp8.reset(trainable.chunks, but=found)
        fp8.load(trainable.chunks, found)
        _keep_group_settings(state["optimizer"], settings)
        trainable.optimizer.load_state_dict(state["optimizer"])
    saved = state["opt_param_scheduler"]
    changes = schedule_changes(saved, trainable.scheduler)
    if changes:
        notes.append(
            f"the schedule follows this run's configuration, not the checkpoint's: {', '.join(changes)}"
        )
    trainable.scheduler.num_steps = 0
    trainable.scheduler.load_state_dict(saved)
    # Checkpoints of earlier versions know no V.
    if {"v": False, **document["layout"]} == asdict(job.layout):
        own = load_rng(folder, job)
        if fp8_continues:
            fp8.load_rank_state(trainable.chunks, own)
    else:
        notes.append(
            f"random states start from the seed: the checkpoint's layout {_words(document['layout'])} is not "
            f"this run's {_words(asdict(job.layout))}"
        )
    return progress_from(document["progress"]), notes


def _verified(folder: Path, verify: bool) -> dict[str, Any]:
    found = damage(folder) if verify else []
    if found:
        raise CheckpointError(
            f"{folder} is damaged and was not loaded:\n"
            + "\n".join(f"- {line}" for line in found)
            + "\nGive another checkpoint, or --no-verify-checkpoint to load it all the same"
        )
    return read_manifest(folder)


def load_weights(folder: Path, trainable: Trainable, *, verify: bool = True) -> None:
    """Only the model's weights of ``folder``, for a run that starts anew from them; collective.

    Raises ``CheckpointError`` as ``load_checkpoint`` does.
    """
    from megatron.core.dist_checkpointing.validation import StrictHandling

    with in_use(folder), synchronised_parameters(trainable):
        document = _verified(folder, verify)
        wanted = _model_state(trainable)
        # The checkpoint also holds an optimizer's state, which nobody asked for.
        _load_chunks(trainable, _load(folder, wanted, document, StrictHandling.RAISE_UNEXPECTED))
        trainable.optimizer.reload_model_params()


def run_state(trainable: Trainable, progress: Progress, *, is_loading: bool) -> dict[str, Any]:
    """The sharded state dict of everything that training changes, but for random states.

    Its tensors are the live ones. The optimizer's state is made where there is none yet.
    """
    complete(trainable.optimizer)
    state = _model_state(trainable)
    state["optimizer"] = trainable.optimizer.sharded_state_dict(dict(state), is_loading=is_loading)
    state["opt_param_scheduler"] = trainable.scheduler.state_dict()
    if fp8_state := fp8.sharded_state(trainable.chunks):
        state[fp8.KEY] = fp8_state
    state["iteration"] = progress.iteration
    state["checkpoint_version"] = 3.0
    return state


def _model_state(trainable: Trainable) -> dict[str, Any]:
    from megatron.core import parallel_state

    chunks = trainable.bare_chunks()
    state: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        if len(chunks) > 1:
            # Layer offsets are computed from the current virtual rank.
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        # FP8 state is beside the weights in ours.
        with without_extra_state():
            state[_key(index, chunks)] = chunk.sharded_state_dict()  # type: ignore[operator]
    return state


def padded_vocab_size(trainable: Trainable) -> int | None:
    """Rows of the embedding with padding; None for a model without one."""
    size: int | None = getattr(trainable.bare_chunks()[0], "vocab_size", None)
    return size


def _padding_notes(folder: Path, document: Mapping[str, Any], trainable: Trainable) -> list[str]:
    saved, wanted = document.get("padded_vocab_size"), padded_vocab_size(trainable)
    if saved == wanted:
        return []
    if trainable.chunks[0].ddp_config.use_distributed_optimizer:
        # Megatron-Core leaves the state of rows that are not in the file uninitialised.
        raise CheckpointError(
            f"{folder} has a vocabulary padded to {saved}, this run pads it to {wanted}, and the distributed "
            "optimizer's state cannot be padded anew. Choose --make-vocab-size-divisible-by so that both "
            "agree, or start from the weights alone with --load"
        )
    return [f"the vocabulary is padded to {wanted} instead of {saved}: new rows start at zero"]


def _require_same_optimizer(folder: Path, document: Mapping[str, Any], trainable: Trainable) -> None:
    parallel = document.get("config", {}).get("parallel", {})
    experts = parallel.get("expert_model_parallel_size", 1)
    if (experts > 1) != (trainable.core.expert_model_parallel_size > 1):
        # Experts have an optimizer of their own as soon as they are spread, not before.
        raise CheckpointError(
            f"{folder} was saved with expert_model_parallel_size {experts} and this run has "
            f"{trainable.core.expert_model_parallel_size}: with 1 there is one optimizer, above it experts "
            "have their own. Choose a size on the same side, or start from the weights alone with --load"
        )
    saved = parallel.get("use_distributed_optimizer")
    wanted = bool(trainable.chunks[0].ddp_config.use_distributed_optimizer)
    if saved is None or bool(saved) == wanted:
        return
    # Megatron-Core stores slices of flattened tensors in the one case and whole tensors in the other.
    raise CheckpointError(
        f"{folder} was saved {'with' if saved else 'without'} the distributed optimizer and this run is "
        f"{'with' if wanted else 'without'} it: their states have different forms. "
        f"{'Set' if saved else 'Leave out'} --use-distributed-optimizer, or start from the weights alone "
        "with --load"
    )


def _load_chunks(trainable: Trainable, state: Mapping[str, Any]) -> None:
    chunks = trainable.bare_chunks()
    for index, chunk in enumerate(chunks):
        with without_extra_state():
            chunk.load_state_dict(state[_key(index, chunks)])


def _group_settings(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """What this rank decided about its parameter groups, from a (nested) optimizer state."""
    kept: dict[Any, Any] = {}
    for key, value in state.items():
        if key == "param_groups":
            kept[key] = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in value]
        elif isinstance(value, dict) and key not in ("state", "param_state"):
            kept[key] = _group_settings(value)
    return kept


def _keep_group_settings(loaded: dict[Any, Any], own: Mapping[Any, Any]) -> None:
    """Put ``own`` settings back into a loaded optimizer state.

    The file holds rank 0's groups. A later pipeline stage meets a norm before a matrix, so its
    groups come in another order: taken over as they are, they would swap who has weight decay.
    """
    for key, value in own.items():
        if key == "param_groups":
            loaded[key] = [{**theirs, **mine} for theirs, mine in zip(loaded[key], value, strict=True)]
        elif key in loaded:
            _keep_group_settings(loaded[key], value)


def _key(index: int, chunks: list[torch.nn.Module]) -> str:
    return "model" if len(chunks) == 1 else f"model{index}"


def _load(folder: Path, wanted: dict[str, Any], document: Mapping[str, Any], strict: Any) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    if "optimizer" in wanted:
        _require_same_groups(folder, wanted)
    try:
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(folder), strict=strict)
    except (
        CheckpointingException,
        CheckpointException,
        KeyError,
        ValueError,
        RuntimeError,
        OSError,
        EOFError,
    ) as error:
        saved = document.get("config", {}).get("model", {})
        shape = ", ".join(f"{name} {saved[name]}" for name in _SHAPE if name in saved)
        raise CheckpointError(
            f"{folder} ({shape}) does not load into this run's model: {type(error).__name__}: {error}. Use "
            f"the configuration stored in its {MANIFEST}, or another checkpoint"
        ) from error
    return state


def _require_same_groups(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` on every rank when one has other numbers of parameter groups than ``folder``;
    collective. Megatron-Core notices it on that rank alone, and the others wait for it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    mine = None
    try:
        saved = dist_checkpointing.load_common_state_dict(str(folder))
    except (CheckpointingException, KeyError, ValueError, RuntimeError, OSError, EOFError):
        # Damage is reported where the file is loaded, by every rank.
        saved = {}
    if "optimizer" in saved:
        there, own = _group_counts(saved["optimizer"]), _group_counts(wanted["optimizer"])
        if there != own:
            mine = f"rank {dist.get_rank()} has {own} and the checkpoint {there}"
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    said = [each for each in everyone if each is not None]
    if said:
        raise CheckpointError(
            f"{folder} holds other parameter groups of the optimizer than this run has: {said[0]} (and "
            f"{len(said) - 1} more ranks). Continue with the layout and the --decoupled-lr that it was saved "
            "with, or start from the weights alone with --load"
        )


def _group_counts(state: Mapping[Any, Any]) -> list[int]:
    """Numbers of parameter groups of the optimizers in a (nested) state."""
    found: list[int] = []
    for key, value in state.items():
        if key == "param_groups":
            found.append(len(value))
        elif isinstance(value, dict) and key not in ("state", "param_state"):
            found += _group_counts(value)
    return found


def _words(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in layout.items())


def schedule_changes(saved: dict[str, Any], scheduler: Any) -> list[str]:
    """What the configuration changes about a checkpoint's schedule, by option, one phrase each."""
    return [
        f"{_OPTIONS.get(name, name)} {saved[name]} -> {value}{' samples' * (name in _IN_SAMPLES)}"
        for name, value in scheduler.state_dict().items()
        if name != "num_steps" and name in saved and saved[name] != value
    ]


_IN_SAMPLES = ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")
_OPTIONS = {
    "max_lr": "lr",
    "lr_warmup_steps": "lr_warmup_iters",
    "lr_decay_steps": "lr_decay_iters",
    "wd_incr_steps": "train_iters",
    "start_wd": "start_weight_decay",
    "end_wd": "end_weight_decay",
    "wd_incr_style": "weight_decay_incr_style",
}
"""Names in the scheduler's state, and the option that each comes from. It calls samples steps."""
