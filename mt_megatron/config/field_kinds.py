"""What another value of each option does to a model whose weights are kept: one declaration per option.

``--resume``, ``--load``, ``--init-from-hf`` and ``mt-megatron convert`` compare by it. A new option fails
a test until it is declared here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mt_megatron.config.types import options
from mt_megatron.layers.transformer_fields import ROPE_TYPES_OF, moe_pattern

Values = Mapping[str, Any]
"""Option name -> value, of all sections together."""


class Kind(Enum):
    """What depends on an option."""

    SHAPE = "shape"
    """Which parameters there are and how large. Weights of another shape cannot be used."""

    FUNCTION = "function"
    """What the model computes from the same weights."""

    OBJECTIVE = "objective"
    """What training minimises, how, and on which data. The model's output stays."""

    NEUTRAL = "neutral"
    """Layout, speed, rounding, initial values, reports."""


_DECLARED: Mapping[Kind, str] = {
    Kind.SHAPE: """
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
        max_position_embeddings position_embedding_type untie_embeddings_and_output_weights
        gated_linear_unit add_bias_linear add_qkv_bias qk_layernorm normalization
        num_moe_experts moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size
        moe_router_enable_expert_bias multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim
        qk_pos_emb_head_dim v_head_dim mtp_num_layers bert_binary_head
    """,
    Kind.FUNCTION: """
        activation_func layernorm_epsilon layernorm_zero_centered_gamma window_size
        rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor rope_type
        rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
        rope_low_freq_factor rope_high_freq_factor
        moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_num_groups
        moe_router_group_topk moe_router_group_score_topk moe_router_topk_scaling_factor
        moe_expert_capacity_factor moe_token_drop_policy
    """,
    Kind.OBJECTIVE: """
        hidden_dropout attention_dropout mask_padded_vocabulary calculate_per_token_loss
        moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps
        moe_router_bias_update_rate mtp_loss_scaling_factor
        global_batch_size rampup_batch_size seq_length train_iters seed
        lr min_lr decoupled_lr decoupled_min_lr lr_decay_style lr_decay_iters lr_warmup_iters
        lr_warmup_fraction lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters
        weight_decay start_weight_decay end_weight_decay weight_decay_incr_style
        optimizer adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad
        data_path train_data_path valid_data_path test_data_path split mock_data tokenizer_type
        tokenizer_model reset_position_ids reset_attention_mask eod_mask_loss mask_prob short_seq_prob
    """,
    Kind.NEUTRAL: """
        preset family transformer_impl make_vocab_size_divisible_by
        init_method output_layer_init_method init_method_std perform_initialization use_cpu_initialization
        deterministic_mode enable_autocast autocast_dtype attention_softmax_in_fp32
        apply_query_key_layer_scaling apply_residual_connection_post_layernorm fp32_residual_connection
        masked_softmax_fusion bias_activation_fusion bias_dropout_fusion apply_rope_fusion
        persist_layer_norm memory_efficient_layer_norm clone_scatter_output_in_embedding
        gradient_accumulation_fusion cross_entropy_loss_fusion
        activation_func_fp8_input_store fp8 fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
        fp8_dot_product_attention fp8_multi_head_attention fp8_param_gather tp_only_amax_red
        fp8_recipe fp8_recipe_format fp8_backend fp8_output_layer fp8_save_activations fp8_telemetry_interval
        fp8_demote_underflow fp8_demote_saturation fp8_demote_snr
        first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
        disable_parameter_transpose_cache enable_cuda_graph external_cuda_graph
        recompute_granularity recompute_method recompute_num_layers distribute_saved_activations
        moe_layer_recompute recompute_mla_up_proj num_microbatches_with_partial_activation_checkpoints
        cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
        moe_extended_tp moe_grouped_gemm moe_token_dispatcher_type moe_per_layer_logging
        moe_pad_expert_input_to_capacity moe_shared_expert_overlap moe_router_dtype
        use_te_rng_tracker tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
        tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs
        tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
        variable_seq_lengths overlap_p2p_comm batch_p2p_sync use_ring_exchange_p2p
        deallocate_pipeline_outputs defer_embedding_wgrad_compute wgrad_deferral_limit
        first_pipeline_num_layers last_pipeline_num_layers num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
        tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
        num_layers_per_virtual_pipeline_stage pipeline_schedule p2p_transport context_parallel_size
        cp_comm_type expert_model_parallel_size allow_tensor_parallel_across_nodes sequence_parallel
        use_distributed_optimizer overlap_grad_reduce overlap_param_gather
        overlap_param_gather_with_optimizer_step grad_reduce_in_fp32 align_param_gather bucket_size
        average_in_collective check_for_nan_in_grad log_num_zeros_in_grad
        micro_batch_size bf16 fp16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
        exit_duration_in_mins exit_interval on_divergence max_divergences loss_spike_factor
        grad_norm_threshold eval_interval eval_iters
        data_cache_path num_workers mmap_bin_files packed_sequences
        save save_interval load init_from_hf allow_function_change resume resume_skip_damaged
        verify_checkpoint async_save save_interval_in_mins save_keep_last save_retain_interval
        save_over_others
        log_interval metrics_path display peak_tflops tensorboard_dir wandb_project wandb_exp_name
        wandb_save_dir config_logger_dir
        backend distributed_timeout_minutes watchdog_seconds cpu_threads cpu_bf16_products strict check_memory
        print_config
        scan scan_window scan_dir scan_alerts scan_webhook scan_prometheus_port scan_prometheus_address
        scan_prometheus_hosts scan_group_readable scan_retain_mib scan_on_straggler
        scope scope_interval scope_watch scope_port scope_sink scope_lab scope_retain_mib scope_dir
        scope_pause_minutes
    """,
}


def declared() -> list[tuple[str, Kind]]:
    """Every declaration, as often as it is made."""
    return [(name, kind) for kind, names in _DECLARED.items() for name in names.split()]


KINDS: Mapping[str, Kind] = dict(declared())
"""Option name -> what depends on it."""


def names_of(kind: Kind) -> frozenset[str]:
    """The options of ``kind``."""
    return frozenset(name for name, its in KINDS.items() if its is kind)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One option that two configurations set differently."""

    name: str
    kind: Kind
    before: Any
    """What the weights were made with, as it was set."""

    now: Any


def changes(before: Values, now: Values, *, ignored: tuple[str, ...] = ()) -> list[Change]:
    """The options of every kind but neutral that differ, where they have an effect.

    A name that is missing on a side has its default there. Different spellings of one model (a width
    that is None and the one that follows from others) are no change.
    """
    sides = (before, now)
    complete = [{name: option.default for name, option in options().items()} | dict(each) for each in sides]
    found = []
    for name, kind in KINDS.items():
        if kind is Kind.NEUTRAL or name in ignored:
            continue
        if not all(_ACTIVE.get(name, _always)(values) for values in complete):
            # Where it has an effect on one side only, the option that decides so differs as well.
            continue
        old, new = (_in_force(name, values) for values in complete)
        if _same(old, new):
            continue
        if name == "moe_router_load_balancing_type" and "sinkhorn" in (old, new):
            # The others are losses; this one also chooses the experts.
            kind = Kind.FUNCTION
        found.append(Change(name=name, kind=kind, before=complete[0][name], now=complete[1][name]))
    return found


def _in_force(name: str, values: Values) -> Any:
    """The value that counts: for None, what it stands for."""
    value = values[name]
    if name == "moe_layer_freq":
        plain = list(value) if isinstance(value, tuple) else value
        return moe_pattern(plain, values["num_layers"])
    if value is None and name in _STANDS_FOR:
        return _STANDS_FOR[name](values)
    return tuple(value) if isinstance(value, list) else value


def _same(old: Any, new: Any) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (old, new))
    # A file may hold fewer digits than the number has.
    return bool(abs(old - new) <= 1e-9 * max(abs(old), abs(new))) if numbers else bool(old == new)


def _always(values: Values) -> bool:
    return True


def _width(values: Values) -> Any:
    width = values["ffn_hidden_size"]
    return 4 * values["hidden_size"] if width is None else width


def _latent(values: Values) -> bool:
    return bool(values["multi_latent_attention"])


def _experts(values: Values) -> bool:
    return values["num_moe_experts"] is not None


def _groups(values: Values) -> bool:
    return _experts(values) and values["moe_router_num_groups"] is not None


def _capacity(values: Values) -> bool:
    return _experts(values) and values["moe_expert_capacity_factor"] is not None


def _rotary(values: Values) -> bool:
    return values["position_embedding_type"] == "rope" or _latent(values)


def _of_type(kinds: tuple[str, ...]) -> Callable[[Values], bool]:
    return lambda values: _rotary(values) and values["rope_type"] in kinds


def _dense_width(values: Values) -> bool:
    """Whether some layer is dense. An experts' width that follows from it is compared as theirs."""
    if not _experts(values):
        return True
    freq = values["moe_layer_freq"]
    return 0 in moe_pattern(list(freq) if isinstance(freq, tuple) else freq, values["num_layers"])


_ACTIVE: Mapping[str, Callable[[Values], bool]] = {
    "ffn_hidden_size": _dense_width,
    "num_query_groups": lambda values: not _latent(values),
    "kv_channels": lambda values: not _latent(values),
    "max_position_embeddings": lambda values: values["position_embedding_type"] == "learned_absolute",
    "rotary_base": _rotary,
    "rotary_percent": _rotary,
    "rotary_interleaved": _rotary,
    "rotary_seq_len_interpolation_factor": _rotary,
    "rope_type": _rotary,
    "moe_router_group_topk": _groups,
    "moe_router_group_score_topk": _groups,
    "moe_token_drop_policy": _capacity,
    "moe_router_pre_softmax": lambda values: (
        _experts(values) and values["moe_router_score_function"] == "softmax"
    ),
    "moe_router_bias_update_rate": lambda values: (
        _experts(values) and bool(values["moe_router_enable_expert_bias"])
    ),
    "mtp_loss_scaling_factor": lambda values: bool(values["mtp_num_layers"]),
    **{name: _of_type(kinds) for name, kinds in ROPE_TYPES_OF.items()},
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim"), _latent),
    "v_head_dim": _latent,
    **dict.fromkeys(
        (
            "moe_ffn_hidden_size",
            "moe_layer_freq",
            "moe_shared_expert_intermediate_size",
            "moe_router_enable_expert_bias",
            "moe_router_topk",
            "moe_router_score_function",
            "moe_router_num_groups",
            "moe_router_topk_scaling_factor",
            "moe_expert_capacity_factor",
            "moe_router_load_balancing_type",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
            "moe_input_jitter_eps",
        ),
        _experts,
    ),
}
"""When an option has an effect; always, where it is not named."""

_STANDS_FOR: Mapping[str, Callable[[Values], Any]] = {
    "ffn_hidden_size": _width,
    "moe_ffn_hidden_size": _width,
    "num_query_groups": lambda values: values["num_attention_heads"],
    "kv_channels": lambda values: values["hidden_size"] // max(1, values["num_attention_heads"]),
    "max_position_embeddings": lambda values: values["seq_length"],
    "mtp_num_layers": lambda values: 0,
    "moe_router_topk_scaling_factor": lambda values: 1.0,
    "rotary_seq_len_interpolation_factor": lambda values: 1.0,
    "moe_router_group_score_topk": lambda values: (
        values["moe_router_topk"] // max(1, values["moe_router_group_topk"] or 1)
    ),
    "moe_z_loss_coeff": lambda values: 0.0,
}
"""What None means."""
