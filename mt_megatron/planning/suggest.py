"""Layouts of a training run that fit a device's memory, in the order of the time that they should take."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.planning.activation_memory import Recompute
from mt_megatron.planning.cost import StepCost, step_cost
from mt_megatron.planning.flops import forward_flops
from mt_megatron.planning.hardware import Hardware
from mt_megatron.planning.layouts import Layout, layouts, reason_of, rule_problems
from mt_megatron.planning.memory import MemoryCase, RankMemory, chunk_layers, worst_memory
from mt_megatron.planning.memory_estimate import DEFAULT_IMBALANCE, memory_case, padded_shape, recompute_of
from mt_megatron.planning.validate.supported import support_problems

_DEFAULT_TOKENS = 4 * 2**20
_LARGEST_GROWTH = 64
_ANY_NUMBER_OF_STEPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout that fits, with what it is estimated to need."""

    layout: Layout
    memory: RankMemory
    """The rank that holds most."""

    cost: StepCost
    mfu: float
    """Share of the peak that the model's own operations are, by the estimated time."""

    tokens_per_second: float
    """Of all devices together."""


@dataclass(kw_only=True)
class Rejected:
    """Layouts that one and the same rule refuses."""

    reason: str
    count: int
    example: str
    """The rule's whole message for one of them."""


@dataclass(frozen=True, kw_only=True)
class NearMiss:
    """The layout that comes nearest to fitting among those that need too much memory."""

    layout: Layout
    needs_bytes: int
    usable_bytes: float


@dataclass(kw_only=True)
class Suggestion:
    """Layouts that were tried, and what came of them."""

    config: TrainingConfig
    """The configuration with what was assumed filled in."""

    world_size: int
    hardware: Hardware
    assumed: list[str]
    """What the configuration left open and was filled in, as options."""

    expert_imbalance: float = DEFAULT_IMBALANCE
    """Tokens that the busiest expert-parallel rank is assumed to receive over their mean."""

    considered: int = 0
    choices: list[Choice] = field(default_factory=list)
    """Best first; of layouts that differ in switches alone the best one."""

    fitting: int = 0
    """All layouts that fit."""

    rejected: list[Rejected] = field(default_factory=list)
    """Most frequent first."""

    too_large: int = 0
    """Layouts that keep every rule and need too much memory."""

    near_miss: NearMiss | None = None
    advice: list[str] = field(default_factory=list)
    """What would make it fit, when nothing does."""


def suggest(
    config: TrainingConfig,
    world_size: int,
    hardware: Hardware,
    *,
    expert_imbalance: float = DEFAULT_IMBALANCE,
) -> Suggestion:
    """Rank the layouts of ``config`` on ``world_size`` devices.

    What ``config`` sets itself (sizes above 1, a recomputation, switches that are on) is kept. Raises
    ``ConfigError`` for a model that is not complete, and for settings that no layout could mend.
    """
    if world_size < 1:
        raise ConfigError(f"--world-size is {world_size}; expected at least 1")
    complete, assumed = _complete(config)
    problems = support_problems(complete)
    if problems:
        raise ConfigError("no layout can be suggested:\n" + "\n".join(f"- {each}" for each in problems))
    found = Suggestion(
        config=complete,
        world_size=world_size,
        hardware=hardware,
        assumed=assumed,
        expert_imbalance=expert_imbalance,
    )
    _search(found)
    if not found.choices:
        found.advice = _advice(found)
    return found


def _complete(config: TrainingConfig) -> tuple[TrainingConfig, list[str]]:
    padded_shape(config)  # Raises for a model that is not complete.
    train, optimizer, assumed = config.train, config.optimizer, []
    if train.seq_length is None:
        raise ConfigError("seq_length is not set; memory and time depend on it. Set --seq-length.")
    if train.global_batch_size is None:
        size = max(1, _DEFAULT_TOKENS // train.seq_length)
        train = dataclasses.replace(train, global_batch_size=size)
        assumed.append(f"--global-batch-size {size}")
    # Neither changes what a layout needs, and nobody has to have decided them already.
    if train.train_iters is None:
        train = dataclasses.replace(train, train_iters=_ANY_NUMBER_OF_STEPS)
    if optimizer.lr is None:
        optimizer = dataclasses.replace(optimizer, values={**optimizer.values, "lr": 1.0})
    return dataclasses.replace(config, train=train, optimizer=optimizer), assumed


def _search(found: Suggestion) -> None:
    best: dict[tuple[int, ...], Choice] = {}
    rejected: dict[str, Rejected] = {}
    for layout in layouts(found.config, found.world_size):
        found.considered += 1
        given = dataclasses.replace(layout, recompute=recompute_of(found.config.model))
        problems = rule_problems(given, found.config, found.world_size, found.hardware.devices_per_node)
        if problems:
            reason = reason_of(problems[0])
            entry = rejected.setdefault(reason, Rejected(reason=reason, count=0, example=problems[0]))
            entry.count += 1
            continue
        fits, smallest = False, (sys.maxsize, layout)
        for variant, case, memory in _variants(layout, found):
            if memory.total > found.hardware.usable_bytes:
                smallest = min(smallest, (memory.total, variant), key=lambda pair: pair[0])
                continue
            fits = True
            found.fitting += 1
            choice = _choice(found, variant, case, memory)
            key = (
                *(variant.tensor, variant.pipeline, variant.chunks, variant.context, variant.expert),
                variant.micro_batch,
            )
            if key not in best or _order(choice) < _order(best[key]):
                best[key] = choice
        if not fits:
            found.too_large += 1
            _note_miss(found, smallest[1], smallest[0])
    found.choices = sorted(best.values(), key=_order)
    found.rejected = sorted(rejected.values(), key=lambda entry: -entry.count)


def _order(choice: Choice) -> tuple[float, int]:
    return choice.cost.total, choice.memory.total


Variant = tuple[Layout, MemoryCase, RankMemory]


def _case(found: Suggestion, layout: Layout, world_size: int) -> MemoryCase:
    return memory_case(layout.apply(found.config), world_size, expert_imbalance=found.expert_imbalance)


def _variants(layout: Layout, found: Suggestion) -> Iterator[Variant]:
    """``layout`` with every recomputation worth trying, and the worst rank's memory."""
    case = _case(found, layout, found.world_size)
    given, model = recompute_of(found.config.model), found.config.model
    if given != Recompute():
        yield _with(layout, case, given)
        return
    plain = _with(layout, case, Recompute())
    yield plain
    yield _with(layout, case, Recompute(granularity="selective"))
    latent, experts = model.multi_latent_attention, model.num_moe_experts is not None
    if latent:
        yield _with(layout, case, Recompute(mla_up_proj=True))
    if experts:
        yield _with(layout, case, Recompute(moe_layer=True))
    if latent and experts:
        yield _with(layout, case, Recompute(mla_up_proj=True, moe_layer=True))
    if _lasting(plain[2]) <= found.hardware.usable_bytes < plain[2].total:
        yield from _smallest_block(layout, case, found.hardware.usable_bytes)
    yield _with(layout, case, Recompute(granularity="full", method="uniform", num_layers=1))


def _lasting(memory: RankMemory) -> int:
    """Bytes that no recomputation saves: where they alone pass the memory, no number of layers fits."""
    return memory.total - memory.activations - memory.workspace


def _smallest_block(layout: Layout, case: MemoryCase, usable: float) -> Iterator[Variant]:
    """The fewest recomputed layers per chunk that fit; nothing when that is all of them."""
    low, high, best = 1, max(chunk_layers(case)) - 1, None
    while low <= high:
        middle = (low + high) // 2
        tried = _with(layout, case, Recompute(granularity="full", method="block", num_layers=middle))
        if tried[2].total <= usable:
            best, high = tried, middle - 1
        else:
            low = middle + 1
    if best is not None:
        yield best


def _with(layout: Layout, case: MemoryCase, recompute: Recompute) -> Variant:
    activations = dataclasses.replace(case.activations, recompute=recompute)
    case = dataclasses.replace(case, activations=activations)
    return dataclasses.replace(layout, recompute=recompute), case, worst_memory(case)


def _choice(found: Suggestion, layout: Layout, case: MemoryCase, memory: RankMemory) -> Choice:
    config, hardware = found.config, found.hardware
    cost = step_cost(case, memory, hardware)
    tokens = config.global_batch_size(found.world_size) * case.activations.sequence
    training = forward_flops(case.shape, case.activations.sequence).training
    return Choice(
        layout=layout,
        memory=memory,
        cost=cost,
        mfu=training * tokens / (cost.total * found.world_size * hardware.tflops * 1e12),
        tokens_per_second=tokens / cost.total,
    )


def _note_miss(found: Suggestion, layout: Layout, needed: int) -> None:
    if found.near_miss is None or needed < found.near_miss.needs_bytes:
        found.near_miss = NearMiss(
            layout=layout, needs_bytes=needed, usable_bytes=found.hardware.usable_bytes
        )


def _advice(found: Suggestion) -> list[str]:
    advice = []
    hardware, parallel = found.hardware, found.config.parallel
    if not found.considered:
        sizes = (
            f"tensor {parallel.tensor_model_parallel_size}, "
            f"pipeline {parallel.pipeline_model_parallel_size}, context {parallel.context_parallel_size}"
        )
        advice.append(
            f"{found.world_size} devices are no multiple of the sizes that are set ({sizes}): another number "
            "of them, or other sizes"
        )
    if found.near_miss is not None:
        needed = found.near_miss.needs_bytes / (1 - hardware.memory_reserve)
        advice.append(
            f"devices of at least {needed / 2**30:.1f} GiB each would do for {found.world_size} of them "
            f"({hardware.memory_bytes / 2**30:.1f} GiB are given)"
        )
    world = found.world_size
    while world < found.world_size * _LARGEST_GROWTH:
        world *= 2
        if _fits(found, world):
            advice.append(f"{world} of these devices would do")
            return advice
    if found.near_miss is None:
        advice.append(
            "no layout keeps all rules: change the number of devices, --global-batch-size, or the sizes that "
            "the rules above name"
        )
    else:
        advice.append(
            f"up to {world} of these devices would not do at a global batch of "
            f"{found.config.train.global_batch_size} sequences of {found.config.train.seq_length} tokens"
        )
    return advice


def _fits(found: Suggestion, world_size: int) -> bool:
    given = recompute_of(found.config.model)
    full = Recompute(granularity="full", method="uniform", num_layers=1)
    candidates: Iterable[Layout] = layouts(found.config, world_size, frugal=True)
    for layout in candidates:
        layout = dataclasses.replace(layout, recompute=full if given == Recompute() else given)
        if rule_problems(layout, found.config, world_size, found.hardware.devices_per_node):
            continue
        case = _case(found, layout, world_size)
        if worst_memory(case).total <= found.hardware.usable_bytes:
            return True
    return False
