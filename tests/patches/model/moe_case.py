"""A layer with experts, token by token: what every layout and every kind of experts is compared with."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

HIDDEN, DENSE, EXPERTS, TOPK, SEQUENCE, BATCH = 16, 40, 4, 2, 8, 4
WIDTH, SHARED = 12, 20


def seeded(name: str, *shape: int) -> Tensor:
    """The same numbers for the same name everywhere, float64."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The whole weights of one layer, as ``torch.nn.functional.linear`` takes them."""

    router: Tensor
    first: list[Tensor]
    """One [(2) width, hidden] per expert; gate over up where they are gated."""

    second: list[Tensor]
    """One [hidden, width] per expert."""

    shared: tuple[Tensor, Tensor] | None

    def named(self) -> dict[str, Tensor]:
        """By the name of what the layer under test calls them."""
        found = {"router": self.router}
        for index, (first, second) in enumerate(zip(self.first, self.second, strict=True)):
            found |= {f"experts.{index}.linear_fc1": first, f"experts.{index}.linear_fc2": second}
        if self.shared is not None:
            found |= {
                "shared_experts.linear_fc1": self.shared[0],
                "shared_experts.linear_fc2": self.shared[1],
            }
        return found


def weights(*, width: int, shared: int | None, gated: bool) -> Weights:
    """Seeded weights that remember gradients."""
    rows = 2 if gated else 1
    made = Weights(
        router=seeded("router", EXPERTS, HIDDEN),
        first=[seeded(f"first{index}", rows * width, HIDDEN) for index in range(EXPERTS)],
        second=[seeded(f"second{index}", HIDDEN, width) for index in range(EXPERTS)],
        shared=None
        if shared is None
        else (seeded("shared1", rows * shared, HIDDEN), seeded("shared2", HIDDEN, shared)),
    )
    for weight in made.named().values():
        weight.requires_grad_()
    return made


def mlp(token: Tensor, first: Tensor, second: Tensor, gated: bool) -> Tensor:
    """One token through one network."""
    inner = first @ token
    if gated:
        gate, up = inner.chunk(2)
        inner = gate / (1 + torch.exp(-gate)) * up
    else:
        inner = inner / (1 + torch.exp(-inner))
    return second @ inner


def token_by_token(tokens: Tensor, used: Weights, gated: bool) -> Tensor:
    """[n, hidden] to [n, hidden]: the best experts by logit, weighted by the softmax over them."""
    rows = []
    for token in tokens:
        logits = used.router @ token
        best = sorted(range(EXPERTS), key=lambda index: (-float(logits[index]), index))[:TOPK]
        powers = torch.stack([torch.exp(logits[index]) for index in best])
        row = sum(
            power / powers.sum() * mlp(token, used.first[index], used.second[index], gated)
            for power, index in zip(powers, best, strict=True)
        )
        if used.shared is not None:
            row = row + mlp(token, *used.shared, gated)
        rows.append(row)
    return torch.stack(rows)  # type: ignore[arg-type]
