"""Megatron-LM 0.9's arguments that are no field names here: what each of them sets.

Facts read from ``megatron/training/arguments.py`` at tag ``core_r0.9.0``. An argument that asks for
what happens anyway sets nothing and leaves a note; one that asks for anything else that is not
there is refused (``REFUSED`` says why, and what to do instead).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NOT_YET = "this version has no such feature; leave it out"

_REASONS: tuple[tuple[str, str], ...] = (
    # Renamed, in Megatron-LM itself or here.
    ("it was replaced in Megatron-LM; use --micro-batch-size", "batch-size"),
    ("it was replaced in Megatron-LM; use --lr-warmup-fraction or --lr-warmup-iters", "warmup"),
    ("it was replaced in Megatron-LM; use --tensor-model-parallel-size", "model-parallel-size"),
    ("it was replaced in Megatron-LM; use --recompute-activations", "checkpoint-activations"),
    ("the YAML file of this project has other sections; use --config FILE", "yaml-cfg"),
    ("the process's rank comes from torchrun's LOCAL_RANK; leave it out", "local-rank lazy-mpu-init"),
    # Runs are measured in steps.
    (
        "runs are measured in steps; divide by the global batch size and use the argument ending in -iters",
        "lr-wsd-decay-samples",
    ),
    (
        "a global batch size that does not fit is an error; change --global-batch-size",
        "decrease-batch-size-if-needed",
    ),
    # The model.
    ("only Megatron-Core's models are there; leave it out", "use-legacy-models"),
    ("a model family is chosen by name; use --family", "spec"),
    ("use the activation that was trained with: --activation-func gelu", "openai-gelu"),
    ("export to ONNX is not part of training; leave it out", "onnx-safe"),
    ("the loss is always computed in fp32; leave it out", "fp16-lm-cross-entropy"),
    (
        "hybrid Mamba models have no family here",
        "hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern",
    ),
    (
        (
            "encoder-decoder models have no family here; use --tensor-model-parallel-size and "
            "--pipeline-model-parallel-size"
        ),
        (
            "decoder-num-layers encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size "
            "pipeline-model-parallel-split-rank standalone-embedding-stage decoder-seq-length vocab-extra-ids"
        ),
    ),
    (
        "it serves Retro and bi-encoders, which have no family here",
        "bert-load output-bert-embeddings bert-embedder-type",
    ),
    (
        "Retro has no family here",
        (
            "retro-project-dir retro-add-retriever retro-cyclic-train-iters retro-encoder-layers "
            "retro-encoder-hidden-dropout retro-encoder-attention-dropout retro-num-neighbors "
            "retro-num-retrieved-chunks retro-attention-gate retro-no-verify-neighbor-count"
        ),
    ),
    (
        "bi-encoder retrieval has no family here",
        (
            "ict-head-size biencoder-projection-dim biencoder-shared-query-context-model ict-load "
            "titles-data-path query-in-block-prob use-one-sent-docs evidence-data-path "
            "retriever-report-topk-accuracies retriever-score-scaling block-data-path embedding-path "
            "indexer-batch-size indexer-log-interval retriever-seq-length sample-rate"
        ),
    ),
    (
        "vision models have no family here",
        (
            "num-classes img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction "
            "no-data-sharding head-lr-mult vision-pretraining vision-pretraining-type vision-backbone-type "
            "swin-backbone-type mask-type mask-factor iter-per-epoch dino-local-img-size "
            "dino-local-crops-number dino-head-hidden-size dino-bottleneck-size dino-freeze-last-layer "
            "dino-norm-last-layer dino-warmup-teacher-temp dino-teacher-temp dino-warmup-teacher-temp-epochs"
        ),
    ),
    ("dense weights are not turned into experts in this version; leave it out", "moe-use-upcycling"),
    # Tokens.
    (
        "a tokenizer.json or a SentencePiece model is read; convert the tokenizer and use --tokenizer-model",
        "vocab-file merge-file tiktoken-pattern tiktoken-num-special-tokens tiktoken-special-tokens",
    ),
    ("data is read from local files; copy it and use --data-path", "s3-cache-path"),
    (_NOT_YET, "num-dataset-builder-threads renormalize-blend-weights"),
    # Processes and communication.
    ("the order of ranks is tensor, context, expert, data, pipeline; leave it out", "use-tp-pp-dp-mapping"),
    ("set the collective library's own environment variables instead", "nccl-communicator-config-path"),
    (
        "it configures Transformer Engine's overlap, which is not used here; leave it out",
        "tp-comm-overlap-cfg",
    ),
    (_NOT_YET, "no-scatter-gather-tensors-in-pipeline no-align-grad-reduce data-parallel-random-init"),
    # The loop.
    ("only validation during training is there; leave it out", "skip-train"),
    (
        "collection of garbage and of unused memory is left to Python and torch; leave it out",
        "manual-gc manual-gc-interval no-manual-gc-eval empty-unused-memory-level",
    ),
    (_NOT_YET, "check-weight-hash-across-dp-replicas-interval train-sync-interval exit-signal-handler"),
    ("nothing in megatron-core 0.9.0 reads it; leave it out", "test-mode"),
    (
        "the schedule always comes from this configuration; leave it out",
        "override-opt_param-scheduler use-checkpoint-opt_param-scheduler",
    ),
    # Checkpoints.
    (
        "the configuration never comes from a checkpoint; give it by --config or --model",
        "use-checkpoint-args",
    ),
    ("name the checkpoint's directory with --resume DIR", "ckpt-step"),
    ("checkpoints are always whole (weights, optimizer, RNG); leave it out", "no-save-optim no-save-rng"),
    (
        "--load DIR alone takes the weights and begins a new run, --resume continues one whole (weights, "
        "optimizer, RNG); use --load and leave it out",
        "no-load-optim no-load-rng finetune",
    ),
    ("use --load", "pretrained-checkpoint"),
    (
        "only torch_dist checkpoints are there; leave it out",
        (
            "auto-detect-ckpt-format ckpt-convert-format "
            "ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format"
        ),
    ),
    (
        "how torch_dist checkpoints are written and read is fixed in this version; leave it out",
        (
            "no-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure "
            "dist-ckpt-strictness"
        ),
    ),
    (
        "checkpoints all go to --save; leave it out",
        (
            "non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir "
            "non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo"
        ),
    ),
    ("runs are continued by --resume auto; leave it out", "adlr-autoresume adlr-autoresume-interval"),
    ("restarts are torchrun's (--max-restarts); leave it out", "enable-ft-package"),
    # Reports.
    (
        "every report holds what there is, and goes to --metrics-path and --tensorboard-dir; leave it out",
        (
            "tensorboard-log-interval log-params-norm log-progress "
            "timing-log-option tensorboard-queue-size log-timers-to-tensorboard "
            "no-log-loss-scale-to-tensorboard "
            "log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard "
            "logging-level"
        ),
    ),
    (
        "this logger is not built in; use --wandb-project, --tensorboard-dir or --metrics-path's JSONL",
        ("one-logger-project one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version"),
    ),
    (
        "windows of the torch profiler are part of the trace; use --scan kernel and --scan-window",
        "profile profile-step-start profile-step-end use-pytorch-profiler profile-ranks",
    ),
    (
        "the tracing finds stragglers; use --scan base and --scan-on-straggler",
        "log-straggler disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count",
    ),
    # Inference.
    ("this is a trainer; leave it out", "inference-batch-times-seqlen-threshold max-tokens-to-oom"),
)

REFUSED: Mapping[str, str] = {name: reason for reason, names in _REASONS for name in names.split()}
"""Argument name without the leading dashes -> why it is refused and what to do instead."""

RENAMED: Mapping[str, str] = {
    "moe-noaux-gamma": "use --moe-router-bias-update-rate",
    "use-multi-token-prediction": "use --mtp-num-layers with the number of depths",
    "q-rms-recompute": "the nearest is --recompute-mla-up-proj; or leave it out",
}
"""MT-MegatronLM's own arguments that have another name in Megatron-Core and here."""


_BATCH = "use --micro-batch-size (sequences of one model at a time) and --global-batch-size (of a step)"
_LENGTH = "use --train-iters N, steps, or --train-samples N, sequences; an epoch has the length of the data"

ELSEWHERE: Mapping[str, str] = {
    "learning-rate": "use --lr",
    "epochs": _LENGTH,
    "num-epochs": _LENGTH,
    "num-train-epochs": _LENGTH,
    "max-steps": "use --train-iters",
    "batch-size": _BATCH,
    "per-device-train-batch-size": _BATCH,
    "gradient-accumulation-steps": "it is --global-batch-size over --micro-batch-size and the data-parallel "
    "size",
    "warmup-steps": "use --lr-warmup-iters",
    "output-dir": "use --save",
    "max-seq-length": "use --seq-length",
    "dryrun": "use --dry-run with a launch script, or --print-config here",
    "dry-run": "a launch script has it; here use --print-config, or mt-megatron plan",
}
"""Names that other trainers have for what is here -> what to use."""


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
    _switch("bert-no-binary-head", bert_binary_head=False),
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
