"""A decoder in float64 that shares no line with the package: its training, and every statistic of it.

Written from the definitions: RMS norm, rotary positions, grouped queries, SwiGLU, two experts of several,
cross-entropy, AdamW with clipping by the norm of all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity.case import CLIP, GLOBAL_BATCH, MICRO_BATCH, SEQUENCE, Chain

HEADS, GROUPS, EPSILON, BASE = 4, 2, 1e-5, 500000.0
LR, LEAST, WARMUP, STEPS, DECAY, BETAS, ADAM_EPSILON = 4e-3, 4e-4, 4, 20, 0.1, (0.9, 0.95), 1e-8
ROWS, STRETCHES, OUTLIERS = 16, 64, 16

Values = dict[str, Any]
"""``path|statistic`` -> number, or list where the statistic has a vector (``path|statistic|vector``)."""


class Oracle:
    """Trains from ``weights``, named as the whole model's in Megatron."""

    def __init__(
        self, weights: Mapping[str, Tensor], seed: int, steps: int, *, token_loss: bool = False
    ) -> None:
        """``token_loss``: the loss is the mean of the global batch's tokens, not of its micro-batches'."""
        self.weights = {name: value.double().requires_grad_() for name, value in weights.items()}
        self.layers = 1 + max(
            int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers")
        )
        self.tied = "output_layer.weight" not in weights
        self.data = Chain(seed, steps * GLOBAL_BATCH)
        self.first = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        self.second = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        self.token_loss = token_loss
        self.done = 0
        self.outputs: dict[str, list[Tensor]] = {}
        """Of every module in this step, one tensor per micro-batch, with gradients kept."""

        self.attention: dict[int, list[tuple[Tensor, ...]]] = {}
        """By layer: query, key, value, logits, probabilities, context; heads first."""

        self.routing: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.losses: list[tuple[Tensor, Tensor, Tensor]] = []
        """Logits, losses and mask of each micro-batch."""

        self.lenses: dict[str, list[Tensor]] = {}
        """Logits that the head makes of each layer's output, of each micro-batch."""

        self.loss = self.norm = 0.0

    def step(self) -> Values:
        """Train one step; its statistics."""
        self.outputs, self.attention, self.routing, self.losses, self.lenses = {}, {}, {}, [], {}
        for weight in self.weights.values():
            weight.grad = None
        rounds = GLOBAL_BATCH // MICRO_BATCH
        total, counted = 0.0, 0.0
        batch = range(self.done * GLOBAL_BATCH, (self.done + 1) * GLOBAL_BATCH)
        every = sum(float(self.data[index]["loss_mask"].sum()) for index in batch)
        for number in range(rounds):
            first = self.done * GLOBAL_BATCH + number * MICRO_BATCH
            samples = [self.data[index] for index in range(first, first + MICRO_BATCH)]
            tokens, labels, mask = (
                torch.stack([each[name] for each in samples]) for name in ("tokens", "labels", "loss_mask")
            )
            logits = self._forward(tokens)
            losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            self.losses.append((logits.detach(), losses.detach(), mask))
            counts = every if self.token_loss else mask.sum() * rounds
            ((losses * mask).sum() / counts).backward()  # type: ignore[no-untyped-call]
            total, counted = total + float((losses * mask).sum()), counted + float(mask.sum())
        self.loss = total / counted
        values = {**self._of_activations(), **self._of_attention(), **self._of_experts(), **self._of_losses()}
        gradients = {name: weight.grad for name, weight in self.weights.items()}
        values |= self._by_unit("gradient_norm", {name: _squares(each) for name, each in gradients.items()})
        self.norm = math.sqrt(sum(float((each**2).sum()) for each in gradients.values() if each is not None))
        before = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self._update(min(1.0, CLIP / (self.norm + 1e-6)))
        after = {name: weight.detach() for name, weight in self.weights.items()}
        values |= self._by_unit("weight_norm", {name: _squares(each) for name, each in after.items()})
        moved = self._summed({name: _squares(after[name] - before[name]) for name in after})
        stood = self._summed({name: _squares(each) for name, each in before.items()})
        values |= {f"{unit}|update_ratio": math.sqrt(moved[unit] / stood[unit]) for unit in moved}
        words = after["embedding.word_embeddings.weight"]
        values["embedding.word_embeddings|embedding_norm"] = math.sqrt(_squares(words) / len(words))
        self.done += 1
        return values

    def _update(self, factor: float) -> None:
        step, (beta1, beta2) = self.done + 1, BETAS
        rate = learning_rate(self.done)
        with torch.no_grad():
            for name, weight in self.weights.items():
                assert weight.grad is not None
                gradient = weight.grad * factor
                self.first[name] = beta1 * self.first[name] + (1 - beta1) * gradient
                self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient**2
                mean = self.first[name] / (1 - beta1**step)
                root = (self.second[name] / (1 - beta2**step)).sqrt() + ADAM_EPSILON
                if not name.endswith("norm.weight"):
                    weight -= rate * DECAY * weight
                weight -= rate * mean / root

    def _forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, s, words] of ``tokens`` [b, s]."""
        hidden = self._keep("embedding", self.weights["embedding.word_embeddings.weight"][tokens])
        norm = self.weights["decoder.final_layernorm.weight"]
        head = self.weights["embedding.word_embeddings.weight" if self.tied else "output_layer.weight"]
        for layer in range(self.layers):
            hidden = self._layer(layer, hidden)
            lens = _rms_norm(hidden.detach(), norm.detach()) @ head.detach().T
            self.lenses.setdefault(f"decoder.layers.{layer}", []).append(lens)
        return self._keep("decoder.final_layernorm", _rms_norm(hidden, norm)) @ head.T

    def _keep(self, path: str, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.retain_grad()
        self.outputs.setdefault(path, []).append(output)
        return output

    def _layer(self, layer: int, hidden: Tensor) -> Tensor:
        path = f"decoder.layers.{layer}"
        normed = _rms_norm(hidden, self.weights[f"{path}.input_layernorm.weight"])
        after = hidden + self._keep(f"{path}.self_attention", self._self_attention(layer, path, normed))
        normed = _rms_norm(after, self.weights[f"{path}.pre_mlp_layernorm.weight"])
        mixed = f"{path}.mlp.router.weight" in self.weights
        inner = self._experts(layer, path, normed) if mixed else self._mlp(path, normed)
        return self._keep(path, after + self._keep(f"{path}.mlp", inner))

    def _self_attention(self, layer: int, path: str, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        joined = hidden @ self.weights[f"{path}.self_attention.linear_qkv.weight"].T
        self._keep(f"{path}.self_attention.linear_qkv", joined)
        size = joined.size(-1) // (HEADS + 2 * GROUPS)
        # Megatron keeps a group's queries, its key and its value together.
        grouped = joined.view(batch, length, GROUPS, HEADS // GROUPS + 2, size)
        query = grouped[..., : HEADS // GROUPS, :].reshape(batch, length, HEADS, size).transpose(1, 2)
        key, value = (grouped[..., at, :].transpose(1, 2) for at in (HEADS // GROUPS, HEADS // GROUPS + 1))
        query, key = _rotated(query), _rotated(key)
        share = HEADS // GROUPS
        logits = query @ key.repeat_interleave(share, 1).transpose(2, 3) / math.sqrt(size)
        hidden_future = torch.ones(length, length, dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden_future, -math.inf)
        weights = logits.softmax(-1)
        context = weights @ value.repeat_interleave(share, 1)
        seen = (query, key, value, logits, weights, context)
        self.attention.setdefault(layer, []).append(tuple(each.detach() for each in seen))
        flat = context.transpose(1, 2).reshape(batch, length, -1)
        return flat @ self.weights[f"{path}.self_attention.linear_proj.weight"].T

    def _mlp(self, path: str, hidden: Tensor) -> Tensor:
        joined = hidden @ self.weights[f"{path}.mlp.linear_fc1.weight"].T
        inner = _swiglu(self._keep(f"{path}.mlp.linear_fc1", joined))
        self._keep(f"{path}.mlp.hidden", inner)
        return inner @ self.weights[f"{path}.mlp.linear_fc2.weight"].T

    def _experts(self, layer: int, path: str, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.size(-1))
        logits = flat @ self.weights[f"{path}.mlp.router.weight"].T
        best = logits.topk(2, dim=-1)
        shares = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(-1))
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, best.indices, True)
        self.routing.setdefault(layer, []).append((logits.detach(), chosen))
        first, second = (self.weights[f"{path}.mlp.experts.weight{each}"] for each in (1, 2))
        every = torch.stack([_swiglu(flat @ first[e].T) @ second[e].T for e in range(len(first))], dim=1)
        return (every * shares[..., None]).sum(dim=1).view_as(hidden)

    # Statistics, by their definitions.

    def _of_activations(self) -> Values:
        values: Values = {}
        for path, outputs in self.outputs.items():
            every = torch.stack([each.detach() for each in outputs])
            if path.endswith(("linear_qkv", "linear_fc1", "hidden")):
                continue
            values[f"{path}|activation_rms"] = float((every**2).mean().sqrt())
            values[f"{path}|activation_max"] = float(every.abs().max())
            values[f"{path}|not_finite"] = 0.0
        for layer in range(self.layers):
            path = f"decoder.layers.{layer}"
            every = torch.stack([each.detach() for each in self.outputs[path]])
            before = self.outputs["embedding" if layer == 0 else f"decoder.layers.{layer - 1}"]
            entered = torch.stack([each.detach() for each in before])
            values[f"{path}|residual_growth"] = float(((every**2).sum() / (entered**2).sum()).sqrt())
            largest = every.abs().amax(dim=(0, 1, 2))
            order = largest.argsort(descending=True)[:OUTLIERS]
            values[f"{path}|outlier_channels"] = float(largest.max() / (every**2).mean().sqrt())
            values[f"{path}|outlier_channels|vector"] = [
                number for channel in order.tolist() for number in (channel, float(largest[channel]))
            ]
        return values

    def _of_attention(self) -> Values:
        values: Values = {}
        rows = [(index + 1) * SEQUENCE // ROWS - 1 for index in range(ROWS)]
        for layer, calls in self.attention.items():
            path = f"decoder.layers.{layer}.self_attention"
            logits = torch.stack([call[3] for call in calls])[..., rows, :]
            values[f"{path}|attention_logit_max"] = float(logits.max())
            values[f"{path}|attention_entropy"] = _entropy(logits.softmax(-1))
        return values

    def _of_experts(self) -> Values:
        values: Values = {}
        for layer, calls in self.routing.items():
            path = f"decoder.layers.{layer}.mlp.router"
            logits = torch.cat([call[0] for call in calls])
            load = torch.cat([call[1] for call in calls]).sum(dim=0).double()
            values[f"{path}|router_entropy"] = _entropy(logits.softmax(-1))
            values[f"{path}|expert_load"] = float(load.max() / load.mean())
            values[f"{path}|expert_load|vector"] = load.tolist()
        return values

    def _of_losses(self) -> Values:
        sums, counts = np.zeros(STRETCHES), np.zeros(STRETCHES)
        for _, losses, mask in self.losses:
            for position in range(SEQUENCE):
                stretch = position * STRETCHES // SEQUENCE
                sums[stretch] += float((losses[:, position] * mask[:, position]).sum())
                counts[stretch] += float(mask[:, position].sum())
        with np.errstate(invalid="ignore"):
            vector = (sums / counts).tolist()
        return {
            "output_layer|loss_per_position": float(sums.sum() / counts.sum()),
            "output_layer|loss_per_position|vector": vector,
        }

    def _summed(self, squares: Mapping[str, float]) -> dict[str, float]:
        found = {"": sum(squares.values())}
        for name, each in squares.items():
            parts = name.split(".")
            unit = ".".join(parts[:3]) if "layers" in parts else parts[0]
            unit = "decoder.final_layernorm" if parts[1] == "final_layernorm" else unit
            found[unit] = found.get(unit, 0.0) + each
        return found

    def _by_unit(self, statistic: str, squares: Mapping[str, float]) -> Values:
        return {f"{unit}|{statistic}": math.sqrt(each) for unit, each in self._summed(squares).items()}

    def moments_of(self, path: str) -> list[float]:
        """Elements, sums of first to fourth powers, smallest and largest of a module's output."""
        every = torch.stack([each.detach() for each in self.outputs[path]]).flatten()
        powers = [float((every**power).sum()) for power in (1, 2, 3, 4)]
        return [float(every.numel()), *powers, float(every.min()), float(every.max())]

    def histogram_of(self, path: str) -> list[float]:
        """Elements by power of two of the absolute value, 2^-40 to 2^23."""
        every = torch.stack([each.detach() for each in self.outputs[path]]).flatten().abs().numpy()
        counts = [0.0] * 64
        for value in every:
            exponent = math.floor(math.log2(value)) if value else -1000
            counts[min(max(exponent + 40, 0), 63)] += 1
        return counts


def learning_rate(done: int) -> float:
    """Linear warm-up from 0, then cosine; ``done`` counts updates."""
    if done <= WARMUP:
        return LR * done / WARMUP
    share = (done - WARMUP) / (STEPS - WARMUP)
    return LEAST + (LR - LEAST) * 0.5 * (1 + math.cos(math.pi * share))


def _squares(values: Tensor | None) -> float:
    assert values is not None
    return float((values**2).sum())


def _entropy(probabilities: Tensor) -> float:
    logs = torch.where(probabilities > 0, probabilities.log(), 0.0)
    return float(-(probabilities * logs).sum(-1).mean())


def _rms_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden / (hidden.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def _swiglu(values: Tensor) -> Tensor:
    gate, up = values.chunk(2, dim=-1)
    return F.silu(gate) * up


def _rotated(heads: Tensor) -> Tensor:
    """[b, heads, s, d], positions 0, 1, 2 ...; pairs are dimensions i and i + d / 2."""
    half = heads.size(-1) // 2
    speeds = BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(heads.size(2), dtype=torch.float64)[:, None] * speeds
    one, other = heads[..., :half], heads[..., half:]
    return torch.cat(
        (one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), dim=-1
    )
