"""Whole tensors from pieces, and the error of a row."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mt_megatron.diverge.pieces import Piece, assemble, load, row_error, save
from mt_megatron.diverge.place import Frame, Kind, place
from mt_megatron.parallel.context_parallel import positions

ALL = (None, None)


def piece(
    tensor: torch.Tensor, shape: tuple[int, ...], index: tuple[torch.Tensor | None, ...], **more: object
) -> Piece:
    return Piece(phase="forward", name="x", order=(0, 0), shape=shape, index=index, tensor=tensor, **more)


def test_pieces_come_back_from_a_file(tmp_path: Path) -> None:
    one = piece(torch.randn(2, 3).bfloat16(), (4, 3), (torch.tensor([1, 3]), None))
    save([one], tmp_path / "rank_0.pt")
    (back,) = load(tmp_path / "rank_0.pt")
    assert (back.name, back.order, back.shape, back.mask) == ("x", (0, 0), (4, 3), None)
    assert torch.equal(back.tensor, one.tensor) and back.tensor.dtype == torch.bfloat16
    assert torch.equal(back.index[0], torch.tensor([1, 3])) and back.index[1] is None


def test_scattered_rows_make_a_whole() -> None:
    whole = torch.arange(12.0).view(4, 3)
    rows = [torch.tensor([3, 0]), torch.tensor([1, 2])]
    found = assemble([piece(whole[each], (4, 3), (each, None)) for each in rows])
    assert torch.equal(found.tensor, whole) and found.copies == 0.0
    assert found.digest() is not None


def test_what_no_rank_holds_is_known() -> None:
    found = assemble([piece(torch.ones(1, 3), (4, 3), (torch.tensor([2]), None))])
    assert found.covered.sum() == 3 and found.digest() is None


def test_copies_that_differ_are_measured() -> None:
    value = torch.ones(2, 2)
    other = value.clone()
    other[1] *= 1.25
    found = assemble([piece(each, (2, 2), ALL) for each in (value, value, other)])
    assert found.copies == pytest.approx(0.25) and torch.equal(found.tensor, value)


def test_a_mask_says_which_elements_a_rank_answers_for() -> None:
    left = torch.tensor([[True, False]] * 2)
    nonsense = torch.full((2, 2), 7.0)
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    one = piece(torch.where(left, value, nonsense), (2, 2), ALL, mask=left)
    two = piece(torch.where(left, nonsense, value), (2, 2), ALL, mask=~left)
    found = assemble([one, two])
    assert torch.equal(found.tensor, value) and found.copies == 0.0 and bool(found.covered.all())


def test_the_worst_row_is_found_and_scaled_by_its_own_size() -> None:
    a = torch.ones(5, 4)
    b = a.clone()
    b[3] += 0.5
    error, row = row_error(a, b)
    assert (error, row) == (pytest.approx(0.5), 3)
    quiet = a.clone()
    quiet[2] = 0  # A row of zeros is measured against the others, not against nothing.
    error, row = row_error(quiet, quiet + torch.eye(5, 4) * 1e-3)
    assert 0 < error < 2e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_on_one_side_is_an_infinite_error(bad: float) -> None:
    a = torch.ones(3, 2)
    b = a.clone()
    b[1, 0] = bad
    assert row_error(a, b) == (math.inf, 1) and row_error(b, a) == (math.inf, 1)
    assert row_error(b, b)[0] == 0.0


def test_context_and_sequence_parallel_tokens_are_placed_together() -> None:
    """16 tokens over cp 2 and, within, sp 2: rank (cp 1, tp 1) holds the second half of chunks 1 and 2."""
    held = positions(1, 2, 8)
    frame = Frame(sequence=16, batch=6, positions=held, samples=torch.tensor([4, 5]), tp_rank=1, tp_size=2)
    found = place(Kind(), torch.zeros(4, 2, 8), frame)
    assert found is not None
    shape, index = found
    assert shape == (16, 6, 8) and index[2] is None
    assert index[0].tolist() == [8, 9, 10, 11] and index[1].tolist() == [4, 5]


def test_a_gated_projections_halves_stay_apart() -> None:
    frame = Frame(
        sequence=4, batch=1, positions=torch.arange(4), samples=torch.arange(1), tp_rank=1, tp_size=2
    )
    found = place(Kind(split="gated"), torch.zeros(4, 1, 6), frame)
    assert found is not None and found[0] == (4, 1, 12)
    assert found[1][2].tolist() == [3, 4, 5, 9, 10, 11]


def test_heads_are_split_and_latents_are_not() -> None:
    frame = Frame(
        sequence=4, batch=1, positions=torch.arange(4), samples=torch.arange(1), tp_rank=1, tp_size=2
    )
    heads = place(Kind(split="heads"), torch.zeros(4, 1, 2, 8), frame)
    assert heads is not None and heads[0] == (4, 1, 4, 8) and heads[1][2].tolist() == [2, 3]
    latent = place(Kind(split="heads"), torch.zeros(4, 1, 24), frame)
    assert latent is not None and latent[0] == (4, 1, 24) and latent[1][2] is None


def test_a_shape_that_is_not_known_is_not_placed() -> None:
    frame = Frame(
        sequence=16, batch=4, positions=torch.arange(16), samples=torch.arange(2), tp_rank=0, tp_size=1
    )
    for shape in ((5, 2, 8), (16, 3, 8), (16,), (1, 2, 3, 4, 5)):
        assert place(Kind(), torch.zeros(shape), frame) is None
