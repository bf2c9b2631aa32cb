"""Steps, batches, precision, and where tokens come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how large, how fast, in which precision."""

    micro_batch_size: int = 1
    """Sequences in one forward pass of one process."""

    global_batch_size: int | None = None
    """Sequences per step over all processes. None: ``micro_batch_size`` x data-parallel size."""

    rampup_batch_size: tuple[int, int, int] | None = None
    """First global batch size, increment, and the samples over which it grows to ``global_batch_size``."""

    seq_length: int | None = None
    """Tokens per sequence; required."""

    train_iters: int | None = None
    """Optimizer steps; required for training."""

    exit_duration_in_mins: float | None = None
    """Save and stop after this many minutes of wall-clock time. None: never."""

    exit_interval: int | None = None
    """Save and stop after a step whose number this divides. None: never."""

    on_divergence: Literal["stop", "skip", "rollback"] = "stop"
    """What follows a step whose loss or gradient norm is not finite, or too large by the options below:
    an error, the step without its update, or the last checkpoint and then the data after this step."""

    max_divergences: int = 10
    """How many steps of a run may diverge before it stops whatever ``on_divergence`` says."""

    loss_spike_factor: float | None = None
    """A loss above this many times its running mean counts as divergence. None: only NaN and infinity."""

    grad_norm_threshold: float | None = None
    """A gradient norm above this counts as divergence. None: only NaN and infinity."""

    eval_interval: int | None = 1000
    """Validate every so many steps. None: only at the end."""

    eval_iters: int = 100
    """Global batches per validation; 0 turns validation off."""

    seed: int = 1234
    """Seed of initialisation, dropout and the order of the data."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the learning rate after warm-up."""

    lr_decay_iters: int | None = None
    """Steps until the learning rate reaches ``min_lr``. None: ``train_iters``."""

    lr_warmup_iters: int | None = None
    """Steps of linear warm-up. None: a hundredth of ``lr_decay_iters``, at most 2,000."""

    lr_warmup_fraction: float | None = None
    """Warm-up as a share of ``lr_decay_iters``; excludes ``lr_warmup_iters``."""

    lr_warmup_init: float = 0.0
    """Learning rate at step 0 of the warm-up."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine"] = "exponential"
    """Shape of the final decay when ``lr_decay_style`` is WSD."""

    lr_wsd_decay_iters: int | None = None
    """Steps of the final decay when ``lr_decay_style`` is WSD."""

    start_weight_decay: float | None = None
    """Weight decay at step 0. None: ``weight_decay``."""

    end_weight_decay: float | None = None
    """Weight decay at the last step. None: ``weight_decay``."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay moves from start to end."""

    bf16: bool = False
    """bf16 parameters and activations with fp32 master weights. Neither bf16 nor fp16: fp32."""

    fp16: bool = False
    """fp16 parameters and activations with fp32 master weights and loss scaling."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from. A path is Megatron's prefix: the name without ``.bin`` and ``.idx``."""

    data_path: tuple[str, ...] = ()
    """One prefix, several prefixes, or weight and prefix in turn; divided by ``split``."""

    train_data_path: tuple[str, ...] = ()
    """Training prefixes, in the form of ``data_path``; excludes it."""

    valid_data_path: tuple[str, ...] = ()
    """Validation prefixes, in the form of ``data_path``; excludes it."""

    test_data_path: tuple[str, ...] = ()
    """Test prefixes, in the form of ``data_path``; excludes it."""

    split: str | None = None
    """Shares of training, validation and test within ``data_path``, such as ``969,30,1``."""

    mock_data: bool = False
    """Whether to train on Megatron-Core's generated samples instead of data."""

    tokenizer_type: Literal[
        "HuggingFaceTokenizer",
        "GPTSentencePieceTokenizer",
        "Llama2Tokenizer",
        "ByteLevelTokenizer",
        "NullTokenizer",
    ] = "HuggingFaceTokenizer"
    """HuggingFaceTokenizer reads a ``tokenizer.json``; GPTSentencePieceTokenizer and Llama2Tokenizer
    (which begins documents with a token) a SentencePiece model; ByteLevelTokenizer knows 256 bytes
    and an end; NullTokenizer only knows ``vocab_size``."""

    tokenizer_model: str | None = None
    """Path of the ``tokenizer.json``, of a folder that holds one, or of the SentencePiece model."""

    data_cache_path: str | None = None
    """Directory of the sample index. None: beside the data."""

    num_workers: int = 2
    """Worker processes of each data loader; 0 loads in the training process."""

    mmap_bin_files: bool = True
    """Whether ``.bin`` files are mapped into memory instead of read."""

    reset_position_ids: bool = False
    """Whether positions start again after each document."""

    reset_attention_mask: bool = False
    """Whether attention stops at document borders."""

    packed_sequences: bool | None = None
    """Whether ``reset_attention_mask`` computes each document by itself, which needs no mask and less
    time. False: one mask of the whole sequence. None: by itself wherever layers and layout can."""

    eod_mask_loss: bool = False
    """Whether the end-of-document token is left out of the loss."""
