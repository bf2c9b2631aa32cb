"""``GroupedMLP`` without the package ``grouped_gemm``: two parameters with every local expert's matrices.

Upstream's parameters are two-dimensional in name and are read as [experts, inputs, outputs], the order in
which CUTLASS wanted them. Ours say what they hold, [experts, outputs, inputs], as any linear's weight and
as ``SequentialMLP``'s: slices of a flattened parameter are slices of a ``SequentialMLP`` checkpoint, which
is what makes the distributed optimizer's state interchangeable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_megatron.layers import linear
from mt_megatron.layers.moe import token_dispatch
from mt_megatron.layers.moe.permutation import Routing, sum_rows
from mt_megatron.seams.gemm import GemmRole, Operand, WeightRef, gemm, is_deferrable, prepared, wgrad_queue
from mt_megatron.seams.grouped_gemm import (
    TokenGroups,
    compiled_for_each_shape,
    grouped_gemm,
    groups_from,
    has_grouped_kernel,
)

WEIGHTS = ("weight1", "weight2")
"""Upstream's names of the two parameters."""

_PARTITION = {"weight1": 1, "weight2": 2}


def arrange_weights(module: Any) -> None:
    """Turn what upstream's constructor made into ``weight1`` [experts, (2) f, h] and ``weight2``
    [experts, h, f]: the same matrices, so that a seed means the same model with and without us.

    A forward of a subclass, or one that was put in the place of ours, reads them in upstream's order: it
    finds that.
    """
    if not takes_linears(type(module)):
        return
    for name in WEIGHTS:
        made = getattr(module, name)
        weight = torch.nn.Parameter(_as_linears(made.data, name, module), requires_grad=made.requires_grad)
        for attribute, value in vars(made).items():
            setattr(weight, attribute, value)
        if hasattr(weight, "partition_dim"):
            weight.partition_dim = _PARTITION[name]
        setattr(module, name, weight)
    module.register_load_state_dict_pre_hook(_accept_upstream_order)


def takes_linears(kind: Any) -> bool:
    """True for ``GroupedMLP`` and its subclasses that compute by the patched forward."""
    return bool(getattr(kind.forward, "takes_linears", False))


def is_arranged(module: Any) -> bool:
    """True when the weights of a ``GroupedMLP`` have our order, False for upstream's."""
    return bool(module.weight1.dim() == 3)


def _as_linears(flat: Tensor, name: str, module: Any) -> Tensor:
    """Upstream's two-dimensional weight as [experts, outputs, inputs]."""
    experts, hidden = module.num_local_experts, module.config.hidden_size
    inputs = hidden if name == "weight1" else flat.numel() // (experts * hidden)
    return flat.view(experts, inputs, -1).transpose(1, 2).contiguous()


def _accept_upstream_order(module: Any, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Take a state dict of upstream's own ``GroupedMLP``, whose weights have two dimensions."""
    for name in WEIGHTS:
        found = state_dict.get(f"{prefix}{name}")
        if isinstance(found, Tensor) and found.dim() == 2 and found.numel() == getattr(module, name).numel():
            state_dict[f"{prefix}{name}"] = _as_linears(found, name, module)


def forward(module: Any, hidden: Tensor, tokens_per_expert: Tensor) -> tuple[Tensor, None]:
    """``GroupedMLP.forward``: rows grouped by expert, ``tokens_per_expert`` of each; or, where the token
    dispatcher left the gathering to us, every token once. Returns the same rows, and no bias."""
    handover: token_dispatch.Handover | None = None
    dispatcher = getattr(module, "token_dispatcher", None)
    if dispatcher is not None:
        handover = token_dispatch.of(dispatcher).take()
    config = module.config
    weight1, weight2 = module.weight1, module.weight2
    arranged = is_arranged(module)
    if not arranged:  # a subclass's own forward calls this one
        weight1, weight2 = (_as_linears(getattr(module, name), name, module) for name in WEIGHTS)
    # Gradients of weights that are computed reach the parameters through autograd.
    options = {"gradient_accumulation_fusion": arranged and bool(config.gradient_accumulation_fusion)}
    if handover is not None:
        groups = handover.routing.groups
    else:
        groups = groups_from(tokens_per_expert, hidden.shape[0], hidden.device)
    if config.gated_linear_unit and config.activation_func is F.silu:
        routing, probs = (groups, None) if handover is None else (handover.routing, handover.probs)
        return experts_swiglu(hidden, probs, weight1, weight2, routing, **options), None
    rows = hidden if handover is None else handover.routing.take(hidden)
    rows = module.activation_func(grouped_linear(rows, weight1, groups, **options))
    if handover is not None:
        weights = handover.routing.probs_of_rows(handover.probs)
        rows = rows * weights.unsqueeze(1).to(rows.dtype)
    rows = grouped_linear(rows, weight2, groups, **options)
    return (rows if handover is None else handover.routing.combine(rows)), None


# The expert layers of a mixture as one autograd function: gather, product, SwiGLU, product, sum.
#
# Each expert's weights are [outputs, inputs] as in any linear, all experts of a rank in one parameter
# [experts, outputs, inputs]. The probability of a choice multiplies the activation between the two products:
# the result is the same (the second product is linear), the factor is narrower than the output there, and the
# experts' output need not be kept for the router's gradient. Kept for backward are the layer's input, which
# exists anyway, and the output of the first product; everything else is gathered or computed again.


def grouped_linear(
    x: Tensor,
    weights: Tensor,
    groups: TokenGroups | Tensor,
    *,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """``x[rows of e] @ weights[e].T`` for every expert e: x [t, k], weights [e, n, k] -> [t, n].

    ``groups`` are the rows of each expert, or a tensor that counts them. Autocast, deferred weight
    gradients, ``main_grad`` and installed GEMMs are treated as in ``layers.linear.TensorParallelLinear``.
    """
    if isinstance(groups, Tensor):
        groups = groups_from(groups, x.shape[0], x.device)
    output: Tensor = _GroupedLinear.apply(x, weights, groups, gradient_accumulation_fusion)  # type: ignore[no-untyped-call]
    return output


def experts_swiglu(
    hidden: Tensor,
    probs: Tensor | None,
    weight1: Tensor,
    weight2: Tensor,
    routing: Routing | TokenGroups,
    *,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """Every token's experts, ``W2 (silu(gate) * up * p)`` with ``gate, up = W1 x``, summed.

    With a ``Routing``: ``hidden`` [tokens, h] and ``probs`` [tokens, topk] give [tokens, h]. With
    ``TokenGroups``: ``hidden`` [rows, h] is grouped by expert already, there are no ``probs``, and each row
    keeps its place. ``weight1`` is [e, 2 f, h] (gate over up), ``weight2`` [e, h, f].
    """
    output: Tensor = _ExpertsSwiGLU.apply(  # type: ignore[no-untyped-call]
        hidden, probs, weight1, weight2, routing, gradient_accumulation_fusion
    )
    return output


@dataclass(frozen=True)
class _Tile:
    """Rows that are worked on together: of one expert, or of all where one kernel takes all."""

    rows: slice
    expert: int | None
    groups: TokenGroups
    padded: int
    """Rows that products are made with; those beyond ``rows`` are zero."""

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def gather(self, hidden: Tensor, routing: Routing | TokenGroups) -> Tensor:
        """This tile's rows [padded, h] of the layer's input or of its output's gradient."""
        if not isinstance(routing, Routing):
            part = hidden[self.rows]
            return part if self.padded == len(self) else F.pad(part, (0, 0, 0, self.padded - len(self)))
        tokens = routing.tokens[self.rows]
        if self.padded == len(self):
            return hidden.index_select(0, tokens)
        gathered, exact = self.padded_empty(hidden, hidden.shape[1])
        torch.index_select(hidden, 0, tokens, out=exact)
        return gathered

    def padded_empty(self, like: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """A tensor [padded, width] whose padding is zero, and the rest of it."""
        made = like.new_empty(self.padded, width)
        made[len(self) :].zero_()
        return made, made[: len(self)]

    def prepared(self, kind: Literal["input", "grad"], rows: Tensor, like: Tensor) -> Tensor | Operand:
        """``rows`` as operand of products with this tile's matrices of the parameter ``like``."""
        groups = self.groups if self.expert is None else None
        return prepared(kind, rows, WeightRef(like, self.expert), groups=groups)

    def product(
        self, role: GemmRole, a: Tensor | Operand, weight: Tensor, like: Tensor, into: Tensor
    ) -> Tensor:
        """``role`` (fprop or dgrad) with this tile's weights, put into the tile's rows of ``into``.

        ``like`` is the parameter that ``weight`` comes from. Returns the result [padded, n], which holds
        until the next tile's is computed: padding is written where that will be. The result of a tile of
        all rows is a tensor of its own, and takes the place of ``into``.
        """
        if self.expert is None:
            return self.compute(role, a, weight, like)
        recipe, reference = linear._recipe(like), WeightRef(like, self.expert)
        out = into[self.rows.start : self.rows.start + self.padded]
        if out.shape[0] == self.padded:
            return gemm(role, a, weight[self.expert], out=out, recipe=recipe, weight=reference)
        result = gemm(role, a, weight[self.expert], recipe=recipe, weight=reference)
        out.copy_(result[: out.shape[0]])
        return result

    def compute(self, role: GemmRole, a: Any, weight: Tensor, like: Tensor) -> Tensor:
        """``product`` into a new tensor."""
        recipe, reference = linear._recipe(like), WeightRef(like, self.expert)
        if self.expert is None:
            return grouped_gemm(role, a, weight, self.groups, recipe=recipe, weight=reference)
        return gemm(role, a, weight[self.expert], recipe=recipe, weight=reference)

    def wgrad(self, grad: Any, input: Any, like: Tensor, out: Tensor, accumulate: bool) -> None:
        """The weights' gradient into ``out`` [e, n, k], which gets this tile's experts alone."""
        how: dict[str, Any] = {
            "accumulate": accumulate,
            "recipe": linear._recipe(like),
            "weight": WeightRef(like, self.expert),
        }
        if self.expert is None:
            grouped_gemm("wgrad", grad, input, self.groups, out=out, **how)
        else:
            gemm("wgrad", grad, input, out=out[self.expert], **how)


def _tiles(groups: TokenGroups, a: Tensor, weight: Tensor) -> Iterator[_Tile]:
    """One tile per expert that has rows, or a single one where a grouped kernel runs: an expert's rows
    stay in a core's cache from the first product to the last, and a kernel wants them all at once."""
    if has_grouped_kernel(a, weight):
        yield _Tile(slice(0, groups.rows), None, groups, groups.rows)
        return
    for expert, (start, end) in enumerate(groups.bounds()):
        if end > start:
            yield _Tile(slice(start, end), expert, groups, padded_rows(end - start, a))


def padded_rows(rows: int, like: Tensor) -> int:
    """``rows`` rounded up to one of eight sizes per power of two, where every size costs a compilation.

    oneDNN compiles a kernel for each shape, in the time of computing it a few times over, and an expert
    has another number of rows in every step.
    """
    if not compiled_for_each_shape(like):
        return rows
    step = max(16, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


class _WeightGradients:
    """Where one weight's gradient goes: ``main_grad``, a new tensor for autograd, or a queue."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, groups: TokenGroups, fused: bool) -> None:
        self._weight, self._dtype, self._groups, self._fused = weight, dtype, groups, fused
        self._queue = wgrad_queue() if is_deferrable(weight) else None
        self._later: list[tuple[_Tile, Any, Any]] = []
        self._into: Tensor | None = None
        self._complete = False

    def add(self, tile: _Tile, grad: Any, input: Any) -> None:
        """The gradient of ``tile``'s experts from their output's gradient and their input."""
        if self._queue is not None:
            self._later.append((tile, grad, input))
        else:
            self._compute(tile, grad, input)

    def result(self) -> Tensor | None:
        """What backward returns for the weight."""
        if self._queue is None:
            gradient = self._finished()
            if self._fused and hasattr(self._weight, "grad_added_to_main_grad"):
                # The hook of DDP runs without a gradient too; this flag shows that the gradient is there.
                self._weight.grad_added_to_main_grad = True
            return gradient
        self._queue.put(self._weight, self._compute_later)
        return None

    def _compute(self, tile: _Tile, grad: Any, input: Any) -> None:
        tile.wgrad(grad, input, self._weight, self._target(), self._fused)
        self._complete |= tile.expert is None

    def _target(self) -> Tensor:
        if self._into is None:
            if self._fused:
                self._into = linear._main_grad(self._weight)
            else:
                self._into = self._weight.new_empty(self._weight.shape, dtype=self._dtype)
        return self._into

    def _finished(self) -> Tensor | None:
        into = self._target()
        if self._fused:
            return None
        if not self._groups.rows:
            return into.zero_()
        # Experts without rows; one product for all has seen to them, and need not be waited for.
        for expert in () if self._complete else self._groups.empty():
            into[expert].zero_()
        return into

    def _compute_later(self) -> None:
        with torch.no_grad(), linear._autocast_off(self._weight):
            for tile, grad, input in self._later:
                self._compute(tile, grad, input)
            gradient = self._finished()
        self._later.clear()
        if self._fused:
            gradient = linear._already_added(self._weight)
        if gradient is not None:
            torch.autograd.backward([self._weight], [gradient])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, groups: TokenGroups, fused: bool) -> Tensor:
        ctx.dtype = linear._autocast_dtype(x)
        ctx.groups, ctx.fused = groups, fused
        linear._keep_weight(ctx, weights)
        with linear._autocast_off(x):
            x = linear._cast(x, ctx.dtype).contiguous()
            ctx.save_for_backward(x)
            cast = linear._cast(weights, ctx.dtype)
            reference = WeightRef(weights)
            operand = prepared("input", x, reference, groups=groups)
            return grouped_gemm(
                "fprop", operand, cast, groups, recipe=linear._recipe(weights), weight=reference
            )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weights, groups = linear._kept_weight(ctx), ctx.groups
        grad_x = grad_weights = None
        with linear._autocast_off(x):
            reference = WeightRef(weights)
            grad_output = linear._cast(grad_output, ctx.dtype).contiguous()
            grad = prepared("grad", grad_output, reference, groups=groups)
            if ctx.needs_input_grad[0]:
                cast = linear._cast(weights, ctx.dtype)
                recipe = linear._recipe(weights)
                grad_x = grouped_gemm("dgrad", grad, cast, groups, recipe=recipe, weight=reference)
            if ctx.needs_input_grad[1]:
                gradients = _WeightGradients(weights, x.dtype, groups, ctx.fused)
                if groups.rows:
                    input = prepared("input", x, reference, groups=groups)
                    gradients.add(_Tile(slice(0, groups.rows), None, groups, groups.rows), grad, input)
                grad_weights = gradients.result()
        return grad_x, grad_weights, None, None


class _ExpertsSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        probs: Tensor | None,
        weight1: Tensor,
        weight2: Tensor,
        routing: Routing | TokenGroups,
        fused: bool,
    ) -> Tensor:
        ctx.dtype = linear._autocast_dtype(hidden)
        ctx.routing, ctx.fused = routing, fused
        ctx.weight1, ctx.weight2 = _Kept(weight1), _Kept(weight2)
        with linear._autocast_off(hidden):
            hidden = linear._cast(hidden, ctx.dtype).contiguous()
            w1, w2 = linear._cast(weight1, ctx.dtype), linear._cast(weight2, ctx.dtype)
            groups, weights = _groups(routing), _weights(routing, probs, hidden.dtype)
            preactivation, rows = (_room(groups, hidden, w1, w.shape[1]) for w in (weight1, weight2))
            for tile in _tiles(groups, hidden, w1):
                input = tile.prepared("input", tile.gather(hidden, routing), weight1)
                part = tile.product("fprop", input, w1, weight1, preactivation)
                activation = tile.prepared("input", _activation(part, tile, weights), weight2)
                result = tile.product("fprop", activation, w2, weight2, rows)
                if tile.expert is None:
                    preactivation, rows = part, result
            ctx.save_for_backward(hidden, probs, preactivation)
            return sum_rows(rows, routing) if isinstance(routing, Routing) else rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, probs, preactivation = ctx.saved_tensors
        weight1, weight2 = linear._kept_weight(ctx.weight1), linear._kept_weight(ctx.weight2)
        routing: Routing | TokenGroups = ctx.routing
        groups = _groups(routing)
        needs_hidden, needs_probs, needs_weight1, needs_weight2 = ctx.needs_input_grad[:4]
        with linear._autocast_off(hidden):
            grad_output = linear._cast(grad_output, ctx.dtype).contiguous()
            w1, w2 = linear._cast(weight1, ctx.dtype), linear._cast(weight2, ctx.dtype)
            weights = _weights(routing, probs, hidden.dtype)
            grad_rows = _room(groups, hidden, w1, hidden.shape[1])
            grad_weights = None if probs is None else probs.new_empty(groups.rows)
            into1 = _WeightGradients(weight1, hidden.dtype, groups, ctx.fused)
            into2 = _WeightGradients(weight2, hidden.dtype, groups, ctx.fused)
            for tile in _tiles(groups, hidden, w1):
                grad = tile.prepared("grad", tile.gather(grad_output, routing), weight2)
                grad_activation = tile.compute("dgrad", grad, w2, weight2)
                activation, grad_part, grad_weight = _activation_backward(
                    preactivation[tile.rows], tile, weights, grad_activation
                )
                if grad_weights is not None and grad_weight is not None:
                    grad_weights[tile.rows] = grad_weight
                if needs_weight2:
                    into2.add(tile, grad, tile.prepared("input", activation, weight2))
                part = tile.prepared("grad", grad_part, weight1)
                if needs_hidden:
                    result = tile.product("dgrad", part, w1, weight1, grad_rows)
                    grad_rows = result if tile.expert is None else grad_rows
                if needs_weight1:
                    into1.add(tile, part, tile.prepared("input", tile.gather(hidden, routing), weight1))
            grad_hidden = grad_probs = None
            if needs_hidden:
                grad_hidden = sum_rows(grad_rows, routing) if isinstance(routing, Routing) else grad_rows
            if needs_probs and grad_weights is not None and isinstance(routing, Routing):
                grad_probs = routing.to_choices(grad_weights)
            grad1 = into1.result() if needs_weight1 else None
            grad2 = into2.result() if needs_weight2 else None
        return grad_hidden, grad_probs, grad1, grad2, None, None


class _Kept:
    """One of several weights of a function, kept as ``linear._keep_weight`` keeps the only one."""

    weight: Tensor
    weight_version: int | None

    def __init__(self, weight: Tensor) -> None:
        linear._keep_weight(self, weight)


def _groups(routing: Routing | TokenGroups) -> TokenGroups:
    return routing.groups if isinstance(routing, Routing) else routing


def _weights(routing: Routing | TokenGroups, probs: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """[rows, 1] in the dtype to compute in."""
    if probs is None or not isinstance(routing, Routing):
        return None
    return routing.probs_of_rows(probs).to(dtype).unsqueeze(1)


def _room(groups: TokenGroups, like: Tensor, weight: Tensor, width: int) -> Tensor:
    """Room for every row's result; none where one kernel makes all of them in a tensor of its own."""
    rows = 0 if has_grouped_kernel(like, weight) else groups.rows
    return like.new_empty(rows, width)


def _activation(preactivation: Tensor, tile: _Tile, weights: Tensor | None) -> Tensor:
    gate, up = preactivation.chunk(2, -1)
    activation = F.silu(gate).mul_(up)
    if weights is not None:
        activation[: len(tile)].mul_(weights[tile.rows])
    return activation


def _activation_backward(
    preactivation: Tensor, tile: _Tile, weights: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The activation itself and the gradient of ``preactivation``, both padded, and the gradient of the
    tile's weights. Changes ``grad``."""
    gate, up = preactivation.chunk(2, -1)
    grad = grad[: len(tile)]
    padded_grad, grad_preactivation = tile.padded_empty(grad, preactivation.shape[1])
    grad_gate, grad_up = grad_preactivation.chunk(2, -1)
    silu = F.silu(gate)
    padded_activation, activation = tile.padded_empty(grad, up.shape[1])
    torch.mul(silu, up, out=activation)
    grad_weight = None
    if weights is not None:
        grad_weight = torch.linalg.vecdot(grad, activation)
        grad.mul_(weights[tile.rows])
        activation.mul_(weights[tile.rows])
    torch.mul(silu, grad, out=grad_up)
    grad.mul_(up)
    torch.ops.aten.silu_backward.grad_input(grad, gate, grad_input=grad_gate)
    return padded_activation, padded_grad, grad_weight
