"""The simulator of a training step against closed forms."""

from __future__ import annotations

import pytest

from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.simulate.costs import Costs
from mt_megatron.pipeline.simulate.program import Program

SIZES = [(1, 1), (2, 2), (2, 8), (4, 4), (4, 7), (8, 8), (8, 32)]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (1.0, 1.0), (0.7, 1.9)])
def test_1f1b_takes_ranks_less_one_micro_batches_more(
    ranks: int, microbatches: int, forward: float, backward: float
) -> None:
    timeline = Program(generate("1f1b", ranks=ranks, microbatches=microbatches)).run(
        Costs(forward=forward, backward=backward)
    )
    assert timeline.makespan == pytest.approx((microbatches + ranks - 1) * (forward + backward))
    assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 2, 32)])
@pytest.mark.parametrize("name", ["interleaved", "depth_first"])
def test_interleaving_divides_the_bubble_by_the_chunks(
    name: str, ranks: int, chunks: int, microbatches: int
) -> None:
    forward, backward = 0.7, 1.9
    program = Program(generate(name, ranks=ranks, chunks=chunks, microbatches=microbatches))
    found = program.makespan(Costs(forward=forward / chunks, backward=backward / chunks))
    assert found == pytest.approx((microbatches + (ranks - 1) / chunks) * (forward + backward))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16), (8, 32)])
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1.0, 2.0, 1.0), (1.0, 2.0, 0.8)])
def test_zb_h1_fills_the_drain_with_weight_gradients(
    ranks: int, microbatches: int, forward: float, backward: float, weight: float
) -> None:
    program = Program(generate("zb_h1", ranks=ranks, microbatches=microbatches))
    found = program.makespan(Costs(forward=forward, backward=backward, weight=weight))
    ideal = microbatches * (forward + backward)
    assert found == pytest.approx(ideal + (ranks - 1) * (forward + backward - 2 * weight))
