"""Logits of asked tokens: of the model, out of the blocks of its loss, and of a layer (the logit lens).

Tensor-parallel ranks have other words of the same tokens. Each sends what it has with the log of the sum of
its exponentials; ``scope.format.tokens`` makes one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mt_megatron.errors import ConfigError
from mt_megatron.scope.watch.defaults import first_tensor
from mt_megatron.scope.watch.requests import Request
from mt_megatron.scope.watch.shares import Place, is_layer
from mt_megatron.seams import taps
from mt_megatron.seams.taps import Call, LossBlock, Watch
from mt_megatron.seams.taps.names import unwrapped

TOP = 10
"""Likeliest words of a token that are sent."""

MOST_TOKENS = 1024
"""Of one request and sequence."""

MOST_WORDS = 2**24
"""Logits that are looked at at a time: some copies of them are made."""

MOST_SEEN = 6 * 2**20
"""Bytes of one rank and step; what is beyond is dropped and counted."""


@dataclass(frozen=True, kw_only=True)
class SeenTokens:
    """Losses and likeliest words of consecutive tokens, on the device."""

    path: str
    microbatch: int
    sample: int
    position: int
    """Of the first."""

    tensors: tuple[Tensor, ...]
    """ids, loss, entropy, top_ids, top_logprobs, lse."""


class Head:
    """The output layer, where this rank has it."""

    def __init__(self, chunks: Sequence[Any], place: Place, *, told: Callable[[str], None]) -> None:
        self._place = place
        self._told = told
        self.seen: list[SeenTokens] = []
        """Of this step."""

        self.dropped = 0
        """Bytes left out of this step."""

        self._size = 0
        self._chunks: list[Any] = [unwrapped(chunk) for chunk in chunks]
        self._model: Any = None
        for bare in self._chunks:
            if getattr(bare, "post_process", False) and hasattr(bare, "output_layer"):
                self._model = bare

    def taken(self) -> tuple[list[SeenTokens], int]:
        """Tokens seen since the last call, and the bytes that were left out of them."""
        found = self.seen, self.dropped
        self.seen, self.dropped, self._size = [], 0, 0
        return found

    def check(self, path: str, module: nn.Module) -> None:
        """Raises ``ConfigError`` where logits of ``module`` cannot be computed on this rank alone."""
        if path == "output_layer":
            return
        if not is_layer(path, module) or not path.startswith("decoder."):
            # A prediction depth has a norm, and labels further on, of its own.
            raise ConfigError(
                f"found {path}; expected output_layer, or a layer for its logit lens such as decoder.layers.0"
            )
        if self._model is None:
            raise ConfigError(
                f"found {path} on a pipeline stage without the output layer, and watching sends nothing "
                "between stages; expected a layer of the last stage"
            )
        if self._place.tokens_spread == "tokens":
            raise ConfigError(
                f"found {path} under sequence parallelism, where no rank has a token's hidden state and all "
                "words, and watching sends nothing between ranks; expected output_layer"
            )

    def open(self, request: Request, path: str, module: nn.Module) -> list[Watch]:
        """Taps that add to ``seen`` until they are closed."""
        first, last = request.tokens or (0, self._place.seq_length - 1)
        last = min(last, self._place.seq_length - 1, first + MOST_TOKENS - 1)
        if path == "output_layer":
            rows = sorted({each % self._place.micro_batch_size for each in request.samples})
            local: list[int] = []
            for position, at, length in self._place.stretches(
                self._place.seq_length // self._place.layout.cp, "same"
            ):
                low, high = max(first, position), min(last + 1, position + length)
                local += range(at + low - position, at + high - position) if low < high else ()
            return [
                taps.loss_blocks(
                    partial(self._block, request), positions=local, samples=rows, told=self._told
                )
            ]
        lens = _Lens(self, request, path, first, last)
        opened = [taps.watch(module, after=lens.after, told=self._told)]
        # Labels are known to the forward of the chunk that the layer is of: another chunk of this rank has
        # those of another micro-batch by then.
        chunk = next(each for each in self._chunks if any(module is inner for inner in each.modules()))
        opened.append(taps.watch(chunk, before=lens.before, told=self._told))
        return opened

    def _block(self, request: Request, block: LossBlock) -> None:
        if block.depth > 0:
            return
        asked = dict(self._place.asked(request.samples, block.microbatch))
        positions = self._place.positions(
            self._place.seq_length // self._place.layout.cp, torch.device("cpu")
        )[block.positions]
        for row, sample in asked.items():
            at = (block.samples == row).nonzero().flatten()
            for stretch in _consecutive(positions[at].tolist()):
                lines = at[stretch].to(block.logits.device)
                self.add(
                    "output_layer",
                    block.microbatch,
                    sample,
                    int(positions[at[stretch.start]]),
                    block.logits[lines],
                    block.labels[lines],
                    block.first,
                    words=-(-block.vocab_size // self._place.layout.tp),
                )

    def add(
        self,
        path: str,
        microbatch: int,
        sample: int,
        position: int,
        logits: Tensor,
        labels: Tensor,
        first: int,
        *,
        words: int,
    ) -> None:
        """Keep what ``logits`` [n, words], of the words from id ``first`` on, say of ``labels`` [n].
        ``words``: the same on all ranks. One whose words are padding in part has fewer, and its pieces
        must be those of the others."""
        step = max(1, MOST_WORDS // max(words, 1))
        for begin in range(0, logits.size(0), step):
            piece = slice(begin, begin + step)
            self._add(path, microbatch, sample, position + begin, logits[piece], labels[piece], first)

    def _add(
        self,
        path: str,
        microbatch: int,
        sample: int,
        position: int,
        logits: Tensor,
        labels: Tensor,
        first: int,
    ) -> None:
        top = min(TOP, logits.size(-1))
        # The same on ranks with fewer words than others, or some would leave out what others send.
        size = logits.size(0) * (labels.element_size() + 3 * 4 + TOP * (8 + 4))
        if self._size + size > MOST_SEEN:
            self.dropped += size
            return
        self._size += size
        wide = logits.float()
        lse = torch.logsumexp(wide, dim=-1)
        logprobs = wide - lse[:, None]
        entropy = torch.special.entr(logprobs.exp()).sum(dim=-1)
        values, columns = logprobs.topk(top, dim=-1)
        column = labels - first
        inside = (column >= 0) & (column < wide.size(-1))
        loss = torch.full_like(lse, float("inf"))
        if wide.size(-1):
            # A rank may hold nothing but padding of the vocabulary.
            own = logprobs.gather(-1, column.clamp(0, wide.size(-1) - 1)[:, None])[:, 0]
            loss = torch.where(inside, -own, loss)
        self.seen.append(
            SeenTokens(
                path=path,
                microbatch=microbatch,
                sample=sample,
                position=position,
                tensors=(labels.clone(), loss, entropy, columns + first, values, lse),
            )
        )


def _consecutive(numbers: list[int]) -> list[slice]:
    """Stretches of rising numbers without gaps."""
    found, start = [], 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            found.append(slice(start, index))
            start = index
    return found


class _Lens:
    """Logit lens: the output layer applied to a layer's output."""

    def __init__(self, head: Head, request: Request, path: str, first: int, last: int) -> None:
        self._head = head
        self._request = request
        self._path = path
        self._first, self._last = first, last
        self._labels: Tensor | None = None

    def before(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._labels = kwargs.get("labels", args[4] if len(args) > 4 else None)

    def after(self, call: Call, output: Any) -> None:
        place, labels = self._head._place, self._labels
        if labels is None:
            raise ConfigError(
                f"found no labels beside {self._path}, which its logit lens compares with; expected the "
                "forward step to pass labels to every model chunk"
            )
        hidden = first_tensor(output)
        if hidden is None:
            return
        for row, sample in place.asked(self._request.samples, call.microbatch):
            for position, local, length in place.stretches(hidden.size(0), "same"):
                low, high = max(self._first, position), min(self._last + 1, position + length)
                if low < high:
                    at = slice(local + low - position, local + high - position)
                    self._tokens(call.microbatch, sample, low, hidden[at, row], labels[row, at])

    def _tokens(self, microbatch: int, sample: int, position: int, hidden: Tensor, labels: Tensor) -> None:
        model: Any = self._head._model
        weight = model.output_layer.weight
        if weight is None:
            weight = model.shared_embedding_or_output_weight()
        weight = weight.detach()
        norm = model.decoder.final_layernorm
        each = words = weight.size(0)
        first = self._head._place.at.tp * words
        whole = getattr(model, "unpadded_vocab_size", None)
        if whole is not None:
            words = min(words, max(whole - first, 0))
        step = max(1, MOST_WORDS // max(each, 1))
        for begin in range(0, hidden.size(0), step):
            piece = slice(begin, begin + step)
            # The modules' own forward, past whatever is tapped on them.
            normed = type(norm).forward(norm, hidden[piece].unsqueeze(1))[:, 0]
            logits = normed.to(weight.dtype) @ weight[:words].t()
            at = position + begin
            self._head.add(self._path, microbatch, sample, at, logits, labels[piece], first, words=each)
