"""The recipe of one weight: ``weight.gemm_recipe`` of every linear that computes in FP8."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mt_megatron.fp8 import grouped_products, products
from mt_megatron.fp8.activation import Activation, GroupedActivation
from mt_megatron.fp8.deep_gemm_products import deep_gemm_nt
from mt_megatron.fp8.formats import FORMATS
from mt_megatron.fp8.grouped import GroupedQuantised, quantise_groups
from mt_megatron.fp8.kernels import Kernels
from mt_megatron.fp8.quantise import Quantised, amax_of, quantise, rotated, scale_of
from mt_megatron.fp8.recipe import CONTRACTED, OPERANDS, ROLES, Cast, Kind, Recipe, Role
from mt_megatron.fp8.state import NO_DRAW, Draw
from mt_megatron.seams import collectives
from mt_megatron.seams.gemm import GemmRole, Operand, WeightRef, torch_gemm
from mt_megatron.seams.grouped_gemm import TokenGroups, grouped_gemm, groups_from, one_by_one

if TYPE_CHECKING:
    from mt_megatron.fp8.state import Fp8State


class Fp8Linear:
    """A ``seams.gemm.GemmRecipe``. One per parameter; the experts of a layer that have a parameter each share
    the name, and with it the scales of delayed scaling."""

    def __init__(self, state: Fp8State, name: str, parameter: Tensor) -> None:
        self.state = state
        self.name = name
        self._parameter = weakref.ref(parameter)
        self.index = 0
        """Among the linears of this name: experts that have parameters of their own."""

        self.demoted = False
        """Demotion: the linear has fallen back to bf16."""

        self.gathers = True
        """True where the distributed optimizer may gather the weight in FP8."""

        self.gathered_scale: Tensor | None = None
        """With which the distributed optimizer gathered the weight in FP8."""

        self._compute = _COMPUTES[state.kernels]
        self._weights: dict[tuple[int | None, int], tuple[int | None, Any]] = {}
        self._draws: Counter[tuple[Kind, int | None]] = Counter()
        self._drawn = frozenset(
            kind for role in ROLES for kind in OPERANDS[role] if self.recipe.cast(role, kind).stochastic
        )

    def __reduce__(self) -> Any:
        # A stored module is loaded without us. A copied one is given copies by ``attach.Attached``.
        return _nothing, ()

    def copied(self, state: Fp8State, parameter: Tensor) -> Fp8Linear:
        """The same for a copy of the parameter, in a state of the copied model's."""
        made = Fp8Linear(state, self.name, parameter)
        made.index, made.demoted, made.gathers = self.index, self.demoted, self.gathers
        made.gathered_scale = None if self.gathered_scale is None else self.gathered_scale.clone()
        return made

    @property
    def parameter(self) -> Tensor:
        """The weight. It must be alive."""
        found = self._parameter()
        assert found is not None
        return found

    @property
    def alive(self) -> bool:
        """True while the weight exists."""
        return self._parameter() is not None

    def __repr__(self) -> str:
        return f"Fp8Linear({self.name!r}, {self.recipe.name})"

    @property
    def recipe(self) -> Recipe:
        return self.state.recipe

    def begin_step(self) -> None:
        self._draws.clear()
        self._weights.clear()

    def end_step(self) -> None:
        self._weights.clear()

    def draws(self, kind: Kind) -> bool:
        """True where operands of this kind are rounded stochastically."""
        return kind in self._drawn

    def next_draw(self, kind: Kind, expert: int | None) -> Draw:
        """Keys of the next operand's draws. Experts count for themselves, so that their order
        means nothing."""
        if not self.draws(kind):
            return NO_DRAW
        self._draws[kind, expert] += 1
        return Draw(self.state.step, self._draws[kind, expert])

    # The protocol of seams.gemm.

    def prepared(
        self,
        kind: Literal["input", "grad"],
        x: Tensor,
        weight: WeightRef,
        *,
        group: Any,
        keep: bool,
        groups: TokenGroups | None = None,
    ) -> Tensor | Operand:
        """See ``seams.gemm.GemmRecipe``; the tensor itself after a demotion."""
        if self.demoted:
            return x
        if groups is not None:
            return GroupedActivation(self, kind, x, groups)
        return Activation(self, kind, x, group=group, dtype=x.dtype, expert=weight.expert, keep=keep)

    def restored(self, tensors: tuple[Tensor, ...], weight: WeightRef, *, group: Any) -> Tensor | Operand:
        if not tensors or self.demoted:
            return tensors[0] if tensors else self.parameter.new_empty(0, 0)
        return Activation.restored(self, tensors, group=group, dtype=self.compute_dtype(tensors[0]))

    def compute_dtype(self, like: Tensor) -> torch.dtype:
        return like.dtype if like.dtype in (torch.bfloat16, torch.float32) else self.parameter.dtype

    def product(
        self,
        role: GemmRole,
        a: Any,
        b: Any,
        weight: WeightRef,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        product = self.recipe.product(role)
        if self.demoted or not product.quantised or not isinstance(a, Activation):
            a, b = (each.matrix() if isinstance(each, Activation) else each for each in (a, b))
            return torch_gemm(role, a, b, out=out, accumulate=accumulate)
        left = a.quantised(role)
        right = b.quantised(role) if isinstance(b, Activation) else self.weight(role, b, weight)
        return self._compute(role, left, right, product, a.dtype, out=out, accumulate=accumulate)

    def grouped(
        self,
        role: GemmRole,
        a: Any,
        b: Any,
        groups: TokenGroups,
        weight: WeightRef,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """Every expert's rows are a tensor of their own. A device casts and multiplies all at once."""
        product = self.recipe.product(role)
        if self.demoted or not product.quantised:
            a, b = (each.rows if isinstance(each, GroupedActivation) else each for each in (a, b))
            return grouped_gemm(role, a, b, groups, out=out, accumulate=accumulate)
        if not isinstance(a, GroupedActivation):
            a = GroupedActivation(self, "input" if role == "fprop" else "grad", a, groups)
        if role == "wgrad" and not isinstance(b, GroupedActivation):
            b = GroupedActivation(self, "input", b, groups)
        if self._compute is products.reference:
            return self._one_by_one(role, a, b, groups, weight, out, accumulate)
        left = a.quantised(role)
        right = b.quantised(role) if role == "wgrad" else self.weights(role, b, weight)
        dtype = a.rows.dtype
        return grouped_products.grouped(
            role, left, right, product, dtype, self._compute, out=out, accumulate=accumulate
        )

    def _one_by_one(
        self,
        role: GemmRole,
        a: GroupedActivation,
        b: Any,
        groups: TokenGroups,
        weight: WeightRef,
        out: Tensor | None,
        accumulate: bool,
    ) -> Tensor:
        def product(expert: int, role: GemmRole, left: Tensor, right: Tensor, **how: Any) -> Tensor:
            other = b.of(expert) if role == "wgrad" else right
            return self.product(role, a.of(expert), other, WeightRef(weight.parameter, expert), **how)

        rows = b.rows if role == "wgrad" else b
        return one_by_one(role, a.rows, rows, groups, product, out, accumulate)

    # Casts.

    def weight(self, role: Role, matrix: Tensor, reference: WeightRef) -> Quantised:
        """The weight as ``role`` reads it; within a step cast once for each layout."""
        found: Quantised = self._kept(
            role,
            reference,
            lambda along: self.cast(role, "weight", matrix, along, expert=reference.expert),
        )
        return found

    def weights(self, role: Role, matrices: Tensor, reference: WeightRef) -> GroupedQuantised:
        """The same of all experts' weights [experts, outputs, inputs]."""
        experts, outputs, inputs = matrices.shape
        groups = groups_from([outputs] * experts, experts * outputs, matrices.device)
        found: GroupedQuantised = self._kept(
            role,
            reference,
            lambda along: self.cast_groups(role, "weight", matrices.reshape(-1, inputs), along, groups),
        )
        return found

    def _kept(self, role: Role, reference: WeightRef, make: Callable[[int], Any]) -> Any:
        along = CONTRACTED[role][1]
        key, version = (reference.expert, along), reference.version
        if self.state.in_step:
            kept = self._weights.get(key)
            if kept is not None and kept[0] == version:
                return kept[1]
            other = self._weights.get((reference.expert, 1 - along))
            if other is not None and other[0] == version and self.recipe.shares_weight_codes:
                turned = other[1].turned()
                self._weights[key] = (version, turned)
                return turned
        made = make(along)
        if self.state.in_step:
            self._weights[key] = (version, made)
        return made

    def cast(
        self,
        role: Role,
        kind: Kind,
        x: Tensor,
        along: int,
        *,
        group: Any = None,
        draw: Draw = NO_DRAW,
        expert: int | None = None,
    ) -> Quantised:
        """Quantise one operand; counts it, notes its magnitude, measures it where this step is sampled."""
        state, cast = self.state, self.recipe.cast(role, kind)
        state.counts[f"{kind}.{along}"] += 1
        if along == 0 and kind != "weight":
            state.counts["padded_rows"] += -x.shape[0] % self.recipe.row_multiple
        generator = None
        if cast.stochastic:
            generator = state.generator(f"{self.name} {self.index}", expert, role, kind, draw, x.device)
        if self.recipe.scaling == "delayed":
            largest = amax_of(x, cast, along)
            if group is not None and group.size() > 1 and not state.has_scale(self.name, kind):
                # The tensor's own scale is taken, and ranks with other rows must take the same.
                largest = self._largest(largest, group)
            scale = self._gathered(kind, cast, largest)
            if scale is None:
                scale = state.delayed_scale(self.name, kind, largest)
            # A clamp would turn infinity into a number.
            made = quantise(x, cast, along, scale=torch.where(torch.isfinite(largest), scale, torch.nan))
        else:
            amax = amax_of(x, cast, along) if not cast.hadamard else None
            whole = None
            if group is not None and group.size() > 1:
                amax, whole = self._shared(x, cast, along, amax, group)
            kept = self._gathered(kind, cast, amax)
            made = quantise(x, cast, along, amax=amax, whole=whole, scale=kept, generator=generator)
        if state.sampling and state.telemetry is not None:
            state.telemetry.measure(self.name, kind, role, x, made)
        return made

    def cast_groups(
        self,
        role: Role,
        kind: Kind,
        x: Tensor,
        along: int,
        groups: TokenGroups,
        draws: Mapping[int, Draw] | None = None,
    ) -> GroupedQuantised:
        """``cast`` of every expert's rows; ``draws``: by expert."""
        state, cast = self.state, self.recipe.cast(role, kind)
        state.counts[f"{kind}.{along}"] += 1
        if along == 0 and kind != "weight" and groups.on_host:
            rows = (end - start for start, end in groups.bounds())
            state.counts["padded_rows"] += sum(-count % self.recipe.row_multiple for count in rows)

        def generator(expert: int) -> torch.Generator:
            draw = (draws or {}).get(expert, NO_DRAW)
            return state.generator(f"{self.name} {self.index}", expert, role, kind, draw, x.device)

        def delayed(largest: Tensor) -> Tensor:
            scale = state.delayed_scale(self.name, kind, largest)
            return torch.where(torch.isfinite(largest), scale, torch.nan)

        made = quantise_groups(
            x,
            groups,
            cast,
            along,
            scales=delayed if self.recipe.scaling == "delayed" else None,
            generators=generator,
            kernel=state.native,
        )
        if state.sampling and state.telemetry is not None:
            filled = next((expert for expert, (a, b) in enumerate(groups.bounds()) if b > a), None)
            if filled is not None:
                start, end = groups.bounds()[filled]
                state.telemetry.measure(self.name, kind, role, x[start:end], made.of(filled))
        return made

    def _gathered(self, kind: Kind, cast: Cast, amax: Tensor | None) -> Tensor | None:
        """The scale that a weight's values come from, so that they become the same codes again; None where
        the weight has changed since, or was not gathered in FP8."""
        scale = self.gathered_scale
        if kind != "weight" or scale is None or amax is None:
            return None
        now = scale_of(amax, FORMATS[cast.format], margin=self.recipe.margin)
        return scale if bool((now / scale - 1).abs() < 2.0**-7) else None

    def _shared(
        self, x: Tensor, cast: Any, along: int, amax: Tensor | None, group: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Magnitudes of scales that ranks with other rows have too: the largest of all, in one reduction."""
        split_rows = cast.granularity == "row" and along == 1
        if split_rows or (cast.granularity == "block" and cast.block_scale != "e4m3"):
            return amax, None
        if amax is None:
            amax = amax_of(rotated(x, along, cast.hadamard), cast, along)
        values = self._largest(amax.amax() if cast.granularity == "block" else amax, group)
        return (amax, values) if cast.granularity == "block" else (values, None)

    def _largest(self, values: Tensor, group: Any) -> Tensor:
        """Elementwise largest over the ranks of ``group``, in a tensor of its own."""
        import torch.distributed as dist

        values = values.contiguous().clone()
        self.state.counts["gather_reductions"] += 1
        with collectives.announced("all_reduce", "tp", group):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return values


_COMPUTES: dict[Kernels, products.Compute] = {
    "reference": products.reference,
    "scaled_mm": products.scaled_mm,
    "deep_gemm": deep_gemm_nt,
}


def _nothing() -> None:
    """Stand-in: a stored recipe is loaded as None."""
