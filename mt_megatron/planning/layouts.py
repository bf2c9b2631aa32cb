"""Every way to spread a training run over a number of devices, and why some of them are impossible.

The rules are ``validate``'s own; nothing is restated here.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mt_megatron.config.schema import CoreOptions, TrainingConfig, layout_chunks
from mt_megatron.parallel.stage_layers import end_counts
from mt_megatron.planning.activation_options import Recompute
from mt_megatron.planning.pipeline_layout import BALANCED
from mt_megatron.planning.validate.experts import expert_problems
from mt_megatron.planning.validate.fp8 import fp8_layer_problems
from mt_megatron.planning.validate.model import model_problems
from mt_megatron.planning.validate.parallel import node_problems, parallel_problems
from mt_megatron.planning.validate.rampup import rampup_problems
from mt_megatron.planning.validate.train import train_problems

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
    expert: int = 1
    data: int = 1
    micro_batch: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: Recompute = Recompute()
    balanced: bool = False
    """Whether layers, which do not come out even, are divided over the chunks by cost."""

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
            "recompute_mla_up_proj": self.recompute.mla_up_proj,
            "moe_layer_recompute": self.recompute.moe_layer,
            "overlap_p2p_comm": self.chunks > 1,
        }
        if self.balanced:
            core["pipeline_model_parallel_layout"] = BALANCED
        parallel = dataclasses.replace(
            config.parallel,
            tensor_model_parallel_size=self.tensor,
            pipeline_model_parallel_size=self.pipeline,
            virtual_pipeline_model_parallel_size=self._chunks_beside(config),
            num_layers_per_virtual_pipeline_stage=None,
            context_parallel_size=self.context,
            cp_comm_type=config.parallel.cp_comm_type if self.context > 1 else None,
            expert_model_parallel_size=self.expert,
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

    def _chunks_beside(self, config: TrainingConfig | None) -> int | None:
        """Chunks per stage to ask for; None where an explicit layout of ``config`` says it, or for one."""
        is_said = config is not None and _is_explicit(config)
        return self.chunks if self.chunks > 1 and not is_said else None

    def options(self, config: TrainingConfig | None = None) -> list[str]:
        """The layout as options of ``mt-megatron pretrain``. Behind those of ``config`` what it asks for and
        the layout does without is taken back."""
        recompute = self.recompute
        numbers: dict[str, int | str | None] = {
            "tensor-model-parallel-size": self.tensor,
            "pipeline-model-parallel-size": self.pipeline,
            "virtual-pipeline-model-parallel-size": self._chunks_beside(config),
            "pipeline-model-parallel-layout": BALANCED if self.balanced else None,
            "context-parallel-size": self.context,
            "expert-model-parallel-size": self.expert if self.expert > 1 else None,
            "micro-batch-size": self.micro_batch,
            "recompute-granularity": recompute.granularity,
            "recompute-method": recompute.method,
            "recompute-num-layers": recompute.num_layers if recompute.granularity == "full" else None,
        }
        switches = {
            "recompute-mla-up-proj": recompute.mla_up_proj,
            "moe-layer-recompute": recompute.moe_layer,
            "sequence-parallel": self.sequence_parallel,
            "use-distributed-optimizer": self.distributed_optimizer,
            "overlap-grad-reduce": self.overlaps,
            "overlap-param-gather": self.overlaps and self.distributed_optimizer,
        }
        found = [
            word for name, value in numbers.items() if value is not None for word in (f"--{name}", str(value))
        ]
        found += [f"--{name}" for name, on in switches.items() if on]
        if config is None:
            return found
        for name, on in switches.items():
            asked = getattr(config.parallel, name.replace("-", "_"), False)
            found += [f"--no-{name}"] if asked and not on else []
        # A printed configuration holds the value of its own layout.
        if config.model.overlap_p2p_comm != (self.chunks > 1):
            found.append("--overlap-p2p-comm" if self.chunks > 1 else "--no-overlap-p2p-comm")
        unset = {
            "virtual-pipeline-model-parallel-size": self._chunks_beside(config) is None,
            "num-layers-per-virtual-pipeline-stage": True,
            "cp-comm-type": self.context == 1,
        }
        for name, without in unset.items():
            asked = getattr(config.parallel, name.replace("-", "_")) is not None
            found += [f"--{name}", "none"] if asked and without else []
        if config.model.recompute_num_layers is not None and recompute.granularity != "full":
            found += ["--recompute-num-layers", "none"]
        return found


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
                data = world_size // share
                for expert, chunks, size in itertools.product(
                    _expert_sizes(config, data), _chunks(config, pipeline, frugal), micro
                ):
                    layout = Layout(
                        tensor=tensor,
                        pipeline=pipeline,
                        chunks=chunks,
                        context=context,
                        expert=expert,
                        data=data,
                        micro_batch=size,
                        balanced=_uneven(config, pipeline * chunks),
                    )
                    yield from _switches(layout, config, frugal)


def _expert_sizes(config: TrainingConfig, data: int) -> list[int]:
    """Sizes of expert parallelism: its ranks are data-parallel ones, and each has as many experts."""
    given, experts = config.parallel.expert_model_parallel_size, config.model.num_moe_experts
    if given > 1 or experts is None:
        return [given] if data % given == 0 else []
    return [size for size in _divisors(experts) if data % size == 0]


def _switches(layout: Layout, config: TrainingConfig, frugal: bool) -> Iterator[Layout]:
    # Experts need sequence parallelism beside tensor parallelism, and are too many for whole optimizers.
    frugal = frugal or config.model.num_moe_experts is not None
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
        *expert_problems(applied, world_size),
        *fp8_layer_problems(applied),
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
    if _is_explicit(config):
        # Chunks of the stages that are tried; rules refuse a layout that they do not divide.
        return [layout_chunks(config.model.pipeline_model_parallel_layout, pipeline) or 1]
    given = config.virtual_pipeline_model_parallel_size
    per_chunk = config.parallel.num_layers_per_virtual_pipeline_stage
    if pipeline == 1 or frugal:
        return [1]
    if per_chunk is not None:
        # It gives another number of chunks for each number of stages that is tried.
        chunks, rest = divmod(config.model.num_layers, pipeline * per_chunk)
        return [chunks if rest == 0 and chunks else 1]
    if given is not None:
        return [given]
    layers = config.model.num_layers
    if _settled(config):
        return [1]
    most = min(_MOST_CHUNKS, layers // pipeline)
    if layers % pipeline:
        # They come out even for no number of chunks, so that any number will do.
        return [2**power for power in range(most.bit_length())] or [1]
    return [each for each in _divisors(layers // pipeline) if each <= most]


def _is_explicit(config: TrainingConfig) -> bool:
    """True where the configuration itself gives every stage and chunk its layers."""
    return config.model.pipeline_model_parallel_layout not in (None, BALANCED)


def _settled(config: TrainingConfig) -> bool:
    """Whether the configuration itself says how many layers the stages have."""
    return config.model.pipeline_model_parallel_layout is not None or end_counts(config.model) != (None, None)


def _uneven(config: TrainingConfig, chunks: int) -> bool:
    """Whether an equal number of layers for all chunks does not come out even, and nothing else is said."""
    return not _settled(config) and config.model.num_layers % chunks != 0
