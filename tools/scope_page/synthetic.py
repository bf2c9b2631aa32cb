"""A recording made of formulas: every kind of data that the page shows, the same in every process.

Nothing of it looks like a particular training; it has what a page must cope with: a spike of the loss, a
layer with values that are not finite, an expert that nobody asks, attention with sinks and bands, text.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scope.format.statistics import OUTLIERS, POSITIONS
from mt_megatron.scope.web.source import (
    Alert,
    Bookmark,
    By,
    Dropped,
    Matrix,
    Module,
    TensorFacts,
    TensorName,
    TokenKey,
    TokenRow,
)
from mt_megatron.scope.web.tiles import pooled

_TEXT = (
    "def merge ( left , right ) : \n     # both are sorted ; the result is sorted , too \n     i = j = 0 \n "
    "    found = [ ] \n     while i < len ( left ) and j < len ( right ) : \n         if left [ i ] <= right "
    "[ j ] : \n             found . append ( left [ i ] ) \n             i += 1 \n         else : \n       "
    "      found . append ( right [ j ] ) \n             j += 1 \n     return found + left [ i : ] + right "
    "[ j : ] \n \n The north wind and the sun argued about which of them was the stronger , when a traveller "
    "came along , wrapped in a warm cloak . They agreed that the one who first made the traveller take the "
    "cloak off should count as the stronger of the two . \n 北风 和 太阳 争论 谁 更 强 。 "
)
_WORDS = [word if word.strip() else word for word in _TEXT.replace("  ", "  ").split(" ")]
_VOCABULARY = sorted(set(_WORDS))


@dataclass
class SyntheticSource:
    """``Source`` of ``layers`` layers and ``last`` steps; tensors at multiples of ``every``."""

    layers: int = 8
    heads: int = 8
    hidden: int = 256
    experts: int = 16
    tokens_: int = 512
    long: int = 0
    """Tokens of one more attention, of which only ``long_heads`` heads are; 0: without it."""

    long_heads: int = 2
    last: int = 1_000
    every: int = 20
    live: bool = False
    seed: int = 7
    name: str = "llama3_tiny"
    marks: list[Bookmark] = field(default_factory=lambda: [Bookmark(step=620, text="spike of the loss")])

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def advance(self, steps: int = 1) -> None:
        """Grow."""
        with self._lock:
            self.last += steps

    def revision(self) -> int:
        return self.last

    def facts(self) -> Mapping[str, Any]:
        ranks = [
            {
                "rank": r,
                "host": f"node{r // 4}",
                "tp": r % 2,
                "pp": r // 4,
                "dp": r // 2 % 2,
                "cp": 0,
                "ep": r % 2,
            }
            for r in range(8)
        ]
        model = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_moe_experts": self.experts,
            "seq_length": self.tokens_,
            "parameters": sum(module.parameters for module in self.modules()),
        }
        return {
            "name": self.name,
            "live": self.live,
            "world_size": 8,
            "ranks": ranks,
            "model": model,
            "steps_total": 5_000,
            "started": 1_790_000_000.0,
        }

    @functools.cached_property
    def _modules(self) -> list[Module]:
        h = self.hidden
        found = [Module(path="embedding", class_name="LanguageModelEmbedding", parameters=8192 * h)]
        for layer in range(self.layers):
            base = f"decoder.layers.{layer}"
            mlp = ("router", "TopKRouter") if layer % 2 else ("linear_fc1", "ColumnParallelLinear")
            for path, name, size in (
                ("", "TransformerLayer", 12 * h * h),
                (".input_layernorm", "RMSNorm", h),
                (".self_attention", "SelfAttention", 4 * h * h),
                (".self_attention.linear_qkv", "ColumnParallelLinear", 3 * h * h),
                (".self_attention.core_attention", "FlashAttention", 0),
                (".self_attention.linear_proj", "RowParallelLinear", h * h),
                (".mlp", "MoELayer" if layer % 2 else "MLP", 8 * h * h),
                (f".mlp.{mlp[0]}", mlp[1], h * (self.experts if layer % 2 else 4 * h)),
            ):
                found.append(Module(path=base + path, class_name=name, parameters=size))
        found.append(Module(path="output_layer", class_name="ColumnParallelLinear", parameters=8192 * h))
        return found

    def modules(self) -> Sequence[Module]:
        return self._modules

    def steps(self) -> Mapping[str, NDArray[Any]]:
        i = np.arange(1, self.last + 1)
        rng = np.random.default_rng(self.seed)
        noise = (
            rng.standard_normal(20_000)[: self.last]
            if self.last <= 20_000
            else rng.standard_normal(self.last)
        )
        loss = 2.1 + 7.2 * np.exp(-i / 160) + 0.05 * noise + 1.6 * np.exp(-(((i - 620) / 9.0) ** 2))
        seconds = 0.42 + 0.012 * np.abs(np.roll(noise, 3))
        return {
            "i": i,
            "t": (1_790_000_000 + np.cumsum(seconds)) * 1e9,
            "seconds": seconds,
            "loss": loss,
            "grad_norm": 0.6
            + 3.5 * np.exp(-i / 90)
            + 0.08 * np.abs(noise)
            + 5 * np.exp(-(((i - 618) / 6.0) ** 2)),
            "lr": 3e-4 * np.minimum(1, i / 100) * (0.55 + 0.45 * np.cos(np.pi * np.minimum(1, i / 5000))),
            "tokens": np.full(len(i), 65_536.0),
            "tokens_per_second": 65_536 / seconds,
            "memory_bytes": 11.2e9 + 0.02e9 * np.sin(i / 40),
            "perturbed": (i >= 700) & (i < 720),
        }

    @functools.cached_property
    def _statistics(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {
            "": ["loss_per_position"],
            "embedding": ["embedding_norm", "gradient_norm"],
        }
        for module in self._modules[1:-1]:
            names = ["activation_rms", "activation_max", "not_finite"]
            if module.class_name == "TransformerLayer":
                names += [
                    "gradient_norm",
                    "weight_norm",
                    "update_ratio",
                    "residual_growth",
                    "outlier_channels",
                ]
            if module.class_name == "FlashAttention":
                names += ["attention_logit_max", "attention_entropy"]
            if module.class_name == "TopKRouter":
                names += ["router_entropy", "expert_load", "dead_experts", "overloaded_experts"]
            found[module.path] = names
        return found

    def statistics(self) -> Mapping[str, Sequence[str]]:
        return self._statistics

    def _at(self) -> NDArray[np.int64]:
        return np.arange(self.every, self.last + 1, self.every)

    def series(self, path: str, statistic: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        if statistic not in self._statistics[path]:
            raise KeyError(f"{statistic} of {path}")
        i = self._at()
        if statistic == "not_finite":
            broken = path.startswith(f"decoder.layers.{self.layers - 3}.mlp") and self.last >= 940
            return i, np.where((i >= 940) & broken, 128.0, 0.0)
        if statistic in ("expert_load", "dead_experts", "overloaded_experts"):
            loads = self.vectors(path, "expert_load")[1]
            mean = loads.mean(axis=1, keepdims=True)
            chosen = {
                "expert_load": loads.max(axis=1) / mean[:, 0],
                "dead_experts": (loads == 0).sum(axis=1),
                "overloaded_experts": (loads > 2 * mean).sum(axis=1),
            }
            return i, np.asarray(chosen[statistic], np.float64)
        number = sum(map(ord, path + statistic)) % 97
        rng = np.random.default_rng(self.seed + number)
        scale = {"update_ratio": 1e-3, "weight_norm": 38.0, "attention_logit_max": 9.0}.get(statistic, 1.0)
        drift = 1 + 0.6 * np.exp(-i / (80 + number)) + 0.0004 * number / 97 * i
        spike = 0.8 * np.exp(-(((i - 620) / 14.0) ** 2)) * (number % 3)
        return i, scale * (drift + spike + 0.03 * rng.standard_normal(len(i)))

    def vectors(self, path: str, statistic: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        if statistic not in self._statistics[path]:
            raise KeyError(f"{statistic} of {path}")
        i = self._at()
        rng = np.random.default_rng(self.seed + len(path))
        if statistic == "loss_per_position":
            place = np.arange(POSITIONS)
            return i, 2.0 + 7 * np.exp(-i / 160)[:, None] + 1.5 * np.exp(-place / 6)[None]
        if statistic == "outlier_channels":
            pairs = np.stack(
                [rng.permutation(self.hidden)[:OUTLIERS], np.sort(rng.gamma(3, 4, OUTLIERS))[::-1]], 1
            )
            return i, np.repeat(pairs.reshape(1, -1), len(i), axis=0)
        if statistic == "expert_load":
            share = rng.gamma(4, 1, self.experts)
            share[3] = 0.0 if "layers.3" in path else share[3]
            sway = 1 + 0.3 * np.sin(i[:, None] / 70 + np.arange(self.experts))
            loads = share * sway
            return i, np.floor(loads / loads.sum(axis=1, keepdims=True) * 2 * self.tokens_)
        raise KeyError(f"{statistic} has no vector")

    def tensors(self) -> Sequence[TensorFacts]:
        steps = tuple(int(each) for each in self._at())
        found = []
        for layer in range(self.layers):
            core = f"decoder.layers.{layer}.self_attention.core_attention"
            for head in range(self.heads):
                name = TensorName(path=core, what="attention", index=(("head", head), ("layer", layer)))
                found.append(TensorFacts(name=name, shape=(self.tokens_, self.tokens_), steps=steps))
            name = TensorName(path=f"decoder.layers.{layer}", what="residual", index=(("layer", layer),))
            found.append(TensorFacts(name=name, shape=(self.tokens_, self.hidden), steps=steps))
        for head in range(self.long_heads if self.long else 0):
            core = "decoder.layers.0.self_attention.core_attention"
            name = TensorName(path=core, what="attention", microbatch=1, index=(("head", head), ("layer", 0)))
            found.append(TensorFacts(name=name, shape=(self.long, self.long), steps=steps[-1:]))
        return found

    def _shape(self, name: TensorName) -> tuple[int, int]:
        if name.what == "residual":
            return self.tokens_, self.hidden
        size = self.long if name.microbatch == 1 else self.tokens_
        return size, size

    def _whole(self, name: TensorName, step: int, rows: tuple[int, int]) -> NDArray[np.float32]:
        index = dict(name.index)
        if name.what == "attention":
            return attention(self._shape(name)[0], index["layer"], index["head"], step, rows)
        return self._residual(index["layer"], step)[rows[0] : rows[1]]

    def _residual(self, layer: int, step: int) -> NDArray[np.float32]:
        rng = np.random.default_rng(layer)
        base = rng.standard_normal((self.tokens_, 12)) @ rng.standard_normal((12, self.hidden))
        turn = np.random.default_rng(step).standard_normal((self.tokens_, self.hidden))
        values = (base / 3 + 0.2 * turn + 0.002 * step * np.sin(np.arange(self.hidden) / 9)).astype(
            np.float32
        )
        values[:, 17 % self.hidden] *= 9
        if layer == self.layers - 3 and step >= 940:
            values[40:44] = np.nan
        return values

    def window(self, name: TensorName, step: int, rows: tuple[int, int], columns: tuple[int, int]) -> Matrix:
        self._known(name, step)
        values = self._whole(name, step, rows)[:, columns[0] : columns[1]]
        return Matrix(values=values, perturbed="noise 0.1 on layer 3" if 700 <= step < 720 else None)

    def overview(self, name: TensorName, step: int, block: int, by: By) -> Matrix:
        self._known(name, step)
        rows, columns = self._shape(name)
        stretch = max(block, 512)
        parts = [
            pooled(self._whole(name, step, (first, min(first + stretch, rows))), block, by)
            for first in range(0, rows, stretch)
        ]
        return Matrix(values=np.concatenate(parts))

    def _known(self, name: TensorName, step: int) -> None:
        if not any(each.name == name and step in each.steps for each in self.tensors()):
            raise KeyError(f"{name.text} at step {step} is no longer kept")

    def token_rows(self) -> Sequence[TokenKey]:
        paths = ["output_layer", *(f"decoder.layers.{layer}" for layer in range(self.layers))]
        return [
            TokenKey(step=int(step), sample=sample, microbatch=0, path=path)
            for step in self._at()
            for sample in (0, 1)
            for path in (paths if sample == 0 else paths[:1])
        ]

    def tokens(self, key: TokenKey) -> TokenRow:
        step, sample = key.step, key.sample
        if key not in self.token_rows():
            raise KeyError(f"no tokens of step {step}, sample {sample} at {key.path}")
        rng = np.random.default_rng((step, sample))
        words = [_WORDS[(index + 37 * sample) % len(_WORDS)] for index in range(self.tokens_)]
        ids = np.asarray([_VOCABULARY.index(word) for word in words])
        hard = 0.4 + 2.6 * (np.asarray([len(word) for word in words]) > 3) * rng.random(self.tokens_)
        loss = (hard * (0.5 + 3 * np.exp(-step / 160)) + 0.5 * rng.random(self.tokens_)).astype(np.float32)
        layer = self.layers if key.path == "output_layer" else int(key.path.rsplit(".", 1)[1])
        loss = (loss + 6 * (1 - layer / self.layers) * rng.random(self.tokens_)).astype(np.float32)
        top = rng.integers(0, len(_VOCABULARY), (self.tokens_, 5))
        top[:, 0] = np.where(loss < 1.6, ids, top[:, 0])
        logs = np.log(np.sort(rng.dirichlet(np.ones(6) * 0.6, self.tokens_), axis=1)[:, ::-1][:, :5] + 1e-6)
        return TokenRow(
            position=np.arange(self.tokens_),
            ids=ids,
            loss=loss,
            entropy=(loss * 0.8 + 0.3).astype(np.float32),
            top_ids=top,
            top_logprobs=logs.astype(np.float32),
        )

    def text_of(self, ids: Sequence[int]) -> Sequence[str] | None:
        return [f" {_VOCABULARY[each]}" if each < len(_VOCABULARY) else "?" for each in ids]

    def alerts(self) -> Sequence[Alert]:
        found = [
            Alert(
                step=620,
                path="decoder.layers.2",
                statistic="gradient_norm",
                text="gradient_norm of decoder.layers.2 left its band",
                value=6.1,
                low=0.5,
                high=2.2,
            ),
            Alert(
                step=940,
                path=f"decoder.layers.{self.layers - 3}.mlp",
                statistic="not_finite",
                text=f"decoder.layers.{self.layers - 3}.mlp has values that are not finite",
                value=128,
                low=0,
                high=0,
            ),
        ]
        return [each for each in found if each.step <= self.last]

    def bookmarks(self) -> Sequence[Bookmark]:
        return sorted(self.marks, key=lambda mark: mark.step)

    def bookmark(self, mark: Bookmark) -> None:
        self.marks.append(mark)

    def dropped(self) -> Dropped:
        return Dropped(frames=12, bytes=3 * 2**20)


def attention(size: int, layer: int, head: int, step: int, span: tuple[int, int]) -> NDArray[np.float32]:
    """Rows ``span`` of causal attention probabilities [``size``, ``size``]: a sink, a band, a head that looks
    back by a fixed distance, and noise."""
    rng = np.random.default_rng((layer, head, step % 1_000))
    texture = rng.random(size, dtype=np.float32) ** 6
    kind = (layer * 3 + head) % 4
    rows = np.arange(*span, dtype=np.float32)[:, None]
    back = rows - np.arange(size, dtype=np.float32)[None]
    weight = np.exp(-np.abs(back) / (4.0 + 10 * head + 0.02 * rows)) + 0.05 * texture
    if kind == 1:
        weight = np.zeros_like(back) + 0.3 * texture + 0.02
    if kind == 2:
        weight += 1.5 * np.exp(-np.abs(back - (17 + 13 * head)) / 2.0)
    if kind != 3:
        weight[:, 0] += 2.0
    weight = np.where(back >= 0, weight, 0)
    found: NDArray[np.float32] = (weight / weight.sum(axis=1, keepdims=True)).astype(np.float32)
    return found


class SyntheticSubscription:
    """Bounded, as the hub's."""

    def __init__(self, most: int, leave: Any) -> None:
        self.dropped = 0
        self._queue: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue(most)
        self._leave = leave

    def put(self, event: Mapping[str, Any]) -> None:
        """Without waiting."""
        if self._queue.full():
            self._queue.get_nowait()
            self.dropped += 1
        self._queue.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Mapping[str, Any]]:
        while True:
            yield await self._queue.get()

    def close(self) -> None:
        """End it."""
        self._leave(self)


@dataclass(frozen=True, kw_only=True)
class SyntheticResult:
    """Of a command."""

    ok: bool
    value: Any = None
    error: str = ""


@dataclass
class SyntheticLive:
    """``Live`` that answers commands by itself."""

    source: SyntheticSource
    live: bool = True
    commands: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    subscriptions: list[SyntheticSubscription] = field(default_factory=list)
    paused: bool = False
    armed: list[dict[str, Any]] = field(default_factory=list)

    def subscribe(self, most: int = 256) -> SyntheticSubscription:
        """As the hub's."""
        found = SyntheticSubscription(most, self.subscriptions.remove)
        self.subscriptions.append(found)
        return found

    def publish(self, event: Mapping[str, Any]) -> None:
        """To all; in the server's loop."""
        for each in list(self.subscriptions):
            each.put(event)

    async def command(
        self, do: str, arguments: Mapping[str, Any], timeout_s: float = 30.0
    ) -> SyntheticResult:
        """What a training would answer."""
        self.commands.append((do, dict(arguments)))
        if do == "pause":
            self.paused = True
        elif do == "resume":
            self.paused = False
        elif do == "step":
            self.source.advance(int(arguments.get("n", 1)))
        elif do == "generate":
            return SyntheticResult(ok=True, value=self._generate(arguments))
        elif do == "arm":
            self.armed.append({"id": f"p{len(self.armed) + 1}", "perturbation": arguments["perturbation"]})
            return SyntheticResult(ok=True, value=self.armed[-1])
        elif do in ("disarm", "undo"):
            known = [each for each in self.armed if each["id"] == arguments["id"]]
            if not known:
                return SyntheticResult(ok=False, error=f"found no perturbation {arguments['id']}")
            self.armed.remove(known[0])
        elif do == "preview":
            return SyntheticResult(
                ok=True, value={"elements": 65_536, "changed": 1, "before": 0.031, "after": -0.031}
            )
        return SyntheticResult(ok=True, value={"paused": self.paused, "armed": list(self.armed)})

    def _generate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(int(arguments.get("seed", 0)))
        rows = []
        for place in range(int(arguments.get("n", 8))):
            shares = np.sort(rng.dirichlet(np.ones(6) * 0.5))[::-1][:5]
            words = [_WORDS[(place * 7 + each * 3) % len(_WORDS)] for each in range(5)]
            rows.append(
                {
                    "id": place,
                    "text": f" {words[0]}",
                    "logprob": float(np.log(shares[0])),
                    "top": [
                        [f" {word}", float(np.log(share + 1e-9))]
                        for word, share in zip(words, shares, strict=True)
                    ],
                }
            )
        return {"tokens": rows, "step": self.source.last}
