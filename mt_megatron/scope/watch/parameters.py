"""Norms of gradients, weights and updates by layer, from what this rank's optimizer holds.

Every element is counted by one rank. With the distributed optimizer that is the rank that updates it; else
the ranks with the same parameter (data-, context- and, where it is not split, tensor-parallel) answer for a
stretch each, which divides the work. A weight that two pipeline stages share counts on the first.

An update is not found by keeping the weights of before. Adam's state says what it subtracted, so weights of
before are computed from those after it: no memory is needed but that of one piece. What other optimizers
did is seen by a copy, up to ``MOST_COPIED``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.backends.dtypes import wide_float
from mt_megatron.scope.watch import scalars
from mt_megatron.scope.watch.parts import Parts
from mt_megatron.scope.watch.shares import Place
from mt_megatron.scope.watch.sums import square_sum
from mt_megatron.seams.taps.names import unwrapped, whole_name

MOST_COPIED = 64 * 2**20
"""Bytes of weights that are copied before an update of an optimizer whose state does not tell it."""

_PIECE = 2**24
"""Elements worked on at a time: what temporaries are as large as."""

_TOGETHER = 2**25
"""Elements worked on in the same kernels, on other devices than a CPU: two temporaries are as large as they
are together."""

_PIECE_OF_CPU = 2**16
"""The same on a CPU, whose cache then holds them, and whose products are summed up in float32."""

WHOLE = ""
"""Path of the whole model."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A stretch of one parameter that this rank answers for."""

    name: str
    """The parameter's, in the whole model."""

    held: Any
    """What the inner optimizer updates: the parameter, its float32 copy, or this rank's part of one."""

    start: int
    stop: int
    """Of ``held``, flattened."""

    offset: int
    """Where ``held`` begins within the parameter that this rank has, flattened."""

    rows: int
    row_size: int
    """Of that parameter as a matrix."""

    inner: Any
    """The torch optimizer."""

    group: dict[str, Any]
    """Its parameter group."""

    @property
    def weight(self) -> Tensor:
        """The stretch of the weights."""
        flat: Tensor = self.held.detach().view(-1)
        return flat[self.start : self.stop]

    @property
    def gradient(self) -> Tensor | None:
        """The stretch of the gradient, reduced and unscaled; between ``prepare_grads`` and the clipping."""
        found = self.held.grad
        return None if found is None else found.detach().view(-1)[self.start : self.stop]


def unit_of(name: str) -> str:
    """The path that a parameter's norms are summed under: its layer, or the outermost module outside of
    layers."""
    parts = name.split(".")
    if "layers" in parts[:-1]:
        return ".".join(parts[: parts.index("layers") + 2])
    return ".".join(parts[:2]) if parts[0] in ("decoder", "encoder", "mtp") else parts[0]


def shares_of(chunks: Sequence[Any], optimizer: Any, place: Place) -> list[Share]:
    """This rank's stretches of all parameters that are trained."""
    names: dict[Tensor, str] = {}
    for chunk in chunks:
        bare = unwrapped(chunk)
        for local, parameter in bare.named_parameters():
            names.setdefault(parameter, whole_name(bare, local))
    found = []
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        groups = {held: group for group in part.optimizer.param_groups for held in group["params"]}
        for parameter, held in _pairs(part):
            if getattr(parameter, "shared", False) or parameter not in names or held not in groups:
                continue
            stretch = _stretch(part, parameter, held, place)
            if stretch is None or stretch[0] == stretch[1]:
                continue
            start, stop, offset = stretch
            rows = parameter.size(0) if parameter.dim() > 1 else 1
            found.append(
                Share(
                    name=names[parameter],
                    held=held,
                    start=start,
                    stop=stop,
                    offset=offset,
                    rows=rows,
                    row_size=parameter.numel() // max(rows, 1),
                    inner=part.optimizer,
                    group=groups[held],
                )
            )
    return found


def loss_scale(optimizer: Any) -> Tensor | None:
    """What losses are multiplied with before backward; None where nothing scales them."""
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        if getattr(part, "grad_scaler", None) is not None:
            scale: Tensor = part.grad_scaler.scale
            return scale
    return None


def _pairs(part: Any) -> Iterator[tuple[Any, Any]]:
    """Each model parameter and what the inner optimizer updates for it."""
    if hasattr(part, "shard_fp32_from_float16_groups"):
        pairs = (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        )
    elif hasattr(part, "fp32_from_float16_groups"):
        pairs = (
            (part.float16_groups, part.fp32_from_float16_groups),
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        )
    else:
        each: Any = [group["params"] for group in part.optimizer.param_groups]
        pairs = ((each, each), ([], []))
    for models, helds in pairs:
        for model_group, held_group in zip(models, helds, strict=True):
            yield from zip(model_group, held_group, strict=True)


def _stretch(part: Any, parameter: Any, held: Any, place: Place) -> tuple[int, int, int] | None:
    """``start``, ``stop`` and ``offset`` of a ``Share``; None where others count all of it."""
    layout, at = place.layout, place.at
    split = bool(getattr(parameter, "tensor_model_parallel", False)) or layout.tp == 1
    if hasattr(part, "shard_fp32_from_float16_groups"):
        if not split and at.tp:
            return None
        return 0, held.numel(), int(part._get_model_param_range_map(parameter)["param"].start)
    if getattr(parameter, "allreduce", True):
        copies, index = layout.dp * layout.cp, at.dp * layout.cp + at.cp
    else:
        # Experts are spread over the data-parallel ranks.
        copies, index = layout.edp * layout.cp, at.edp * layout.cp + at.cp
    if not split:
        copies, index = copies * layout.tp, index * layout.tp + at.tp
    count = held.numel()
    start, stop = count * index // copies, count * (index + 1) // copies
    return None if start == stop else (start, stop, 0)


class Norms:
    """The statistics of one rank's shares, step by step."""

    def __init__(
        self, chunks: Sequence[Any], place: Place, *, vocab_size: int | None, say: Callable[[str], None]
    ) -> None:
        """``vocab_size`` is that of the tokenizer: further rows of the embedding pad it and are left out of
        ``embedding_norm``. There are no norms before ``hold``."""
        self._chunks = chunks
        self._place = place
        self._vocab_size = vocab_size
        self._say = say
        self._shares: list[Share] = []
        self._paths: list[tuple[str, ...]] = []
        self._copies: dict[int, Tensor] = {}
        self._copied: list[int] = []

    def hold(self, optimizer: Any) -> bool:
        """Take the norms of what ``optimizer`` updates; whether it holds weights of the chunks."""
        self._shares = shares_of(self._chunks, optimizer, self._place)
        self._paths = [(WHOLE, unit_of(share.name)) for share in self._shares]
        unknown = [index for index, share in enumerate(self._shares) if _rule(share) is None]
        self._copied = unknown
        size = sum(4 * (self._shares[index].stop - self._shares[index].start) for index in unknown)
        if size > MOST_COPIED:
            kind = type(self._shares[unknown[0]].inner).__name__
            self._say(
                f"update_ratio is not recorded: the state of {kind} does not say what an update was, and the "
                f"{size:,} bytes of this rank's weights are too many to copy (at most {MOST_COPIED:,})"
            )
            self._copied = []
        return bool(self._shares)

    def gradients(self, parts: Parts) -> None:
        """Add ``gradient_norm``."""
        if parts.defers:
            there = [(i, share.gradient) for i, share in enumerate(self._shares)]
            known = [(i, gradient) for i, gradient in there if gradient is not None]
            norms = _norms([gradient for _, gradient in known])
            for (index, _), each in zip(known, norms, strict=True):
                parts.later(scalars.GRADIENT, self._paths[index], [each])
            return
        for index, share in enumerate(self._shares):
            if share.gradient is not None:
                self._add(parts, "gradient_norm", index, [_squares(share.gradient)])

    def before_update(self) -> None:
        """Copy what the optimizer's state will not tell."""
        self._copies = {index: self._shares[index].weight.clone() for index in self._copied}

    def after_update(self, parts: Parts, *, skipped: bool) -> None:
        """Add ``weight_norm``, ``update_ratio`` and ``embedding_norm``; where the update was ``skipped`` it
        was zero."""
        if parts.defers:
            self._after_update_later(parts, skipped=skipped)
            return
        for index, share in enumerate(self._shares):
            copy = self._copies.pop(index, None)
            told = update_of(share) if copy is None and not skipped else None
            weights = _squares(share.weight) if told is None else told[0]
            self._add(parts, "weight_norm", index, [weights])
            if share.name == "embedding.word_embeddings.weight":
                self._embedding(parts, share)
            if skipped:
                self._add(parts, "update_ratio", index, [0.0, weights])
            elif copy is not None:
                self._add(parts, "update_ratio", index, [_squares(share.weight - copy), _squares(copy)])
            elif told is not None:
                self._add(parts, "update_ratio", index, told[1:])

    def _after_update_later(self, parts: Parts, *, skipped: bool) -> None:
        weights = _norms([share.weight for share in self._shares])
        told = []
        for index, (share, norm) in enumerate(zip(self._shares, weights, strict=True)):
            paths = self._paths[index]
            parts.later(scalars.WEIGHT, paths, [norm])
            if share.name == "embedding.word_embeddings.weight":
                self._embedding(parts, share)
            if skipped:
                parts.later(scalars.NO_UPDATE, paths, [norm])
            elif index in self._copies:
                before = self._copies.pop(index)
                both = [scalars.norm(share.weight - before), scalars.norm(before)]
                parts.later(scalars.UPDATE_BY_COPY, paths, both)
            else:
                told.append(index)
        updates = pieces_of([self._shares[i] for i in told], [weights[i] for i in told])
        for number, found, known in updates:
            family = scalars.UPDATE if len(found) == 3 else scalars.UPDATE_BY_TENSOR
            parts.later(family, self._paths[told[number]], found, known)
        self._copies = {}

    def _embedding(self, parts: Parts, share: Share) -> None:
        limit = share.rows
        if self._vocab_size is not None:
            limit = min(max(self._vocab_size - self._place.at.tp * share.rows, 0), share.rows)
        first = share.offset + share.start
        last = min(share.offset + share.stop, limit * share.row_size)
        if last > first and parts.defers:
            norm, rows = scalars.norm(share.weight[: last - first]), (last - first) / share.row_size
            parts.later(scalars.EMBEDDING, ("embedding.word_embeddings",), [norm], [rows])
        elif last > first:
            found = [_squares(share.weight[: last - first]), (last - first) / share.row_size]
            parts.add("embedding.word_embeddings", "embedding_norm", found)

    def _add(self, parts: Parts, statistic: str, index: int, sums: Sequence[float]) -> None:
        for path in self._paths[index]:
            parts.add(path, statistic, sums)


def _squares(values: Tensor) -> float:
    """On a CPU, where a look at it waits for nothing."""
    return float(square_sum(values))


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Norms [] in float32 at least, of all in few kernels."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        of = [index for index, each in enumerate(tensors) if each.dtype is dtype]
        wide = torch.promote_types(dtype, torch.float32)
        found |= zip(of, torch._foreach_norm([tensors[i] for i in of], 2.0, dtype=wide), strict=True)
    return [found[index] for index in range(len(tensors))]


# What an optimizer did, told by its state after the update.


def update_of(share: Share) -> tuple[float, float, float] | None:
    """Sums of squares of the weights after the last update, of the update and of the weights before it; None
    where the optimizer's state does not tell it. On a CPU."""
    rule = _rule(share)
    state = share.inner.state.get(share.held)
    if rule is None or not state:
        return None
    held = share.held.detach().view(-1)
    after = square = product = multiple = decay = 0.0
    for first in range(share.start, share.stop, _PIECE_OF_CPU):
        piece = slice(first, min(first + _PIECE_OF_CPU, share.stop))
        direction, multiple, decay = rule(share, state, piece)
        weights = held[piece].float()
        after += float(torch.dot(weights, weights))
        square += multiple**2 * float(torch.dot(direction, direction))
        product += multiple * float(torch.dot(direction, weights))
    # after = kept * before - multiple * direction, so that sums over the elements give all others.
    kept = 1.0 - decay or float("nan")
    before = (after + 2.0 * product + square) / kept**2
    return after, square + 2.0 * decay * (product + square) / kept + decay**2 * before, before


_Rule = Callable[[Share, Any, slice], tuple[Tensor, float, float]]


def _rule(share: Share) -> _Rule | None:
    """Reader of a direction, the multiple of it that was subtracted from the weights, and their decay; None
    where no state tells them."""
    group, name = share.group, type(share.inner).__name__
    if any(group.get(option) for option in ("amsgrad", "maximize", "nesterov")):
        return None
    # FusedAdamW: torch_musa's.
    if name in ("AdamW", "FusedAdamW") or (
        name == "FusedAdam" and group.get("adam_w_mode", _adam_w_mode(share.inner))
    ):
        return _adamw
    if name == "SGD" and group.get("momentum") and not group.get("dampening"):
        return _momentum
    return None


def _adam_w_mode(inner: Any) -> bool:
    # Apex and Transformer Engine keep it on the optimizer, as 1 for decoupled weight decay.
    return bool(getattr(inner, "adam_w_mode", True))


def _adamw(share: Share, state: Any, piece: slice) -> tuple[Tensor, float, float]:
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2; as in torch the decay is times the rate. Of a
    number of steps that the host has."""
    first = state["exp_avg"].view(-1)[piece].float()
    second = state["exp_avg_sq"].view(-1)[piece].float()
    multiple, eps = _rate(share, state)
    # Some CPUs take 20 times as long for the root of 0 [measured]; beside eps what is so small is nothing.
    root = second.clamp_min((1e-5 * eps) ** 2).sqrt_().add_(eps)
    decay = float(share.group["lr"]) * float(share.group["weight_decay"])
    return torch.div(first, root, out=root), multiple, decay


Rate = tuple[Any, Any]
"""Of Adam: what its direction is multiplied with, and what is added to the root: a number or a tensor []."""


def _waits_for(step: Any) -> bool:
    """True where a look at the number would wait for the device."""
    return isinstance(step, Tensor) and step.device.type != "cpu"


def _rates(shares: Sequence[Share]) -> dict[int, Rate]:
    """Adam's rates of shares whose number of steps is on the device, all in few kernels."""
    alike: dict[tuple[float, ...], list[int]] = {}
    for index, share in enumerate(shares):
        step = share.inner.state.get(share.held, {}).get("step", share.group.get("step"))
        if _rule(share) is _adamw and _waits_for(step):
            group = share.group
            key = (float(group["lr"]), *map(float, group["betas"]), float(group["eps"]))
            alike.setdefault(key, []).append(index)
    found: dict[int, Rate] = {}
    for (lr, beta1, beta2, eps), indices in alike.items():
        states = (shares[i].inner.state[shares[i].held] for i in indices)
        steps = [
            state.get("step", shares[i].group.get("step")) for i, state in zip(indices, states, strict=True)
        ]
        joined = torch.stack([step.reshape(()) for step in steps])
        joined = joined.to(wide_float(joined.device))
        root = (1.0 - beta2**joined).sqrt()
        multiples = (lr * root / (1.0 - beta1**joined)).float().unbind()
        found |= zip(indices, zip(multiples, (eps * root).unbind(), strict=True), strict=True)
    return found


def pieces_of(
    shares: Sequence[Share], weights: Sequence[Tensor]
) -> Iterator[tuple[int, list[Tensor], tuple[float, float]]]:
    """Number of a share, scalars and known numbers of ``scalars.UPDATE`` for each piece of ``shares``;
    nothing of those whose optimizer's state does not tell an update. ``weights`` are the norms of the weights
    after it."""
    rates = _rates(shares)
    # Numbers and tensors are not added by the same kernel.
    waiting = {on_device: _Together() for on_device in (False, True)}
    for index, share in enumerate(shares):
        rule, state = _rule(share), share.inner.state.get(share.held)
        if rule is None or not state:
            continue
        for first in range(share.start, share.stop, _PIECE):
            piece = slice(first, min(first + _PIECE, share.stop))
            if rule is not _adamw:
                direction, multiple, decay = rule(share, state, piece)
                yield index, _scalars_of(share, piece, weights[index], direction), (decay, multiple)
                continue
            together = waiting[index in rates]
            if together.size + piece.stop - piece.start > _TOGETHER:
                yield from _adamw_pieces(shares, together.taken(), weights, rates)
            together.add(index, piece)
    for together in waiting.values():
        yield from _adamw_pieces(shares, together.taken(), weights, rates)


class _Together:
    """Pieces that share kernels: numbers of shares, and stretches of them."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, slice]] = []
        self.size = 0
        """Elements."""

    def add(self, index: int, piece: slice) -> None:
        self._pieces.append((index, piece))
        self.size += piece.stop - piece.start

    def taken(self) -> list[tuple[int, slice]]:
        """All of them, which are forgotten here."""
        pieces, self._pieces, self.size = self._pieces, [], 0
        return pieces


def _adamw_pieces(
    shares: Sequence[Share],
    pieces: Sequence[tuple[int, slice]],
    weights: Sequence[Tensor],
    rates: dict[int, Rate],
) -> Iterator[tuple[int, list[Tensor], tuple[float, float]]]:
    """The same of ``pieces`` (number of a share, stretch of it) that Adam updated, in few kernels."""
    if not pieces:
        return
    of = [shares[index] for index, _ in pieces]
    states = [share.inner.state[share.held] for share in of]
    each_rate = [
        rates.get(index) or _rate(share, state)
        for (index, _), share, state in zip(pieces, of, states, strict=True)
    ]
    first, second = (
        [state[name].view(-1)[piece].float() for (_, piece), state in zip(pieces, states, strict=True)]
        for name in ("exp_avg", "exp_avg_sq")
    )
    directions = torch._foreach_sqrt(second)
    torch._foreach_add_(directions, [rate[1] for rate in each_rate])
    directions = torch._foreach_div(first, directions)
    norms = torch._foreach_norm(directions)
    for (index, piece), share, rate, direction, norm in zip(
        pieces, of, each_rate, directions, norms, strict=True
    ):
        found = _scalars_of(share, piece, weights[index], direction, norm)
        decay = float(share.group["lr"]) * float(share.group["weight_decay"])
        if isinstance(rate[0], Tensor):
            yield index, [*found, rate[0]], (decay, 1.0)
        else:
            yield index, found, (decay, float(rate[0]))


def _scalars_of(
    share: Share, piece: slice, weights: Tensor, direction: Tensor, norm: Tensor | None = None
) -> list[Tensor]:
    held = share.held.detach().view(-1)[piece].float()
    after = weights if piece.start == share.start else torch.zeros_like(weights)
    return [after, scalars.norm(direction) if norm is None else norm, torch.dot(direction, held)]


def _rate(share: Share, state: Any) -> Rate:
    """The same of a number of steps that the host has."""
    group = share.group
    (beta1, beta2), step = group["betas"], float(state.get("step", group.get("step")))
    root = (1.0 - beta2**step) ** 0.5
    return float(group["lr"]) * root / (1.0 - beta1**step), group["eps"] * root


def _momentum(share: Share, state: Any, piece: slice) -> tuple[Tensor, float, float]:
    # Weight decay is in the gradient, and so in the buffer.
    return state["momentum_buffer"].view(-1)[piece].float(), float(share.group["lr"]), 0.0
