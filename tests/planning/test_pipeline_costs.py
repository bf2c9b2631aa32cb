"""What the simulator is given for a configuration agrees with the memory estimate and the cost model."""

from __future__ import annotations

import numpy as np
import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.pipeline.compare import with_chunks
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.simulate.memory import memory_peaks
from mt_megatron.pipeline.simulate.program import Program
from mt_megatron.planning.cost import stage_times, step_cost
from mt_megatron.planning.hardware import DEVICES
from mt_megatron.planning.memory import MemoryCase, estimate_memory, placement_of, worst_memory
from mt_megatron.planning.memory_estimate import memory_case
from mt_megatron.planning.pipeline_costs import pipeline_costs

H100 = DEVICES["h100"]
MODEL = "--model llama3_8b --bf16 --pipeline-model-parallel-size 4 --micro-batch-size 1"


def case_of(more: str, world_size: int) -> MemoryCase:
    return memory_case(load_config([*MODEL.split(), *more.split()]), world_size)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(
    "more", ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
)
def test_memory_and_time_are_those_of_the_plan(chunks: int, more: str) -> None:
    virtual = f"--virtual-pipeline-model-parallel-size {chunks}" if chunks > 1 else ""
    case = case_of(f"--global-batch-size 16 {virtual} {more}", 4)
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = generate(name, ranks=4, chunks=chunks, microbatches=16)
    costs = pipeline_costs(case, H100)
    expected = [stage.total for stage in estimate_memory(case).stages]
    assert memory_peaks(schedule, costs).tolist() == expected
    cost = step_cost(case, worst_memory(case), H100)
    parts = cost.compute + cost.recompute + cost.bubble
    assert Program(schedule, links=False).makespan(costs) == pytest.approx(parts, rel=0.01)
    whole = np.asarray(costs.backward)
    assert (np.asarray(costs.weight) < whole).all() and (2 * np.asarray(costs.weight) > 0.5 * whole).any()
    total = sum(time.total - time.pipeline for time in stage_times(case, H100))
    assert np.sum(costs.forward) + np.sum(costs.backward) == pytest.approx(total)


def test_links_and_reductions_follow_the_machine() -> None:
    inside, outside = case_of("--global-batch-size 16", 4), case_of("--global-batch-size 64", 16)
    near, far = pipeline_costs(inside, H100), pipeline_costs(outside, H100)
    assert near.link.bandwidth == 0.8 * H100.intra_node_gbps * 1e9
    assert far.link.bandwidth == 0.8 * H100.inter_node_gbps * 1e9
    assert near.message == far.message == 8192 * 4096 * 2
    assert set(np.ravel(near.reduction)) == {0.0}
    reductions = np.ravel(far.reduction)
    assert (reductions > 0).all() and reductions[0] > reductions[1] == reductions[2]  # The embedding.


def test_weights_are_cut_anew_with_the_layers() -> None:
    case = case_of("--global-batch-size 16 --virtual-pipeline-model-parallel-size 2", 4)
    costs = pipeline_costs(case, H100)
    whole = [stage.total - stage.activations for stage in estimate_memory(case).stages]
    static = np.ravel(with_chunks(costs, placement_of(case), 1).static)
    assert static.sum() == pytest.approx(sum(whole))
    # Stages 0 and 1 had been those of ranks 0 and 1: the first rank's share is a half of each.
    halves = [each / 2 for each in whole]
    assert static == pytest.approx([halves[0] + halves[1], halves[2] + halves[3]] * 2)


def test_a_v_takes_its_chunks_down_and_up_again() -> None:
    layers = [1, 2, 3, 4, 5, 6, 7, 4]
    case = case_of(
        "--global-batch-size 16 --virtual-pipeline-model-parallel-size 2 --pipeline-schedule zbv "
        f"--pipeline-model-parallel-layout {','.join(map(str, layers))} --fp8-recipe blockwise",
        4,
    )
    assert case.schedule is not None and case.casts is not None
    costs = pipeline_costs(case, H100)
    for times in (costs.forward, costs.backward, costs.weight):
        assert (np.diff(np.ravel(times)[:7]) > 0).all(), times  # the last chunk has the output layer too
    kept = np.ravel(costs.activation)
    assert (np.diff(kept[:7]) > 0).all(), kept
    stages = estimate_memory(case).stages
    assert memory_peaks(case.schedule, costs).tolist() == [stage.total for stage in stages]
    # The first layer and the last one, both of the first rank, stay in bf16.
    of_a_layer = stages[3].casts // 9
    assert [stage.casts // of_a_layer for stage in stages] == [1 + 4 - 2, 2 + 7, 3 + 6, 4 + 5]
