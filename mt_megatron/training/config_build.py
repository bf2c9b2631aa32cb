"""Megatron-Core's configuration objects from ours. Imports torch and megatron when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mt_megatron.training.config import TrainingConfig


def transformer_config(config: TrainingConfig) -> Any:
    """A ``megatron.core.transformer.TransformerConfig``. Call it after ``mt_megatron.patch``.

    Raises ``ValueError`` from Megatron-Core for what ``validate`` does not cover.
    """
    import torch
    from megatron.core.transformer import TransformerConfig

    values = dict(config.model.core.values)
    dtype = getattr(torch, config.params_dtype)
    autocast = values.pop("autocast_dtype")
    values["autocast_dtype"] = None if autocast is None else getattr(torch, autocast)
    values["activation_func"] = _activation(values.pop("activation_func"))
    for name in ("init_method", "output_layer_init_method"):
        values[name] = _init_method(values.pop(name))
    parallel = config.parallel
    return TransformerConfig(
        **values,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        fp16=config.train.fp16,
        bf16=config.train.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        batch_p2p_comm=not config.model.overlap_p2p_comm,
        barrier_with_L1_time=False,
        config_logger_dir=config.logging.config_logger_dir,
    )


def optimizer_config(config: TrainingConfig) -> Any:
    """A ``megatron.core.optimizer.OptimizerConfig``. Call it after ``mt_megatron.patch``."""
    import torch
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        **config.optimizer.values,
        fp16=config.train.fp16,
        bf16=config.train.bf16,
        params_dtype=getattr(torch, config.params_dtype),
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
        config_logger_dir=config.logging.config_logger_dir,
    )


def ddp_config(config: TrainingConfig) -> Any:
    """A ``megatron.core.distributed.DistributedDataParallelConfig``. Call it after ``mt_megatron.patch``."""
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        **config.ddp.values,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )


def _activation(name: str) -> Callable[..., Any]:
    from torch.nn import functional

    if name == "squared_relu":
        return squared_relu
    function: Callable[..., Any] = getattr(functional, name)
    return function


def squared_relu(x: Any) -> Any:
    """``relu(x) ** 2``, elementwise."""
    import torch

    return torch.square(torch.relu(x))


def _init_method(name: str) -> Callable[..., Any] | None:
    # None is upstream's own normal (and, for output layers, normal scaled by depth).
    if name in ("normal", "scaled_normal"):
        return None
    import torch

    method: Callable[..., Any] = torch.nn.init.xavier_uniform_
    return method
