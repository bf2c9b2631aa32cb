"""Files of each form of a result, planned and not yet written."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mt_megatron
from mt_megatron.checkpoint.files import write_manifest
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.convert.file_groups import groups, virtual_stages
from mt_megatron.convert.folders import CONFIG
from mt_megatron.convert.hf import side_files as hf_files
from mt_megatron.convert.hf.config import config_json
from mt_megatron.convert.hf.fp8_blocks import BLOCK
from mt_megatron.convert.hf.safetensors_writer import SafetensorsWriter
from mt_megatron.convert.inputs import Input
from mt_megatron.convert.optimizer_state import Carried
from mt_megatron.convert.output_folder import FileTask, OutputFolder
from mt_megatron.convert.rank_files.arguments import COMMON, arguments_of
from mt_megatron.convert.rank_files.writer import TorchWriter
from mt_megatron.convert.request import MAX_SHARD, Request
from mt_megatron.convert.run_state import common_entry
from mt_megatron.convert.settings import Model
from mt_megatron.convert.tensors.megatron_names import KeyStyle
from mt_megatron.convert.tensors.shapes import shape_of
from mt_megatron.convert.tensors.sources import Source
from mt_megatron.convert.torch_dist.writer import DistWriter
from mt_megatron.data.loader.tokenizer import TOKENIZER_FILES
from mt_megatron.fp8.layers import layer_reason
from mt_megatron.layers.block_spec import has_uniform_layers
from mt_megatron.layers.transformer_fields import moe_layer_pattern


def published_files(
    request: Request, given: Input, model: Model, source: Source, say: Callable[[str], None]
) -> list[FileTask]:
    """The files of a published folder: weights and their index, ``config.json``, what comes with it. ``say``
    gets a line for what differs from the files that were given. Raises ``CheckpointError`` where these
    contradict the run or each other."""
    config = model.config.model
    shapes = {name: _published_shapes(name, model) for name in model.rows}
    writer = SafetensorsWriter(
        source,
        model.rows,
        shapes,
        max_shard_size=request.max_shard_size or MAX_SHARD["huggingface"],
        fp8=request.fp8,
        fp8_recipe=request.fp8_recipe,
        in_bf16=lambda layer: layer_reason(layer + 1, config) is not None,
    )
    files = side_files_of(request, given)
    like = json.loads(files.pop(CONFIG)) if CONFIG in files else None
    document = config_json(
        config,
        dtype=_name_of_dtype(model, source),
        like=like,
        fp8_block=BLOCK if request.fp8 else None,
        in_bf16=writer.modules_in_bf16(),
    )
    files[CONFIG] = (json.dumps(document, indent=2) + "\n").encode()
    files[hf_files.GENERATION] = hf_files.generation_config(document, files)
    files = hf_files.with_end(files, given.end, say)
    for line in hf_files.check_tokens(files, model.sizes.vocab_size):
        say(line)
    return writer.tasks() + _small(
        {**files, **{name: text.encode() for name, text in writer.index().items()}}
    )


def side_files_of(request: Request, given: Input) -> dict[str, bytes]:
    """What a published folder has beside weights, by name: the source's files, then those asked for. Raises
    ``CheckpointError`` where these are of another tokenizer."""
    asked = {} if request.side_files is None else hf_files.side_files(request.side_files)
    if not hf_files.has_tokenizer(asked):
        return {**given.side_files, **asked}
    hf_files.check_same_tokens(given.side_files, asked)
    # Files of two tokenizers would contradict each other.
    return {**{name: each for name, each in given.side_files.items() if name not in TOKENIZER_FILES}, **asked}


def _published_shapes(name: str, model: Model) -> tuple[tuple[int, ...], ...]:
    """The shapes of the published tensors of one row."""
    row, sizes = model.rows[name], model.sizes
    rows, *rest = shape_of(name, model.config.model)
    if row.packing == "query_groups":
        head = sizes.kv_channels
        counts = [sizes.num_attention_heads * head, *[sizes.num_query_groups * head] * 2]
    else:
        counts = [rows // len(row.sources)] * len(row.sources)
    return tuple((count, *rest) for count in counts)


def _name_of_dtype(model: Model, source: Source) -> str:
    """The dtype that most numbers have."""
    counts: dict[torch.dtype, int] = {}
    for name in model.rows:
        dtype = source.dtype(name)
        counts[dtype] = counts.get(dtype, 0) + torch.Size(shape_of(name, model.config.model)).numel()
    return str(max(counts, key=lambda each: counts[each])).removeprefix("torch.")


def _padded_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, row in model.rows.items():
        shape = shape_of(name, model.config.model)
        shapes[name] = (model.sizes.padded_vocab_size, *shape[1:]) if row.vocabulary else shape
    return shapes


def distributed_files(
    request: Request,
    given: Input,
    config: TrainingConfig,
    model: Model,
    source: Source,
    carried: Carried | None,
) -> list[FileTask]:
    """The files of a distributed checkpoint, but for our manifest. The optimizer's tensors of ``carried`` are
    among those of ``model``."""
    shapes = _padded_shapes(model)
    sizes = {name: torch.Size(shape).numel() * source.dtype(name).itemsize for name, shape in shapes.items()}
    options, pattern = config.model, moe_layer_pattern(config.model)
    writer = DistWriter(
        source,
        model.rows,
        shapes,
        KeyStyle(
            num_layers=options.num_layers,
            moe_layers=tuple(index for index, is_moe in enumerate(pattern) if is_moe),
            num_experts=options.num_moe_experts or 0,
            latent=options.multi_latent_attention,
            uniform=has_uniform_layers(options),
            transformer_engine=options.transformer_impl == "transformer_engine",
            expert_optimizer=carried is not None and carried.expert_optimizer,
        ),
        tensor=config.parallel.tensor_model_parallel_size,
        groups=groups(config, sizes, request.max_shard_size or MAX_SHARD["torch_dist"]),
        distributed=carried is not None and carried.distributed,
    )
    further: dict[str, Any] = {}
    if carried is not None:
        further["optimizer"] = common_entry(
            carried.run,
            master=carried.master,
            distributed=carried.distributed,
            expert_optimizer=carried.expert_optimizer,
        )
        further["opt_param_scheduler"] = dict(carried.run.scheduler)
    common = io.BytesIO()
    torch.save(
        {
            "args": arguments_of(
                config,
                model.sizes.padded_vocab_size,
                iteration_of(given),
                progress=None if carried is None else carried.progress,
            ),
            "checkpoint_version": 3.0,
            "iteration": iteration_of(given),
            "num_floating_point_operations_so_far": 0,
            **further,
        },
        common,
    )
    beside = {f"{hf_files.CARRIED}/{name}": content for name, content in given.side_files.items()}
    return writer.tasks() + _small(
        {**writer.metadata(), COMMON: common.getvalue(), "config.yaml": config.to_yaml().encode(), **beside}
    )


def write_our_manifest(
    output: OutputFolder, given: Input, config: TrainingConfig, model: Model, carried: Carried | None
) -> None:
    """The manifest and the marker of our own checkpoints, by which a run takes it for a whole one."""
    parallel = config.parallel
    start = {"consumed_samples": 0, "consumed_tokens": 0, "skipped_iterations": 0}
    write_manifest(
        output.folder,
        {
            "format": 2,
            "weights_only": carried is None,
            "progress": {
                **(start if carried is None else carried.progress),
                "iteration": iteration_of(given),
            },
            **({} if carried is None else {"data_order": carried.data_order}),
            "layout": {
                "tp": parallel.tensor_model_parallel_size,
                "pp": parallel.pipeline_model_parallel_size,
                "ep": parallel.expert_model_parallel_size,
                "cp": 1,
                "vpp": config.virtual_pipeline_model_parallel_size,
                "world_size": 0,
            },
            "padded_vocab_size": model.sizes.padded_vocab_size,
            "files": dict(output.entries),
            "config": config.to_dict(),
            **({} if given.end is None else {"tokenizer": given.end.to_dict()}),
            **({} if given.perturbed is None else {"perturbed": given.perturbed}),
            "converted_from": str(given.path.name),
            "versions": {"torch": torch.__version__, "mt_megatron": mt_megatron.__version__},
        },
    )


def files_by_rank(
    given: Input,
    config: TrainingConfig,
    model: Model,
    source: Source,
    scratch: Path,
    carried: Carried | None,
) -> list[FileTask]:
    """The files of a checkpoint in the ``torch`` form; ``scratch`` takes what is removed again."""
    counts = [len(layers) for layers in virtual_stages(config)]
    arguments = arguments_of(
        config,
        model.sizes.padded_vocab_size,
        iteration_of(given),
        None if len(set(counts)) == 1 else counts,
        progress=None if carried is None else carried.progress,
    )
    whole = dataclasses.replace(model, config=config)
    return TorchWriter(source, whole, _padded_shapes(model), arguments, scratch, carried).tasks()


def _small(files: dict[str, bytes]) -> list[FileTask]:
    return [
        FileTask(name=name, size=len(content), produce=lambda content=content: [content])  # type: ignore[misc]
        for name, content in files.items()
    ]


def iteration_of(given: Input) -> int:
    """The step that a result is named by."""
    # Megatron-LM takes 0 for a damaged pointer.
    return max(1, given.iteration)
