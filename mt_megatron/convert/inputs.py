"""Input of a conversion: a published folder or a Megatron checkpoint, opened, with its options and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mt_megatron.checkpoint.files import MANIFEST, read_manifest
from mt_megatron.config.types import options as known_options
from mt_megatron.convert.folders import CONFIG, METADATA, check_published, megatron_folder, read_json
from mt_megatron.convert.hf.config import options_of
from mt_megatron.convert.hf.side_files import (
    End,
    carried_files,
    check_tokens,
    end_of_run,
    side_files,
    tokenizer_files,
)
from mt_megatron.convert.hf.weights import PublishedFolder, PublishedSource, of_prediction
from mt_megatron.convert.optimizer_state import Optimizer
from mt_megatron.convert.rank_files.arguments import COMMON, options_from_arguments, read_common
from mt_megatron.convert.rank_files.reader import TorchFolder, is_torch_folder
from mt_megatron.convert.run_state import RunState
from mt_megatron.convert.settings import buildable, model_of
from mt_megatron.convert.tensors.sources import WholeTensors
from mt_megatron.convert.torch_dist.reader import DistFolder
from mt_megatron.errors import CheckpointError

_ADAPTER = "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class Input:
    """An opened source."""

    path: Path
    options: Mapping[str, Any]
    """What it says of its model, by option name."""

    published: PublishedFolder | None = None
    checkpoint: WholeTensors | None = None
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    """Tokenizer, generation settings and ``config.json``, by name."""

    end: End | None = None
    """The end of document of the run that made it."""

    iteration: int = 0
    """Of a Megatron checkpoint."""

    has_optimizer: bool = False
    optimizer: Optimizer | None = None
    """State by parameter; None without one, or where parameters cannot be distinguished."""

    flat_optimizer: str | None = None
    """Why it cannot."""

    notes: tuple[str, ...] = ()
    """What the log should say."""

    perturbed: str | None = None
    """Perturbations that a run saved the weights under; None: none."""


def open_published(
    path: Path,
    *,
    prediction: bool,
    fp8_as: torch.dtype = torch.bfloat16,
    copies: bool = True,
    weights: bool = True,
) -> Input:
    """A folder in Hugging Face's form, of which ``config.json``, the index, the files' headers, the tokenizer
    and the generation settings are compared with each other, and with ``copies`` the tensors that repeat
    others. Nothing else of the weights is read. Without ``prediction`` layers of multi-token prediction are
    left out, whether ``config.json`` or the files have them. Without ``weights`` there need be none.

    Raises ``CheckpointError`` where sources of one fact disagree, naming both.
    """
    check_published(path)
    options = options_of(read_json(path / CONFIG), prediction=prediction)
    files = side_files(path)
    notes = check_tokens(files, options["vocab_size"])
    if not weights:
        return Input(path=path, options=options, side_files=files, notes=tuple(notes))
    if (path / _ADAPTER).exists():
        raise CheckpointError(
            f"{path} has {_ADAPTER}: transformers adds that adapter to the weights. Merge it into them, or "
            "take its files out"
        )
    folder = PublishedFolder(path, fp8_as)
    model = model_of(buildable(options))
    mtp = of_prediction(folder.tensors, model.config.model.num_layers)
    ignored = {name for name in folder.tensors if name.endswith(".rotary_emb.inv_freq")}
    ignored |= set() if prediction else mtp
    source = PublishedSource(folder=folder, rows=model.rows, sizes=model.sizes, target=None)
    if prediction:
        _require_prediction(path, source, mtp)
    source.check(model.config.model, ignored)
    if copies:
        source.check_copies()
    if ignored:
        notes.append(
            f"{len(ignored)} tensors are left out: rotary frequencies, which follow from config.json, and "
            "what --no-mtp says"
        )
    return Input(path=path, options=options, published=folder, side_files=files, notes=tuple(notes))


def _require_prediction(path: Path, source: PublishedSource, found: set[str]) -> None:
    """Raise ``CheckpointError`` where config.json and the tensors ``found`` disagree about layers of
    multi-token prediction."""
    needed = {each for name, row in source.rows.items() if name.startswith("mtp.") for each in row.sources}
    missing, unknown = sorted(needed - set(source.folder.tensors)), sorted(found if not needed else ())
    if missing or unknown:
        raise CheckpointError(
            f"{path} {'lacks' if missing else 'has'} {len(missing or unknown)} tensors of multi-token "
            f"prediction, such as {', '.join((missing or unknown)[:5])}, and num_nextn_predict_layers in "
            f"config.json is {source.folder.config.get('num_nextn_predict_layers', 0)}. Give a complete "
            "copy, or leave those layers out: --no-mtp (convert) or --mtp-num-layers none (pretrain, plan)"
        )


def open_megatron(path: Path) -> Input:
    """A Megatron checkpoint: the folder of one, or a folder that names its newest. Raises
    ``CheckpointError``."""
    folder = megatron_folder(path)
    if (folder / METADATA).is_file():
        return _distributed(folder)
    if is_torch_folder(folder):
        checkpoint = TorchFolder(folder)
        return Input(
            path=folder,
            options=options_from_arguments(checkpoint.arguments),
            checkpoint=checkpoint,
            iteration=checkpoint.iteration,
            has_optimizer=checkpoint.has_optimizer,
            optimizer=_optimizer_by_rank(checkpoint),
            flat_optimizer=checkpoint.flat_optimizer,
            notes=checkpoint.notes,
        )
    raise CheckpointError(
        f"{folder} is no Megatron checkpoint: it has neither {METADATA} (torch_dist) nor mp_rank_* folders "
        "(torch)"
    )


def _distributed(folder: Path) -> Input:
    checkpoint = DistFolder(folder)
    found: dict[str, Any] = {"path": folder, "checkpoint": checkpoint}
    found["has_optimizer"] = checkpoint.has_optimizer
    found["flat_optimizer"] = checkpoint.flat_optimizer
    found["side_files"] = carried_files(folder)
    if (folder / MANIFEST).is_file():
        document = read_manifest(folder)
        config = document.get("config", {})
        options = _model_options(config)
        found["end"] = end_of_run(document)
        perturbed = document.get("perturbed")
        if perturbed is not None:
            found["perturbed"] = perturbed
            found["notes"] = (f"{folder} is of a perturbed run ({perturbed}): so is the result",)
        progress = document.get("progress", {})
        found["iteration"] = int(progress.get("iteration", 0))
        tokenizer = config.get("data", {}).get("tokenizer_model")
        if not found["side_files"] and tokenizer and Path(tokenizer).exists():
            found["side_files"] = tokenizer_files(Path(tokenizer))
    else:
        common = read_common(folder)
        options = options_from_arguments(common.get("args"))
        found["iteration"] = int(common.get("iteration") or 0)
        document, progress = {}, _progress(common.get("args"), found["iteration"])
    if checkpoint.state:
        found["optimizer"] = Optimizer(
            checkpoint=checkpoint,
            run_state=lambda: _common_run_state(folder),
            progress=progress,
            data_order=document.get("data_order"),
        )
    return Input(options=options, **found)


def _optimizer_by_rank(checkpoint: TorchFolder) -> Optimizer | None:
    if not checkpoint.state:
        return None
    return Optimizer(
        checkpoint=checkpoint,
        run_state=checkpoint.run_state,
        progress=_progress(checkpoint.arguments, checkpoint.iteration),
    )


def _common_run_state(folder: Path) -> RunState:
    common = read_common(folder)
    if "optimizer" not in common:
        raise CheckpointError(
            f"{folder} has an optimizer's tensors and {COMMON} has no optimizer; give a complete copy of it"
        )
    return RunState.of(common["optimizer"], common.get("opt_param_scheduler"), str(folder / COMMON))


def _progress(args: Any, iteration: int) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "consumed_samples": int(getattr(args, "consumed_train_samples", 0) or 0),
        "consumed_tokens": 0,
        "skipped_iterations": 0,
    }


def _model_options(config: Mapping[str, Any]) -> dict[str, Any]:
    known = known_options()
    values = {name: value for name, value in config.get("model", {}).items() if name in known}
    # It has given its values already.
    values.pop("preset", None)
    for name in ("bf16", "fp16"):
        if config.get("train", {}).get(name):
            values[name] = True
    for name in _OF_A_RUN:
        values.pop(name, None)
    return values


_OF_A_RUN = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "first_pipeline_num_layers",
    "last_pipeline_num_layers",
)
"""Options of the model's section that say how a run laid it out, which the result need not follow."""
