"""Tokens from the current weights, one after another, over the layout that trains them.

Every rank takes part: the model runs forward as in validation, over the whole sequence for each token,
since a training keeps no cache of keys. Random states, training flags, FP8 scales and counters are as
before afterwards, so that training goes on to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mt_megatron.checkpoint.rng import capture_rng, restore_rng
from mt_megatron.checkpoint.run_parts import synchronised_parameters
from mt_megatron.errors import ConfigError
from mt_megatron.fp8.state import states_of
from mt_megatron.parallel.context_parallel import chunks, part_of_sequence, positions
from mt_megatron.scope.lab.agreement import gathered
from mt_megatron.scope.lab.random_numbers import key_of, uniform
from mt_megatron.scope.trainer import Trainer
from mt_megatron.seams import collectives, taps
from mt_megatron.seams.schedule import run_schedule

MOST_TOKENS = 1024
MOST_REPORTED = 50
MOST_ATTENTION = 1 << 21
"""Weights of attention in one answer."""

_UNFINISHED = "\ufffd"
"""Ends a text whose last character lacks bytes."""

_ROUND = 32
"""Sequences are padded to a multiple of so many tokens for each rank that shares them: kernels want that."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for tokens, checked."""

    ids: tuple[int, ...]
    """Of the prompt."""

    n: int
    """Tokens to generate at most."""

    temperature: float
    """0: the most probable token each time."""

    top_k: int
    """Tokens to draw from; 0: all."""

    seed: int
    report: int
    """Most probable tokens that are told of each."""

    stop_at_end: bool
    layers: tuple[int, ...]
    """Whose attention is told."""

    heads: tuple[int, ...] | None
    """None: all."""


def request_from(arguments: Mapping[str, Any], trainer: Trainer) -> Request:
    """The request in ``arguments``: ``prompt`` (text) or ``ids``, and maybe ``n``, ``temperature``,
    ``top_k``, ``seed``, ``report``, ``stop_at_end``, ``attention`` ({"layers", "heads"}). Raises
    ``ConfigError``."""
    if not all(hasattr(chunk, "decoder") for chunk in trainer.bare_chunks()):
        raise ConfigError("found a model without a decoder; expected one that predicts the next token")
    known = ("prompt", "ids", "n", "temperature", "top_k", "seed", "report", "stop_at_end", "attention")
    for key in arguments:
        if key not in known:
            raise ConfigError(f"found {key!r} for generate; expected {', '.join(known)}")
    ids = _prompt(arguments, trainer)
    usual = max(1, min(32, trainer.seq_length - len(ids)))
    n = _whole(arguments, "n", usual, 1, MOST_TOKENS)
    if len(ids) + n > trainer.seq_length:
        raise ConfigError(
            f"found a prompt of {len(ids)} tokens and n: {n}; expected at most {trainer.seq_length} "
            "together, the length that the model trains with"
        )
    temperature = arguments.get("temperature", 1.0)
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or not 0 <= temperature <= 100
    ):
        raise ConfigError(f"found temperature: {temperature!r}; expected a number from 0 to 100")
    attention = arguments.get("attention") or {}
    if not isinstance(attention, Mapping) or set(attention) - {"layers", "heads"}:
        raise ConfigError(f"found attention: {attention!r}; expected a map with layers and maybe heads")
    layers = _numbers(attention.get("layers", []), "layers", _count(trainer, "num_layers"))
    count = _count(trainer, "num_attention_heads")
    given = attention.get("heads")
    heads = None if given is None else _numbers(given, "heads", count)
    weights = n * (len(ids) + n) * len(layers) * (count if heads is None else len(heads))
    if weights > MOST_ATTENTION:
        raise ConfigError(
            f"found attention of some {weights:,} weights; expected at most {MOST_ATTENTION:,}. Ask for "
            "fewer layers, heads or tokens"
        )
    return Request(
        ids=ids,
        n=n,
        temperature=float(temperature),
        top_k=_whole(arguments, "top_k", 0, 0, 1 << 20),
        seed=_whole(arguments, "seed", 0, 0, 2**63 - 1),
        report=_whole(arguments, "report", 10, 1, MOST_REPORTED),
        stop_at_end=bool(arguments.get("stop_at_end", True)),
        layers=layers,
        heads=heads,
    )


def generate(
    trainer: Trainer,
    arguments: Mapping[str, Any],
    *,
    told: Callable[[Mapping[str, Any]], None] = lambda token: None,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Generate as ``arguments`` ask (``request_from``); collective, between two steps.

    Returns ``ids`` of the prompt, ``text``, and ``tokens``: for each ``id``, ``text``, ``probability``,
    ``entropy`` in nats, ``top_ids``, ``top_texts``, ``top_probabilities`` (of the model, without
    temperature), and where asked ``attention``, {layer: {head: weights of the tokens so far}}. Texts are None
    without a tokenizer that has some; those of the tokens follow one another, a character of several tokens
    with its last. ``told`` gets each as it is made. ``ended``: why it ended before its end, or None; it does
    when the run is to end, or ``is_over`` on any rank. Raises ``ConfigError`` on all ranks.
    """
    request = request_from(arguments, trainer)
    tokens: list[dict[str, Any]] = []
    texts = _Texts(trainer, request.ids[-1])
    with _untouched(trainer):
        model = _Forward(trainer, request, is_over)
        sequence = list(request.ids)
        for number in range(request.n):
            token = model.next(sequence)
            token["position"] = len(sequence)
            token["top_texts"] = [texts.instead(each) for each in token["top_ids"]]
            token["text"] = texts.next(token["id"])
            sequence.append(token["id"])
            tokens.append(token)
            told({"number": number, **token})
            if request.stop_at_end and token["id"] == getattr(trainer.tokenizer, "eod", -1):
                break
            if model.ended is not None:
                break
    return {
        "ids": list(request.ids),
        "text": _text(trainer, sequence[len(request.ids) :]),
        "tokens": tokens,
        "step": trainer.iteration,
        "ended": model.ended,
    }


class _Texts:
    """Texts of tokens that follow one another: single ones lack the space before them, and parts of a
    character are none."""

    def __init__(self, trainer: Trainer, before: int) -> None:
        self._decode: Callable[[list[int]], str] | None = getattr(trainer.tokenizer, "decode", None)
        self._ids = [before]
        self._shown = "" if self._decode is None else str(self._decode([before]))

    def next(self, token: int) -> str | None:
        """Text that ``token`` adds; empty where it leaves a character unfinished."""
        if self._decode is None:
            return None
        self._ids.append(token)
        whole = str(self._decode(list(self._ids)))
        if whole.endswith(_UNFINISHED):
            return ""
        added = whole[len(self._shown) :] if whole.startswith(self._shown) else str(self._decode([token]))
        self._shown = whole
        return added

    def instead(self, token: int) -> str | None:
        """Text that ``token`` would add in the next one's place."""
        if self._decode is None:
            return None
        head = str(self._decode(self._ids[-1:]))
        both = str(self._decode([self._ids[-1], token]))
        return both[len(head) :] if both.startswith(head) else str(self._decode([token]))


@contextmanager
def _untouched(trainer: Trainer) -> Iterator[None]:
    """Around forward passes that leave no trace in training."""
    random_states = capture_rng(trainer)  # type: ignore[arg-type]
    restoring = [state.snapshot() for state in states_of(trainer.chunks)]
    modules = [module for chunk in trainer.chunks for module in chunk.modules()]
    were_training = [module.training for module in modules]
    with synchronised_parameters(trainer), torch.no_grad():  # type: ignore[arg-type]
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, training in zip(modules, were_training, strict=True):
                module.training = training
            for restore in restoring:
                restore()
            restore_rng(random_states, trainer)  # type: ignore[arg-type]


class _Forward:
    """Forward passes over the layout, with what is known after them on all ranks."""

    def __init__(self, trainer: Trainer, request: Request, is_over: Callable[[], bool]) -> None:
        layout, at = trainer.layout, trainer.at
        self.ended: str | None = None
        """Why no further token should follow, as of the last one; the same on every rank."""

        self._is_over = is_over
        self._trainer = trainer
        self._request = request
        share = 2 * layout.cp * layout.tp * _ROUND if layout.cp > 1 else layout.tp * _ROUND
        length = -(-(len(request.ids) + request.n) // share) * share
        self._length = min(length, trainer.seq_length)
        self._last = at.pp == (0 if layout.v else layout.pp - 1)
        self._microbatches = layout.pp if layout.interleaved else 1
        self._device = trainer.backend.device(trainer.backend.current_device())
        vocabulary = getattr(trainer.tokenizer, "vocab_size", None)
        self._vocabulary = None if vocabulary is None else int(vocabulary)

    def next(self, sequence: Sequence[int]) -> dict[str, Any]:
        """The next token after ``sequence``, the same on every rank; collective."""
        place = len(sequence) - 1
        owner, within = self._owner(place)
        at = self._trainer.at
        with self._attention() as captured:
            row = self._row(sequence, within)
        mine = self._last and row is not None and at.dp == 0 and at.cp == owner and at.tp == 0
        report = self._request.report
        found = [0.0] * (3 + 2 * report)
        if mine:
            assert row is not None
            found = self._chosen(row, place)
        # A job that is told to end has seconds, and a token of a large model takes one.
        ending = [float(any(self._trainer.wishes()[:1])), float(self._is_over())]
        *total, stops, overs = self._trainer.sum_over_ranks([*found, *ending])
        if stops or overs:
            self.ended = "the run is to end" if stops else "by command"
        token: dict[str, Any] = {
            "id": round(total[0]),
            "probability": total[1],
            "entropy": total[2],
            "top_ids": [round(each) for each in total[3 : 3 + report]],
            "top_probabilities": total[3 + report :],
        }
        if self._request.layers:
            token["attention"] = self._weights(captured, place, owner, within)
        return token

    def _owner(self, place: int) -> tuple[int, int]:
        """The context-parallel rank that holds the token at ``place``, and where among its own."""
        size = self._trainer.layout.cp
        if size == 1:
            return 0, place
        half = self._length // (2 * size)
        chunk, offset = divmod(place, half)
        for rank in range(size):
            if chunk in chunks(rank, size):
                return rank, offset + half * chunks(rank, size).index(chunk)
        raise AssertionError(place)

    def _row(self, sequence: Sequence[int], within: int) -> NDArray[np.float32] | None:
        """Logits of the whole vocabulary at the row ``within`` of this rank's tokens; None but on the last
        stage."""
        trainer = self._trainer
        whole = torch.zeros(1, self._length, dtype=torch.int64)
        whole[0, : len(sequence)] = torch.tensor(list(sequence))
        places = torch.arange(self._length).unsqueeze(0)
        size, rank = trainer.layout.cp, trainer.at.cp
        if size > 1:
            whole, places = (part_of_sequence(each, 1, rank, size) for each in (whole, places))
        tokens, places = whole.to(self._device), places.to(self._device)

        def forward_step(batches: Any, model: Any) -> tuple[Tensor, Any]:
            next(batches)
            output = model(tokens, places, None)

            def report(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                row = logits[0, within].detach().float().clone()
                return torch.zeros((), device=logits.device), {"row": row}

            return output, report

        reports = run_schedule(
            forward_step,
            list(trainer.chunks),
            [iter([None] * self._microbatches) for _ in trainer.chunks],
            num_microbatches=self._microbatches,
            seq_length=self._length,
            micro_batch_size=1,
            forward_only=True,
        )
        if not self._last:
            return None
        row = _gathered_row(reports[0]["row"], trainer.layout.tp)
        logits: NDArray[np.float32] = row.cpu().numpy()
        return logits if self._vocabulary is None else logits[: self._vocabulary]

    def _chosen(self, row: NDArray[np.float32], place: int) -> list[float]:
        """Id, probability, entropy; then ids and probabilities of the most probable tokens."""
        request = self._request
        logits = row.astype(np.float64)
        probabilities = _softmax(logits)
        order = np.argsort(-probabilities, kind="stable")
        chosen = int(order[0])
        if request.temperature > 0:
            allowed = order[: request.top_k] if request.top_k else order
            weights = _softmax(logits[allowed] / request.temperature)
            drawn = float(uniform(key_of(request.seed, "generate"), torch.tensor([place]))[0])
            index = int(np.searchsorted(np.cumsum(weights), drawn, side="right"))
            chosen = int(allowed[min(index, len(allowed) - 1)])
        positive = probabilities[probabilities > 0]
        entropy = float(-(positive * np.log(positive)).sum())
        top = order[: request.report]
        missing = request.report - len(top)
        return [
            float(chosen),
            float(probabilities[chosen]),
            entropy,
            *map(float, top),
            *[0.0] * missing,
            *map(float, probabilities[top]),
            *[0.0] * missing,
        ]

    @contextmanager
    def _attention(self) -> Iterator[dict[int, taps.AttentionInputs]]:
        """Queries and keys of the layers that are asked for, of the first micro-batch."""
        captured: dict[int, taps.AttentionInputs] = {}
        opened = []
        try:
            for layer, module in self._layers():
                opened.append(taps.attention_inputs(module, partial(_keep, captured, layer)))
            yield captured
        finally:
            for each in opened:
                each.close()

    def _layers(self) -> Iterator[tuple[int, Any]]:
        for path, module in taps.named_modules(list(self._trainer.bare_chunks())):
            layer = taps.layer_of(path)
            if layer in self._request.layers and path == f"decoder.layers.{layer}":
                assert layer is not None
                yield layer, module

    def _weights(
        self, captured: Mapping[int, taps.AttentionInputs], place: int, owner: int, within: int
    ) -> dict[str, dict[str, list[float]]]:
        """Attention of the token at ``place`` to those before it and itself: by layer and head, numbers as
        text, since a frame's maps have no other keys."""
        at = self._trainer.at
        mine = at.dp == 0 and bool(captured)
        queries = (
            {
                (layer, head): given.query[within, 0, index].float().cpu().numpy()
                for layer, given in captured.items()
                for index, head in enumerate(given.heads)
                if self._request.heads is None or head in self._request.heads
            }
            if mine and at.cp == owner
            else {}
        )
        every: dict[tuple[int, int], NDArray[np.float32]] = {}
        for part in gathered(queries):
            every |= part
        logits = gathered(self._logits(captured, every, place) if mine else {})
        found: dict[str, dict[str, list[float]]] = {}
        for layer, head in sorted(every):
            whole = np.full(place + 1, -np.inf)
            for part in logits:
                where, values = part.get((layer, head), (np.zeros(0, np.int64), np.zeros(0)))
                whole[where] = values
            found.setdefault(str(layer), {})[str(head)] = [float(each) for each in _softmax(whole)]
        return found

    def _logits(
        self, captured: Mapping[int, taps.AttentionInputs], queries: Mapping[tuple[int, int], Any], place: int
    ) -> dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Of this rank's keys up to ``place``: their places, and their logits."""
        found = {}
        for layer, given in captured.items():
            count, groups = given.key.shape[0], given.key.shape[-2]
            where = (
                positions(given.context_rank, given.context_size, count) if given.context_size > 1 else None
            )
            places = np.arange(count) if where is None else where.numpy()
            seen = places <= place
            if given.window is not None and given.window[0] >= 0:
                seen &= places >= place - given.window[0]
            keys = given.key[:, 0].float().cpu().numpy()
            for index, head in enumerate(given.heads):
                query = queries.get((layer, head))
                if query is not None:
                    of_head = keys[seen, index * groups // len(given.heads)]
                    found[layer, head] = places[seen], (of_head @ query).astype(np.float64) * given.scale
        return found


def _keep(captured: dict[int, taps.AttentionInputs], layer: int, given: taps.AttentionInputs) -> None:
    captured.setdefault(layer, given)


def _gathered_row(row: Tensor, size: int) -> Tensor:
    """Logits of the whole vocabulary from each tensor-parallel rank's part; collective over its group."""
    if size == 1:
        return row
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(row) for _ in range(size)]
    with collectives.announced("all_gather", "tp", group, row):
        dist.all_gather(parts, row, group=group)
    return torch.cat(parts)


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    raised = np.exp(logits - logits.max())
    return np.asarray(raised / raised.sum())


def _text(trainer: Trainer, ids: Sequence[int]) -> str | None:
    decode = getattr(trainer.tokenizer, "decode", None)
    return None if decode is None else str(decode(list(ids)))


def _prompt(arguments: Mapping[str, Any], trainer: Trainer) -> tuple[int, ...]:
    prompt, ids = arguments.get("prompt"), arguments.get("ids")
    if (prompt is None) == (ids is None):
        raise ConfigError("found both or neither of prompt and ids for generate; expected one of them")
    if prompt is not None:
        encode = getattr(trainer.tokenizer, "encode", None)
        if encode is None or not isinstance(prompt, str):
            raise ConfigError(
                f"found prompt: {prompt!r:.60}; expected a text, and a tokenizer that takes it; give ids"
            )
        ids = encode(prompt)
    if not isinstance(ids, list) or not ids or any(type(each) is not int or each < 0 for each in ids):
        raise ConfigError(f"found {ids!r:.60} for the prompt; expected at least one token id from 0")
    size = getattr(trainer.tokenizer, "vocab_size", math.inf)
    if max(ids) >= size:
        raise ConfigError(f"found token id {max(ids)}; expected one below {size}, the size of the vocabulary")
    return tuple(ids)


def _whole(arguments: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = arguments.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(
            f"found {name}: {value!r} for generate; expected a whole number from {least} to {most}"
        )
    return value


def _count(trainer: Trainer, name: str) -> int:
    return int(getattr(trainer.core, name))


def _numbers(given: Any, name: str, count: int) -> tuple[int, ...]:
    if (
        not isinstance(given, list)
        or len(given) > count
        or any(type(each) is not int or not 0 <= each < count for each in given)
    ):
        raise ConfigError(f"found {name}: {given!r:.60}; expected a list of numbers from 0 to {count - 1}")
    return tuple(given)
