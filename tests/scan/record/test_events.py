"""Events of real trainings: ranks agree on groups and numbers, and no communication of a step is silent."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.second_lane import DAILY, of_lane

EXPERTS = (
    "--family deepseek --num-moe-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
    "--moe-token-dispatcher-type alltoall --moe-router-score-function sigmoid --moe-router-dtype fp32 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001"
)
PARALLEL = "--{}-parallel-size 2"
LAYOUTS = of_lane(
    {
        "dp2": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --save-interval 2",
        "tp2": PARALLEL.format("tensor-model"),
        "tp2_apart": f"{PARALLEL.format('tensor-model')} --sequence-parallel --no-cross-entropy-loss-fusion",
        "pp2": PARALLEL.format("pipeline-model"),
        "vpp2": f"{PARALLEL.format('pipeline-model')} --virtual-pipeline-model-parallel-size 2",
        "zb_h1": f"{PARALLEL.format('pipeline-model')} --pipeline-schedule zb_h1",
        "breadth_first": f"{PARALLEL.format('pipeline-model')} --virtual-pipeline-model-parallel-size 2 "
        "--pipeline-schedule breadth_first --overlap-grad-reduce",
        "zbv": f"{PARALLEL.format('pipeline-model')} --virtual-pipeline-model-parallel-size 2 "
        "--pipeline-schedule zbv",
        "cp2": PARALLEL.format("context"),
        "cp2_ring": f"{PARALLEL.format('context')} --cp-comm-type p2p",
        "ep2": f"{PARALLEL.format('expert-model')} {EXPERTS}",
        "tp2_experts": f"{PARALLEL.format('tensor-model')} --sequence-parallel "
        + EXPERTS.replace("seq_aux_loss", "aux_loss"),
    },
    *("dp2", "tp2", "tp2_apart", "vpp2", "zbv", "cp2", "cp2_ring", "ep2"),
)
STEPS = 2


def these(*names: str) -> list[str]:
    """Those of ``names`` whose layout runs in this lane."""
    return [name for name in names if name in LAYOUTS]


def _fewer(name: str) -> str:
    """A flag for two layers in the first lane where neither stages nor counts need four."""
    return "" if DAILY or name in ("vpp2", "zbv", "ep2") else " --num-layers 2"


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("events")
    layouts = {name: f"{flags} --save {folder / name}{_fewer(name)}" for name, flags in LAYOUTS.items()}
    return run_ranks(2, "tests.scan.record.event_ranks:runs", str(folder), layouts, timeout=240)


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_ranks_number_the_same_collectives(heard: list[dict[str, Any]], name: str) -> None:
    sides = []
    for rank in heard:
        assert rank[name]["error"] is None and rank[name]["unbalanced"] == 0
        groups = defaultdict(list)
        for group, ranks, seq, op, _, asynchronous, *_ in rank[name]["collectives"]:
            assert ranks == [0, 1]
            groups[group].append((seq, op, asynchronous))
        sides.append(groups)
    assert sides[0] == sides[1]
    for calls in sides[0].values():
        begun = [seq for seq, _, asynchronous in calls if asynchronous != "wait"]
        assert begun == list(range(begun[0], begun[0] + len(begun)))
        started = {seq for seq, _, asynchronous in calls if asynchronous == "start"}
        # What the last step starts for the next one nobody waits for.
        assert {seq for seq, _, asynchronous in calls if asynchronous == "wait"} <= started


def test_numbers_go_on_from_run_to_run(heard: list[dict[str, Any]]) -> None:
    # Each run has the world's all-reduce of the loss; a listener that comes later goes on counting.
    firsts = [
        min(seq for group, _, seq, *_ in rank[name]["collectives"] if group == "world")
        for rank in heard
        for name in ("dp2", "tp2")
    ]
    assert firsts[0] == firsts[2] == 0 and firsts[1] == firsts[3] > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_communication_of_a_step_is_silent(heard: list[dict[str, Any]], name: str) -> None:
    for rank in heard:
        assert rank[name]["silent"] == []


def test_the_listener_for_silence_hears_it() -> None:
    for found in run_ranks(2, "tests.scan.record.event_ranks:silence", timeout=60):
        assert found == ["allreduce in step"]


def ops(rank: dict[str, Any], name: str) -> Counter[tuple[str, str, str | None]]:
    return Counter((group, op, part) for group, _, _, op, _, part, *_ in rank[name]["collectives"])


def test_which_collectives_are_heard(heard: list[dict[str, Any]]) -> None:
    for rank in heard:
        found = {name: ops(rank, name) for name in LAYOUTS}
        data = found["dp2"]
        assert data["dp", "start_grad_sync", "start"] == data["dp", "finish_grad_sync", "wait"] >= STEPS
        assert data["dp", "start_param_sync", "start"] >= data["dp", "finish_param_sync", "wait"] >= STEPS - 1
        # The gradient norm and the loss; with the distributed optimizer both go over all ranks.
        assert data["world", "all_reduce", None] >= 2 * STEPS
        assert found["tp2"]["tp", "all_reduce", "start"] == found["tp2"]["tp", "all_reduce", "wait"] > 0
        # The loss's exchange; its sum over the ranks.
        assert found["tp2"]["tp", "all_gather", None] >= STEPS and found["tp2"]["world", "all_reduce", None]
        assert found["tp2_apart"]["tp", "reduce_scatter", "start"] > 0
        assert found["tp2_apart"]["tp", "all_gather", "wait"] > 0
        assert found["cp2"]["cp", "all_gather", None] and found["cp2"]["cp", "reduce_scatter", None]
        ring = found["cp2_ring"]
        assert ring["cp", "ring", "start"] == ring["cp", "ring", "wait"] > 0
        # To the experts and back, forward and backward, in 4 layers for 2 micro-batches of each step.
        assert found["ep2"]["ep", "all_to_all", None] >= 4 * 4 * 2 * STEPS
        # The biases are moved once a step.
        assert found["ep2"]["dp", "all_reduce", None] >= STEPS


def test_sums_inside_the_loss_are_heard_where_they_are_made(heard: list[dict[str, Any]]) -> None:
    for rank in heard:
        inside = [
            row for row in rank["tp2_apart"]["collectives"] if row[3] == "all_reduce" and row[7] == "forward"
        ]
        # Two exchanges (the maximum; the label's logit with the sum) for 4 micro-batches of each step.
        assert len(inside) == 2 * 4 * STEPS
        assert [row[4] for row in inside[:2]] == [2 * 32 * 4, 2 * 2 * 32 * 4]


@pytest.mark.parametrize("name", these("pp2", "vpp2", "zb_h1", "breadth_first", "zbv"))
def test_both_ends_of_an_edge_number_the_same_transfers(heard: list[dict[str, Any]], name: str) -> None:
    sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
    received: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for rank, found in enumerate(heard):
        for op, peer, seq, size, part in found[name]["transfers"]:
            if part != "wait":
                edge = (rank, peer) if op == "send" else (peer, rank)
                (sent if op == "send" else received)[edge].append((seq, size))
    assert sent == received and set(sent) == {(0, 1), (1, 0)}
    for numbers in sent.values():
        assert [seq for seq, _ in numbers] == list(range(numbers[0][0], numbers[0][0] + len(numbers)))
        # [sequence, micro-batch, hidden] in fp32
        assert {size for _, size in numbers} == {32 * 2 * 32 * 4}
    # Outputs of the first of two stages, or of the first and third of four and a gradient of the third; in a
    # V of the first, and a gradient of the last.
    per_step = {"pp2": 4, "zb_h1": 4, "zbv": 4 + 4}.get(name, 4 * 2 + 4)
    assert len(sent[0, 1]) == per_step * STEPS


def test_a_transfer_that_was_started_is_waited_for(heard: list[dict[str, Any]]) -> None:
    for found in heard:
        parts: dict[str, set[Any]] = defaultdict(set)
        for op, peer, seq, _, part in found["vpp2"]["transfers"]:
            parts[str(part)].add((op, peer, seq))
        assert parts["wait"] and parts["wait"] <= parts["start"]
        assert not parts["None"] & parts["start"]


@pytest.mark.parametrize("name", these("dp2", "pp2", "vpp2", "breadth_first"))
def test_micro_batches_are_counted_both_ways(heard: list[dict[str, Any]], name: str) -> None:
    chunks = 1 if name in ("dp2", "pp2") else 2
    per_step = 2 if name == "dp2" else 4
    for found in heard:
        for direction in ("forward", "backward"):
            for chunk in range(chunks):
                numbers = [each[2] for each in found[name]["passes"] if each[:2] == [direction, chunk]]
                assert numbers == list(range(per_step)) * STEPS
        assert len(found[name]["passes"]) == 2 * chunks * per_step * STEPS


@pytest.mark.parametrize("name", these("zb_h1", "zbv"))
def test_deferred_weight_gradients_are_a_second_backward(heard: list[dict[str, Any]], name: str) -> None:
    for found in heard:
        for chunk in range(1 if name == "zb_h1" else 2):
            numbers = Counter(each[2] for each in found[name]["passes"] if each[:2] == ["backward", chunk])
            assert numbers == dict.fromkeys(range(4), 2 * STEPS)


def test_work_is_tokens_and_rows_of_experts(heard: list[dict[str, Any]]) -> None:
    for found in heard:
        assert set(found["dp2"]["work"]["data"]) == {2 * 32}
        assert found["dp2"]["work"]["module"] == []
    rows = [found["ep2"]["work"]["module"] for found in heard]
    assert len(rows[0]) == len(rows[1]) > 0
    # Both ranks' micro-batches, each token to two of the eight experts, of which a rank has four.
    assert {one + other for one, other in zip(*rows, strict=True)} == {2 * 2 * 32 * 2}
    assert rows[0] != rows[1]


def test_a_checkpoint_says_what_it_writes(heard: list[dict[str, Any]]) -> None:
    for found in heard:
        said = found["dp2"]["checkpoints"]
        assert [op for op, _ in said] == [None, "write", "written", "collect", "finish"]
        assert said[2][1] > 0


def test_a_step_of_the_ring_names_the_rank_before(heard: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(heard):
        assert {row[6] for row in found["cp2_ring"]["collectives"] if row[3] == "ring"} == {1 - rank}
