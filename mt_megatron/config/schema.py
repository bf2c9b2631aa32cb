"""What a training run is told: Megatron-Core's own dataclass fields composed with ours.

A name lives in exactly one section, so flags need no prefix. ``model``, ``optimizer`` and ``ddp``
hold Megatron-Core's fields (see ``upstream_fields``); the sections' own dataclasses hold fields that
Megatron-Core does not have, or has in several of its dataclasses. Nothing here imports torch or
megatron; ``mt_megatron.planning.build`` makes Megatron-Core's objects from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mt_megatron.config.watching import ScanConfig, ScopeConfig
from mt_megatron.errors import ConfigError
from mt_megatron.parallel.stage_layers import chunks_of_layout

if TYPE_CHECKING:
    from mt_megatron.pipeline.choice import ScheduleChoice


@dataclass(frozen=True)
class CoreOptions:
    """Values of one of Megatron-Core's dataclasses, by field name; read them as attributes."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Every settable field that has its home here, defaults included. Callables and dtypes are
    named by text (``"silu"``, ``"bfloat16"``)."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and name != "values" and name in self.values:
            return self.values[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model's shape. TransformerConfig's fields are attributes too: ``config.model.num_layers``."""

    preset: str | None = None
    """Name of the preset in ``mt_megatron/config/presets`` that the other values started from."""

    family: str = "llama"
    """Key of the model family that builds the model (``mt_megatron.seams.family``)."""

    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Whose layers: Megatron-Core's local ones or its Transformer Engine spec. auto: Transformer
    Engine on CUDA where it is installed."""

    vocab_size: int | None = None
    """Entries of the vocabulary before padding. None: the tokenizer's."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times ``tensor_model_parallel_size``."""

    mask_padded_vocabulary: bool = True
    """Whether rows that pad the vocabulary are left out of the softmax, so that the loss does not depend
    on the padding. Megatron-LM has them in it."""

    max_position_embeddings: int | None = None
    """Longest sequence the model is built for. None: ``seq_length``; required for learned positions."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter the model."""

    rotary_base: float = 10000.0
    """Theta of the rotary embedding."""

    rotary_percent: float = 1.0
    """Share of each head's dimensions that is rotated, in (0, 1]."""

    rotary_seq_len_interpolation_factor: float | None = None
    """Positions are divided by this factor. None: not at all."""

    untie_embeddings_and_output_weights: bool = False
    """Whether the output layer has weights of its own."""

    bert_binary_head: bool = True
    """Whether the family bert has token types and a head that tells swapped halves of a sample from ordered
    ones. Other families have neither."""

    core: CoreOptions = field(default_factory=CoreOptions)
    """TransformerConfig's fields that no other section holds."""

    @property
    def masked_words(self) -> bool:
        """Whether the model is an encoder that learns to fill in masked words."""
        return self.family == "bert"

    @property
    def sentence_order(self) -> bool:
        """Whether it also learns the order of a sample's two halves."""
        return self.masked_words and self.bert_binary_head

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and name != "core":
            return getattr(self.core, name)
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model and the data are spread over processes."""

    tensor_model_parallel_size: int = 1
    """Processes that share every layer's matrices."""

    pipeline_model_parallel_size: int = 1
    """Pipeline stages."""

    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline stage (interleaved 1F1B). None or 1: the plain 1F1B schedule."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """The same said by layers: chunks = layers per stage / this."""

    pipeline_schedule: str | None = None
    """The order of a step's passes: a name (``mt-megatron pipeline draw`` lists them), such as ``zb_h1`` or
    ``hybrid:4``, a FILE.csv, or ``auto``, which adapts while training (``auto:N``: at most N activations of
    one chunk on a rank; ``auto_if_pipeline``: nothing without a pipeline). 1f1b, interleaved and None:
    Megatron-Core's own."""

    p2p_transport: Literal["auto", "shm", "rdma", "nixl", "collective"] = "collective"
    """What carries activations and gradients between pipeline stages: shared memory within a host, RDMA
    between hosts, or the collective library (Megatron-Core's own way). auto: the quickest that works, for
    each two ranks; by name: that, or an error before training."""

    context_parallel_size: int = 1
    """Processes that share every sequence."""

    cp_comm_type: Literal["all_gather", "p2p"] | None = None
    """How they exchange keys and values: at once, or round a ring while computing. None: at once."""

    expert_model_parallel_size: int = 1
    """Processes that share the experts."""

    allow_tensor_parallel_across_nodes: bool = False
    """Whether a tensor-parallel group may have processes on several nodes, which is slow."""

    sequence_parallel: bool = False
    """Whether norms and dropout are split along the sequence within a tensor-parallel group."""

    use_distributed_optimizer: bool = False
    """Whether optimizer state is spread over the data-parallel processes."""

    overlap_grad_reduce: bool = False
    """Whether gradients are reduced while the backward pass still runs."""

    overlap_param_gather: bool = False
    """Whether parameters are gathered while the next forward pass already runs."""


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

    lr_decay_iters: int | float | None = None
    """Steps until the learning rate reaches ``min_lr``; part of a step is that part of its samples. None:
    ``train_iters``."""

    lr_warmup_iters: int | float | None = None
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
    """Test prefixes, in the form of ``data_path``; excludes it. No run evaluates on them or indexes them."""

    split: str | None = None
    """Shares of training, validation and test within ``data_path``, such as ``98,2,0``; no run evaluates on
    the third."""

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

    mask_prob: float = 0.15
    """Share of a sample's tokens that the family bert masks and predicts."""

    short_seq_prob: float = 0.1
    """Share of the samples of the family bert that are cut to a random length."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept, and where a run starts."""

    save: str | None = None
    """Directory to write checkpoints to. None: none are written."""

    save_interval: int | None = None
    """Write one every so many steps. None: ``save_interval_in_mins`` decides."""

    save_interval_in_mins: float | None = None
    """Write one every so many minutes; 0: never by the clock. None: 30 when ``save_interval`` is not set."""

    load: str | None = None
    """Directory to start from when ``resume`` finds nothing in ``save``; it must hold a checkpoint."""

    init_from_hf: str | None = None
    """Folder in Hugging Face's form (config.json, safetensors) to start from when ``resume`` finds nothing in
    ``save``; excludes ``load``."""

    allow_function_change: tuple[str, ...] = ()
    """Options that change what the same weights compute and may differ from those of the checkpoint or of the
    Hugging Face folder that a run starts from; ``tokenizer_model`` and ``train_data_path`` or ``data_path``
    likewise, whose contents are compared. Any other difference of the model is an error."""

    resume: str = "auto"
    """``auto``: continue from the newest checkpoint in ``save`` if there is one. ``never``: start
    anew. Anything else is the directory of the checkpoint to continue from."""

    save_over_others: bool = False
    """Permission for ``--resume never``, or a checkpoint of another folder, to start in a ``save`` that holds
    another run's checkpoints, and to replace them. Without it that is an error."""

    resume_skip_damaged: bool = False
    """Whether ``--resume auto`` continues from the newest whole checkpoint when the newest one is
    damaged. Otherwise that ends the run, and the error names the whole one."""

    verify_checkpoint: bool = True
    """Whether the checksum of every file is compared before a checkpoint is loaded."""

    async_save: bool = False
    """Whether files are written in the background, from a copy in host memory, while training goes
    on. The last checkpoint of a run is waited for either way."""

    save_keep_last: int | None = None
    """How many checkpoints to keep, counted from the newest. None: all, or 1 with
    ``save_retain_interval``."""

    save_retain_interval: int | None = None
    """Keep for good the first checkpoint from each multiple of so many steps on. None: ``save_keep_last``
    alone decides."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run says about itself."""

    log_interval: int = 100
    """Report every so many steps."""

    metrics_path: str | None = None
    """JSONL file that rank 0 appends one record per report to. None: ``metrics.jsonl`` in ``save``."""

    display: Literal["auto", "panel", "plain"] = "auto"
    """What rank 0 shows. auto: a panel that is redrawn on a terminal, plain lines elsewhere."""

    peak_tflops: float | None = None
    """Dense peak of one device in 1e12 operations per second, which MFU is measured against. None: the
    backend's table for the parameters' dtype."""

    tensorboard_dir: str | None = None
    """Directory that rank 0 writes TensorBoard event files to. None: none are written."""

    wandb_project: str | None = None
    """Weights & Biases project that rank 0 logs to. None: none. Offline unless a key or WANDB_MODE is set."""

    wandb_exp_name: str | None = None
    """Name of the run there. None: the name of the ``save`` directory, else one that wandb makes up."""

    wandb_save_dir: str | None = None
    """Directory for its files. None: ``save``, else the current directory."""

    config_logger_dir: str = ""
    """Directory that Megatron-Core dumps its configurations to. Empty: off."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How the process itself runs. Processes are started by torchrun."""

    backend: str = "auto"
    """``auto``, or the name of a backend (``cpu``, ``cuda``, ``musa``)."""

    distributed_timeout_minutes: float = 10.0
    """How long a collective may take before the run is given up; also how long a rank may show no progress in
    the first step of a start, in validation and while it saves (see ``watchdog_seconds``)."""

    watchdog_seconds: float = 300.0
    """How long a rank may show no progress within a step before every rank says where it is and ends; 0: for
    ever. In the first step of a start, in validation and while it saves, ``distributed_timeout_minutes``
    takes its place."""

    cpu_threads: int | None = None
    """Threads of each process on the cpu backend. None: OMP_NUM_THREADS if it was set, else the cores of
    this node shared out among its processes."""

    cpu_bf16_products: Literal["torch", "fp32"] = "torch"
    """Kernels of bf16 products on the cpu backend. fp32: on a processor without AVX-512, for which torch has
    no bf16 kernels, those of fp32, rounded once, several times as fast; sums have another order. It changes
    nothing on other processors."""

    strict: bool = False
    """Whether a fallback is an error instead of one log line."""

    check_memory: bool = True
    """Whether a model whose weights, gradients and optimizer state alone exceed the device's memory, or data
    loader workers whose batches exceed ``/dev/shm``, is an error before the start, not one log line."""

    print_config: bool = False
    """Print the whole configuration as YAML and stop."""


def layout_chunks(layout: Any, stages: int) -> int | None:
    """Chunks per stage of ``pipeline_model_parallel_layout``; None: one, or uneven, which is reported."""
    try:
        chunks = chunks_of_layout(layout, stages)
    except (ConfigError, ZeroDivisionError):
        return None
    return None if chunks == 1 else chunks


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything a run is told. Made by ``mt_megatron.config.parse.load_config``."""

    model: ModelConfig
    """The model's shape."""

    parallel: ParallelConfig
    """How it is spread over processes."""

    optimizer: CoreOptions
    """OptimizerConfig's fields that no other section holds (``lr``, ``min_lr``, ``clip_grad`` ...)."""

    ddp: CoreOptions
    """DistributedDataParallelConfig's fields that no other section holds."""

    train: TrainConfig
    """Batches, steps, schedule, precision."""

    data: DataConfig
    """Tokens and tokenizer."""

    checkpoint: CheckpointConfig
    """Checkpoints."""

    logging: LoggingConfig
    """Reports."""

    launch: LaunchConfig
    """The process."""

    scan: ScanConfig = field(default_factory=ScanConfig)
    """Traces and alerts."""

    scope: ScopeConfig = field(default_factory=ScopeConfig)
    """What is looked at inside the model."""

    notes: tuple[str, ...] = ()
    """One line for everything that was accepted but means something else here; log them once."""

    @property
    def params_dtype(self) -> str:
        """The parameters' dtype by name: ``bfloat16``, ``float16`` or ``float32``."""
        return "bfloat16" if self.train.bf16 else "float16" if self.train.fp16 else "float32"

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Chunks per stage, from any way of saying it; None without interleaving, also for one."""
        per_chunk = self.parallel.num_layers_per_virtual_pipeline_stage
        chunks = self.parallel.virtual_pipeline_model_parallel_size
        layout = self.model.pipeline_model_parallel_layout
        if layout not in (None, "balanced"):
            return layout_chunks(layout, self.parallel.pipeline_model_parallel_size)
        if per_chunk is not None:
            chunks = self.model.num_layers // self.parallel.pipeline_model_parallel_size // per_chunk
        return None if chunks == 1 else chunks

    @property
    def schedule_choice(self) -> ScheduleChoice | None:
        """Choice that ``pipeline_schedule`` names; None where Megatron-Core's own schedule runs. Raises
        ``ConfigError`` for an unknown name or an unreadable file."""
        if self.parallel.pipeline_schedule is None:
            return None
        from mt_megatron.pipeline.choice import parse

        choice = parse(self.parallel.pipeline_schedule)
        means_nothing = choice.is_default and self.parallel.pipeline_model_parallel_size == 1
        return None if choice.is_upstream or means_nothing else choice

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model in ``world_size`` processes. Raises ``ConfigError`` if it does not divide."""
        parallel = self.parallel
        share = (
            parallel.tensor_model_parallel_size
            * parallel.pipeline_model_parallel_size
            * parallel.context_parallel_size
        )
        if world_size < 1 or world_size % share:
            raise ConfigError(
                f"world size is {world_size}; expected a multiple of tensor x pipeline x context parallel "
                f"size = {share}. Start another number of processes or change those sizes."
            )
        return world_size // share

    @property
    def fewest_processes(self) -> int:
        """Smallest number of processes that the parallel sizes allow. Experts are shared out over
        data-parallel processes, to which those of one context-parallel group do not belong."""
        parallel = self.parallel
        return (
            parallel.tensor_model_parallel_size
            * parallel.pipeline_model_parallel_size
            * parallel.context_parallel_size
            * parallel.expert_model_parallel_size
        )

    def global_batch_size(self, world_size: int) -> int:
        """Sequences per step; ``micro_batch_size`` x data-parallel size when none was given."""
        if self.train.global_batch_size is not None:
            return self.train.global_batch_size
        return self.train.micro_batch_size * self.data_parallel_size(world_size)

    def num_microbatches(self, world_size: int) -> int:
        """Micro-batches per step and process. Raises ``ConfigError`` if they do not come out even."""
        size = self.train.micro_batch_size * self.data_parallel_size(world_size)
        total = self.global_batch_size(world_size)
        if total % size:
            raise ConfigError(
                f"global_batch_size is {total}; expected a multiple of micro_batch_size x data-parallel "
                f"size = {size}. Change --global-batch-size or --micro-batch-size."
            )
        return total // size

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Section -> name -> value, complete, in plain types; what ``to_yaml`` writes."""
        sections: dict[str, dict[str, Any]] = {}
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            if isinstance(value, CoreOptions):
                sections[section.name] = dict(value.values)
            elif dataclasses.is_dataclass(value):
                own = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
                core = own.pop("core", None)
                sections[section.name] = own | (dict(core.values) if core else {})
        sections["launch"].pop("print_config")
        return {
            section: {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
            for section, values in sections.items()
        }

    def to_show(self) -> TrainingConfig:
        """The same for others to see: without the address of the webhook, which may be a secret."""
        return dataclasses.replace(self, scan=dataclasses.replace(self.scan, scan_webhook=None))

    def to_yaml(self) -> str:
        """The whole configuration as YAML that ``load_config`` reads back to the same values."""
        import yaml

        text: str = yaml.safe_dump(self.to_dict(), sort_keys=False)
        return text
