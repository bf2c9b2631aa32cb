"""RankLayout builds the groups that Megatron-Core builds, and refuses sizes that do not fit."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.parallel.rank_layout import RankLayout

# Our name of a group -> (Megatron's token, whether its rank generator treats ep and dp apart).
TOKENS = {
    "tp": ("tp", False),
    "pp": ("pp", False),
    "cp": ("cp", False),
    "dp": ("dp", False),
    "dp-cp": ("dp-cp", False),
    "tp-pp": ("tp-pp", False),
    "tp-cp": ("tp-cp", False),
    "tp-dp": ("tp-dp", False),
    "tp-dp-cp": ("tp-dp-cp", False),
    "ep": ("ep", True),
    "tp-ep": ("tp-ep", True),
    "tp-ep-pp": ("tp-ep-pp", True),
    "edp": ("dp", True),
    "edp-cp": ("dp-cp", True),
}


def random_layouts(count):
    choose = random.Random(7)
    for _ in range(count):
        tp, pp, cp, ep, edp = (choose.choice((1, 2, 3, 4)) for _ in range(5))
        yield RankLayout(world_size=tp * pp * cp * ep * edp, tp=tp, pp=pp, cp=cp, ep=ep)


def test_groups_equal_megatrons_rank_generator():
    from megatron.core.parallel_state import RankGenerator, default_embedding_ranks

    for layout in random_layouts(150):
        theirs = RankGenerator(
            tp=layout.tp, ep=layout.ep, dp=layout.dp, pp=layout.pp, cp=layout.cp, order="tp-cp-ep-dp-pp"
        )
        for kind, (token, independent) in TOKENS.items():
            assert layout.groups(kind) == theirs.get_ranks(token, independent_ep=independent), (layout, kind)
        pipelines = theirs.get_ranks("pp")
        assert layout.groups("embedding") == [default_embedding_ranks(ranks) for ranks in pipelines]
        assert layout.groups("position-embedding") == [ranks[:1] for ranks in pipelines]


def test_coordinates_are_positions_within_the_groups():
    layout = RankLayout(world_size=48, tp=2, pp=3, cp=2, ep=2)
    assert (layout.dp, layout.edp) == (4, 2)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        for axis in ("tp", "cp", "dp", "pp", "ep", "edp"):
            (group,) = [g for g in layout.groups(axis) if rank in g]
            assert group[getattr(at, axis)] == rank


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 6, "tp": 4}, "multiple of 4"),
        ({"world_size": 4, "tp": 2, "ep": 4}, "expert parallel size 4"),
        ({"world_size": 2, "vpp": 2}, "pp of at least 2"),
        ({"world_size": 4, "pp": 0}, "pp is 0"),
        ({"world_size": 4, "pp": 2, "vpp": 0}, "vpp is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        RankLayout(**sizes)


def test_unknown_kinds_and_ranks_are_refused():
    layout = RankLayout(world_size=4, tp=2)
    for kind in ("tpp", "dp-ep", ""):
        with pytest.raises(ConfigError, match="unknown kind"):
            layout.groups(kind)
    with pytest.raises(ConfigError, match="rank 4"):
        layout.coordinates(4)


def parallel_state_of(sizes):
    """Runs on every rank: the groups that Megatron really made, as lists of global ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    import mt_megatron
    from mt_megatron.parallel import rank_layout as seam

    mt_megatron.patch("cpu")
    layout = seam.RankLayout(**sizes)
    seam.initialize(layout, mt_megatron.backend(), timedelta(minutes=2))
    names = {
        "tp": "_TENSOR_MODEL_PARALLEL_GROUP",
        "pp": "_PIPELINE_MODEL_PARALLEL_GROUP",
        "dp": "_DATA_PARALLEL_GROUP",
        "dp-cp": "_DATA_PARALLEL_GROUP_WITH_CP",
        "cp": "_CONTEXT_PARALLEL_GROUP",
        "tp-pp": "_MODEL_PARALLEL_GROUP",
        "tp-ep-pp": "_MODEL_AND_EXPERT_PARALLEL_GROUP",
        "tp-ep": "_TENSOR_AND_EXPERT_PARALLEL_GROUP",
        "ep": "_EXPERT_MODEL_PARALLEL_GROUP",
        "edp": "_DATA_MODULO_EXPERT_PARALLEL_GROUP",
        "tp-dp-cp": "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    }
    found = {
        kind: dist.get_process_group_ranks(getattr(parallel_state, name)) for kind, name in names.items()
    }
    try:
        seam.initialize(layout, mt_megatron.backend())
        again = "accepted"
    except ConfigError as error:
        again = str(error)
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    seam.destroy()
    return {"groups": found, "again": again, "chunks": chunks, "left": dist.is_initialized()}


@pytest.mark.parametrize(
    "sizes", [{"world_size": 4, "tp": 2, "pp": 2, "vpp": 2}, {"world_size": 4, "tp": 2, "ep": 2}]
)
def test_initialize_makes_these_groups(sizes):
    from tests.launch import run_ranks

    layout = RankLayout(**sizes)
    results = run_ranks(sizes["world_size"], "tests.parallel.test_rank_layout:parallel_state_of", sizes)
    for rank, result in enumerate(results):
        for kind, ranks in result["groups"].items():
            assert ranks in layout.groups(kind) and rank in ranks, kind
        assert "exist already" in result["again"]
        assert result["chunks"] == (layout.vpp if layout.interleaved else None)
        assert result["left"] is False


def wrong_world():
    from mt_megatron.backends import registry
    from mt_megatron.parallel import rank_layout as seam

    try:
        seam.initialize(seam.RankLayout(world_size=4), registry.get("cpu"))
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_another_number_of_processes_is_refused():
    from tests.launch import run_ranks

    (message,) = run_ranks(1, "tests.parallel.test_rank_layout:wrong_world")
    assert "1 process(es)" in message and "start 4" in message
