"""Continued pre-training from a folder in Hugging Face's form: every rank reads the parts that it holds.

Nothing is converted first. A command that names no model takes the folder's. Else the configuration must be
that of the published model in everything that its weights or its function depend on; every difference is
named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_megatron.config.model_change import changes_from, notes, refused
from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from mt_megatron.config.field_kinds import Change
    from mt_megatron.convert.hf.weights import PublishedSource
    from mt_megatron.convert.inputs import Input
    from mt_megatron.convert.rank_shards import Part
    from mt_megatron.training.model import Trainable


def load_run(argv: Sequence[str]) -> TrainingConfig:
    """``load_config``; where ``argv`` has ``--init-from-hf`` and names no model, with the model of that
    folder's ``config.json`` below what is typed.

    Raises ``ConfigError``, and ``CheckpointError`` for a ``config.json`` that is absent or no model here.
    """
    config = load_config(argv)
    model, folder = config.model, config.checkpoint.init_from_hf
    named = model.num_layers and model.hidden_size and model.num_attention_heads
    if folder is None or model.preset is not None or named:
        return config
    return load_config(argv, published=_options(Path(folder)))


def check_published(config: TrainingConfig) -> list[str]:
    """What the log says about the folder that ``init_from_hf`` names, of which headers and side files are
    read, and tensors that repeat others.

    Raises ``CheckpointError`` when its files disagree, or its model is not ``config``'s.
    """
    if config.checkpoint.init_from_hf is None:
        return []
    folder = Path(config.checkpoint.init_from_hf)
    given, found = _compared(config, folder, copies=True)
    return [*given.notes, *notes(found, config, str(folder / "config.json"))]


def _compared(config: TrainingConfig, folder: Path, *, copies: bool) -> tuple[Input, list[Change]]:
    """The opened folder, and where ``config`` differs from its model. Raises ``CheckpointError``."""
    from mt_megatron.convert.inputs import open_published

    # A run without prediction layers leaves those out that config.json names.
    named = _options(folder).get("mtp_num_layers")
    given = open_published(folder, prediction=bool(config.model.mtp_num_layers) or not named, copies=copies)
    # The tokenizer's vocabulary takes the place of one that is not set, and is compared later.
    ignored = () if config.model.vocab_size is not None else ("vocab_size",)
    found = changes_from(given.options, config, ignored=ignored)
    wrong = refused(found, config, "config.json")
    if wrong:
        raise CheckpointError(
            f"the weights in {folder} are of another model than this run's:\n"
            + "\n".join(f"- {line}" for line in wrong)
            + "\nSet these options as config.json says, or leave out everything that names a model (--model, "
            "--num-layers and its siblings): it is then the folder's. Or name another folder"
        )
    return given, found


def _options(folder: Path) -> dict[str, Any]:
    """The model options of a published folder. Raises ``CheckpointError``."""
    from mt_megatron.convert.folders import CONFIG, check_published, read_json
    from mt_megatron.convert.hf.config import options_of

    check_published(folder)
    return options_of(read_json(folder / CONFIG))


def init_from_hf(config: TrainingConfig, trainable: Trainable) -> str:
    """Fill this rank's parameters, and the optimizer's master weights, from the folder that
    ``init_from_hf`` names; collective. Returns a line for the log.

    Raises ``CheckpointError`` on every rank when a tensor is missing, unknown or of another shape on
    any, and when the folder is of another model.
    """
    from mt_megatron.checkpoint.run_parts import synchronised_parameters
    from mt_megatron.convert.rank_shards import fill

    folder = Path(config.checkpoint.init_from_hf or "")
    with synchronised_parameters(trainable):
        source, wanted = _together(folder, lambda: _opened(config, folder, trainable.bare_chunks()))
        _together(folder, lambda: fill(wanted, _Reading(source).part))
        trainable.optimizer.reload_model_params()
    left = source.folder.config.get("num_nextn_predict_layers") if not config.model.mtp_num_layers else 0
    more = f", without its {left} layers of multi-token prediction" if left else ""
    return f"starting from the published weights of {folder}{more}"


def fill_from(folder: Path, config: TrainingConfig, chunks: Sequence[Module]) -> None:
    """Fill this rank's bare model ``chunks`` of ``config`` from a folder in Hugging Face's form.

    Raises ``CheckpointError`` when a tensor is missing, unknown or of another shape.
    """
    from mt_megatron.convert.rank_shards import fill

    source, wanted = _opened(config, folder, chunks)
    fill(wanted, _Reading(source).part)


def _opened(
    config: TrainingConfig, folder: Path, chunks: Sequence[Module]
) -> tuple[PublishedSource, list[Part]]:
    from mt_megatron.convert.hf.weights import PublishedSource
    from mt_megatron.convert.rank_shards import check_parts, parts
    from mt_megatron.convert.settings import model_of
    from mt_megatron.convert.tensors.shapes import shape_of
    from mt_megatron.models.tables.fused import local_name

    given, _ = _compared(config, folder, copies=False)
    assert given.published is not None
    model = model_of(config, tensor=config.parallel.tensor_model_parallel_size)
    source = PublishedSource(folder=given.published, rows=model.rows, sizes=model.sizes, target=None)
    wanted = [replace(part, name=local_name(part.name)) for part in parts(chunks)]
    shapes = {}
    for name, row in model.rows.items():
        shape = shape_of(name, model.config.model)
        shapes[name] = (model.sizes.padded_vocab_size, *shape[1:]) if row.vocabulary else shape
    check_parts(wanted, shapes)
    return source, wanted


class _Reading:
    """The parts of tensors, of which the last one is kept: gate and up come behind each other."""

    def __init__(self, source: PublishedSource) -> None:
        self._source = source
        self._name = ""
        self._parts: list[Tensor] = []

    def part(self, part: Part) -> Tensor:
        from mt_megatron.convert.tensors.shards import Shard, take
        from mt_megatron.convert.tensors.table import pack, rows_in_parts

        row = self._source.rows[part.name]
        if part.name != self._name:
            if self._name:
                self._source.release(self._name)
            self._name, self._parts = part.name, self._source.published(part.name)
        offsets = tuple(each.start for each in part.region)
        sizes = tuple(each.stop - each.start for each in part.region)
        tensors = self._parts
        if row.packing == "query_groups":
            # Only the query groups of this rank.
            ranges, smaller = rows_in_parts(
                row, self._source.sizes, part.region[0].start, part.region[0].stop
            )
            tensors = [each[slice(*rows)] for each, rows in zip(tensors, ranges, strict=True)]
            tensors, offsets = [pack(row, tensors, smaller)], (0, *offsets[1:])
        elif row.rotary or row.packing != "stacked":
            tensors = [pack(row, tensors, self._source.sizes)]
        return take(tensors, Shard(offsets=offsets, sizes=sizes))


def _together(folder: Path, action: Any) -> Any:
    """What ``action`` returns; an error on any rank is raised on every one, so that none waits."""
    import torch.distributed as dist

    result, error = None, None
    try:
        result = action()
    except (CheckpointError, OSError, RuntimeError) as raised:
        error = str(raised)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, error)
    said = list(dict.fromkeys(each for each in everyone if each is not None))
    if said:
        ranks = [rank for rank, each in enumerate(everyone) if each is not None]
        raise CheckpointError(f"{folder} cannot be started from (ranks {ranks}): " + "\n".join(said))
    return result
