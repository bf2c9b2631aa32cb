"""Layers of each pipeline stage so that the slowest one is as fast as can be."""

from __future__ import annotations

import math
from functools import lru_cache

from mt_megatron.errors import ConfigError
from mt_megatron.planning.flops import forward_flops
from mt_megatron.planning.parameters import ModelShape

_LAYERS_OF_AN_EMBEDDING = 0.05
"""Share of a layer's time that looking up the embedding and adding up its gradient are counted as."""


def balanced_layout(shape: ModelShape, pp: int, chunks: int = 1, *, sequence: int = 4096) -> list[int]:
    """Layers of each of ``pp * chunks`` model chunks, in the order that a batch takes.

    Contiguous runs of at least one layer whose largest cost is least, then whose costs differ least. Cost
    is floating-point operations for sequences of ``sequence`` tokens; the first chunk also has the embedding,
    the last one the output layer and multi-token prediction with its own pass through it.
    ``shape.vocab_size`` is the padded size. Raises ``ConfigError`` for fewer layers than chunks.
    """
    stages = pp * chunks
    if pp < 1 or chunks < 1:
        raise ConfigError(f"pipeline stages x chunks is {pp} x {chunks}; expected at least 1 x 1")
    if problem := too_few_layers(shape.num_layers, pp, chunks):
        raise ConfigError(problem)
    return list(_balanced(shape, stages, sequence))


def too_few_layers(num_layers: int, pp: int, chunks: int) -> str | None:
    """A line where some of ``pp * chunks`` model chunks would have no layer."""
    if num_layers >= pp * chunks:
        return None
    return (
        f"num_layers is {num_layers}; expected at least one for each of pipeline stages x chunks = {pp} x "
        f"{chunks}. Lower --pipeline-model-parallel-size or --virtual-pipeline-model-parallel-size."
    )


@lru_cache(maxsize=1024)
def _balanced(shape: ModelShape, stages: int, sequence: int) -> tuple[int, ...]:
    flops = forward_flops(shape, sequence)
    costs = [float(flops.layer(bool(kind))) for kind in shape.pattern]
    first = _LAYERS_OF_AN_EMBEDDING * costs[0]
    last = float(flops.head + flops.multi_token_prediction)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def best(limit: float) -> tuple[float, float, tuple[int, ...]]:
        """Largest cost, sum of squares and counts of the best division with no cost above ``limit``: the
        least largest cost without a limit, else the least sum of squares."""
        layers = len(costs)
        held: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
        for stage in range(stages):
            found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
            room = layers - (stages - stage - 1)
            more = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
            for start, (largest, squares, counts) in held.items():
                before = sums[start]
                for end in [layers] if stage == stages - 1 else range(start + 1, room + 1):
                    cost = sums[end] - before + more
                    if cost > limit:
                        break
                    most, square = max(largest, cost), squares + cost * cost
                    old = found.get(end)
                    if old is None or (most < old[0] if limit == math.inf else square < old[1]):
                        found[end] = (most, square, (*counts, end - start))
            held = found
        return held[layers]

    return best(best(math.inf)[0] * (1 + 1e-12))[2]
