"""What the FP8 linears of a model share: options, the step, histories of largest magnitudes, counts.

A *step* is one call of a forward-backward schedule. Within it weights do not change, so each is cast once
for all micro-batches; outside of it they are cast for each product. Megatron's optimizers write weights
through ``.data``, which torch's version counter does not see: nothing but the step says that they are the
same.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mt_megatron.fp8.formats import FORMATS
from mt_megatron.fp8.kernels import Kernels
from mt_megatron.fp8.quantise import scale_of
from mt_megatron.fp8.recipe import ROLES, AmaxGroup, Kind, Recipe, Role
from mt_megatron.seams import collectives

_log = logging.getLogger("mt_megatron")

if TYPE_CHECKING:
    from mt_megatron.fp8.linear import Fp8Linear
    from mt_megatron.fp8.telemetry import Telemetry


class Draw(NamedTuple):
    """Keys of one operand's draws, beside its linear and rank."""

    step: int
    """Completed steps when the operand came up."""

    number: int
    """Among the operands of its linear, or of one of its experts, in that step."""


NO_DRAW = Draw(0, 0)

KINDS: tuple[Kind, ...] = ("input", "weight", "grad")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run decides beside the recipe."""

    save_activations: bool = False
    """Whether inputs are kept for backward in FP8 also where wgrad needs other codes than fprop."""

    telemetry_interval: int = 0
    """Numerics are measured in every step that this divides; 0: never."""

    demote_underflow: float | None = None
    demote_saturation: float | None = None
    demote_snr: float | None = None
    """Thresholds of demotion to bf16: shares in [0, 1] above, median SNR in dB below."""

    seed: int = 1234
    """Of the draws for stochastic rounding."""


class Fp8State:
    """One per model and process; made when the first FP8 linear is."""

    def __init__(self, recipe: Recipe, options: Options) -> None:
        self.recipe = recipe
        self.options = options
        self.linears: dict[str, list[Fp8Linear]] = {}
        """By name; the experts of a layer that have parameters of their own share one."""

        self.step = 0
        """Completed training steps."""

        self.kernels: Kernels = "reference"
        """Kernels of the products."""

        self.in_step = False
        self.trains = False
        """Whether the current step is a training step, not an evaluation."""

        self.counts: Counter[str] = Counter()
        """Casts by kind and layout, gathers, padded rows, amax reductions: what tests and reports read."""

        self.telemetry: Telemetry | None = None
        self.sampling = False
        self.announce: Callable[[str], None] = _log.warning
        """Called on the first rank of the stage alone."""

        self._slots: dict[tuple[str, Kind], int] = {}
        self._maxima: list[float] = []
        """The format's maximum of each slot."""

        self._history: Tensor | None = None
        """fp32 [slots, history], the newest first."""

        self._scale: Tensor | None = None
        """fp32 [slots]; 0 where no step has seen a magnitude yet."""

        self._seen: Tensor | None = None
        """fp32 [slots]: largest magnitudes of the current step."""

        self._noted: list[bool] | None = None
        """By slot: whether it has a scale; None: to be asked of the device."""

        _made.append(True)

    def __reduce__(self) -> Any:
        # A copied or stored configuration is another model's; ``attach.Attached`` copies models.
        return _nothing, ()

    def copied(self) -> Fp8State:
        """The same recipe, step, scales and histories, without linears."""
        made = Fp8State(self.recipe, self.options)
        made.step, made.kernels = self.step, self.kernels
        if self.telemetry is not None:
            made.telemetry = type(self.telemetry)()
        made._slots, made._maxima = dict(self._slots), list(self._maxima)
        made._history, made._scale, made._seen = (
            None if each is None else each.clone() for each in (self._history, self._scale, self._seen)
        )
        return made

    @property
    def native(self) -> bool:
        """True where kernels compute the products, not the reference."""
        return self.kernels != "reference"

    @property
    def alive(self) -> bool:
        """True while a weight of the model exists, or none was added yet."""
        return not self.linears or any(linear.alive for linear in self.every())

    @property
    def takes_more(self) -> bool:
        """False once there are histories: linears that are built later belong to a state of their own."""
        return self._history is None

    def add(self, linear: Fp8Linear) -> None:
        """Register a linear and, under delayed scaling, its slots."""
        same = self.linears.setdefault(linear.name, [])
        linear.index = len(same)
        same.append(linear)
        # A copied state has the slots already.
        if self.recipe.scaling == "delayed" and (linear.name, KINDS[0]) not in self._slots:
            assert self._history is None, "linears are added before the first step"
            for kind in KINDS:
                self._slots[linear.name, kind] = len(self._slots)
                formats = {self.recipe.cast(role, kind).format for role in ROLES if _reads(role, kind)}
                quantised = [each for each in formats if each != "bf16"]
                self._maxima.append(FORMATS[quantised[0]].maximum if quantised else 1.0)

    # Delayed scaling.

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if self._history is None or self._scale is None or self._seen is None:
            count = len(self._slots)
            self._history = torch.zeros(count, self.recipe.history, device=device)
            self._scale = torch.zeros(count, device=device)
            self._seen = torch.zeros(count, device=device)
        elif self._history.device != device:
            # Weights that were loaded, or looked at, on the host before they were moved.
            self._history, self._scale = self._history.to(device), self._scale.to(device)
            self._seen = self._seen.to(device)
        return self._history, self._scale, self._seen

    def delayed_scale(self, name: str, kind: Kind, amax: Tensor) -> Tensor:
        """The scale of a slot, fp32, after its tensor's ``amax`` (a scalar, or one for each expert: so is the
        scale) was noted for later steps. Before any step has seen one there is none, and the tensor's own is
        taken. Steps whose tensors are all zeros keep the scale, as in Transformer Engine, however many they
        are."""
        _, scale, seen = self._tensors(amax.device)
        slot = self._slots[name, kind]
        if self.trains:
            # A magnitude that is not finite says nothing about the next steps.
            finite = torch.where(torch.isfinite(amax), amax, 0.0).amax()
            torch.maximum(seen[slot], finite, out=seen[slot])
        fmt = next(each for each in FORMATS.values() if each.maximum == self._maxima[slot])
        own = scale_of(amax, fmt, margin=self.recipe.margin)
        return torch.where(scale[slot] > 0, scale[slot], own)

    def has_scale(self, name: str, kind: Kind) -> bool:
        """False where ``delayed_scale`` takes the tensor's own. Waits for the device once in a step."""
        if self._noted is None:
            self._noted = (self._tensors(self._device())[1] > 0).tolist()
        return self._noted[self._slots[name, kind]]

    def _update_scales(self) -> None:
        history, scale, seen = self._tensors(self._device())
        self._noted = None
        self.reduce_max(seen, self.recipe.amax_group)
        history.copy_(torch.roll(history, 1, dims=1))
        history[:, 0] = seen
        seen.zero_()
        scale.copy_(self._scales_of(history, scale, self._maxima))

    def _scales_of(self, history: Tensor, scale: Tensor, maxima: Sequence[float]) -> Tensor:
        """Scales [slots] for ``history`` [slots, length]; of slots that have seen nothing those in ``scale``.
        ``maxima`` are those of the slots' formats."""
        amax = history.amax(dim=1) if self.recipe.algorithm == "max" else history[:, 0]
        of_format = torch.tensor(maxima, device=history.device)
        for maximum in set(maxima):
            fmt = next(each for each in FORMATS.values() if each.maximum == maximum) if maximum > 1 else None
            if fmt is None:
                continue
            new = scale_of(amax, fmt, margin=self.recipe.margin)
            # Nothing was seen yet: the scale stays as it was.
            scale = torch.where((of_format == maximum) & (amax > 0), new, scale)
        return scale

    def _device(self) -> torch.device:
        # Layers may have been taken out of a model since.
        return next(linear.parameter.device for linear in self.every() if linear.alive)

    def every(self) -> Iterator[Fp8Linear]:
        """All linears."""
        for each in self.linears.values():
            yield from each

    def demote(self, name: str) -> None:
        """Let the linears of ``name`` compute in bf16 from now on."""
        for linear in self.linears[name]:
            linear.demoted = True

    def is_demoted(self, name: str) -> bool:
        return self.linears[name][0].demoted

    def reduce_max(self, values: Tensor, among: AmaxGroup = "tp-cp-dp") -> None:
        """Elementwise largest over the ranks that share this stage's layers: tensor, context and, unless
        ``among`` leaves them out, data parallel."""
        import torch.distributed as dist
        from megatron.core import parallel_state

        if not dist.is_initialized() or not parallel_state.model_parallel_is_initialized():
            return
        group = parallel_state.get_amax_reduction_group(
            with_context_parallel=True, tp_only_amax_red=among == "tp-cp"
        )
        if group.size() == 1:
            return
        self.counts["amax_reductions"] += 1
        name = "tp-dp-cp" if among == "tp-cp-dp" else "tp-cp"
        with collectives.announced("all_reduce", name, group):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)

    # Steps.

    @contextmanager
    def stepping(self, *, forward_only: bool) -> Iterator[None]:
        """One call of a schedule."""
        if self.in_step:  # a schedule within a schedule
            yield
            return
        self.in_step, self.trains = True, not forward_only
        interval = self.options.telemetry_interval
        self.sampling = self.trains and interval > 0 and (self.step + 1) % interval == 0
        if self.trains:
            self._forget()
        for linear in self.every():
            linear.begin_step()
        try:
            yield
            if self.trains:
                self._complete_step()
        finally:
            self.in_step = self.trains = self.sampling = False
            for linear in self.every():
                linear.end_step()

    def _forget(self) -> None:
        """Drop what a step has left that ended with an error."""
        if self._seen is not None:
            self._seen.zero_()
        if self.telemetry is not None:
            self.telemetry.forget()

    def _complete_step(self) -> None:
        self.step += 1
        if not self.linears:
            return
        if self.recipe.scaling == "delayed":
            self._update_scales()
        if self.sampling and self.telemetry is not None:
            self.telemetry.complete(self)

    # Draws.

    def generator(
        self, name: str, expert: int | None, role: Role, kind: Kind, draw: Draw, device: torch.device
    ) -> torch.Generator:
        """A generator for one cast: the same for the same seed, step, linear, product and micro-batch. Other
        products of an operand draw other numbers, so that their errors are independent, as do ranks with
        other samples; tensor-parallel ranks the same, since some of their operands are equal and must stay
        so."""
        text = f"{self.options.seed} {draw.step} {_data_rank()} {name} {expert} {role} {kind} {draw.number}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
        generator = torch.Generator(device=device)
        generator.manual_seed(seed)
        return generator

    # Checkpoints.

    def row(self, name: str) -> Tensor:
        """Everything that a checkpoint keeps of one linear, fp64 [n]: whether it was
        demoted and, under delayed scaling, scales and histories of its three operands."""
        values = [torch.tensor([float(self.is_demoted(name))], dtype=torch.float64)]
        if self.recipe.scaling == "delayed":
            history, scale, _ = self._tensors(self._device())
            slots = [self._slots[name, kind] for kind in KINDS]
            values += [scale[slots].cpu().double(), history[slots].cpu().double().flatten()]
        return torch.cat(values)

    def load_row(self, name: str, row: Tensor) -> None:
        """What ``row`` returned."""
        for linear in self.linears[name]:
            linear.demoted = bool(row[0])
        if self.recipe.scaling == "delayed":
            history, scale, _ = self._tensors(self._device())
            self._noted = None
            slots = [self._slots[name, kind] for kind in KINDS]
            seen = row[1 + len(KINDS) :].view(len(KINDS), -1).to(history)
            history[slots] = seen
            saved = row[1 : 1 + len(KINDS)].to(scale)
            # Earlier versions wrote 1 for a slot that has seen nothing.
            saved = saved.masked_fill((saved == 1) & ~seen.any(dim=1), 0.0)
            # Made anew: the saved ones are for the format and the margin of the run that saved them.
            maxima = [self._maxima[slot] for slot in slots]
            scale[slots] = self._scales_of(seen, saved, maxima)

    def reset_row(self, name: str) -> None:
        """Start one linear anew, as when its model was built."""
        for linear in self.linears[name]:
            linear.demoted = False
        if self.recipe.scaling == "delayed":
            self._noted = None
            slots = [self._slots[name, kind] for kind in KINDS]
            for tensor in self._tensors(self._device()):
                tensor[slots] = 0.0

    def snapshot(self) -> Callable[[], None]:
        """Remembers everything that a step changes; what is returned brings it back."""
        tensors = [
            None if each is None else each.clone() for each in (self._history, self._scale, self._seen)
        ]
        step, demoted = self.step, {name: self.is_demoted(name) for name in self.linears}

        def restore() -> None:
            self._history, self._scale, self._seen = (
                None if each is None else each.clone() for each in tensors
            )
            left_out, self.step, self._noted = self.step, step, None
            for name, value in demoted.items():
                if self.is_demoted(name) and not value and is_first_of_stage():
                    self.announce(f"fp8: {name} does not fall back after all: step {left_out} is taken back")
                for linear in self.linears[name]:
                    linear.demoted = value

        return restore


def _reads(role: str, kind: Kind) -> bool:
    from mt_megatron.fp8.recipe import OPERANDS

    return kind in OPERANDS[role]  # type: ignore[index]


_made: list[bool] = []
"""Whether any state was made in this process: without one nobody needs to look for them."""


def states_of(chunks: Any) -> list[Fp8State]:
    """The states of the weights in ``chunks``, each once. A configuration may have those of other models."""
    found: list[Fp8State] = []
    if not _made:
        return found
    for chunk in chunks:
        for parameter in chunk.parameters():
            state = getattr(getattr(parameter, "gemm_recipe", None), "state", None)
            if isinstance(state, Fp8State) and state not in found:
                found.append(state)
    return found


@contextmanager
def unmeasured(states: Iterable[Fp8State]) -> Iterator[None]:
    """Within it steps have no telemetry: they write no records and demote nothing."""
    before = [(state, state.telemetry) for state in states]
    for state, _ in before:
        state.telemetry = None
    try:
        yield
    finally:
        for state, telemetry in before:
            state.telemetry = telemetry


def _nothing() -> None:
    """What a copied state becomes."""


def is_first_of_stage() -> bool:
    """True on one of the ranks that share this stage's layers."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return True
    from megatron.core import parallel_state

    return _data_rank() == 0 and (
        not parallel_state.model_parallel_is_initialized()
        or parallel_state.get_tensor_model_parallel_rank() == 0
    )


def _data_rank() -> int:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))
