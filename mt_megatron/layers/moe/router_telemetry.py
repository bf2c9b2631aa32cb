"""Load of this rank's routers since the last reading: summed on the device, copied to the host when read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EXTRA = 7
"""Numbers of ``RouterLoad.take`` beside the tokens per expert."""


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """One layer's routing over a number of micro-batches and all ranks that hold the layer."""

    tokens_per_expert: tuple[int, ...]
    """Tokens routed to each expert, before any capacity."""

    dropped: int
    """Assignments that no expert took for lack of capacity."""

    entropy: float | None
    """Mean over tokens of the entropy of the scores, in nats: log(num_experts) where all are alike."""

    balancing_loss: float | None
    """Mean over micro-batches of the balancing loss without its coefficient; None when there is none."""

    z_loss: float | None
    """The same of the z-loss."""

    @classmethod
    def of(cls, numbers: list[float]) -> LayerLoad:
        """From the sum over ranks of what ``RouterLoad.take`` gave."""
        counts, extra = numbers[:-EXTRA], numbers[-EXTRA:]
        dropped, tokens, entropy, balancing, parts, z, passes = extra
        return cls(
            tokens_per_expert=tuple(round(each) for each in counts),
            dropped=round(dropped),
            entropy=entropy / tokens if tokens else None,
            balancing_loss=balancing / parts if parts else None,
            z_loss=z / passes if passes else None,
        )

    @property
    def imbalance(self) -> float | None:
        """Tokens of the busiest expert over the mean; 1 is even. None when no token was routed."""
        total = sum(self.tokens_per_expert)
        return max(self.tokens_per_expert) * len(self.tokens_per_expert) / total if total else None

    @property
    def dropped_share(self) -> float | None:
        """Dropped assignments over all, 0 to 1; None when no token was routed."""
        total = sum(self.tokens_per_expert)
        return self.dropped / total if total else None


class RouterLoad:
    """Running sums of one router, on its device; adding to them waits for nothing."""

    def __init__(self, num_experts: int, device: torch.device, *, copies: int = 1) -> None:
        """``copies``: how many ranks route the same tokens, and so count each of them."""
        self._experts = num_experts
        self._copies = copies
        # Tokens per expert, dropped, tokens; whole numbers stay exact however many steps they are over.
        self._counts = torch.zeros(num_experts + 2, dtype=torch.int64, device=device)
        # Entropy, balancing loss and the parts it is the sum of, z-loss and its passes.
        self._sums = torch.zeros(5, dtype=torch.float32, device=device)

    def add_tokens(self, counts: Tensor, dropped: Tensor | None, scores: Tensor) -> None:
        """One pass: tokens per expert int64 [num_experts], dropped assignments (None: none), and the
        scores [tokens, num_experts]."""
        self._counts[: self._experts] += counts
        if dropped is not None:
            self._counts[self._experts] += dropped
        self._counts[self._experts + 1] += scores.size(0)
        scores = scores.detach()
        # Sigmoid scores for one expert per token do not add up to 1, the others do.
        self._sums[0] += torch.special.entr(scores / scores.sum(dim=-1, keepdim=True)).sum()

    def add_balancing_loss(self, loss: Tensor, parts: int) -> None:
        """One pass: this rank's part, without the coefficient, of a loss that is the sum of ``parts``."""
        self._sums[1] += loss.detach()
        self._sums[2] += 1.0 / parts

    def add_z_loss(self, loss: Tensor) -> None:
        """One pass: the mean over this rank's tokens, without the coefficient."""
        self._sums[3] += loss.detach()
        self._sums[4] += 1.0

    def remember(self) -> Callable[[], None]:
        """Keeps the sums so far; what is returned brings them back."""
        counts, sums = self._counts.clone(), self._sums.clone()

        def restore() -> None:
            self._counts.copy_(counts)
            self._sums.copy_(sums)

        return restore

    def take(self) -> list[float]:
        """Everything so far, [num_experts + EXTRA], to be summed over ranks for ``LayerLoad.of``; begins
        anew. Waits for the device."""
        counts = [number / self._copies for number in self._counts.tolist()]
        sums = self._sums.tolist()
        sums[0] /= self._copies
        self._counts.zero_()
        self._sums.zero_()
        return [*counts, *sums]
