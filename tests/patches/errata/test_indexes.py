"""Indexes and documents of more than 2 GiB; outputs that are freed while they are sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mt_megatron.patches.errata.wrong_results import _get, _p2p_ops, _sequence_pointers
from tests.launch import run_ranks

HERE = "tests.patches.errata.test_indexes"


def beyond_2_gib() -> list[Any]:
    """Upstream's pointers and offsets and ours, from lengths and offsets in int32."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset, _IndexWriter

    class Index(list[Any]):
        dtype = np.int32

    def read(dtype: Any, count: int, offset: int) -> int:
        return int(offset)

    writer: Any = SimpleNamespace(dtype=np.int32)
    lengths = np.array([300_000_000, 300_000_000, 5], dtype=np.int32)
    upstream = _IndexWriter._sequence_pointers
    pointers = [
        _sequence_pointers(upstream, writer, each) for each in (lengths, [*lengths], lengths.tolist())
    ]
    data: Any = SimpleNamespace(
        index=Index([(np.int64(8), np.int32(900_000_000), None)]), bin_reader=SimpleNamespace(read=read)
    )
    offset = np.int32(600_000_000)
    ours = [_get(IndexedDataset.get, data, 0, offset, 3), _get(IndexedDataset.get, data, 0, offset)]
    with np.errstate(over="ignore"):
        wrapped = [int(upstream(writer, list(lengths))[2]), IndexedDataset.get(data, 0, offset, 3)]
    return [pointers, ours, wrapped]


@pytest.mark.skipif(np.__version__ < "2", reason="numpy 1 computes them in int64")
def test_pointers_and_offsets_of_int32_reach_beyond_2_gib() -> None:
    [[pointers, offsets, upstream]] = run_ranks(1, f"{HERE}:beyond_2_gib")
    assert pointers == [[0, 1_200_000_000, 2_400_000_000]] * 3
    assert offsets == [2_400_000_008] * 2
    # Upstream alone wraps. Should that change one day, the patches can go.
    assert upstream == [2_400_000_000 - 2**32, 2_400_000_008 - 2**32]


def test_a_freed_output_is_sent_as_it_was() -> None:
    """As torch's NCCL since 2.8: a pending transfer holds the tensor, not its memory."""
    pending: list[torch.Tensor] = []

    def original(**kwargs: Any) -> list[Any]:
        pending.extend(
            kwargs[name] for name in ("tensor_send_prev", "tensor_send_next") if kwargs[name] is not None
        )
        return pending

    for name in ("tensor_send_prev", "tensor_send_next"):
        output = torch.full((4,), 3.0, requires_grad=True) * 1
        given: dict[str, Any] = {"tensor_send_prev": None, "tensor_send_next": None, name: output}
        assert _p2p_ops(original, **given) is pending
        output.data = torch.empty((1,))  # what upstream's deallocate_output_tensor does
        assert pending.pop().tolist() == [3.0] * 4
