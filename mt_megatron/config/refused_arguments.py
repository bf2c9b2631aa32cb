"""Megatron-LM 0.9's arguments that are refused: why, and what to do instead.

Names read from ``megatron/training/arguments.py`` at tag ``core_r0.9.0``. Nothing is ignored
silently: an argument that would change a run and has no counterpart here stops it.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        "BERT has no family here",
        "bert-no-binary-head bert-load mask-prob short-seq-prob output-bert-embeddings bert-embedder-type",
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
        "a checkpoint is always loaded whole (weights, optimizer, RNG) in this version; leave it out",
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
