"""What a training run is told: Megatron-Core's own dataclass fields composed with ours.

A name lives in exactly one section, so flags need no prefix. ``model``, ``optimizer`` and ``ddp``
hold Megatron-Core's fields (see ``config_core``); the sections' own dataclasses hold fields that
Megatron-Core does not have, or has in several of its dataclasses. Nothing here imports torch or
megatron until ``TrainingConfig.transformer_config`` and its siblings are called.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.parallel.stage_layers import chunks_of_layout
from mt_megatron.training.config_model import CoreOptions, ModelConfig, ParallelConfig
from mt_megatron.training.config_process import CheckpointConfig, LaunchConfig, LoggingConfig
from mt_megatron.training.config_scan import ScanConfig
from mt_megatron.training.config_train import DataConfig, TrainConfig


def layout_chunks(layout: Any, stages: int) -> int | None:
    """Chunks per stage that ``pipeline_model_parallel_layout`` describes; None for one, and where it
    does not come out even, which ``validate`` reports."""
    try:
        chunks = chunks_of_layout(layout, stages)
    except (ConfigError, ZeroDivisionError):
        return None
    return None if chunks == 1 else chunks


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything a run is told. Made by ``mt_megatron.training.arguments.load_config``."""

    model: ModelConfig
    """The model's shape."""

    parallel: ParallelConfig
    """How it is spread over processes."""

    optimizer: CoreOptions
    """OptimizerConfig's fields that no other section holds (``lr``, ``min_lr``, ``clip_grad`` ...)."""

    ddp: CoreOptions
    """DistributedDataParallelConfig's fields that no other section holds."""

    train: TrainConfig
    """Batches, steps, schedule, precision."""

    data: DataConfig
    """Tokens and tokenizer."""

    checkpoint: CheckpointConfig
    """Checkpoints."""

    logging: LoggingConfig
    """Reports."""

    launch: LaunchConfig
    """The process."""

    scan: ScanConfig = field(default_factory=ScanConfig)
    """Traces and alerts."""

    notes: tuple[str, ...] = ()
    """One line for everything that was accepted but means something else here; log them once."""

    @property
    def params_dtype(self) -> str:
        """The parameters' dtype by name: ``bfloat16``, ``float16`` or ``float32``."""
        return "bfloat16" if self.train.bf16 else "float16" if self.train.fp16 else "float32"

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Chunks per stage, from any way of saying it; None without interleaving, also for one."""
        per_chunk = self.parallel.num_layers_per_virtual_pipeline_stage
        chunks = self.parallel.virtual_pipeline_model_parallel_size
        layout = self.model.pipeline_model_parallel_layout
        if layout not in (None, "balanced"):
            return layout_chunks(layout, self.parallel.pipeline_model_parallel_size)
        if per_chunk is not None:
            chunks = self.model.num_layers // self.parallel.pipeline_model_parallel_size // per_chunk
        return None if chunks == 1 else chunks

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model in ``world_size`` processes. Raises ``ConfigError`` if it does not divide."""
        parallel = self.parallel
        share = (
            parallel.tensor_model_parallel_size
            * parallel.pipeline_model_parallel_size
            * parallel.context_parallel_size
        )
        if world_size < 1 or world_size % share:
            raise ConfigError(
                f"world size is {world_size}; expected a multiple of tensor x pipeline x context parallel "
                f"size = {share}. Start another number of processes or change those sizes."
            )
        return world_size // share

    def global_batch_size(self, world_size: int) -> int:
        """Sequences per step; ``micro_batch_size`` x data-parallel size when none was given."""
        if self.train.global_batch_size is not None:
            return self.train.global_batch_size
        return self.train.micro_batch_size * self.data_parallel_size(world_size)

    def num_microbatches(self, world_size: int) -> int:
        """Micro-batches per step and process. Raises ``ConfigError`` if they do not come out even."""
        size = self.train.micro_batch_size * self.data_parallel_size(world_size)
        total = self.global_batch_size(world_size)
        if total % size:
            raise ConfigError(
                f"global_batch_size is {total}; expected a multiple of micro_batch_size x data-parallel "
                f"size = {size}. Change --global-batch-size or --micro-batch-size."
            )
        return total // size

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Section -> name -> value, complete, in plain types; what ``to_yaml`` writes."""
        sections: dict[str, dict[str, Any]] = {}
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            if isinstance(value, CoreOptions):
                sections[section.name] = dict(value.values)
            elif dataclasses.is_dataclass(value):
                own = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
                core = own.pop("core", None)
                sections[section.name] = own | (dict(core.values) if core else {})
        sections["launch"].pop("print_config")
        return {
            section: {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
            for section, values in sections.items()
        }

    def to_show(self) -> TrainingConfig:
        """The same for others to see: without the address of the webhook, which may be a secret."""
        return dataclasses.replace(self, scan=dataclasses.replace(self.scan, scan_webhook=None))

    def to_yaml(self) -> str:
        """The whole configuration as YAML that ``load_config`` reads back to the same values."""
        import yaml

        text: str = yaml.safe_dump(self.to_dict(), sort_keys=False)
        return text

    def transformer_config(self) -> Any:
        """Build Megatron-Core's ``TransformerConfig``. Imports megatron: patch first."""
        from mt_megatron.training.config_build import transformer_config

        return transformer_config(self)

    def optimizer_config(self) -> Any:
        """Build Megatron-Core's ``OptimizerConfig``. Imports megatron: patch first."""
        from mt_megatron.training.config_build import optimizer_config

        return optimizer_config(self)

    def ddp_config(self) -> Any:
        """Build Megatron-Core's ``DistributedDataParallelConfig``. Imports megatron: patch first."""
        from mt_megatron.training.config_build import ddp_config

        return ddp_config(self)
