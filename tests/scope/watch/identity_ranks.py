"""The ranks' side: the same training watched and not, compared to the bit, call by call."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.checkpoint.load import Progress, load_weights
from mt_megatron.checkpoint.save import save_checkpoint
from mt_megatron.config.parse import load_config
from mt_megatron.models.families import family_of
from mt_megatron.seams import events, taps
from mt_megatron.seams.taps.modules import Tapped
from mt_megatron.training.distributed import Job, joined, seed_everything
from mt_megatron.training.model import Trainable, build
from mt_megatron.training.nan_watch import RandomStates
from mt_megatron.training.step import Shape, make_forward_step, train_step
from tests.parity.case import MICRO_BATCH, SEQUENCE
from tests.scope.watch.ranks import Observed, batches_of, begin, watched

INTERVAL = 3
REQUESTS = (
    "attention@decoder.layers.*:every=2",
    "qkv@decoder.layers.1:every=2",
    "gradient@decoder.layers.*.mlp:every=2",
    "router@decoder.layers.**:every=2",
    "residual@decoder.layers.*:every=2",
    "logits@output_layer:tokens=0-9:every=2",
    "logits@decoder.layers.3:tokens=0-9:every=2",
    "moments@decoder.layers.*.**:every=5",
    "histogram@decoder.layers.*.mlp:every=5",
)

CALLS = (
    *(
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_gather_object",
        "reduce",
    ),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier"),
    *("batch_isend_irecv", "send", "recv"),
)
"""Of torch.distributed; ``isend`` and ``irecv`` are passed about as what they are."""


def compare(folder: str, layouts: dict[str, str], steps: int) -> dict[str, Any]:
    """For each layout what both runs did: bits of every step, calls of every step, what was tapped when."""
    begin()
    return {name: _both(Path(folder) / name, flags, steps) for name, flags in layouts.items()}


def _both(folder: Path, flags: str, steps: int) -> dict[str, Any]:
    return {
        "on": _train(folder, flags, steps, watch=True),
        "off": _train(folder, flags, steps, watch=False),
    }


def _train(folder: Path, flags: str, steps: int, *, watch: bool) -> dict[str, Any]:
    config = load_config([*flags.split(), "--seed", "5", "--mock-data"])
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        if watch:
            save_checkpoint(folder, trainable, Progress(), job, manifest={})
        load_weights(folder / "iter_0000000", trainable)
        seed_everything(5, job)
        shape = Shape(
            num_microbatches=config.num_microbatches(job.layout.world_size),
            micro_batch_size=MICRO_BATCH,
            seq_length=SEQUENCE,
        )
        inner = make_forward_step(family, job.backend.device(job.backend.current_device()))
        seen: list[int] = []

        def forward_step(batches: Any, model: Any) -> Any:
            seen.append(len(_tapped(trainable)))
            return inner(batches, model)

        batches = [batches_of(job, 5, steps) for _ in trainable.chunks]
        before = _callables(trainable)
        found: dict[str, Any] = {"steps": [], "calls": [], "tapped": [], "lines": [], "frames": {}}

        def run(observed: Observed | None) -> None:
            for iteration in range(1, steps + 1):
                seen.clear()
                numbers = _group_numbers()
                with _counted() as calls:
                    found["steps"].append(
                        _step(trainable, forward_step, batches, shape, job, iteration, observed)
                    )
                calls["numbered by the groups"] = _group_numbers() - numbers
                found["calls"].append(dict(calls))
                found["tapped"].append(max(seen))
                assert _same(_callables(trainable), before), "a callable is not the original after a step"
                assert _nobody_listens(), "something is left open after a step"

        if watch:
            with watched(config, job, trainable, watch=REQUESTS, interval=INTERVAL) as (observed, reader):
                run(observed)
            if reader is not None:
                found["lines"] = reader.lines
                found["frames"] = dict(Counter(frame["k"] for _, frame in reader.everything()))
        else:
            run(None)
        with taps.watch(trainable.bare_chunks()[0], after=lambda call, output: None):
            found["open_tap_is_seen"] = not _same(_callables(trainable), before) and not _nobody_listens()
        found["closed_tap_is_not"] = _same(_callables(trainable), before) and _nobody_listens()
        dist.barrier()
    return found


def _step(
    trainable: Trainable,
    forward_step: Any,
    batches: Any,
    shape: Shape,
    job: Job,
    iteration: int,
    observed: Observed | None,
) -> list[str]:
    """Hashes of what the step left behind."""
    gradients: list[str] = []

    class Both:
        def gradients_ready(self) -> None:
            gradients.append(hashed(_gradients(trainable)))
            if observed is not None:
                observed.gradients_ready()

        def updated(self, *, skipped: bool) -> None:
            if observed is not None:
                observed.updated(skipped=skipped)

    if observed is not None:
        observed.begin(iteration)
    result = train_step(trainable, forward_step, batches, shape, job, iteration=iteration, observer=Both())
    if observed is not None:
        observed.end(iteration, result)
    states = RandomStates.now(job)
    weights = [each.detach() for chunk in trainable.chunks for each in chunk.parameters()]
    return [
        result.loss.hex(),
        float(result.grad_norm or 0).hex(),
        *gradients,
        hashed(weights),
        hashed([states.torch, states.device, *states.tracker.values()]),
    ]


def _gradients(trainable: Trainable) -> list[torch.Tensor]:
    return [each.main_grad for chunk in trainable.chunks for each in chunk.parameters()]


def hashed(tensors: list[torch.Tensor]) -> str:
    """Of their bits."""
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _modules(trainable: Trainable) -> Iterator[torch.nn.Module]:
    for chunk in trainable.chunks:
        yield from chunk.modules()


def _callables(trainable: Trainable) -> list[Any]:
    """Every module's method, its own callables and its hooks."""
    found: list[Any] = []
    for module in _modules(trainable):
        found.append(getattr(module.forward, "__func__", module.forward))
        found += [value for value in vars(module).values() if callable(value)]
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found += vars(module)[name].values()
    return found


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _nobody_listens() -> bool:
    open_ = (taps.loss._watches, taps.loss._token_watches, taps.loss._whole, taps.attention._listener)
    return not any(open_) and taps.progress._stop is None and not events.listening()


def _group_numbers() -> int:
    """Collectives of this rank so far, as the process groups number them, whoever called them."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def _tapped(trainable: Trainable) -> list[str]:
    return [
        name
        for module in _modules(trainable)
        for name, value in vars(module).items()
        if isinstance(value, Tapped)
    ]


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Calls of torch's collectives and transfers."""
    calls: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in CALLS if hasattr(dist, name)}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
