"""Generators equal ``torch.distributed.pipelining``'s schedules, action for action, where it has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mt_megatron.pipeline.actions import Action, Kind
from mt_megatron.pipeline.generate.catalogue import generate

from . import torch_schedules


def sizes(*, chunks: tuple[int, ...], most: int = 8) -> Iterator[tuple[int, int, int]]:
    for ranks in (1, 2, 3, 4, 8):
        for chunk in chunks:
            for microbatches in sorted({1, 2, 3, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks, 17}):
                if microbatches <= most * ranks:
                    yield ranks, chunk, microbatches


def generated(name: str, ranks: int, chunks: int, microbatches: int, **options: int) -> list[list[Action]]:
    made = generate(name, ranks=ranks, chunks=chunks, microbatches=microbatches, **options)
    return [list(rank) for rank in made.ranks]


def test_1f1b() -> None:
    for ranks, _, microbatches in sizes(chunks=(1,)):
        if microbatches >= ranks:  # torch's takes no fewer.
            expected = torch_schedules.order("1f1b", ranks, 1, microbatches)
            assert generated("1f1b", ranks, 1, microbatches) == expected


def test_interleaved() -> None:
    compared = 0
    for ranks, chunks, microbatches in sizes(chunks=(2, 3)):
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds:
            continue
        expected = torch_schedules.order("interleaved", ranks, chunks, microbatches)
        group = microbatches // rounds
        assert generated("interleaved", ranks, chunks, microbatches, group=group) == expected
        if microbatches % ranks == 0:
            # Megatron-Core runs all forwards first where there are as many micro-batches as ranks.
            same = microbatches != ranks or ranks == 1
            assert (generated("interleaved", ranks, chunks, microbatches) == expected) == same
            compared += 1
    assert compared > 20


def test_breadth_first_but_for_the_order_of_backwards() -> None:
    """torch runs the micro-batches of a chunk backwards in the reverse order, which would add up gradients in
    another order than every other schedule; ours keeps the order."""
    for ranks, chunks, microbatches in sizes(chunks=(1, 2, 3)):
        expected = torch_schedules.order("breadth_first", ranks, chunks, microbatches)
        turned = [
            [a._replace(microbatch=microbatches - 1 - a.microbatch) if a.kind is Kind.B else a for a in rank]
            for rank in expected
        ]
        assert generated("breadth_first", ranks, chunks, microbatches) == turned


def test_zero_bubble() -> None:
    for ranks, chunks, microbatches in sizes(chunks=(1, 2, 3)):
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds == 0:
            expected = torch_schedules.order("zb_h1", ranks, chunks, microbatches)
            group = microbatches // rounds
            assert generated("zb_h1", ranks, chunks, microbatches, group=group) == expected


def test_zbv() -> None:
    for ranks, _, microbatches in sizes(chunks=(2,)):
        expected = torch_schedules.order("zbv", ranks, 2, microbatches)
        assert generated("zbv", ranks, 2, microbatches) == expected


def test_dualpipev() -> None:
    for ranks, _, microbatches in sizes(chunks=(2,)):
        if microbatches >= 2 * ranks:
            expected = torch_schedules.order("dualpipev", ranks, 2, microbatches)
            assert generated("dualpipev", ranks, 2, microbatches) == expected


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_the_comparison_sees_one_action_out_of_place(name: str) -> None:
    expected = torch_schedules.order(name, 4, 2, 8)
    made = generated(name, 4, 2, 8)
    made[1][5], made[1][6] = made[1][6], made[1][5]
    assert made != expected
