"""Ranked layouts: published ones are found, rules are kept, and more never fits less."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.planning.cost import stage_times, step_cost
from mt_megatron.planning.hardware import DEVICES, hardware_of, parse_bytes
from mt_megatron.planning.layouts import Layout, layouts, reason_of, rule_problems
from mt_megatron.planning.memory import worst_memory
from mt_megatron.planning.memory_estimate import memory_case
from mt_megatron.planning.pipeline_layout import chunk_layer_counts
from mt_megatron.planning.suggest import Choice, Suggestion, suggest
from mt_megatron.training.validate import problems

H100 = DEVICES["h100"]
MODEL = (
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --num-query-groups 4 "
    "--vocab-size 32000 --seq-length 2048 --max-position-embeddings 2048 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --bf16 "
    "--train-iters 1 --lr 1e-4"
)
SMALL = [*MODEL.split(), "--global-batch-size", "32"]


def sizes(choice: Choice) -> tuple[int, int, int, int]:
    layout = choice.layout
    return layout.tensor, layout.pipeline, layout.context, layout.data


def searched(model: str, devices: int, batch: int) -> Suggestion:
    return suggest(load_config(["--model", model, "--global-batch-size", str(batch)]), devices, H100)


@pytest.fixture(scope="module")
def llama_70b() -> Suggestion:
    return searched("llama3_70b", 32, 512)


def test_llama_3_8b_on_one_node_of_80_gb() -> None:
    found = searched("llama3_8b", 8, 512)
    best = {sizes(choice) for choice in found.choices[:6]}
    assert all(tensor <= 2 and pipeline <= 2 for tensor, pipeline, _, _ in best), best
    # NeMo's recipe (nemo/collections/llm/recipes/llama3_8b.py): 8 devices, TP 1, PP 1, CP 2.
    recipe = next(choice for choice in found.choices if sizes(choice) == (1, 1, 2, 4))
    assert recipe.cost.total < 1.05 * found.choices[0].cost.total
    assert 0.3 < found.choices[0].mfu < H100.matrix_efficiency


def test_llama_3_70b_on_32_devices_of_80_gb(llama_70b: Suggestion) -> None:
    # NeMo's recipe (nemo/collections/llm/recipes/llama3_70b.py): 32 devices, TP 4, PP 4, VPP 5, CP 2.
    best = {(*sizes(choice), choice.layout.chunks) for choice in llama_70b.choices[:5]}
    assert (4, 4, 2, 1, 5) in best, best
    assert all(
        choice.layout.distributed_optimizer for choice in llama_70b.choices[:5] if choice.layout.overlaps
    )


def test_llama_3_1_405b_fits_16384_devices_as_published() -> None:
    # Table 4 of arXiv 2407.21783: TP 8, PP 16, DP 128 and sequences of 8,192; 16 x 8 layers less one at
    # either end. Its MFU is 41 %.
    config = load_config(["--model", "llama3_405b", "--global-batch-size", "2048"])
    found = suggest(
        dataclasses.replace(
            config,
            parallel=dataclasses.replace(
                config.parallel, tensor_model_parallel_size=8, pipeline_model_parallel_size=16
            ),
        ),
        16384,
        H100,
    )
    published = [choice for choice in found.choices if sizes(choice) == (8, 16, 1, 128)]
    plain = next(choice for choice in published if choice.layout.chunks == 1)
    assert chunk_layer_counts(plain.layout.apply(config)) == (7, *[8] * 14, 7)
    # A stage at a time leaves a long bubble; in chunks the estimate is near what was measured.
    assert plain.mfu < 0.3 < published[0].mfu < found.choices[0].mfu < 0.5
    assert published[0].layout.chunks > 1 and published[0].mfu == pytest.approx(0.41, abs=0.05)
    # With sequences of 131,072 the paper has CP 16 and DP 8.
    long = load_config(
        ["--model", "llama3_405b", "--global-batch-size", "128", "--seq-length", "131072"]
        + ["--max-position-embeddings", "131072", "--tensor-model-parallel-size", "8"]
        + ["--pipeline-model-parallel-size", "16", "--context-parallel-size", "16"]
    )
    assert (8, 16, 16, 8) in {sizes(choice) for choice in suggest(long, 16384, H100).choices}


@pytest.fixture(scope="module")
def mixtral() -> Suggestion:
    return searched("mixtral_8x7b", 64, 1024)


def test_mixtral_8x7b_has_its_experts_in_the_search(mixtral: Suggestion) -> None:
    spread = {choice.layout.expert for choice in mixtral.choices}
    assert spread == {1, 2, 4, 8}
    for choice in mixtral.choices:
        assert choice.layout.data % choice.layout.expert == 0
        assert choice.layout.sequence_parallel == (choice.layout.tensor > 1)
    # NeMo's recipe (nemo/collections/llm/recipes/mixtral_8x7b.py): 64 devices, TP 1, PP 4, VPP 8, EP 8.
    recipe = next(
        choice
        for choice in mixtral.choices
        if (choice.layout.expert, choice.layout.chunks) == (8, 8) and sizes(choice) == (1, 4, 1, 16)
    )
    assert recipe.cost.total < 1.25 * mixtral.choices[0].cost.total


def test_deepseek_v3_fits_2048_devices_as_published() -> None:
    # Section 3.2 of arXiv 2412.19437: 2,048 H800 of 80 GB, PP 16, EP 64, no tensor parallelism.
    argv = ["--model", "deepseek_v3", "--global-batch-size", "15360", "--pipeline-model-parallel-size", "16"]
    config = load_config([*argv, "--expert-model-parallel-size", "64"])
    published = [choice for choice in suggest(config, 2048, H100).choices if sizes(choice)[0] == 1]
    assert published and all(choice.layout.expert == 64 for choice in published)
    counts = chunk_layer_counts(published[0].layout.apply(config))
    assert sum(counts) == 61 and min(counts[1:-1]) == max(counts) > counts[-1], counts


def test_what_is_suggested_for_experts_passes_validation(mixtral: Suggestion) -> None:
    for choice in mixtral.choices[:20]:
        argv = ["--model", "mixtral_8x7b", "--global-batch-size", "1024", "--mock-data", "--train-iters", "1"]
        config = load_config([*argv, *choice.layout.options()])
        assert problems(config, world_size=64, check_files=False) == []
        assert worst_memory(memory_case(config, 64)).total == choice.memory.total


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--num-moe-experts 8 --moe-ffn-hidden-size 706 --family mixtral", "moe_ffn_hidden_size is N"),
        ("--fp8-recipe blockwise --ffn-hidden-size 1440", "mlp.linear_fcN of layer N"),
    ],
)
def test_layouts_that_the_run_refuses_for_its_layers_are_not_offered(options: str, reason: str) -> None:
    argv = [*SMALL, "--mock-data", *options.split()]
    found = suggest(load_config(argv), 8, H100)
    assert any(reason in each.reason for each in found.rejected), found.rejected
    tried = [load_config([*argv, *choice.layout.options()]) for choice in found.choices]
    assert tried and {config.parallel.tensor_model_parallel_size for config in tried} == {1, 2}
    for config in tried:
        assert problems(config, world_size=8, check_files=False) == []


def test_a_busier_rank_needs_more_memory_and_time(mixtral: Suggestion) -> None:
    layout = next(choice.layout for choice in mixtral.choices if choice.layout.expert == 8)
    config = layout.apply(mixtral.config)
    even, uneven = (memory_case(config, 64, expert_imbalance=by) for by in (1.0, 2.0))
    assert worst_memory(uneven).activations > worst_memory(even).activations
    assert (
        step_cost(uneven, worst_memory(uneven), H100).total > step_cost(even, worst_memory(even), H100).total
    )
    with pytest.raises(ConfigError, match="--expert-imbalance is 0.5"):
        memory_case(config, 64, expert_imbalance=0.5)


def test_what_is_suggested_passes_validation(llama_70b: Suggestion) -> None:
    for choice in llama_70b.choices[:40]:
        argv = ["--model", "llama3_70b", "--global-batch-size", "512", "--mock-data", "--train-iters", "1"]
        config = load_config([*argv, *choice.layout.options()])
        assert problems(config, world_size=32, check_files=False) == []
        assert worst_memory(memory_case(config, 32)).total == choice.memory.total
        assert choice.memory.total <= llama_70b.hardware.usable_bytes
        assert choice.layout.tensor <= H100.devices_per_node


def test_order_and_reasons(llama_70b: Suggestion) -> None:
    times = [choice.cost.total for choice in llama_70b.choices]
    assert times == sorted(times)
    assert llama_70b.considered >= len(llama_70b.choices) + llama_70b.too_large
    assert sum(each.count for each in llama_70b.rejected) + llama_70b.too_large <= llama_70b.considered
    assert any("num_query_groups" in each.reason for each in llama_70b.rejected)
    assert llama_70b.near_miss is not None
    assert llama_70b.near_miss.needs_bytes > llama_70b.near_miss.usable_bytes


def test_when_nothing_fits_it_says_what_would() -> None:
    config = load_config(["--model", "llama3_70b", "--global-batch-size", "64"])
    found = suggest(config, 8, H100)
    assert not found.choices and found.near_miss is not None
    needed = found.near_miss.needs_bytes / (1 - H100.memory_reserve)
    assert f"at least {needed / 2**30:.1f} GiB" in found.advice[0]
    enough = dataclasses.replace(H100, memory_bytes=needed * 1.001)
    assert suggest(config, 8, enough).choices, "the memory that was named is enough"
    (more,) = (int(line.split()[0]) for line in found.advice[1:])
    assert suggest(config, more, H100).choices, "the number of devices that was named is enough"


def test_a_layout_that_is_asked_for_is_kept() -> None:
    argv = [*SMALL, "--tensor-model-parallel-size", "2", "--recompute-granularity", "selective"]
    found = suggest(load_config([*argv, "--micro-batch-size", "2"]), 8, H100)
    assert found.choices
    for choice in found.choices:
        assert choice.layout.tensor == 2 and choice.layout.micro_batch == 2
        assert choice.layout.recompute.granularity == "selective"


def found_to_run(argv: list[str]) -> Suggestion:
    """Suggestions behind ``argv``; every command loads, passes the checks and makes the layout shown."""
    found = suggest(load_config(argv), 8, H100)
    assert found.choices, found.rejected
    for choice in found.choices:
        command = [*argv, *(word for each in found.assumed for word in each.split())]
        config = load_config(
            [*command, *choice.layout.options(found.config), "--train-iters", "1", "--lr", "1"]
        )
        assert problems(config, world_size=8, check_files=False) == []
        assert (config.virtual_pipeline_model_parallel_size or 1) == choice.layout.chunks
        assert config.model.overlap_p2p_comm == (choice.layout.chunks > 1)
    return found


@pytest.mark.parametrize(
    "asked",
    [
        "--sequence-parallel",
        "--sequence-parallel --cp-comm-type p2p --seq-length 16384 --max-position-embeddings 16384",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--tensor-model-parallel-size 2 --distribute-saved-activations",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        "--recompute-granularity selective --recompute-num-layers 1",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 2,2,2,2",
        "--pipeline-model-parallel-layout 2,2,2,2",
        "--tensor-model-parallel-size 2 --overlap-p2p-comm",
        "--tensor-model-parallel-size 2 --no-overlap-p2p-communication",
    ],
)
def test_suggestions_run_behind_the_options_that_were_given(asked: str) -> None:
    found_to_run([*SMALL, "--mock-data", *asked.split()])


def test_suggestions_run_behind_a_printed_configuration(tmp_path: Path) -> None:
    interleaved = "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2"
    sizes_kept = "--tensor-model-parallel-size 2 --micro-batch-size 2"
    config = load_config([*SMALL, "--mock-data", *interleaved.split(), *sizes_kept.split()])
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    found = found_to_run(
        ["--config", str(file), "--pipeline-model-parallel-size", "1"]
        + ["--virtual-pipeline-model-parallel-size", "none"]
    )
    assert {(2, 1), (2, 2), (4, 2)} <= {
        (choice.layout.pipeline, choice.layout.chunks) for choice in found.choices
    }


def test_layers_per_chunk_give_each_number_of_stages_its_chunks() -> None:
    """Not those of the one stage that the options themselves ask for; 1 where they do not come out even."""
    config = load_config([*SMALL, "--mock-data", "--num-layers-per-virtual-pipeline-stage", "2"])
    assert config.model.num_layers == 8
    tried = {(layout.pipeline, layout.chunks) for layout in layouts(config, 8)}
    assert tried == {(1, 1), (2, 2), (4, 1), (8, 1)}


def test_a_layout_of_chunks_goes_with_each_number_of_stages_that_divides_it() -> None:
    argv = [*SMALL, "--pipeline-model-parallel-layout", "2,2,2,2"]
    found = suggest(load_config(argv), 8, H100)
    assert {(choice.layout.pipeline, choice.layout.chunks) for choice in found.choices} == {(2, 2), (4, 1)}
    too_small = dataclasses.replace(H100, memory_bytes=2**30)
    found = suggest(load_config([*argv, "--pipeline-model-parallel-size", "2"]), 2, too_small)
    assert not found.choices and found.near_miss is not None
    assert "of these devices would do" in found.advice[-1]


def test_sizes_that_do_not_divide_the_devices_are_named() -> None:
    found = suggest(load_config([*SMALL, "--tensor-model-parallel-size", "4"]), 6, H100)
    assert not found.considered and "6 devices are no multiple" in found.advice[0]


def test_the_batch_is_assumed_when_it_is_not_given() -> None:
    found = suggest(load_config(MODEL.split()), 1, H100)
    assert found.assumed == ["--global-batch-size 2048"]


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="--world-size is 0"):
        suggest(load_config(SMALL), 0, H100)
    with pytest.raises(ConfigError, match="--seq-length"):
        suggest(load_config(MODEL.replace("--seq-length 2048", "").split()), 8, H100)
    with pytest.raises(ConfigError, match="num_moe_experts"):
        suggest(load_config([*SMALL, "--num-experts", "4"]), 8, H100)


def fitting(config: TrainingConfig, devices: int, gib: float) -> set[tuple[int, ...]]:
    hardware = dataclasses.replace(H100, memory_bytes=gib * 2**30)
    return {
        (*sizes(choice), choice.layout.chunks, choice.layout.micro_batch)
        for choice in suggest(config, devices, hardware).choices
    }


@given(
    devices=st.sampled_from([1, 2, 4, 8]),
    gib=st.floats(1, 12),
    more=st.floats(0, 8),
    length=st.sampled_from([1024, 2048]),
)
@settings(max_examples=8, deadline=None)
def test_more_memory_never_takes_a_layout_away(devices: int, gib: float, more: float, length: int) -> None:
    config = load_config([*SMALL, "--seq-length", str(length)])
    assert fitting(config, devices, gib) <= fitting(config, devices, gib + more)


@st.composite
def placed(draw: st.DrawFn) -> Layout:
    config = load_config(SMALL)
    every = [each for each in layouts(config, 16) if not rule_problems(each, config, 16, 8)]
    return draw(st.sampled_from(every))


@given(layout=placed(), name=st.sampled_from(["tflops", "memory_gbps", "intra_node_gbps", "inter_node_gbps"]))
@settings(max_examples=40, deadline=None)
def test_faster_machines_never_take_longer(layout: Layout, name: str) -> None:
    case = memory_case(layout.apply(load_config(SMALL)), 16)
    memory = worst_memory(case)
    before = step_cost(case, memory, H100)
    after = step_cost(case, memory, dataclasses.replace(H100, **{name: getattr(H100, name) * 2}))
    assert after.total <= before.total
    assert before.total == pytest.approx(
        sum(value for key, value in before.as_dict().items() if key != "total")
    )


def test_parts_of_the_cost_by_hand() -> None:
    config = load_config(SMALL)
    layout = Layout(pipeline=4, data=2, distributed_optimizer=True)
    case = memory_case(layout.apply(config), 8)
    cost = step_cost(case, worst_memory(case), H100)
    one = (cost.compute + cost.recompute + cost.tensor_parallel + cost.context_parallel + cost.pipeline) / 16
    # The last stage, with the output layer, is the slowest: it waits while the first micro-batch comes
    # through the three others and the last one goes back, and for nothing else.
    times = [time.total for time in stage_times(case, H100)]
    assert max(times[:3]) < times[3] == pytest.approx(one)
    assert cost.bubble == pytest.approx(sum(times[:3]))
    # Further micro-batches are counted on from two simulated numbers of them, and add no waiting here.
    many = memory_case(layout.apply(load_config([*MODEL.split(), "--global-batch-size", "256"])), 8)
    assert step_cost(many, worst_memory(many), H100).bubble == pytest.approx(cost.bubble)
    assert cost.tensor_parallel == cost.context_parallel == cost.recompute == cost.expert_parallel == 0
    interleaved = memory_case(dataclasses.replace(layout, chunks=2).apply(config), 8)
    shorter = step_cost(interleaved, worst_memory(interleaved), H100)
    assert shorter.bubble < cost.bubble


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("80GB", 80e9),
        ("80e9", 80e9),
        ("1.5TiB", 1.5 * 2**40),
        ("85899345920", 85899345920),
        ("", None),
        ("80 apples", None),
        ("-1", None),
        ("0", None),
        ("inf", None),
        ("1e999", None),
        ("0x10", None),
    ],
)
def test_sizes_are_read(text: str, expected: float | None) -> None:
    assert parse_bytes(text) == expected


def test_devices_are_known_by_name_and_figures_can_be_replaced() -> None:
    assert hardware_of(" h200 ").memory_bytes == 141 * 2**30
    assert hardware_of("80e9", tflops=312.0, inter_node_gbps=None).tflops == 312.0
    assert "H100 speeds unless given" in hardware_of("80e9").name
    for memory, options, said in (
        ("H1000", {}, "--device-memory is 'H1000'"),
        ("H100", {"tflops": 0.0}, "--device-tflops is 0.0"),
        ("H100", {"memory_reserve": 1.0}, "--memory-reserve is 1.0"),
        ("H100", {"devices_per_node": 0}, "--devices-per-node is 0"),
        ("H100", {"intra_node_gbps": float("nan")}, "--intra-node-gbps is nan"),
    ):
        with pytest.raises(ConfigError, match=said):
            hardware_of(memory, **options)


def test_reasons_leave_numbers_and_advice_out() -> None:
    assert (
        reason_of("a is 3; expected a multiple of b = 16. Change --a.")
        == "a is N; expected a multiple of b = N"
    )
    assert reason_of("x is 8 (1, 2, 4, 8) or 1.5; no. Do.") == "x is N (N) or N.N; no"
