"""Objects built from a configuration: Megatron-Core's own, and the shape to count.

torch and megatron are imported by the functions that need them, when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mt_megatron.fp8.layers import run_recipe
from mt_megatron.planning.parameters import ModelShape
from mt_megatron.planning.shape import shape_of

if TYPE_CHECKING:
    from mt_megatron.config.schema import TrainingConfig


def transformer_config(config: TrainingConfig) -> Any:
    """A ``megatron.core.transformer.TransformerConfig``. Call it after ``mt_megatron.patch``.

    Raises ``ValueError`` from Megatron-Core for what ``validate`` does not cover.
    """
    import torch
    from megatron.core.transformer import TransformerConfig

    from mt_megatron.planning.pipeline_layout import resolved_layout

    values = dict(config.model.core.values)
    dtype = getattr(torch, config.params_dtype)
    autocast = values.pop("autocast_dtype")
    values["autocast_dtype"] = None if autocast is None else getattr(torch, autocast)
    values["activation_func"] = _activation(values.pop("activation_func"))
    for name in ("init_method", "output_layer_init_method"):
        values[name] = _init_method(values.pop(name), values["init_method_std"])
    values["fp8_recipe"] = run_recipe(config.model)
    parallel = config.parallel
    values["pipeline_model_parallel_layout"] = resolved_layout(config)
    for name in ("moe_layer_freq", "pipeline_model_parallel_layout"):
        values[name] = list(values[name]) if isinstance(values[name], tuple) else values[name]
    if config.model.multi_latent_attention or config.model.masked_words:
        # Its rotary positions are its own, and BertModel takes no base; otherwise they are GPTModel's.
        values["rotary_base"] = config.model.rotary_base
    built = TransformerConfig(
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
    if parallel.cp_comm_type is not None:
        # A field of later versions, read by the attention of mt_megatron.layers.
        built.cp_comm_type = parallel.cp_comm_type
    return built


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


def model_shape(config: TrainingConfig) -> ModelShape:
    """What decides the number of parameters. Imports neither torch nor megatron.

    Raises ``ConfigError`` naming every size that is not set.
    """
    return shape_of(config.model)


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


def _init_method(name: str, std: float) -> Callable[..., Any] | None:
    """The function that draws weights; ``std`` is that of ``normal``."""
    if name == "scaled_normal":
        return None  # Upstream's default of output layers: normal, scaled by depth.
    if name == "normal":
        from megatron.core.utils import init_method_normal

        normal: Callable[..., Any] = init_method_normal(std)
        return normal
    import torch

    method: Callable[..., Any] = torch.nn.init.xavier_uniform_
    return method
