"""The statistics that every sampled step records, watched with taps that are open for that step alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mt_megatron.errors import ConfigError
from mt_megatron.scope.watch import scalars
from mt_megatron.scope.watch.attention_rows import Rows, RowScalars, row_statistics, watch_rows
from mt_megatron.scope.watch.parts import Parts
from mt_megatron.scope.watch.shares import Place, is_layer, own_modules
from mt_megatron.scope.watch.sums import (
    channel_maxima,
    entropy_sum,
    loss_by_position,
    not_finite,
    square_sum,
)
from mt_megatron.seams import taps
from mt_megatron.seams.taps import AttentionInputs, Call, RouterScores, Watch

ATTENTION_ROWS = 16
"""Queries of each sequence whose attention is computed again, evenly spread; the last is one of them."""

MOST_LOGITS = 2**26
"""Attention logits of one call of one layer on all its ranks; with more there are fewer rows."""

_AROUND_LAYERS = ("embedding", "decoder.final_layernorm", "encoder.final_layernorm")
_STACKS = ("decoder.layers", "encoder.layers")
_WITHIN_LAYER = ("self_attention", "mlp")


class Defaults:
    """Taps on this rank's modules in sampled steps."""

    def __init__(
        self, chunks: Sequence[Any], place: Place, *, heads: int, told: Callable[[str], None]
    ) -> None:
        """``heads`` of one layer's attention, on all ranks; ``told`` gets a line where a tap failed."""
        self._place = place
        self._told = told
        self._layers: list[tuple[str, nn.Module]] = []
        self._modules: list[tuple[str, nn.Module]] = []
        self._attention: list[tuple[str, nn.Module]] = []
        self._routers: list[tuple[str, nn.Module]] = []
        self._last_stage = False
        for path, module in own_modules(chunks):
            if is_layer(path, module):
                self._layers.append((path, module))
                self._inside(path, module)
            elif path in _AROUND_LAYERS:
                self._modules.append((path, module))
            self._last_stage |= path == "output_layer"
        batch = max(place.micro_batch_size, 1)
        rows = MOST_LOGITS // max(batch * heads * place.seq_length, 1)
        self._rows = min(max(rows, 1), ATTENTION_ROWS, place.seq_length)
        self._chosen: dict[Any, list[Rows]] = {}

    def _inside(self, path: str, layer: nn.Module) -> None:
        for name in _WITHIN_LAYER:
            inner = getattr(layer, name, None)
            if isinstance(inner, nn.Module) and not isinstance(inner, nn.Identity):
                self._modules.append((f"{path}.{name}", inner))
        try:
            taps.attention.core_attention(layer)
            self._attention.append((f"{path}.self_attention", layer))
        except ConfigError:
            pass
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if isinstance(router, nn.Module):
            self._routers.append((f"{path}.mlp.router", router))

    def open(self, parts: Parts) -> list[Watch]:
        """Taps that add to ``parts`` until they are closed."""
        told, opened = self._told, list[Watch]()
        looks: dict[str, _Layer] = {}
        for path, layer in self._layers:
            # Of layers that follow each other the one's output is the other's input, in one call of a chunk.
            stack, _, number = path.rpartition(".")
            before = looks.get(f"{stack}.{int(number) - 1}") if stack in _STACKS else None
            look = looks[path] = _Layer(path, parts, self._place, before)
            opened.append(taps.watch(layer, before=look.before, after=look.after, live=True, told=told))
        for path, module in self._modules:
            after = partial(_activation, parts, self._place, path)
            opened.append(taps.watch(module, after=after, live=True, told=told))
        together = RowScalars(told) if parts.defers else None
        if together is not None:
            parts.at_end(together.give)
        for path, layer in self._attention:
            found = partial(_attention, parts, together, path)
            opened += watch_rows(layer, self._rows_of, found, told=told)
        for path, router in self._routers:
            opened.append(taps.router_scores(router, partial(_router, parts, self._place, path), told=told))
        if self._last_stage:
            opened.append(taps.token_losses(partial(_losses, parts, self._place), told=told))
        return opened

    def _rows_of(self, inputs: AttentionInputs) -> list[Rows]:
        query = inputs.query
        form = (query.size(0), query.device, inputs.context_rank, inputs.context_size)
        if form not in self._chosen:
            self._chosen[form] = [Rows(places=self._places_of(inputs), forbidden={})]
        return self._chosen[form]

    def _places_of(self, inputs: AttentionInputs) -> Tensor:
        device, here = inputs.query.device, inputs.query.size(0)
        # A decoder beside an encoder has sequences of a length of its own.
        length = here if inputs.context_size == 1 else self._place.seq_length
        count = min(self._rows, length)
        wanted = (torch.arange(1, count + 1, device=device) * length) // count - 1
        if inputs.context_size == 1:
            return wanted
        own = self._place.positions(here, device)
        # Chunks of a rank lie apart, in the order of positions.
        at = torch.searchsorted(own, wanted).clamp_(max=own.numel() - 1)
        return at[own[at] == wanted]


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor of numbers of what a module returned; None without one."""
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, Tensor) and first.is_floating_point() and first.dim():
        return first
    found = taps.modules.tensors(output)
    return next((each for each in found if each.is_floating_point() and each.dim()), None)


class _Layer:
    """One layer's own statistics: of its output, and of its output against its input."""

    def __init__(self, path: str, parts: Parts, place: Place, before: _Layer | None) -> None:
        """``before`` is the layer whose output this one may get."""
        self._path = path
        self._paths = (path,)
        self._before = before
        self._parts = parts
        self._place = place
        self._input: Tensor | None = None
        self._output: tuple[Any, Tensor] | None = None
        """Size of the output, with its call and where it lies, until the next layer has begun."""

        self._size = scalars.norm if parts.defers else square_sum

    def before(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        # Here, not after the layer: a pipeline may have freed it by then.
        known, self._output = None if self._before is None else self._before._output, None
        if self._before is not None:
            self._before._output = None
        if known is not None and known[0] == _same(call, hidden):
            self._input = known[1]
        else:
            self._input = self._size(self._place.own_rows(hidden, self._place.tokens_spread))

    def after(self, call: Call, output: Any) -> None:
        before, self._input = self._input, None
        whole = first_tensor(output)
        if whole is None or before is None:
            return
        values = self._place.own_rows(whole, self._place.tokens_spread)
        if values.numel() == 0:
            return
        path, parts = self._path, self._parts
        own = self._size(values)
        if call.microbatch >= 0:
            self._output = _same(call, whole), own
        if parts.defers:
            parts.later(scalars.LAYER, self._paths, [own], [float(values.numel())])
            parts.later(scalars.GROWTH, self._paths, [own, before])
            parts.channels(path, scalars.largest_of_channels(values))
            if parts.counts:
                parts.add(path, "not_finite", not_finite(values, own))
            return
        maxima = channel_maxima(values)
        _counts(parts, path, values, float(own))
        parts.largest(path, "activation_max", _largest(maxima, own))
        parts.add(path, "residual_growth", [float(own), float(before)])
        parts.outliers(path, maxima, own, values.numel())


def _activation(parts: Parts, place: Place, path: str, call: Call, output: Any) -> None:
    if call.ordinal > 0:
        return  # the embedding of prediction depths' tokens
    whole = first_tensor(output)
    values = None if whole is None else place.own_rows(whole, place.tokens_spread)
    if values is None or values.numel() == 0:
        return
    if parts.defers:
        found = [scalars.norm(values), scalars.largest(values)]
        family = scalars.COUNTED_OUTPUT if parts.counts else scalars.OUTPUT
        parts.later(family, (path,), found, [float(values.numel())])
        if parts.counts:
            parts.add(path, "not_finite", not_finite(values, found[0]))
        return
    _counts(parts, path, values, float(square_sum(values)))
    low, high = torch.aminmax(values)
    parts.largest(path, "activation_max", torch.maximum(high, -low))


def _counts(parts: Parts, path: str, values: Tensor, squares: float) -> None:
    """Statistics of numbers that a CPU has at once."""
    parts.add(path, "activation_rms", [squares, values.numel()])
    parts.add(path, "not_finite", not_finite(values, squares).tolist())


def _same(call: Call, values: Tensor) -> Any:
    """Mark of ``values`` as those of another layer of the same call: where they lie, and how often they were
    written to. Between calls a new tensor may lie where an old one was."""
    where = (values.data_ptr(), values._version, values.shape, values.dtype)
    return call.chunk, call.microbatch, call.ordinal, where


def _largest(maxima: Tensor, squares: Tensor) -> Tensor:
    """The largest of channel maxima; NaN where an element was, which the sum of squares shows."""
    largest = maxima.amax()
    return torch.where(torch.isnan(squares), squares.to(largest.dtype), largest)


def _attention(
    parts: Parts, together: RowScalars | None, path: str, inputs: AttentionInputs, rows: Rows, logits: Tensor
) -> None:
    if logits.numel() == 0:
        return
    if together is not None:
        all_attend = inputs.mask is None and inputs.cu_seqlens is None and inputs.window is None
        together.add(parts, path, logits, all_attend=all_attend)
        return
    largest, entropies, count = row_statistics(logits)
    parts.largest(path, "attention_logit_max", largest)
    parts.add(path, "attention_entropy", [entropies, float(count)])


def _router(parts: Parts, place: Place, path: str, scores: RouterScores) -> None:
    probabilities = place.own_rows(scores.probabilities(), place.tokens_spread)
    entropies, tokens = entropy_sum(probabilities), float(probabilities.size(0))
    if parts.defers:
        parts.later(scalars.ROUTER, (path,), [entropies], [tokens])
    else:
        parts.add(path, "router_entropy", [entropies, tokens])
    if place.tokens_spread == "same" and place.layout.tp > 1:
        routed = place.own_rows(scores.routing_map(), "same").sum(dim=0)
    else:
        routed = scores.tokens_per_expert()
    parts.add(path, "expert_load", routed)


def _losses(parts: Parts, place: Place, losses: Tensor, mask: Tensor) -> None:
    # All tensor-parallel ranks have them: rows are shared out as elsewhere.
    positions = place.positions(losses.size(1), losses.device)
    own, weights = (place.own_rows(each.t(), "same") for each in (losses, mask))
    positions = place.own_rows(positions, "same")
    parts.add(
        "output_layer",
        "loss_per_position",
        loss_by_position(own.t(), weights.t(), positions, place.seq_length),
    )
