"""Requested tensors and statistics, watched with taps that are open for the step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mt_megatron.errors import ConfigError
from mt_megatron.scope.watch.attention_rows import Rows, watch_rows
from mt_megatron.scope.watch.defaults import first_tensor
from mt_megatron.scope.watch.head import MOST_TOKENS, Head
from mt_megatron.scope.watch.parts import Parts
from mt_megatron.scope.watch.requests import Request
from mt_megatron.scope.watch.shares import (
    Place,
    Spread,
    is_batch_first,
    is_gated,
    is_layer,
    own_modules,
    spread_of,
)
from mt_megatron.scope.watch.sums import histogram, moments
from mt_megatron.scope.watch.tensors import Tensors
from mt_megatron.seams import taps
from mt_megatron.seams.taps import AttentionInputs, Call, RouterScores, Watch

MOST_ROWS = 256
"""Tokens of a tensor that is asked for without ``tokens``; also cells of a side of an attention map."""

FEW_MAPS = 32
"""Attention maps of one request up to which they have ``MOST_ROWS`` cells a side, not ``SMALL_MAP``."""

SMALL_MAP = 64

OF_ALL_SAMPLES = ("moments", "histogram")
"""Kinds of requests that count every sequence of a step."""

WITH_HEADS = ("qkv", "attention", "context")
"""Kinds of requests of which single heads can be asked for."""

MOST_LOGITS = 2**24
"""Attention logits that are computed at a time, float32."""

MOST_LOGITS_KEPT = 2**27
"""The same that are kept until all keys have arrived, under context parallelism."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One module that a request asks about."""

    path: str
    module: nn.Module
    spread: Spread


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A request and its modules on this rank."""

    request: Request
    targets: Sequence[Target]
    matched: int
    """Modules of the whole model that its pattern matches."""


class Asked:
    """Opens the taps of requests."""

    def __init__(
        self,
        chunks: Sequence[Any],
        place: Place,
        *,
        heads: int,
        samples: int | None,
        loss_scale: Callable[[], Tensor | None],
        told: Callable[[str], None],
    ) -> None:
        """``heads`` of one layer's attention on all ranks; ``samples`` of a step, None where not known;
        gradients are divided by ``loss_scale()``, None for none."""
        self._named = list(taps.named_modules(chunks))
        self._own = list(own_modules(chunks))
        self._place = place
        self._heads = heads
        self._samples = samples
        self._loss_scale = loss_scale
        self._told = told
        self._head = Head(chunks, place, told=told)

    def plan(self, request: Request, paths: Sequence[str]) -> tuple[Plan, str | None]:
        """The modules of ``request``, and a line where this rank's cannot be asked for this. ``paths``: of
        the whole model."""
        found: dict[str, Target] = {}
        problem: str | None = None
        for path, module in self._own:
            if not path or not request.matches(path):
                continue
            try:
                target = self._target(request, path, module)
            except ConfigError as error:
                problem = problem or f"{request.text!r}: {error}"
                continue
            found.setdefault(target.path, target)
        matched = sum(request.matches(path) for path in paths)
        plan = Plan(request=request, targets=list(found.values()), matched=matched)
        return plan, None if found else problem

    def beyond(self, request: Request) -> str | None:
        """A line about heads, tokens and samples of ``request`` that the model or a step does not have, or
        that are too many; the same on every rank."""
        length, heads = self._place.seq_length, request.heads or ()
        first, last = request.tokens or (0, 0 if request.kind != "logits" else length - 1)
        largest = request.samples[-1] if request.kind not in OF_ALL_SAMPLES else 0
        if heads and request.kind not in WITH_HEADS:
            return f"found heads in {request.text!r}, which are left out: {request.kind} has none of its own"
        if request.kind in OF_ALL_SAMPLES and (request.tokens is not None or request.samples != (0,)):
            return (
                f"found tokens or samples in {request.text!r}, which are left out: {request.kind} counts "
                "every token of the step"
            )
        if heads and heads[-1] >= self._heads:
            return f"found head {heads[-1]} in {request.text!r}; expected at most {self._heads - 1}"
        if self._samples is not None and largest >= self._samples:
            return f"found sample {largest} in {request.text!r}; expected at most {self._samples - 1}"
        if first >= length:
            return f"found tokens from {first} in {request.text!r}; expected at most {length - 1}"
        if request.tokens is not None and last >= length:
            return f"found tokens to {last} in {request.text!r}, cut at {length - 1}, the sequence's last"
        if request.kind == "logits" and min(last, length - 1) - first >= MOST_TOKENS:
            return (
                f"found {min(last, length - 1) - first + 1} tokens in {request.text!r}, of which the first "
                f"{MOST_TOKENS} are recorded; expected tokens={first}-{first + MOST_TOKENS - 1} or fewer"
            )
        return None

    def _target(self, request: Request, path: str, module: nn.Module) -> Target:
        kind = request.kind
        if kind in ("qkv", "attention", "context"):
            core = taps.attention.core_attention(module)
            path = path.removesuffix(".core_attention")
            path = path if path.endswith("attention") else f"{path}.self_attention"
            return Target(path=path, module=core, spread="columns" if self._place.layout.tp > 1 else "same")
        if kind == "router":
            router = taps.router.router_of(module)
            path = next(name for name, each in self._named if each is router)
            return Target(path=path, module=router, spread=self._place.tokens_spread)
        if kind == "residual" and not is_layer(path, module):
            raise ConfigError(f"found {path}, which is no layer; expected one such as decoder.layers.0")
        if kind == "mlp":
            inner = getattr(module, "mlp", module)
            path = path if inner is module else f"{path}.mlp"
            if path.rpartition(".")[2] != "mlp":
                raise ConfigError(f"found {path}; expected a layer or its mlp")
            module = inner
        if kind == "logits":
            self._head.check(path, module)
            return Target(path=path, module=module, spread="columns")
        if path == "output_layer" and getattr(
            getattr(module, "config", None), "cross_entropy_loss_fusion", False
        ):
            raise ConfigError(
                f"found {path}, which has no output: the blocked loss makes no whole micro-batch of logits. "
                "Ask for logits@output_layer, or train with --no-cross-entropy-loss-fusion"
            )
        outer = path.rpartition(".")[0]
        owner = next((each for name, each in self._named if name == outer), None)
        spread = spread_of(module, path, self._place, owner=owner)
        if spread == "partial":
            raise ConfigError(
                f"found {path}, of whose output each tensor parallel rank has summands; expected its mlp, "
                "where they are added up"
            )
        return Target(path=path, module=module, spread=spread)

    def open(self, plans: Sequence[Plan], tensors: Tensors, parts: Parts) -> list[Watch]:
        """Taps that add to ``tensors`` and ``parts`` until they are closed."""
        opened: list[Watch] = []
        for plan in plans:
            for target in plan.targets:
                opened += self._open(plan, target, tensors, parts)
        return opened

    def _open(self, plan: Plan, target: Target, tensors: Tensors, parts: Parts) -> list[Watch]:
        request, kind, told = plan.request, plan.request.kind, self._told
        take = _Take(request, target, tensors, self._place)
        module = target.module
        if kind in ("activation", "residual"):
            after = partial(take.output, kind)
            return [taps.watch(module, after=after, told=told)]
        if kind == "gradient":
            return [taps.watch(module, output_gradient=partial(take.gradient, self._loss_scale), told=told)]
        if kind == "mlp":
            opened = [taps.watch(module, after=partial(take.output, "mlp"), told=told)]
            second = getattr(module, "linear_fc2", None)
            if isinstance(second, nn.Module):
                opened.append(taps.watch(second, before=take.hidden, told=told))
            return opened
        if kind == "qkv":
            return [taps.attention_inputs(module, take.qkv, told=told)]
        if kind == "context":
            return [taps.watch(module, after=take.context, told=told)]
        if kind == "router":
            return [taps.router_scores(module, take.router, told=told)]
        if kind == "attention":
            asked = len(request.heads) if request.heads is not None else self._heads
            few = plan.matched * asked * len(request.samples) <= FEW_MAPS
            maps = _Maps(take, cells=MOST_ROWS if few else SMALL_MAP, told=told)
            return watch_rows(module, maps.wanted, maps.found, told=told)
        if kind == "logits":
            return self._head.open(request, target.path, target.module)
        after = partial(_statistic, kind, parts, self._place, target)
        return [taps.watch(module, after=after, told=told)]

    @property
    def head(self) -> Head:
        """What was seen of logits."""
        return self._head


def _statistic(kind: str, parts: Parts, place: Place, target: Target, call: Call, output: Any) -> None:
    if call.ordinal > 0:
        return  # of prediction depths' tokens
    whole = first_tensor(output)
    values = None if whole is None else place.own_rows(whole, target.spread)
    if values is None or values.numel() == 0:
        return
    if kind == "moments":
        parts.moments(target.path, values.numel(), *moments(values))
    else:
        parts.add(target.path, "histogram", histogram(values))


class _Take:
    """Takes what one request asks of one module."""

    def __init__(self, request: Request, target: Target, tensors: Tensors, place: Place) -> None:
        self.request = request
        self.target = target
        self.tensors = tensors
        self.place = place
        layer = taps.layer_of(target.path)
        self.layer = -1 if layer is None else layer
        length = place.seq_length
        if request.tokens is None:
            self.first, self.step = 0, -(-length // MOST_ROWS)
            self.rows = -(-length // self.step)
        else:
            self.first, self.step = request.tokens[0], 1
            self.rows = max(0, min(request.tokens[1], length - 1) - request.tokens[0] + 1)

    def output(self, what: str, call: Call, output: Any) -> None:
        if call.ordinal > 0:
            return  # of prediction depths' tokens
        self._features(what, call.microbatch, self._tokens_first(first_tensor(output)), self.target.spread)

    def _tokens_first(self, values: Tensor | None) -> Tensor | None:
        if values is None or values.dim() < 3 or not is_batch_first(self.target.module):
            return values
        return values.transpose(0, 1)

    def gradient(
        self, loss_scale: Callable[[], Tensor | None], call: Call, gradient: Tensor, index: int
    ) -> None:
        if index or call.ordinal > 0:
            return
        scale = loss_scale()
        values = gradient if scale is None else gradient / scale
        if not self.place.per_token_loss:
            # A rank's loss is the mean of its own tokens; that of the global batch is the mean of the ranks'.
            values = values / (self.place.layout.dp * self.place.layout.cp)
        self._features("gradient", call.microbatch, self._tokens_first(values), self.target.spread)

    def hidden(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        spread: Spread = "columns" if self.place.layout.tp > 1 else "same"
        self._features("mlp_hidden", call.microbatch, first_tensor((args, kwargs)), spread)

    def context(self, call: Call, output: Any) -> None:
        values = first_tensor(output)
        if values is None:
            return
        config: Any = self.target.module.config
        heads = int(config.num_attention_heads) // self.place.layout.tp
        by_head = values.unflatten(-1, (heads, -1))
        self._by_head("context", call.microbatch, by_head, range(heads), self.place.at.tp * heads)

    def qkv(self, inputs: AttentionInputs) -> None:
        heads, groups = inputs.query.size(-2), inputs.key.size(-2)
        asked = self.heads(inputs.heads)
        self._by_head("query", inputs.call.microbatch, inputs.query, asked, inputs.heads.start)
        of_keys = sorted({each * groups // heads for each in asked})
        first = inputs.heads.start * groups // heads
        for what, values in (("key", inputs.key), ("value", inputs.value)):
            self._by_head(what, inputs.call.microbatch, values, of_keys, first)

    def router(self, scores: RouterScores) -> None:
        microbatch = scores.call.microbatch
        for what, values in (
            ("router_logits", scores.logits),
            ("router_probabilities", scores.probabilities()),
            ("routing", scores.routing_map().float()),
        ):
            by_token = values.unflatten(0, (-1, self.place.micro_batch_size))
            self._features(what, microbatch, by_token, self.place.tokens_spread)

    def heads(self, held: range) -> list[int]:
        """Those of this rank's heads that are asked for, from 0."""
        if self.request.heads is None:
            return list(range(len(held)))
        return [each - held.start for each in self.request.heads if each in held]

    def _by_head(self, what: str, microbatch: int, values: Tensor, heads: Sequence[int], first: int) -> None:
        """``values`` [tokens, b, heads, d]; ``first`` is the number of this rank's first head."""
        asked = self.request.heads
        for head in heads:
            if what == "context" and asked is not None and first + head not in asked:
                continue
            self._features(what, microbatch, values.select(-2, head), "same", head=first + head, every=True)

    def _features(
        self,
        what: str,
        microbatch: int,
        values: Tensor | None,
        spread: Spread,
        *,
        head: int | None = None,
        every: bool = False,
    ) -> None:
        """``values`` [tokens, b, ...]; ``every`` tensor parallel rank has others of its own."""
        place = self.place
        if values is None or (spread == "same" and place.at.tp and not every):
            return
        if values.dim() < 3:
            raise ConfigError(
                f"found an output of shape {tuple(values.shape)} of {self.target.path}; expected [tokens, "
                "sequences, features]"
            )
        columns = values[0, 0].numel()
        whole = columns * place.layout.tp if spread == "columns" else columns
        parts = [(slice(None), columns * place.at.tp if spread == "columns" else 0)]
        if spread == "columns" and is_gated(self.target.module, self.target.path):
            half = columns // 2
            parts = [
                (slice(0, half), half * place.at.tp),
                (slice(half, columns), half * (place.layout.tp + place.at.tp)),
            ]
        index = {"layer": self.layer, "token_first": self.first, "token_step": self.step}
        if head is not None:
            index["head"] = head
        for row, sample in place.asked(self.request.samples, microbatch):
            for first, local in self.stretches(values.size(0), spread):
                for part, at in parts:
                    self.tensors.add(
                        self.target.path,
                        what,
                        values[local, row].reshape(-1, columns)[:, part],
                        index={**index, "sample": sample},
                        microbatch=microbatch,
                        shape=(self.rows, whole),
                        offset=(first, at),
                    )

    def stretches(self, count: int, spread: Spread) -> Iterator[tuple[int, slice]]:
        """Of ``count`` tokens of this rank: the number of the first asked one, and where the asked ones lie;
        for each contiguous stretch of the sequence."""
        for position, local, length in self.place.stretches(count, spread):
            low = max(0, -(-(position - self.first) // self.step))
            high = min(self.rows, -(-(position + length - self.first) // self.step))
            if low < high:
                start = local + self.first + low * self.step - position
                yield low, slice(start, start + (high - low - 1) * self.step + 1, self.step)


class _Maps:
    """Attention probabilities of one module: exact rows, or a map of cells of the whole square."""

    def __init__(self, take: _Take, *, cells: int, told: Callable[[str], None]) -> None:
        self._take = take
        self._cells = cells
        self._told = told
        self._open: dict[int, tuple[int, int, int, int, bool]] = {}
        """Of the rows object (by identity): sample, micro-batch, first row of the frame, cell height, and
        whether the frame ends with it."""

        self._begun: list[Tensor] = []
        """Cells of a frame that has not ended, [heads, rows, columns] each."""

        length, size = take.place.seq_length, take.place.layout.cp
        self._height = self._width = -(-length // cells)
        if size > 1:
            chunk = length // (2 * size)
            # Cells of queries lie within the chunks that ranks hold.
            self._height = next(
                each for each in range(self._height, chunk + 1) if chunk % each == 0 or each == chunk
            )

    def wanted(self, inputs: AttentionInputs) -> list[Rows]:
        take = self._take
        self._open.clear()
        self._begun.clear()
        samples = take.place.asked(take.request.samples, inputs.call.microbatch)
        heads = take.heads(inputs.heads)
        if not samples or not heads or inputs.query.dim() != 4:
            return []
        exact = take.request.tokens is not None
        queries, device = inputs.query.size(0), inputs.query.device
        length = take.place.seq_length
        # Rows are of a stretch of heads, whatever is left out of it.
        each = (max(heads) - min(heads) + 1) * length
        if inputs.context_size > 1 and self._asked(queries, exact) * each * len(samples) > MOST_LOGITS_KEPT:
            raise ConfigError(
                f"{take.request.text!r} asks for too many rows at a time under context parallelism; "
                f"expected at most {MOST_LOGITS_KEPT:,} logits. Name fewer heads or tokens"
            )
        step = 1 if exact else self._height
        rows_at_once = max(MOST_LOGITS // each // step, 1) * step
        found: list[Rows] = []
        for row, sample in samples:
            for first, local, count in self._stretches(queries, exact):
                for begin in range(0, count, rows_at_once):
                    end = min(begin + rows_at_once, count)
                    rows = Rows(
                        places=torch.arange(local + begin, local + end, device=device),
                        samples=slice(row, row + 1),
                        heads=slice(min(heads), max(heads) + 1),
                    )
                    # Cells are few: those of a stretch go into one frame.
                    from_row, ends = (first + begin, True) if exact else (first, end == count)
                    self._open[id(rows)] = (sample, inputs.call.microbatch, from_row // step, step, ends)
                    found.append(rows)
        return found

    def _asked(self, queries: int, exact: bool) -> int:
        return sum(count for _, _, count in self._stretches(queries, exact))

    def _stretches(self, queries: int, exact: bool) -> Iterator[tuple[int, int, int]]:
        """First row of the whole, where it lies here, and how many follow."""
        take = self._take
        for position, local, length in take.place.stretches(queries, "same"):
            if not exact:
                yield position, local, length
                continue
            low, high = max(position, take.first), min(position + length, take.first + take.rows)
            if low < high:
                yield low - take.first, local + low - position, high - low

    def found(self, inputs: AttentionInputs, rows: Rows, logits: Tensor) -> None:
        take = self._take
        sample, microbatch, first, step, ends = self._open[id(rows)]
        exact = take.request.tokens is not None
        # Queries that may attend to nothing; a NaN of a logit stays one.
        nothing = logits[0].amax(dim=-1, keepdim=True) == -torch.inf
        weights = torch.softmax(logits[0], dim=-1).masked_fill_(nothing, 0.0)
        keys = weights.size(-1)
        height = width = 1
        if not exact:
            height, width = self._height, self._width
            self._begun.append(_pooled(weights, height, width))
            if not ends:
                return
            weights = torch.cat(self._begun, dim=1) if len(self._begun) > 1 else self._begun[0]
            self._begun.clear()
        whole = take.rows if exact else -(-take.place.seq_length // height)
        low, heads = rows.heads.start, take.heads(inputs.heads)
        if len(heads) < weights.size(0):
            weights = weights[[head - low for head in heads]]
        index = {
            "layer": take.layer,
            "sample": sample,
            "query_first": take.first if exact else 0,
            "query_step": height,
            "key_step": width,
        }
        take.tensors.add_alike(
            take.target.path,
            "attention",
            weights,
            indices=[{**index, "head": inputs.heads.start + head} for head in heads],
            microbatch=microbatch,
            shape=(whole, -(-keys // width)),
            offset=(first, 0),
        )


def _pooled(weights: Tensor, height: int, width: int) -> Tensor:
    """[heads, queries, keys] in cells: mean over queries, sum over keys."""
    if height == width == 1:
        return weights
    heads, queries, keys = weights.shape
    columns = -(-keys // width)
    if columns * width != keys:
        weights = nn.functional.pad(weights, (0, columns * width - keys))
    summed = weights.view(heads, queries, columns, width).sum(dim=-1)
    whole = queries // height * height
    cells = summed[:, :whole].reshape(heads, -1, height, columns).mean(dim=2)
    if whole == queries:
        return cells
    return torch.cat((cells, summed[:, whole:].mean(dim=1, keepdim=True)), dim=1)
