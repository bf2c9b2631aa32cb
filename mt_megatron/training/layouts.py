"""Every way to spread a training run over a number of devices, and why some of them are impossible.

The rules are ``validate``'s own; nothing is restated here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mt_megatron.models.activation_memory import Recompute
from mt_megatron.training.config import CoreOptions, TrainingConfig
from mt_megatron.training.validate_model import model_problems
from mt_megatron.training.validate_nodes import node_problems
from mt_megatron.training.validate_parallel import parallel_problems
from mt_megatron.training.validate_rampup import rampup_problems
from mt_megatron.training.validate_train import train_problems

MICRO_BATCHES = (1, 2, 4, 8)
"""Micro-batch sizes that are tried unless the configuration has one above 1."""

_SHORTEST_SHARE = 1024
"""Context parallelism is tried down to so many tokens of a sequence per rank."""

_MOST_CHUNKS = 8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes and switches that ``plan --suggest`` chooses."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    data: int = 1
    micro_batch: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: Recompute = Recompute()
    first_layers: int | None = None
    last_layers: int | None = None

    @property
    def overlaps(self) -> bool:
        """Whether there are gradients to reduce while the backward pass runs."""
        return self.data * self.context > 1

    def apply(self, config: TrainingConfig) -> TrainingConfig:
        """``config`` in this layout."""
        core = {
            **config.model.core.values,
            "recompute_granularity": self.recompute.granularity,
            "recompute_method": self.recompute.method,
            "recompute_num_layers": (
                self.recompute.num_layers if self.recompute.granularity == "full" else None
            ),
            "first_pipeline_num_layers": self.first_layers,
            "last_pipeline_num_layers": self.last_layers,
            "overlap_p2p_comm": self.chunks > 1,
        }
        parallel = dataclasses.replace(
            config.parallel,
            tensor_model_parallel_size=self.tensor,
            pipeline_model_parallel_size=self.pipeline,
            virtual_pipeline_model_parallel_size=self.chunks if self.chunks > 1 else None,
            num_layers_per_virtual_pipeline_stage=None,
            context_parallel_size=self.context,
            cp_comm_type=config.parallel.cp_comm_type if self.context > 1 else None,
            sequence_parallel=self.sequence_parallel,
            use_distributed_optimizer=self.distributed_optimizer,
            overlap_grad_reduce=self.overlaps,
            overlap_param_gather=self.overlaps and self.distributed_optimizer,
        )
        return dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, core=CoreOptions(core)),
            parallel=parallel,
            train=dataclasses.replace(config.train, micro_batch_size=self.micro_batch),
        )

    def options(self) -> list[str]:
        """The layout as options of ``mt-megatron pretrain``."""
        recompute = self.recompute
        numbers: dict[str, int | str | None] = {
            "tensor-model-parallel-size": self.tensor,
            "pipeline-model-parallel-size": self.pipeline,
            "virtual-pipeline-model-parallel-size": self.chunks if self.chunks > 1 else None,
            "first-pipeline-num-layers": self.first_layers,
            "last-pipeline-num-layers": self.last_layers,
            "context-parallel-size": self.context,
            "micro-batch-size": self.micro_batch,
            "recompute-granularity": recompute.granularity,
            "recompute-method": recompute.method,
            "recompute-num-layers": recompute.num_layers if recompute.granularity == "full" else None,
        }
        switches = {
            "sequence-parallel": self.sequence_parallel,
            "use-distributed-optimizer": self.distributed_optimizer,
            "overlap-grad-reduce": self.overlaps,
            "overlap-param-gather": self.overlaps and self.distributed_optimizer,
        }
        found = [
            word for name, value in numbers.items() if value is not None for word in (f"--{name}", str(value))
        ]
        return found + [f"--{name}" for name, on in switches.items() if on]


def layouts(config: TrainingConfig, world_size: int, *, frugal: bool = False) -> Iterator[Layout]:
    """Layouts to try, without recomputation (``recomputes`` adds it); rules are not yet applied.

    Sizes, a recomputation and a micro-batch that ``config`` sets itself are kept. ``frugal`` leaves
    only what needs least memory.
    """
    parallel, model, train = config.parallel, config.model, config.train
    divisors = _divisors(world_size)
    micro = (train.micro_batch_size,) if train.micro_batch_size > 1 else (1,) if frugal else MICRO_BATCHES
    for tensor in _sizes(parallel.tensor_model_parallel_size, divisors, model.num_attention_heads):
        for pipeline in _sizes(parallel.pipeline_model_parallel_size, divisors, model.num_layers):
            for context in _sizes(
                parallel.context_parallel_size, divisors, (train.seq_length or 0) // _SHORTEST_SHARE
            ):
                share = tensor * pipeline * context
                if world_size % share:
                    continue
                for chunks in _chunks(config, pipeline, frugal):
                    first, last = _uneven(config, pipeline)
                    for size in micro:
                        yield from _switches(
                            Layout(
                                tensor=tensor,
                                pipeline=pipeline,
                                chunks=chunks,
                                context=context,
                                data=world_size // share,
                                micro_batch=size,
                                first_layers=first,
                                last_layers=last,
                            ),
                            config,
                            frugal,
                        )


def _switches(layout: Layout, config: TrainingConfig, frugal: bool) -> Iterator[Layout]:
    sequence = (False,) if layout.tensor == 1 else (True,) if frugal else (True, False)
    if config.parallel.sequence_parallel and layout.tensor > 1:
        sequence = (True,)
    spread = (False,) if not layout.overlaps else (True,) if frugal else (True, False)
    if config.parallel.use_distributed_optimizer and layout.overlaps:
        spread = (True,)
    for one in sequence:
        for other in spread:
            yield dataclasses.replace(layout, sequence_parallel=one, distributed_optimizer=other)


def rule_problems(layout: Layout, config: TrainingConfig, world_size: int, per_node: int) -> list[str]:
    """What ``validate`` has against ``layout``; ``config`` is as given, not yet in this layout."""
    applied = layout.apply(config)
    return [
        *model_problems(applied),
        *parallel_problems(applied, world_size),
        *node_problems(applied, world_size, per_node),
        *train_problems(applied),
        *rampup_problems(applied, world_size),
    ]


def reason_of(problem: str) -> str:
    """A problem without its numbers and its advice, so that like ones can be counted together."""
    # A sentence ends with a full stop and a space; one inside of a number has no space.
    return re.sub(r"\d+(, \d+)*", "N", problem.split(". ")[0])


def _sizes(given: int, divisors: list[int], most: int) -> list[int]:
    return [given] if given > 1 else [size for size in divisors if size <= max(1, most)]


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _chunks(config: TrainingConfig, pipeline: int, frugal: bool) -> list[int]:
    given = config.virtual_pipeline_model_parallel_size
    if pipeline == 1 or frugal:
        return [1]
    if given is not None:
        return [given]
    layers = config.model.num_layers
    if layers % pipeline:
        return [1]
    return [each for each in _divisors(layers // pipeline) if each <= _MOST_CHUNKS]


def _uneven(config: TrainingConfig, pipeline: int) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage, where an equal number for all does not come out even."""
    model = config.model
    given = (model.first_pipeline_num_layers, model.last_pipeline_num_layers)
    if pipeline == 1 or given != (None, None):
        return given if pipeline > 1 else (None, None)
    if model.num_layers % pipeline == 0 or pipeline == 2:
        return (None, None) if model.num_layers % pipeline == 0 else (model.num_layers // 2, None)
    # The ends have the embedding and the output layer to do besides.
    ends = model.num_layers - (pipeline - 2) * -(-model.num_layers // pipeline)
    if ends < 2:
        ends += pipeline - 2
    return ends // 2, ends - ends // 2
