"""Cost of the redirection to code that is not redirected: nanoseconds an operation, with and without it.

Runs are interleaved; each figure is the median of the rounds.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable

import torch

import mt_megatron

ROUNDS, NUMBER = 21, 20_000


def imports() -> None:
    import torch  # noqa: F401


TENSOR = torch.ones(2)
OPERATIONS: dict[str, Callable[[], object]] = {
    "import statement in a function": imports,
    "tensor.is_cuda": lambda: TENSOR.is_cuda,
    "tensor.type()": lambda: TENSOR.type(),
    "tensor.to(dtype)": lambda: TENSOR.to(torch.float32),
}


def measure() -> dict[str, float]:
    return {name: timeit.timeit(one, number=NUMBER) / NUMBER * 1e9 for name, one in OPERATIONS.items()}


def main() -> None:
    plain: list[dict[str, float]] = []
    patched: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        plain.append(measure())
        with mt_megatron.patched("cpu"):
            patched.append(measure())
    print(f"{'outside of the scope':<34}{'plain':>9}{'patched':>9}   ns, {ROUNDS} rounds of {NUMBER}")
    for name in OPERATIONS:
        before, after = (statistics.median(one[name] for one in rounds) for rounds in (plain, patched))
        print(f"{name:<34}{before:>9.0f}{after:>9.0f}")


if __name__ == "__main__":
    main()
