"""Checkpoints in Megatron-Core's ``torch_dist`` format: whole or absent, and loadable under any layout.

    SAVE/latest_checkpointed_iteration.txt   the newest complete one; written last
    SAVE/iter_0000100/                       Megatron-Core's files (model, optimizer, schedule)
    SAVE/iter_0000100/rng/rank_00000.pt      random states, one file per rank
    SAVE/iter_0000100/mt_megatron.json       configuration, patches, layout, progress

A checkpoint is written into a hidden folder and renamed when every rank is done, so a folder named
``iter_*`` is complete. Megatron-Core reads parts of the format with pickle: load only checkpoints
that you trust.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.errors import CheckpointError
from mt_megatron.seams import events
from mt_megatron.training.distributed import Job
from mt_megatron.training.evaluate import synchronised_parameters
from mt_megatron.training.lr import schedule_changes
from mt_megatron.training.model import Trainable
from mt_megatron.training.rng import load_rng, save_rng

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "mt_megatron.json"
_FOLDER = re.compile(r"iter_(\d{7,})")
_SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    iteration: int = 0
    """Steps done."""

    consumed_samples: int = 0
    """Training samples used, over all ranks."""

    consumed_tokens: int = 0
    """Tokens that counted towards the loss."""

    skipped_iterations: int = 0
    """Steps without an update."""


def save_checkpoint(
    directory: Path, trainable: Trainable, progress: Progress, job: Job, *, manifest: Mapping[str, Any]
) -> Path:
    """Write a complete checkpoint below ``directory`` and point ``LATEST`` at it; collective.

    ``manifest`` (JSON-able) is stored beside the weights. An older checkpoint of the same iteration
    is replaced. Returns the checkpoint's folder; raises ``CheckpointError`` on every rank when
    rank 0 cannot prepare or finish it.
    """
    from megatron.core import dist_checkpointing

    final = directory / f"iter_{progress.iteration:07d}"
    partial = directory / f".{final.name}.partial"
    with events.span("checkpoint", iteration=progress.iteration), synchronised_parameters(trainable):
        _on_main(job, lambda: _prepare(partial), f"cannot prepare {partial}")
        dist_checkpointing.save(
            _state(trainable, progress, is_loading=False), str(partial), ("torch_dist", 1)
        )
        save_rng(partial, job)
        document = {
            "progress": asdict(progress),
            "layout": asdict(job.layout),
            "padded_vocab_size": _padded_vocab_size(trainable),
            **manifest,
        }
        dist.barrier()
        _on_main(job, lambda: _publish(partial, final, document), f"cannot complete {final}")
    return final


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that ``directory`` says is its newest; None when it says nothing.

    Raises ``CheckpointError`` when the one it names is not there or not complete.
    """
    pointer = directory / LATEST
    if not pointer.exists():
        return None
    text = pointer.read_text(encoding="utf-8").strip()
    if not text.isdigit():
        raise CheckpointError(
            f"{pointer} says {text!r}, expected an iteration; write the number of one of the iter_* folders "
            "into it, or delete it to start anew"
        )
    folder = directory / f"iter_{int(text):07d}"
    read_manifest(folder)
    return folder


def resolve_checkpoint(path: Path) -> Path:
    """``path`` itself when it is a checkpoint, else the newest one below it.

    Raises ``CheckpointError`` when there is neither.
    """
    if _FOLDER.fullmatch(path.name):
        read_manifest(path)
        return path
    found = latest_checkpoint(path)
    if found is None:
        raise CheckpointError(
            f"found no checkpoint in {path}: expected {LATEST} there, or the path of an iter_* folder"
        )
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """The ``mt_megatron.json`` of a checkpoint. Raises ``CheckpointError`` when there is none."""
    try:
        document: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint of mt_megatron: it has no {MANIFEST}. Give another "
            f"iter_* folder, or write its number into {LATEST}"
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged: {error}. Give another iter_* folder"
        ) from error
    return document


def load_checkpoint(folder: Path, trainable: Trainable, job: Job) -> tuple[Progress, list[str]]:
    """Continue from ``folder``: weights, optimizer, schedule, random states, progress; collective.

    The parallel layout may differ from the one that saved; random states are then left as seeded.
    Returns the progress and one line for everything that is not continued exactly. Raises
    ``CheckpointError`` when the checkpoint does not fit the model.
    """
    from megatron.core.dist_checkpointing.validation import StrictHandling

    document = read_manifest(folder)
    notes = _padding_notes(folder, document, trainable)
    with synchronised_parameters(trainable):
        wanted = _state(trainable, Progress(), is_loading=True)
        settings = _group_settings(wanted["optimizer"])
        state = _load(folder, wanted, document, StrictHandling.RAISE_ALL)
        _load_chunks(trainable, state)
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
    if document["layout"] == asdict(job.layout):
        load_rng(folder, job)
    else:
        notes.append(
            f"random states start from the seed: the checkpoint's layout {_words(document['layout'])} is not "
            f"this run's {_words(asdict(job.layout))}"
        )
    return Progress(**document["progress"]), notes


def load_weights(folder: Path, trainable: Trainable) -> None:
    """Only the model's weights of ``folder``, for a run that starts anew from them; collective."""
    from megatron.core.dist_checkpointing.validation import StrictHandling

    document = read_manifest(folder)
    with synchronised_parameters(trainable):
        wanted = _model_state(trainable)
        # The checkpoint also holds an optimizer's state, which nobody asked for.
        _load_chunks(trainable, _load(folder, wanted, document, StrictHandling.RAISE_UNEXPECTED))
        trainable.optimizer.reload_model_params()


def _state(trainable: Trainable, progress: Progress, *, is_loading: bool) -> dict[str, Any]:
    state = _model_state(trainable)
    state["optimizer"] = trainable.optimizer.sharded_state_dict(dict(state), is_loading=is_loading)
    state["opt_param_scheduler"] = trainable.scheduler.state_dict()
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
        state[_key(index, chunks)] = chunk.sharded_state_dict()  # type: ignore[operator]
    return state


def _padded_vocab_size(trainable: Trainable) -> int | None:
    size: int | None = getattr(trainable.bare_chunks()[0], "vocab_size", None)
    return size


def _padding_notes(folder: Path, document: Mapping[str, Any], trainable: Trainable) -> list[str]:
    saved, wanted = document.get("padded_vocab_size"), _padded_vocab_size(trainable)
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


def _load_chunks(trainable: Trainable, state: Mapping[str, Any]) -> None:
    chunks = trainable.bare_chunks()
    for index, chunk in enumerate(chunks):
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

    try:
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(folder), strict=strict)
    except (CheckpointingException, CheckpointException, KeyError, RuntimeError, OSError, EOFError) as error:
        saved = document.get("config", {}).get("model", {})
        shape = ", ".join(f"{name} {saved[name]}" for name in _SHAPE if name in saved)
        raise CheckpointError(
            f"{folder} ({shape}) does not load into this run's model: {type(error).__name__}: {error}. Use "
            f"the configuration stored in its {MANIFEST}, or another checkpoint"
        ) from error
    return state


def _prepare(partial: Path) -> None:
    # Also what an earlier run was writing when it was killed.
    for stale in partial.parent.glob(".iter_*.partial"):
        shutil.rmtree(stale)
    partial.mkdir(parents=True)


def _publish(partial: Path, final: Path, document: Mapping[str, Any]) -> None:
    write_durably(partial / MANIFEST, json.dumps(document, indent=2, sort_keys=True) + "\n")
    _sync_folder(partial)
    replaced = final.with_name(f".{final.name}.replaced")
    if replaced.exists():
        shutil.rmtree(replaced)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    write_durably(final.parent / LATEST, f"{int(final.name.removeprefix('iter_'))}\n")
    if replaced.exists():
        shutil.rmtree(replaced)


def write_durably(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` holds either what it held before or all of it."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _on_main(job: Job, action: Any, what: str) -> None:
    failure: OSError | None = None
    if job.is_main:
        try:
            action()
        except OSError as error:
            failure = error
    said = job.agree(failure)
    if said is not None:
        raise CheckpointError(f"{what}: {said}. Check free space and permissions") from failure


def _words(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in layout.items())
