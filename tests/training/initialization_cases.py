"""The ranks' side: gradient norms of runs that draw their weights and of runs that do not."""

from __future__ import annotations

from pathlib import Path

from tests.parity.case import MODEL, OPTIMIZER
from tests.scope.watch.layouts import EXPERTS
from tests.scope.watch.ranks import begin, train

FLAGS = f"{MODEL} {OPTIMIZER} --untie-embeddings-and-output-weights"


def norms(folder: str, layouts: dict[str, str]) -> dict[str, list[float]]:
    """Of the first steps of each layout, from the weights in ``folder``, which one rank makes."""
    begin()
    found = {}
    for name, flags in layouts.items():
        weights = Path(folder) / ("experts" if EXPERTS in flags else "dense")
        _, results = train(f"{FLAGS} {flags}", weights, seed=3, steps=2)
        found[name] = [result.grad_norm for result in results]
    return found
