"""Inputs and output gradients of a linear, cast once for each layout in which a product reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mt_megatron.errors import MtMegatronError
from mt_megatron.fp8.device import casts as device_casts
from mt_megatron.fp8.grouped import GroupedQuantised
from mt_megatron.fp8.quantise import Quantised
from mt_megatron.fp8.recipe import CONTRACTED, OPERANDS, Role
from mt_megatron.fp8.state import NO_DRAW, Draw
from mt_megatron.seams.grouped_gemm import TokenGroups

if TYPE_CHECKING:
    from mt_megatron.fp8.linear import Fp8Linear


class Activation:
    """An operand of ``seams.gemm`` in FP8: [rows, columns] that is an ``input`` or a ``grad``."""

    def __init__(
        self,
        owner: Fp8Linear,
        kind: Literal["input", "grad"],
        source: Tensor | None,
        *,
        group: Any,
        dtype: torch.dtype,
        expert: int | None = None,
        keep: bool = False,
        draw: Draw | None = None,
    ) -> None:
        """``group``: ranks that have other rows of the same tensor and will gather them: scales that a
        tensor or its columns share are theirs together. ``keep``: backward needs it. ``draw``: what its
        draws depend on; None: those of the next operand."""
        self.source = source
        self.dtype = dtype
        self.expert, self.keep = expert, keep
        self._owner, self._kind, self._group = owner, kind, group
        self._cast: dict[int, Quantised] = {}
        # Now, since the cast may come after the step's end, or after casts of later operands.
        self._draw = owner.next_draw(kind, expert) if draw is None else draw

    def quantised(self, role: Role) -> Quantised:
        """As ``role`` reads it; cast when it is asked for the first time."""
        along = self._along(role)
        if along not in self._cast:
            other = self._cast.get(1 - along)
            if other is not None and self._shared:
                self._cast[along] = other.turned()
            else:
                assert self.source is not None, "the operand was kept for another product"
                self._cast[along] = self._owner.cast(
                    role,
                    self._kind,
                    self.source,
                    along,
                    group=self._group,
                    draw=self._draw,
                    expert=self.expert,
                )
        return self._cast[along]

    def matrix(self) -> Tensor:
        """The operand of a product that is not quantised."""
        if self.source is None:  # kept in FP8, and its linear was demoted since
            return next(iter(self._cast.values())).dequantised(self.dtype)
        return self.source

    def saved(self) -> tuple[Tensor, ...]:
        """Of an input: the codes that wgrad reads, or where it needs others than fprop does, what it can make
        them from."""
        owner, recipe = self._owner, self._owner.recipe
        if not self.keep:
            return ()
        if not recipe.wgrad.quantised:
            return (self.matrix(),)
        if recipe.shares_input_codes or (owner.state.options.save_activations and self._keeps_rows()):
            return _tensors(self.quantised("wgrad"))
        return (self.matrix(),)

    def _keeps_rows(self) -> bool:
        """True where the codes that wgrad reads have the operand's own rows, so that those of several ranks
        can be put together: no block was filled up, which another rank's rows would have to go on with."""
        if self._group is None or self._group.size() == 1 or self.source is None:
            return True
        cast = self._owner.recipe.cast("wgrad", "input")
        block = cast.block[1] if cast.granularity == "block" else 1
        rows = self.source.shape[0]
        return rows % block == 0 and rows % (cast.hadamard or 1) == 0

    @classmethod
    def restored(
        cls, owner: Fp8Linear, tensors: tuple[Tensor, ...], *, group: Any, dtype: torch.dtype
    ) -> Activation:
        """From what ``saved`` returned."""
        if len(tensors) == 1:
            return cls(owner, "input", tensors[0], group=group, dtype=dtype)
        made = cls(owner, "input", None, group=group, dtype=dtype)
        made._cast[0] = _from_tensors(owner, tensors)
        return made

    # Gathering: a rank's rows are a part of the operand.

    def parts(self, role: Role) -> tuple[Tensor, ...] | None:
        """Codes, and the scales that differ between ranks. None where rows of the ranks would share a block:
        the source is gathered, and cast afterwards."""
        if not self._owner.recipe.product(role).quantised:
            return None
        cast = self._owner.recipe.cast(role, self._kind)
        along = self._along(role)
        rows = self.source.shape[0] if self.source is not None else next(iter(self._cast.values())).shape[0]
        if along == 0 and cast.granularity == "block" and rows % cast.block[1]:
            return None
        found = self.quantised(role)
        self._owner.state.counts["gathered_codes"] += 1
        # Ranks' rows follow each other.
        codes = device_casts.contiguous(found.codes).view(torch.uint8)
        return (codes, found.inverse) if _is_split(found) else (codes,)

    def gathered(self, role: Role, parts: tuple[Tensor, ...]) -> Activation:
        mine = self.quantised(role)
        codes = parts[0].view(mine.codes.dtype)
        whole = Quantised(
            cast=mine.cast,
            along=mine.along,
            shape=(codes.shape[0], mine.shape[1]),
            codes=codes,
            inverse=parts[1] if len(parts) > 1 else mine.inverse,
            second=mine.second,
        )
        made = Activation(self._owner, self._kind, None, group=None, dtype=self.dtype)
        made._cast[mine.along] = whole
        return made

    def whole(self, role: Role, source: Tensor) -> Activation:
        """The operand of all rows, from the gathered ``source``."""
        self._owner.state.counts["gathered_bf16"] += 1
        return Activation(self._owner, self._kind, source, group=None, dtype=self.dtype)

    def _along(self, role: Role) -> int:
        return CONTRACTED[role][0 if OPERANDS[role][0] == self._kind else 1]

    @property
    def _shared(self) -> bool:
        recipe = self._owner.recipe
        return recipe.shares_input_codes if self._kind == "input" else recipe.shares_grad_codes


class GroupedActivation:
    """An operand of ``seams.grouped_gemm`` in FP8: all experts' rows [rows, columns], cast at once where a
    device computes, and expert by expert for the reference, which is faster on the CPU."""

    def __init__(
        self,
        owner: Fp8Linear,
        kind: Literal["input", "grad"],
        source: Tensor,
        groups: TokenGroups,
    ) -> None:
        self.source: Tensor | None = source
        self.rows = source
        self.groups = groups
        self._owner, self._kind = owner, kind
        self._cast: dict[int, GroupedQuantised] = {}
        self._experts: dict[int, Activation] = {}
        self._draws: dict[int, Draw] = {}
        if owner.draws(kind):
            bounds = enumerate(groups.bounds())
            filled = [expert for expert, (start, end) in bounds if end > start]
            self._draws = {expert: owner.next_draw(kind, expert) for expert in filled}

    def of(self, expert: int) -> Activation:
        """One expert's rows."""
        if expert not in self._experts:
            start, end = self.groups.bounds()[expert]
            made = Activation(
                self._owner,
                self._kind,
                self.rows[start:end],
                group=None,
                dtype=self.rows.dtype,
                expert=expert,
                draw=self._draws.get(expert, NO_DRAW),
            )
            self._experts[expert] = made
        return self._experts[expert]

    def quantised(self, role: Role) -> GroupedQuantised:
        """All experts' as ``role`` reads it; cast when it is asked for the first time."""
        recipe = self._owner.recipe
        along = CONTRACTED[role][0 if OPERANDS[role][0] == self._kind else 1]
        if along not in self._cast:
            other = self._cast.get(1 - along)
            shared = recipe.shares_input_codes if self._kind == "input" else recipe.shares_grad_codes
            if other is not None and shared:
                self._cast[along] = other.turned()
            else:
                self._cast[along] = self._owner.cast_groups(
                    role, self._kind, self.rows, along, self.groups, self._draws
                )
        return self._cast[along]

    # The protocol of seams.gemm: experts' rows are never gathered, and backward computes inputs anew.

    def parts(self, role: Role) -> tuple[Tensor, ...] | None:
        """None: codes of experts' rows cannot be put together."""
        return None

    def gathered(self, role: Role, parts: tuple[Tensor, ...]) -> Any:
        raise MtMegatronError("experts' rows were gathered in FP8; expected whole rows on every rank")

    def saved(self) -> tuple[Tensor, ...]:
        """The rows themselves."""
        return (self.rows,)


def _is_split(quantised: Quantised) -> bool:
    """True where each rank has scales of its own rows."""
    if quantised.inverse.dim() == 0:
        return False
    return quantised.cast.granularity == "block" or quantised.along == 1


def _tensors(quantised: Quantised) -> tuple[Tensor, ...]:
    second = () if quantised.second is None else (quantised.second,)
    return (quantised.codes, quantised.inverse, *second)


def _from_tensors(owner: Fp8Linear, tensors: tuple[Tensor, ...]) -> Quantised:
    codes, inverse, *second = tensors
    return Quantised(
        cast=owner.recipe.cast("wgrad", "input"),
        along=0,
        shape=(codes.shape[0], codes.shape[1]),
        codes=codes,
        inverse=inverse,
        second=second[0] if second else None,
    )
