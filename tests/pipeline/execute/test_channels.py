"""Transfers, reductions, evaluations and failures under the executor."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.execute.reduction import require_per_chunk
from tests.launch import run_ranks
from tests.pipeline.execute.channel_ranks import AHEAD

HERE = "tests.pipeline.execute.channel_ranks"


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    names = [
        "without_tags",
        "uneven",
        "made_ready_early",
        "evaluations",
        "reductions",
        "wrong_orders",
        "refused",
        "partly_recomputed",
    ]
    return run_ranks(2, f"{HERE}:several", 2, names)


def test_groups_of_edges_meet_among_three_stages() -> None:
    """Of which the middle one is in more groups than the others, and makes its groups one after another."""
    for rank in run_ranks(3, f"{HERE}:without_tags", 3, timeout=100):
        assert len(rank) == 2 and not any(rank.values())


def test_gradients_of_unknown_shape_are_received_in_the_order_of_their_sends(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        differing = rank["made_ready_early"]
        assert len(differing) >= 12 * len(AHEAD), sorted(differing)
        assert {key: names for key, names in differing.items() if names} == {}


@pytest.mark.parametrize("name", ["without_tags", "uneven"])
def test_the_step_is_upstreams(found: list[dict[str, Any]], name: str) -> None:
    """Over groups of two ranks for each edge; with micro-batches of different lengths."""
    for rank in found:
        assert len(rank[name]) == 2
        assert {key: names for key, names in rank[name].items() if names} == {}


def test_evaluations_compute_upstreams_losses(found: list[dict[str, Any]]) -> None:
    first, last = (rank["evaluations"] for rank in found)
    for name in ("zb_h1", "breadth_first"):
        four, three = last[name]["ours"]
        assert four == last[name]["upstream"] and three == four[:3] and len(four) == 4
        assert first[name]["ours"] == [[], []]
    # In a V the first rank has the losses, of the same weights as the loop of two chunks.
    assert last["zbv"]["ours"] == [[], []]
    four, three = first["zbv"]["ours"]
    assert three == four[:3]
    expected = [report["loss"] for report in last["breadth_first"]["upstream"]]
    assert [report["loss"] for report in four] == pytest.approx(expected, rel=1e-6)


def test_a_reduction_starts_when_its_chunk_is_done(found: list[dict[str, Any]]) -> None:
    for rank in found:
        orders = rank["reductions"]
        assert orders["differ"] == []
        for name in ("breadth_first", "zb_h1"):
            early, late = orders[f"{name} early"], orders[f"{name} late"]
            last = "B 0" if name == "breadth_first" else "W 0"
            # The second chunk's backwards come first: its reduction runs beside those of the first chunk.
            assert early.index("reduce 1") < len(early) - 1 - early[::-1].index(last)
            assert late.index("reduce 1") > len(late) - 1 - late[::-1].index(last)
            assert sorted(early) == sorted(late)


def test_few_micro_batches_are_kept_whole(found: list[dict[str, Any]]) -> None:
    """``num_microbatches_with_partial_activation_checkpoints``: as many in flight, whatever the schedule."""
    first, last = (rank["partly_recomputed"]["log"] for rank in found)
    assert [each for each in first if each[0] == "F"] == [
        ["F", 0, False],
        ["F", 1, True],  # the first is still in flight
        ["F", 2, False],
        ["F", 3, True],
    ]
    assert all(each[2:] in ([], [False]) for each in last), "the last stage has one in flight"


def test_a_wrong_order_is_noticed(found: list[dict[str, Any]]) -> None:
    """Without the validator: weight gradients in another order are another sum, and a message of another
    micro-batch another loss."""
    weights = [rank["wrong_orders"]["weights"] for rank in found]
    assert weights[0] == [] and any("linear_fc1" in name for name in weights[1])
    assert not any("layernorm" in name for name in weights[1])
    assert "reports" in found[1]["wrong_orders"]["messages"]


def test_what_cannot_run_is_refused_before_anything_is_sent(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said = rank["refused"]
        assert "B of stage 0 is missing for micro-batch 3" in said["incomplete"]
        assert said["at once"] == said["incomplete"]
        assert "3 micro-batches and a step of 4" in said["microbatches"]
        assert "for 3 ranks of 1 chunks; expected 2 ranks of 1" in said["ranks"]
        assert "2 ranks of 2 chunks; expected 2 ranks of 1" in said["chunks"]
        assert "4 micro-batches forward only" in said["forward only"]
        assert "found another order of actions on another rank" in said["other rank"]


def test_reductions_of_chunks_are_asked_for_one_by_one() -> None:
    """Upstream's interleaved schedule takes one ``no_sync_func`` for all."""
    config = SimpleNamespace(grad_sync_func=print, no_sync_func=nullcontext)
    require_per_chunk(config, 1)
    with pytest.raises(ConfigError, match="found 1 no_sync_func for 2 model chunks"):
        require_per_chunk(config, 2)


def test_a_rank_that_fails_ends_the_others() -> None:
    other, failed = run_ranks(2, f"{HERE}:one_fails", 2, timeout=60)
    assert "must match the size" in failed["error"]
    # By the connection that was closed, long before the groups' own limit of minutes.
    assert other["error"] is not None and other["seconds"] < 20
    for rank in (other, failed):
        assert "this transport was given up after an error (RuntimeError: " in rank["again"]
        assert "start the processes anew" in rank["again"]
    assert "must match the size" in failed["again"]
