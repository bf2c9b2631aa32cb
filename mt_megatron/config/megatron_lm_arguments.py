"""Megatron-LM 0.9's arguments that are no field names here: what each of them sets.

Facts read from ``megatron/training/arguments.py`` at tag ``core_r0.9.0``. An argument that asks for
what happens anyway sets nothing and leaves a note; one that asks for anything else that is not
there is refused (``arguments_refused``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Alias:
    """One argument of Megatron-LM 0.9."""

    name: str
    """Without the leading dashes."""

    to: str | None = None
    """The option that takes its value; None for a switch."""

    sets: Mapping[str, Any] = field(default_factory=dict)
    """What a switch sets, by option name."""

    presumes: Mapping[str, Any] = field(default_factory=dict)
    """What a switch sets where nobody says otherwise, by option name."""

    values: tuple[str, ...] = ()
    """For an argument whose value changes nothing: the only values that are true here."""

    otherwise: str = ""
    """What to say when another value than ``values`` is given."""

    takes_value: bool = False
    """Whether a value follows although none is kept."""

    needs: tuple[str, Any] | None = None
    """Option and value that must hold in the end; the value ``SET`` means any but None."""

    in_samples: bool = False
    """Whether its value counts samples, and ``to`` steps of a global batch."""

    note: str = ""
    """What to tell the user when it sets nothing."""


SET = object()
"""In ``Alias.needs``: any value but None."""


def _switch(name: str, **sets: Any) -> Alias:
    return Alias(name=name, sets=sets)


def _rename(name: str, to: str) -> Alias:
    return Alias(name=name, to=to)


def _anyway(name: str, note: str) -> Alias:
    return Alias(name=name, note=note)


_ALIASES = (
    # Ours: the short spelling of --preset.
    _rename("model", "preset"),
    # The same thing under another name.
    _rename("norm-epsilon", "layernorm_epsilon"),
    _rename("num-experts", "num_moe_experts"),
    _rename("fp8-format", "fp8"),
    _rename("ddp-bucket-size", "bucket_size"),
    _rename("decoder-first-pipeline-num-layers", "first_pipeline_num_layers"),
    _rename("decoder-last-pipeline-num-layers", "last_pipeline_num_layers"),
    _rename("encoder-num-layers", "num_layers"),
    _rename("encoder-seq-length", "seq_length"),
    _rename("persistent-save-interval", "save_interval"),
    *(
        Alias(name=f"{name}-samples", to=f"{name.replace('-', '_')}_iters", in_samples=True)
        for name in ("train", "lr-decay", "lr-warmup")
    ),
    # Switches.
    _switch("swiglu", activation_func="silu", gated_linear_unit=True),
    _switch("squared-relu", activation_func="squared_relu"),
    _switch("disable-bias-linear", add_bias_linear=False),
    _switch("apply-layernorm-1p", layernorm_zero_centered_gamma=True),
    _switch("use-rotary-position-embeddings", position_embedding_type="rope"),
    _switch("recompute-activations", recompute_granularity="selective"),
    _switch("accumulate-allreduce-grads-in-fp32", grad_reduce_in_fp32=True),
    _switch("no-check-for-nan-in-loss-and-grad", check_for_nan_in_grad=False),
    _switch("no-rope-fusion", apply_rope_fusion=False),
    _switch("no-bias-gelu-fusion", bias_activation_fusion=False),
    _switch("no-bias-swiglu-fusion", bias_activation_fusion=False),
    _switch("no-overlap-p2p-communication", overlap_p2p_comm=False),
    _switch("no-initialization", perform_initialization=False),
    _switch("ddp-average-in-collective", average_in_collective=True),
    _switch(
        "init-method-xavier-uniform", init_method="xavier_uniform", output_layer_init_method="xavier_uniform"
    ),
    _switch("disable-tp-comm-overlap-ag", tp_comm_overlap_ag=False),
    _switch("disable-tp-comm-overlap-rs", tp_comm_overlap_rs=False),
    _switch("disable-tp-comm-bulk-dgrad", tp_comm_bulk_dgrad=False),
    _switch("disable-tp-comm-bulk-wgrad", tp_comm_bulk_wgrad=False),
    _switch("disable-tp-comm-split-ag", tp_comm_split_ag=False),
    _switch("disable-tp-comm-split-rs", tp_comm_split_rs=False),
    # Ours: the third precision by name.
    _switch("fp32", bf16=False, fp16=False),
    # True only together with something else.
    Alias(name="group-query-attention", needs=("num_query_groups", SET)),
    Alias(name="no-position-embedding", needs=("position_embedding_type", "rope")),
    Alias(
        name="no-create-attention-mask-in-dataloader",
        needs=("reset_attention_mask", False),
        note="the data loader builds no attention mask unless reset_attention_mask asks for one",
    ),
    # What happens anyway.
    _anyway(
        "use-flash-attn", "core attention is torch's scaled_dot_product_attention, which chooses its kernel"
    ),
    _anyway("use-mcore-models", "models are always Megatron-Core's"),
    _anyway(
        "no-async-tensor-model-parallel-allreduce", "megatron-core 0.9.0 ignores the option it turns off"
    ),
    _anyway("log-throughput", "every report has the throughput"),
    _anyway("no-barrier-with-level-1-timing", "the trainer has no Megatron timers"),
    _anyway("use-dist-ckpt", "checkpoints are always distributed checkpoints"),
    _anyway("ckpt-fully-parallel-save", "it has no effect in Megatron-LM 0.9 either"),
    _anyway("no-one-logger", "there is no one-logger"),
    _anyway("exit-on-missing-checkpoint", "a checkpoint that is asked for and missing is always an error"),
    Alias(
        name="ckpt-format",
        takes_value=True,
        values=("torch_dist",),
        otherwise="only torch_dist checkpoints are written; leave it out",
        note="checkpoints are always torch_dist",
    ),
    Alias(
        name="dist-ckpt-format",
        takes_value=True,
        values=("torch_dist",),
        otherwise="only torch_dist checkpoints are written; leave it out",
        note="checkpoints are always torch_dist",
    ),
    Alias(
        name="dataloader-type",
        takes_value=True,
        values=("single",),
        otherwise="only the sequential order of the sample index is there; leave it out",
        note="samples are always read in the order of the sample index",
    ),
    Alias(
        name="distributed-backend",
        takes_value=True,
        values=("nccl", "gloo"),
        otherwise="the collective library follows from --backend; leave it out",
        note="the collective library follows from --backend",
    ),
    Alias(
        name="timing-log-level",
        takes_value=True,
        values=("0",),
        otherwise="the trainer has no Megatron timers; leave it out",
        note="the trainer has no Megatron timers",
    ),
    Alias(
        name="fp8-interval",
        takes_value=True,
        values=("1",),
        otherwise="megatron-core 0.9.0 ignores it; leave it out",
        note="megatron-core 0.9.0 ignores it",
    ),
)

_LATER = (
    Alias(
        name="use-rope-scaling",
        sets={"rope_type": "llama3"},
        presumes={"rotary_scaling_factor": 8.0, "original_max_position_embeddings": 8192},
    ),
    _rename("rope-scaling-factor", "rotary_scaling_factor"),
    _rename("num-virtual-stages-per-pipeline-rank", "virtual_pipeline_model_parallel_size"),
    _anyway("moe-use-legacy-grouped-gemm", "grouped experts need no package beside torch"),
    _anyway("moe-permute-fusion", "tokens are permuted by one gather and one weighted sum"),
)

ALIASES: Mapping[str, Alias] = {alias.name: alias for alias in (*_ALIASES, *_LATER)}
"""By name, without the leading dashes."""
