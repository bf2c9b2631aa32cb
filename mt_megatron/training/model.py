"""Model chunks, optimizer and learning-rate schedule of one rank, wired together the Megatron way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.patches.optimizer.param_groups import same_on_all_stages
from mt_megatron.planning.build import ddp_config, optimizer_config
from mt_megatron.seams.family import ModelFamily
from mt_megatron.training.distributed import Job, seed_dropout
from mt_megatron.training.lr import build_scheduler


@dataclass(kw_only=True)
class Trainable:
    """Everything of this rank that training changes."""

    chunks: list[Any]
    """``DistributedDataParallel`` modules, one per virtual pipeline stage."""

    core: Any
    """The ``TransformerConfig`` all chunks share."""

    optimizer: Any
    """A ``MegatronOptimizer``."""

    scheduler: Any
    """An ``OptimizerParamScheduler``; it counts samples."""

    update_is_half_done: bool = False
    """Whether an update of the weights, or a load into them, was begun and has not ended."""

    def bare_chunks(self) -> list[torch.nn.Module]:
        """The chunks without their wrappers."""
        return [unwrapped(chunk) for chunk in self.chunks]


def unwrapped(module: Any) -> torch.nn.Module:
    """``module`` without DDP and precision wrappers."""
    while hasattr(module, "module"):
        module = module.module
    inner: torch.nn.Module = module
    return inner


def build(config: TrainingConfig, job: Job, family: ModelFamily) -> Trainable:
    """Build this rank's part of the model and its optimizer.

    The model is cast to bf16 or fp16 when configured (the optimizer keeps fp32 master weights),
    moved to the device and wrapped in Megatron's ``DistributedDataParallel``.
    """
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.utils import get_model_config

    modules = family.build_model(config, job.layout)
    core = get_model_config(modules[0])
    chunks = wrap(config, job, core, modules)
    with same_on_all_stages():
        optimizer = get_megatron_optimizer(optimizer_config(config), chunks)
    scheduler = build_scheduler(config, optimizer, config.global_batch_size(job.layout.world_size))
    _connect(core, chunks, optimizer)
    seed_dropout(config.train.seed, job)
    return Trainable(chunks=chunks, core=core, optimizer=optimizer, scheduler=scheduler)


def wrap(config: TrainingConfig, job: Job, core: Any, modules: list[torch.nn.Module]) -> list[Any]:
    """``modules`` in the configured precision, on the device, ready for data parallelism."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    device = job.backend.device(job.backend.current_device())
    ddp = ddp_config(config)
    # Upstream's check ends one rank while the others wait for it; on ours, which comes after the
    # reduction, all ranks agree (training/step.py).
    ddp.check_for_nan_in_grad = False
    chunks: list[Any] = []
    for index, module in enumerate(modules):
        for parameter in module.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        module.to(device)
        if core.bf16 or core.fp16:
            module = Float16Module(core, module)
        # Buckets only help the first chunk: the others' reductions hide behind its backward pass.
        chunks.append(DistributedDataParallel(core, ddp, module, disable_bucketing=index > 0))
    if not chunks:
        raise ConfigError(f"the model family {config.model.family!r} built no module for rank {job.rank}")
    return chunks


def _connect(core: Any, chunks: list[Any], optimizer: Any) -> None:
    """Tell the schedules whom to call: they read these functions from the model's configuration."""
    from megatron.core.distributed import finalize_model_grads

    core.grad_scale_func = optimizer.scale_loss
    core.finalize_model_grads_func = finalize_model_grads
    ddp = chunks[0].ddp_config
    if ddp.overlap_grad_reduce:
        core.no_sync_func = _one_or_many([chunk.no_sync for chunk in chunks])
    if ddp.overlap_param_gather and ddp.align_param_gather:
        core.param_sync_func = _one_or_many([chunk.start_param_sync for chunk in chunks])


def _one_or_many(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions
