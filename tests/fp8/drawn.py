"""Operands of products as they come up: well scaled, with outliers, tiny, huge."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mt_megatron.fp8.recipe import ROLES, Recipe, Role

KINDS = ("well scaled", "outliers", "tiny", "huge")


def cases(recipe: Recipe, count: int, seed: int) -> Iterator[tuple[str, Role, Tensor, Tensor]]:
    """``count`` times: kind, role and both operands in bf16. Roles that the recipe leaves in bf16 are left
    out."""
    generator = torch.Generator().manual_seed(seed)
    roles = [role for role in ROLES if recipe.product(role).quantised]
    # A bound that holds for all signs of the errors grows with the length, what is random with its root:
    # four bits tell half from whole in short sums only.
    four_bits = recipe.fprop.a.format == "e2m1"

    def size(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    for index in range(count):
        kind, role = KINDS[index % len(KINDS)], roles[size(0, len(roles))]
        summed = size(1, 4) if four_bits else size(1, 17)
        across, along = 16 * size(2, 6), 16 * summed
        rows = size(24, 48) if four_bits else size(1, 48)

        def drawn(*shape: int, kind: str = kind) -> Tensor:
            x = torch.randn(*shape, generator=generator)
            if kind == "outliers":
                x = torch.where(torch.rand(*shape, generator=generator) < 0.01, 1000 * x, x)
            return (x * {"tiny": 1e-9, "huge": 1e9}.get(kind, 1.0)).bfloat16()

        if role == "fprop":
            yield kind, role, drawn(rows, along), drawn(across, along)
        elif role == "dgrad":
            yield kind, role, drawn(rows, along), drawn(along, across)
        else:
            # Tokens are summed over: any number of them.
            tokens = along - size(0, 16)
            yield kind, role, drawn(tokens, across), drawn(tokens, 16 * size(2, 6))
