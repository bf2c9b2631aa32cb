"""Checks that need the device or an earlier checkpoint, made by each process before it joins the others."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mt_megatron.backends.base import Backend
from mt_megatron.checkpoint.files import latest_checkpoint, read_manifest, resolve_checkpoint
from mt_megatron.config.field_kinds import Kind, changes
from mt_megatron.config.model_change import OVERRIDE, flat, notes, refused
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.data.loader.content_digest import content_digest
from mt_megatron.data.loader.shared_memory import shared_memory_problem
from mt_megatron.data.loader.tokenizer import TokenizerLike, load_tokenizer
from mt_megatron.data.prepare.sidecar import looking_for_ends
from mt_megatron.errors import CheckpointError, ConfigError
from mt_megatron.fp8.kernels import chosen
from mt_megatron.fp8.layers import run_recipe
from mt_megatron.layers.moe.router import constant_weight_warning, has_constant_weight
from mt_megatron.parallel.rank_layout import RankLayout
from mt_megatron.planning.memory_estimate import memory_of
from mt_megatron.planning.parameters import padded_vocab_size
from mt_megatron.seams import widened
from mt_megatron.training.init_from_hf import check_published
from mt_megatron.training.logging.quantities import gibibytes


def check_before_start(config: TrainingConfig, backend: Backend, world_size: int) -> list[str]:
    """One line for everything that may go wrong on this device.

    Raises ``ConfigError`` when the model cannot fit the device's memory or the data loader's batches
    ``/dev/shm``, ``CheckpointError`` when the checkpoint to start from is of another model, ``DataError``
    when the tokenizer is unreadable.
    """
    _check_fp8(config, backend)
    return [
        *check_checkpoint(config),
        *router_notes(config),
        *product_notes(config, backend),
        *memory_notes(config, backend, world_size),
        *loader_notes(config),
    ]


def _check_fp8(config: TrainingConfig, backend: Backend) -> None:
    recipe = run_recipe(config.model)
    if recipe is not None:
        chosen(config.model.fp8_backend, recipe, backend, bf16=config.train.bf16)


def product_notes(config: TrainingConfig, backend: Backend) -> list[str]:
    """What is to be said of ``cpu_bf16_products``."""
    note = widened.note(config.launch.cpu_bf16_products, backend.device_type)
    return [] if note is None else [note]


def router_notes(config: TrainingConfig) -> list[str]:
    """What is to be said of a router that its own choice gives no gradient."""
    return [f"WARNING: {constant_weight_warning()}"] if has_constant_weight(config.model) else []


def memory_notes(config: TrainingConfig, backend: Backend, world_size: int) -> list[str]:
    """What is to be said about memory before the start; nothing when the estimate fits.

    Raises ``ConfigError`` when weights, gradients and optimizer state alone do not fit and
    ``check_memory`` is on.
    """
    total = device_memory(backend, os.environ)
    if total is None:
        return []
    stages = memory_of(_complete(config), world_size, on_cpu=backend.device_type == "cpu").stages
    state = max(stages, key=lambda stage: stage.weights + stage.gradients + stage.optimizer)
    fixed = state.weights + state.gradients + state.optimizer
    device = f"{gibibytes(total)} GiB of {backend.device_name(backend.current_device())}"
    if backend.device_type == "cpu":
        device += ", as its local processes share it"
    if fixed > total:
        experts = "" if config.model.num_moe_experts is None else "--expert-model-parallel-size, "
        line = (
            f"weights, gradients and optimizer state need {gibibytes(fixed)} GiB per process (pipeline stage "
            f"{state.stage}); expected at most the {device}. Raise {experts}--tensor-model-parallel-size or "
            "--pipeline-model-parallel-size, set --use-distributed-optimizer or --bf16, or choose a smaller "
            f"model; layouts that fit: {_suggest_command(config, world_size, total)}"
        )
        if config.launch.check_memory:
            raise ConfigError(f"{line}; --no-check-memory starts all the same.")
        return [f"WARNING: {line}. Going on as --no-check-memory asks."]
    worst = max(stages, key=lambda stage: stage.total)
    if worst.total > total:
        return [
            f"WARNING: the estimated peak is {gibibytes(worst.total)} GiB per process (pipeline stage "
            f"{worst.stage}, {gibibytes(worst.activations)} GiB of it activations), more than the {device}: "
            "this run may run out of memory. Lower --micro-batch-size or --seq-length, or use "
            "--recompute-granularity."
        ]
    return []


def loader_notes(config: TrainingConfig) -> list[str]:
    """What is to be said about shared memory before the start; nothing when the loader's batches fit.

    Raises ``ConfigError`` when they do not and ``check_memory`` is on.
    """
    line = shared_memory_problem(config, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if line is None:
        return []
    if config.launch.check_memory:
        raise ConfigError(f"{line}; --no-check-memory starts all the same.")
    return [f"WARNING: {line}. Going on as --no-check-memory asks."]


def _suggest_command(config: TrainingConfig, world_size: int, total: int) -> str:
    model = f"--model {config.model.preset}" if config.model.preset else "--config FILE"
    # The known peaks are those of 16-bit formats.
    peak = "" if config.train.bf16 or config.train.fp16 else " --device-tflops TFLOPS"
    memory = f"--world-size {world_size} --device-memory {total / 2**30:.0f}GiB"
    return f"mt-megatron plan {model} --suggest {memory}{peak}"


def device_memory(backend: Backend, environment: Mapping[str, str]) -> int | None:
    """Bytes that one process may use; None when unknown. Local processes on the CPU share the host's."""
    total = backend.total_memory()
    if total is None or backend.device_type != "cpu":
        return total
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    return total // max(1, int(local) if local.isdecimal() else 1)


def check_checkpoint(config: TrainingConfig) -> list[str]:
    """What the log says about the weights that the run would start from.

    Raises ``CheckpointError`` when they are of another model, or would compute something else.
    """
    folder, continues = _start_folder(config)
    if folder is None:
        return check_published(config)
    return [*check_folder(folder, config), *check_origin(folder, config, continues=continues)]


def check_folder(folder: Path, config: TrainingConfig) -> list[str]:
    """``check_checkpoint`` for the checkpoint ``folder``."""
    manifest = read_manifest(folder)
    perturbed = manifest.get("perturbed")
    marked = (
        []
        if perturbed is None
        else [f"the checkpoint {folder} is of a perturbed run ({perturbed}): so is this"]
    )
    document = manifest.get("config")
    if not isinstance(document, Mapping) or not isinstance(document.get("model"), Mapping):
        return marked
    before, now = flat(document), flat(config.to_dict())
    vocabulary, ours = before.get("vocab_size"), config.model.vocab_size
    alike = (
        not isinstance(vocabulary, int)
        or ours is None
        or _padded(config, vocabulary) == _padded(config, ours)
    )
    found = changes(before, now, ignored=("vocab_size",) if alike else ())
    wrong = refused(found, config, "the checkpoint")
    if wrong:
        raise CheckpointError(
            f"the checkpoint {folder} is of another model than this run's:\n"
            + "\n".join(f"- {line}" for line in wrong)
            + "\nSet these options as they were, or name another --save, --resume or --load."
        )
    if manifest.get("weights_only"):
        # A conversion wrote it: its options of training are defaults, which nobody chose.
        found = [each for each in found if each.kind is not Kind.OBJECTIVE]
    return [*marked, *notes(found, config, f"the checkpoint {folder}")]


def origin(config: TrainingConfig, tokenizer: TokenizerLike) -> dict[str, str]:
    """Digests of what the weights of a run depend on besides its options: ``tokenizer``, and ``data`` of the
    files that it trains on, wherever they lie and in whatever order."""
    data = config.data
    prefixes = [each for each in (*data.train_data_path, *data.data_path) if Path(each + ".idx").is_file()]
    contents = sorted(content_digest([prefix]) for prefix in prefixes)
    digest = hashlib.sha256("".join(contents).encode()).hexdigest()
    return {"tokenizer": tokenizer.identity, "data": digest if contents else "generated"}


def check_origin(folder: Path, config: TrainingConfig, *, continues: bool) -> list[str]:
    """A line for the log where the tokenizer is not that of the run that saved ``folder``, or the training
    data is not, which counts for a run that ``continues`` and not for weights that are loaded alone.

    Raises ``CheckpointError`` unless ``allow_function_change`` names it. Checkpoints of earlier versions have
    no digests and are not compared.
    """
    saved, data = read_manifest(folder).get("origin"), config.data
    if not isinstance(saved, Mapping):
        return []
    now = origin(config, load_tokenizer(data, vocab_size=config.model.vocab_size))
    options = {"tokenizer": "tokenizer_model", "data": "data_path" if data.data_path else "train_data_path"}
    # NullTokenizer stands for any.
    real = not any(str(each.get("tokenizer")).startswith("null-") for each in (saved, now))
    compared = {"tokenizer": real, "data": continues}
    found = [name for name, counts in compared.items() if counts and saved.get(name) != now[name]]
    lines = {
        name: f"the {name} of this run has the digest {now[name][:16]}, that of the checkpoint "
        f"{str(saved.get(name))[:16]}"
        for name in found
    }
    wrong = [name for name in found if options[name] not in config.checkpoint.allow_function_change]
    if wrong:
        raise CheckpointError(
            f"the checkpoint {folder} was trained with other {' and '.join(wrong)}:\n"
            + "\n".join(f"- {lines[name]}" for name in wrong)
            + "\nName those of that run, or another --save for a run of its own (RUN_DIR of the launch "
            f"scripts). If it is intended, give {OVERRIDE} {' '.join(options[name] for name in wrong)}."
        )
    return [f"WARNING: {lines[name]}, as {OVERRIDE} {options[name]} allows" for name in found]


def check_batch_size(folder: Path, config: TrainingConfig, world_size: int) -> None:
    """Raise ``CheckpointError`` when the run that saved ``folder`` had another global batch size than this
    one has by default, on another number of processes: the learning rate's schedule counts samples, and
    would jump."""
    manifest = read_manifest(folder)
    layout, document = manifest.get("layout"), manifest.get("config")
    train = document.get("train") if isinstance(document, Mapping) else None
    ours = config.train
    if ours.global_batch_size is not None or ours.rampup_batch_size is not None:
        return
    if manifest.get("weights_only") or not isinstance(layout, Mapping) or not isinstance(train, Mapping):
        return
    before, micro = train.get("global_batch_size"), train.get("micro_batch_size")
    if before is None and isinstance(micro, int):
        before = micro * RankLayout(**layout).dp
    now = config.global_batch_size(world_size)
    if isinstance(before, int) and before != now:
        raise CheckpointError(
            f"{folder} was trained with {before} sequences per step, and this run takes {now} by default "
            "(micro_batch_size x data-parallel size); expected one size, or a choice. Set "
            f"--global-batch-size {before} to go on as it was, or {now} to change it"
        )


def check_document_end(folder: Path, config: TrainingConfig, end: int) -> None:
    """Raise ``CheckpointError`` when the run that saved ``folder`` ended documents with another token than
    ``end`` and this one looks for it: it would go on with other documents."""
    tokenizer = read_manifest(folder).get("tokenizer")
    saved = tokenizer.get("eod") if isinstance(tokenizer, Mapping) else None
    looking = looking_for_ends(config)
    if looking and isinstance(saved, int) and saved != end:
        raise CheckpointError(
            f"{folder} was saved with the end-of-document token {saved}, and this run's tokenizer ends "
            f"documents with {end}; expected the same for {' and '.join(looking)}. Name that run's tokenizer "
            "with --tokenizer-model, or start from the weights alone with --load"
        )


def _start_folder(config: TrainingConfig) -> tuple[Path | None, bool]:
    """The checkpoint that the run would start from, and whether it would continue from it."""
    options = config.checkpoint
    if options.resume not in ("auto", "never"):
        return resolve_checkpoint(Path(options.resume)), True
    found = None
    if options.resume == "auto" and options.save is not None and Path(options.save).is_dir():
        try:
            found = latest_checkpoint(Path(options.save))
        except CheckpointError:
            # Whether an older one can take the place of a damaged one is decided where it is loaded.
            return None, True
    if found is None and options.load is not None:
        return resolve_checkpoint(Path(options.load)), False
    return found, True


def _padded(config: TrainingConfig, vocab_size: int) -> int:
    return padded_vocab_size(
        vocab_size,
        divisible_by=config.model.make_vocab_size_divisible_by,
        tensor_parallel=config.parallel.tensor_model_parallel_size,
    )


def _complete(config: TrainingConfig) -> TrainingConfig:
    """``config`` with the tokenizer's vocabulary where it names none."""
    if config.model.vocab_size is not None:
        return config
    size = load_tokenizer(config.data).vocab_size
    return replace(config, model=replace(config.model, vocab_size=size))
