"""What is built from a configuration: Megatron-Core's own objects, and the shape to count.

torch and megatron are imported by the functions that need them, when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mt_megatron.errors import ConfigError
from mt_megatron.models.parameters import ModelShape

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
    model = config.model
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
    missing = [name for name in sizes if not getattr(model, name)]
    if model.position_embedding_type == "learned_absolute" and model.max_position_embeddings is None:
        missing.append("max_position_embeddings")
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(
            f"the model is not complete: {', '.join(missing)} not set. Set {flags}, or choose a --model."
        )
    if model.kv_channels is None:
        raise ConfigError(
            f"hidden_size {model.hidden_size} is no multiple of num_attention_heads "
            f"{model.num_attention_heads}; expected one, or --kv-channels to be given."
        )
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        vocab_size=model.vocab_size or 0,
        gated_linear_unit=model.gated_linear_unit,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        normalization=model.normalization,
        qk_layernorm=model.qk_layernorm,
        position_embedding_type=model.position_embedding_type,
        max_position_embeddings=model.max_position_embeddings or 0,
        untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights,
        num_moe_experts=model.num_moe_experts,
        moe_router_topk=model.moe_router_topk,
        moe_grouped_gemm=model.moe_grouped_gemm,
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
