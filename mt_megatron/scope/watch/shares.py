"""Parts of tensors that a rank answers for: the ranks' parts add up to the whole once.

Data- and context-parallel ranks hold different tokens, pipeline stages different modules. Tensor-parallel
ranks hold different tokens (sequence parallelism), columns or heads, or the same: then each answers for
another stretch of the rows, which also divides the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mt_megatron.parallel.context_parallel import chunks, positions
from mt_megatron.parallel.rank_layout import Coordinates, RankLayout
from mt_megatron.seams import taps
from mt_megatron.seams.taps.names import unwrapped

Spread = Literal["same", "tokens", "columns", "partial"]
"""How tensor-parallel ranks hold a module's output: all of it each, some tokens, some columns (heads), or
summands of it."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """This rank among those that hold parts of a tensor."""

    layout: RankLayout
    at: Coordinates
    sequence_parallel: bool
    micro_batch_size: int
    seq_length: int
    """Of the whole sequence."""

    per_token_loss: bool = False
    """Whether what is minimised is the tokens' summed loss, divided at the end
    (``calculate_per_token_loss``)."""

    @property
    def tokens_spread(self) -> Spread:
        """How tensor-parallel ranks hold the residual stream."""
        if self.layout.tp == 1:
            return "same"
        return "tokens" if self.sequence_parallel else "same"

    def own_rows(self, values: Tensor, spread: Spread) -> Tensor:
        """The part of ``values`` [rows, ...] to count; empty where another rank counts them."""
        if self.layout.tp == 1 or spread != "same":
            return values
        return self._stretch(values)

    def _stretch(self, values: Tensor) -> Tensor:
        size, rows = self.layout.tp, values.size(0)
        return values[rows * self.at.tp // size : rows * (self.at.tp + 1) // size]

    def positions(self, count: int, device: torch.device, *, spread: Spread = "same") -> Tensor:
        """int64 [count]: where the ``count`` tokens that this rank holds stand in the whole sequence."""
        held = count * self.layout.tp if spread == "tokens" else count
        if self.layout.cp > 1:
            found = positions(self.at.cp, self.layout.cp, held, device)
        else:
            found = torch.arange(held, device=device)
        return found[self.at.tp * count : (self.at.tp + 1) * count] if spread == "tokens" else found

    def stretches(self, count: int, spread: Spread) -> list[tuple[int, int, int]]:
        """``positions(count)`` as contiguous stretches: first position, where it lies here, length."""
        held = count * self.layout.tp if spread == "tokens" else count
        pieces = [(0, 0, held)]
        if self.layout.cp > 1:
            half = held // 2
            pieces = [
                (chunk * half, n * half, half) for n, chunk in enumerate(chunks(self.at.cp, self.layout.cp))
            ]
        if spread != "tokens":
            return pieces
        low, high = self.at.tp * count, (self.at.tp + 1) * count
        found = []
        for position, local, length in pieces:
            begin, end = max(local, low), min(local + length, high)
            if begin < end:
                found.append((position + begin - local, begin - low, end - begin))
        return found

    def sample(self, microbatch: int, row: int) -> int:
        """Number within the global batch of sequence ``row`` of a micro-batch, in the order of the data."""
        per_round = self.micro_batch_size * self.layout.dp
        return microbatch * per_round + self.at.dp * self.micro_batch_size + row

    def asked(self, samples: Sequence[int], microbatch: int) -> list[tuple[int, int]]:
        """``(row, sample)`` of those of ``samples`` that are in this rank's micro-batch."""
        first = self.sample(microbatch, 0)
        return [(each - first, each) for each in samples if 0 <= each - first < self.micro_batch_size]


def spread_of(module: nn.Module, path: str, place: Place, *, owner: nn.Module | None = None) -> Spread:
    """How tensor-parallel ranks hold the output of ``module``, which is a part of ``owner``."""
    if place.layout.tp == 1:
        return "same"
    if is_batch_first(module):
        return "same"
    last = path.rpartition(".")[2]
    of_linear = column_spread(module)
    if of_linear is not None:
        return of_linear
    # Beside a norm of latents that of the queries is one too, and every rank has latents whole.
    norms = () if hasattr(owner, "kv_layernorm") else ("q_layernorm", "k_layernorm")
    if last in ("core_attention", *norms):
        return "columns"
    if ".experts" in path and last != "shared_experts":
        # Each rank has summands; they are added up after the experts.
        return "partial"
    if last == "output_layer":
        return "columns"
    return place.tokens_spread


def column_spread(module: nn.Module) -> Spread | None:
    """How tensor-parallel ranks hold the output of a column-parallel linear; None for other modules.

    Transformer Engine's, which never gather their output, are known by their classes alone."""
    if not (type(module).__name__.endswith("ColumnParallelLinear") or hasattr(module, "gather_output")):
        return None
    return "same" if getattr(module, "gather_output", False) else "columns"


def is_batch_first(module: nn.Module) -> bool:
    """True for tables of embeddings with outputs [sequences, tokens, features], which the model transposes
    later. One that scatters its output over tensor-parallel ranks has transposed it itself."""
    if isinstance(module, nn.Embedding):
        return True
    return hasattr(module, "vocab_start_index") and not getattr(module, "reduce_scatter_embeddings", False)


def is_gated(module: nn.Module, path: str) -> bool:
    """True for a first linear of an MLP whose output holds all gates, then all values: so does each tensor
    parallel rank's own."""
    config = getattr(module, "config", None)
    return path.endswith("linear_fc1") and bool(getattr(config, "gated_linear_unit", False))


def is_layer(path: str, module: nn.Module) -> bool:
    """Whether ``module`` is a transformer layer."""
    return hasattr(module, "layer_number") and hasattr(module, "self_attention") and bool(path)


def own_modules(chunks: Sequence[Any]) -> Iterator[tuple[str, nn.Module]]:
    """``taps.named_modules``, but each path of the whole model on one pipeline stage and chunk alone.

    Every chunk has a ``decoder`` or an ``encoder``, whose output is the model's on the last one. The last
    stage has a copy of the embedding where weights are tied or prediction depths take tokens from it.
    """
    for chunk in chunks:
        bare = unwrapped(chunk)
        is_first, is_last = (bool(getattr(bare, name, True)) for name in ("pre_process", "post_process"))
        for path, module in taps.named_modules([chunk]):
            part = path.partition(".")[0] if taps.layer_of(path) is None else ""
            within = part not in ("decoder", "encoder")
            if (part not in ("embedding", "rotary_pos_emb") or is_first) and (within or is_last):
                yield path, module


def module_rows(chunks: Sequence[Any]) -> list[list[Any]]:
    """Path, class name and elements of each module of this rank's ``chunks``."""
    found: dict[str, list[Any]] = {}
    for path, module in taps.named_modules(chunks):
        count = sum(each.numel() for each in module.parameters())
        found.setdefault(path, [path, module._get_name(), count])
    return list(found.values())
