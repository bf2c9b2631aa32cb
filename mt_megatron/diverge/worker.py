"""One process of a side: load the common weights, run one step, write down what every module computed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from io import FileIO
from pathlib import Path
from typing import Any

import torch

import mt_megatron
from mt_megatron.backends.threads import RankThread
from mt_megatron.checkpoint.load import Progress, load_weights, resolve_checkpoint
from mt_megatron.checkpoint.run_parts import synchronised_parameters
from mt_megatron.checkpoint.save import save_checkpoint
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.data.loader.batches import train_batches
from mt_megatron.data.loader.datasets import SampleDataset, build_datasets
from mt_megatron.data.loader.tokenizer import load_tokenizer
from mt_megatron.errors import ConfigError
from mt_megatron.models.families import family_of
from mt_megatron.parallel import stage_order
from mt_megatron.parallel.context_parallel import positions
from mt_megatron.patching.hooks import ImportHook
from mt_megatron.training.distributed import Job, joined, require_precision
from mt_megatron.training.lr import learning_rate
from mt_megatron.training.model import Trainable, build
from mt_megatron.training.step import Shape, forward_backward, make_forward_step, summed

from .pieces import Piece, RankFacts, save, write_facts
from .place import Frame
from .record import Recorder
from .side import Side
from .weights import current_value, parameter_pieces, reduced_gradient

INITIAL = "initial"
_PACKAGES = ("megatron.", "mt_megatron.")


def record_side(
    side: Side,
    folder: Path,
    dataset: SampleDataset | None = None,
    changed: Mapping[type[torch.nn.Module], Sequence[str]] | None = None,
) -> None:
    """Run the step of ``side`` in this process and its peers, and write ``folder/<side>/rank_*``.

    Every side loads its weights from the configuration's ``load``, or else from ``folder/initial``, which
    the first side to run writes. Megatron must be patched for the side's backend. ``dataset`` takes the
    place of the configured data; ``changed`` is what ``import_modules`` returned.
    """
    config = side.config()
    backend = mt_megatron.backend()
    require_precision(config, backend)
    tokenizer = None
    if dataset is None or config.model.vocab_size is None:
        tokenizer = load_tokenizer(config.data, vocab_size=config.model.vocab_size)
    if config.model.vocab_size is None and tokenizer is not None:
        config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
    with joined(config, backend) as job:
        mt_megatron.compare_plan_across_ranks()
        if dataset is None:
            dataset = _dataset(config, tokenizer, folder, job)
        family = family_of(config)
        trainable = build(config, job, family)
        load_weights(_initial(config, folder, trainable, job), trainable)
        forward_step = make_forward_step(family, backend.device(backend.current_device()))
        target = folder / side.name
        target.mkdir(parents=True, exist_ok=True)
        with open(target / f"rank_{job.rank}.progress", "wb", buffering=0) as progress:
            pieces, facts = _step(config, job, trainable, forward_step, dataset, progress)
        save(pieces, target / f"rank_{job.rank}.pt")
        present = {type(module) for chunk in trainable.chunks for module in chunk.modules()}
        facts = replace(facts, outside_model=_outside(changed or {}, present))
        write_facts(facts, target / f"rank_{job.rank}.json")


def _initial(config: TrainingConfig, folder: Path, trainable: Trainable, job: Job) -> Path:
    if config.checkpoint.load is not None:
        return resolve_checkpoint(Path(config.checkpoint.load))
    initial = folder / INITIAL / "iter_0000000"
    if not initial.exists():
        save_checkpoint(initial.parent, trainable, Progress(), job, manifest={"config": config.to_dict()})
    return initial


def _dataset(config: TrainingConfig, tokenizer: Any, folder: Path, job: Job) -> SampleDataset:
    # As a training run would build it, so that the step is that run's first.
    return build_datasets(
        config.data,
        tokenizer=tokenizer,
        sequence_length=config.train.seq_length or 0,
        train_samples=(config.train.train_iters or 1) * config.global_batch_size(job.layout.world_size),
        valid_samples=0,
        test_samples=0,
        seed=config.train.seed,
        cache_dir=folder / "index_cache",
    ).train


def _step(
    config: TrainingConfig,
    job: Job,
    trainable: Trainable,
    forward_step: Any,
    dataset: SampleDataset,
    progress: FileIO,
) -> tuple[list[Piece], RankFacts]:
    shape = Shape(
        num_microbatches=config.num_microbatches(job.layout.world_size),
        micro_batch_size=config.train.micro_batch_size,
        seq_length=config.train.seq_length or 0,
    )
    frames = _Frames(shape, job)
    core = trainable.core
    # Back to the gradient of one micro-batch's own loss: the schedule divides by their number, a
    # context-parallel rank's loss is that many times its share, and fp16 scales everything.
    scale = 1.0 if core.calculate_per_token_loss else shape.num_microbatches / job.layout.cp
    scale /= float(trainable.optimizer.get_loss_scale())
    recorder = Recorder(
        frame=frames.of,
        gradient_scale=scale,
        gated=core.gated_linear_unit,
        seen=lambda: progress.write(b"."),
    )
    chunks = range(len(trainable.chunks))
    stages = [stage_order.virtual_stage(job.at.pp, chunk, job.layout.pp) for chunk in chunks]
    for chunk, stage in zip(trainable.bare_chunks(), stages, strict=True):
        recorder.attach(chunk, stage)
    progress.write(b"%d\n" % (recorder.expected * shape.num_microbatches))

    batches = [_batches(dataset, shape, job) for _ in trainable.chunks]
    with synchronised_parameters(trainable):
        pieces = parameter_pieces(trainable, "initial weight", stages, current_value)
    pieces += _tokens(_batches(dataset, shape, job), frames)
    for wrapped in trainable.chunks:
        # Megatron's check stops the ranks that see a NaN and leaves the others waiting for them; here the
        # comparison is what finds it.
        wrapped.ddp_config.check_for_nan_in_grad = False
    reports = forward_backward(trainable, forward_step, batches, shape)
    total, tokens = job.sum_over_ranks(summed(reports, job))
    pieces += parameter_pieces(trainable, "parameter gradient", stages, reduced_gradient(trainable))
    rate = learning_rate(trainable.optimizer)
    trainable.optimizer.step()
    with synchronised_parameters(trainable):
        pieces += parameter_pieces(trainable, "updated weight", stages, current_value)
    recorder.detach()
    facts = RankFacts(
        loss=total / tokens if tokens else None,
        learning_rate=rate,
        dtype=config.params_dtype,
        device=job.backend.device_name(job.backend.current_device()),
        layout=asdict(job.layout),
        not_placed=list(recorder.not_placed),
    )
    return pieces + recorder.pieces, facts


class _Frames:
    """Where each micro-batch of this rank lies; the samplers of training deal them out in rounds."""

    def __init__(self, shape: Shape, job: Job) -> None:
        self._shape = shape
        self._job = job
        held = shape.seq_length // job.layout.cp
        whole = torch.arange(shape.seq_length)
        self._positions = positions(job.at.cp, job.layout.cp, held) if job.layout.cp > 1 else whole

    def of(self, microbatch: int) -> Frame:
        size, dp = self._shape.micro_batch_size, self._job.layout.dp
        first = (microbatch * dp + self._job.at.dp) * size
        return Frame(
            sequence=self._shape.seq_length,
            batch=self._shape.num_microbatches * size * dp,
            positions=self._positions,
            samples=torch.arange(size) + first,
            tp_rank=self._job.at.tp,
            tp_size=self._job.layout.tp,
        )

    def __len__(self) -> int:
        return self._shape.num_microbatches


def _batches(dataset: SampleDataset, shape: Shape, job: Job) -> Iterator[Any]:
    return train_batches(
        dataset,
        consumed_samples=0,
        micro_batch_size=shape.micro_batch_size,
        data_parallel_rank=job.at.dp,
        data_parallel_size=job.layout.dp,
    )


def _tokens(batches: Iterator[Any], frames: _Frames) -> list[Piece]:
    """The input itself: that both sides see the same is checked, not assumed."""
    pieces = []
    for microbatch in range(len(frames)):
        batch, frame = next(batches), frames.of(microbatch)
        for at, name in enumerate(("tokens", "labels", "loss_mask", "position_ids")):
            pieces.append(
                Piece(
                    phase="batch",
                    name=name,
                    order=(0, at),
                    shape=(frame.batch, frame.sequence),
                    index=(frame.samples, None),
                    tensor=batch[name].double(),
                )
            )
    return pieces


def import_modules(names: Sequence[str]) -> dict[type[torch.nn.Module], list[str]]:
    """Import what the user wants on this side: dotted names, or paths of Python files. Returns the classes of
    Megatron's and this package's modules that this changed, and which of their attributes."""
    before = _classes()
    # Megatron's files are imported when they are needed: the user's may be the first that needs one.
    hook = ImportHook(
        lambda name: name.startswith(_PACKAGES), lambda _: before.update({**_classes(), **before})
    )
    hook.install()
    for name in names:
        path = Path(name)
        if path.suffix != ".py":
            importlib.import_module(name)
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ConfigError(f"{name} is no Python file that can be imported; give a path or a dotted name")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    hook.remove()
    return {
        each: attributes
        for each, old in before.items()
        if (
            attributes := [
                name for name in {**old, **vars(each)} if old.get(name) is not vars(each).get(name)
            ]
        )
    }


def _classes() -> dict[type[torch.nn.Module], dict[str, Any]]:
    """The attributes of every class of modules that Megatron's or this package's imported files have."""
    return {
        value: dict(vars(value))
        for name, module in list(sys.modules.items())
        if name.startswith(_PACKAGES)
        for value in list(vars(module).values())
        if isinstance(value, type) and issubclass(value, torch.nn.Module)
    }


def _outside(
    changed: Mapping[type[torch.nn.Module], Sequence[str]], present: set[type[torch.nn.Module]]
) -> dict[str, list[str]]:
    """The ``changed`` classes that no module of the classes ``present`` is an instance of, as
    ``RankFacts.outside_model`` has them."""
    return {
        f"{each.__module__}:{each.__qualname__} ({', '.join(attributes)})": sorted(
            f"{other.__module__}:{other.__qualname__}" for other in present if other.__name__ == each.__name__
        )
        for each, attributes in changed.items()
        if not any(issubclass(other, each) for other in present)
    }


def _leave_with_the_parent() -> None:
    """The parent holds the other end of stdin: when it is gone, so is whoever could read the records."""

    def watch() -> None:
        if not os.read(0, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    RankThread(target=watch, daemon=True).start()


def main(folder: Path, name: str) -> None:
    """A process that ``processes.run_side`` started."""
    _leave_with_the_parent()
    side = Side.read(folder / name / "side.json")
    mt_megatron.patch(side.backend)
    record_side(side, folder, changed=import_modules(side.imports))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
