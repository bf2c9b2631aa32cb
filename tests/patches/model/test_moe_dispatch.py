"""Expert parallelism on cpu: both dispatchers agree with one process and with each other.

Upstream's all-gather dispatcher counts tokens with ``torch.histc`` over the range of its own experts. A
port that counts without that range gives every rank but the first a wrong count; that rank fails
and the others wait for it in a reduce-scatter, which looks like a hang. Ours counts what it sorted.
"""

from __future__ import annotations

import pytest

from tests.launch import run_ranks

RANKS = "tests.patches.ranks:moe_losses"


@pytest.mark.parametrize("experts", [2, 4])
def test_dispatchers_agree_with_one_process(experts: int) -> None:
    alone = run_ranks(1, RANKS, "alltoall", experts, 1)[0]
    assert run_ranks(1, RANKS, "allgather", experts, 1)[0] == pytest.approx(alone, rel=1e-5)
    for dispatcher in ("alltoall", "allgather"):
        for found in run_ranks(2, RANKS, dispatcher, experts, 2):
            assert found == pytest.approx(alone, rel=1e-5), dispatcher


def test_counting_outside_the_local_range_is_what_stops_the_other_ranks() -> None:
    with pytest.raises(Exception, match="AssertionError|split"):
        run_ranks(2, RANKS, "allgather", 4, 2, True, timeout=60)
