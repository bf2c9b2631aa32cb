"""Checks of the model's shape that hold for any number of processes."""

from __future__ import annotations

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.planning.pipeline_layout import chunk_layer_counts


def model_problems(config: TrainingConfig) -> list[str]:
    """One line per problem: found, expected, what to change."""
    return [
        *_sizes(config),
        *_attention(config),
        *_positions(config),
        *_recompute(config),
    ]


def _sizes(config: TrainingConfig) -> list[str]:
    model, found = config.model, []
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(model, name) < 1:
            found.append(
                f"{name} is {getattr(model, name)}; expected at least 1. Set --{name.replace('_', '-')} "
                "or choose a preset with --model."
            )
    for name in ("vocab_size", "ffn_hidden_size", "kv_channels", "num_query_groups"):
        value = getattr(model, name)
        if value is not None and value < 1:
            found.append(f"{name} is {value}; expected at least 1. Set --{name.replace('_', '-')}.")
    if model.make_vocab_size_divisible_by < 1:
        found.append(
            f"make_vocab_size_divisible_by is {model.make_vocab_size_divisible_by}; expected at least 1. "
            "Set --make-vocab-size-divisible-by."
        )
    if model.gated_linear_unit and model.ffn_hidden_size is None:
        thirds = int(4 * model.hidden_size * 2 / 3 / 64) * 64
        found.append(
            f"ffn_hidden_size is not set for a gated unit; expected a number: Megatron-LM takes {thirds} for "
            f"--swiglu, Megatron-Core {4 * model.hidden_size}. Set --ffn-hidden-size to the one you mean."
        )
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(model, name)
        if not 0 <= value < 1:
            found.append(f"{name} is {value}; expected 0 <= p < 1. Set --{name.replace('_', '-')}.")
    for name in ("layernorm_epsilon", "init_method_std"):
        value = getattr(model, name)
        if value <= 0:
            found.append(f"{name} is {value}; expected more than 0. Set --{name.replace('_', '-')}.")
    if model.vocab_size is None and config.data.tokenizer_type == "NullTokenizer":
        found.append("vocab_size is not set; expected a number with NullTokenizer. Set --vocab-size.")
    if config.model.bias_activation_fusion and model.activation_func not in ("gelu", "silu"):
        found.append(
            f"bias_activation_fusion is on with activation_func {model.activation_func}; expected gelu or "
            "silu. Use --no-bias-activation-fusion."
        )
    return found


def _attention(config: TrainingConfig) -> list[str]:
    model, found = config.model, []
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_query_groups
    if heads >= 1 and model.kv_channels is None and not model.multi_latent_attention:
        found.append(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}; expected one, or "
            "kv_channels to be given. Change --hidden-size or --num-attention-heads, or set --kv-channels."
        )
    if heads >= 1 and groups is not None and groups >= 1 and heads % groups:
        found.append(
            f"num_query_groups is {groups}; expected a divisor of num_attention_heads = {heads}. "
            "Change --num-query-groups."
        )
    return found


def _positions(config: TrainingConfig) -> list[str]:
    model, length, found = config.model, config.train.seq_length, []
    limit = model.max_position_embeddings
    if limit is None and model.position_embedding_type == "learned_absolute":
        found.append(
            "max_position_embeddings is not set; expected a number with learned_absolute positions. "
            "Set --max-position-embeddings, or --position-embedding-type rope."
        )
    if limit is not None and length is not None and length > limit:
        found.append(
            f"seq_length is {length}; expected at most max_position_embeddings = {limit}. "
            "Shorten --seq-length or raise --max-position-embeddings."
        )
    if not 0 < model.rotary_percent <= 1:
        found.append(
            f"rotary_percent is {model.rotary_percent}; expected 0 < share <= 1. Set --rotary-percent."
        )
    if model.rotary_base <= 0:
        found.append(f"rotary_base is {model.rotary_base}; expected more than 0. Set --rotary-base.")
    latent = model.multi_latent_attention
    if latent and model.position_embedding_type != "rope":
        found.append(
            f"position_embedding_type is {model.position_embedding_type} with multi_latent_attention; "
            "expected rope: part of each head is rotated. Set --position-embedding-type rope."
        )
    if model.rope_type != "rope" and model.position_embedding_type != "rope":
        found.append(
            f"rope_type is {model.rope_type} with {model.position_embedding_type} positions; expected rotary "
            "ones, which it stretches. Set --position-embedding-type rope or leave --rope-type out."
        )
    if model.position_embedding_type == "rope" and model.kv_channels is not None and not latent:
        rotated = int(model.kv_channels * model.rotary_percent)
        if rotated % 2 or rotated == 0:
            found.append(
                f"{rotated} dimensions per head would be rotated (kv_channels {model.kv_channels} x "
                f"rotary_percent {model.rotary_percent}); expected an even number above 0. "
                "Change --kv-channels, --num-attention-heads or --rotary-percent."
            )
    return found


def _longest_stage(config: TrainingConfig) -> int:
    """Layers of the stage that has the most; a division that is wrong is reported elsewhere."""
    model, stages = config.model, max(1, config.parallel.pipeline_model_parallel_size)
    even: int = max(1, model.num_layers // stages)
    try:
        counts = chunk_layer_counts(config)
    except ConfigError:
        return even
    held: list[int] = [sum(counts[stage::stages]) for stage in range(stages)]
    held[-1] += model.mtp_num_layers or 0
    return max(even, *held)


def _recompute(config: TrainingConfig) -> list[str]:
    model, found = config.model, []
    granularity, method, layers = (
        model.recompute_granularity,
        model.recompute_method,
        model.recompute_num_layers,
    )
    if granularity == "full":
        if method is None:
            found.append("recompute_method is not set; expected uniform or block. Set --recompute-method.")
        per_stage = _longest_stage(config)
        if layers is None or not 1 <= layers <= per_stage:
            found.append(
                f"recompute_num_layers is {layers}; expected 1 to {per_stage} (layers per pipeline stage). "
                "Set --recompute-num-layers."
            )
    elif granularity == "selective" and (method is not None or layers is not None):
        found.append(
            f"recompute_method is {method} and recompute_num_layers is {layers}; expected neither with "
            "selective recomputation. Leave both out or use --recompute-granularity full."
        )
    elif granularity is None and (method is not None or layers is not None):
        found.append(
            f"recompute_method is {method} and recompute_num_layers is {layers} while recomputation is off; "
            "expected neither. Leave both out or set --recompute-granularity."
        )
    if model.distribute_saved_activations:
        if granularity != "full" or config.parallel.tensor_model_parallel_size == 1:
            found.append(
                "distribute_saved_activations is on; expected full recomputation and "
                "tensor_model_parallel_size above 1 with it. Leave --distribute-saved-activations out."
            )
        if config.parallel.sequence_parallel:
            found.append(
                "distribute_saved_activations is on together with sequence_parallel; expected one of the "
                "two. Leave --distribute-saved-activations out."
            )
    return found
