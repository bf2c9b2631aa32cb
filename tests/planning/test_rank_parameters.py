"""What ranks hold: models built with Megatron-Core's modules, the closed form, and published totals."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_megatron.config import presets
from mt_megatron.config.parse import load_config
from mt_megatron.planning.build import model_shape
from mt_megatron.planning.memory import MemoryCase, places
from mt_megatron.planning.memory_estimate import memory_case
from mt_megatron.planning.parameter_tensors import ChunkPlace, chunk_tensors
from mt_megatron.planning.parameters import ModelShape, count_parameters

Build = Callable[[list[str], int, int], list[dict[str, list[int]]]]

PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3.1_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v3": 671_026_404_352,
}
"""Totals of the Hugging Face classes on the meta device, which are the published ones."""

V3_BIASES, V3_DEPTH_BIASES = 58 * 256, 256
V3_DEPTH = 11_610_067_968
"""Multi-token prediction of DeepSeek-V3 without its copies of embedding and head."""

SEQUENTIAL = ("llama3_8b", "mixtral_8x7b", "deepseek_v2_lite", "deepseekv3_tiny", "qwen3_moe_tiny")
"""Built with one module per expert as well."""

LAYOUTS = {
    "llama3_8b": "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2",
    "llama3_70b": "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4",
    "llama3.1_405b": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
    "--pipeline-model-parallel-layout balanced",
    "mixtral_8x7b": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 "
    "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 4 --global-batch-size 8",
    "mixtral_8x22b": "--expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --global-batch-size 8",
    "deepseek_v2_lite": "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 2 "
    "--pipeline-model-parallel-size 3 --global-batch-size 2",
    "deepseek_v2": "--expert-model-parallel-size 16 --pipeline-model-parallel-size 4 --global-batch-size 16",
    "deepseek_v3": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 "
    "--pipeline-model-parallel-size 16 --pipeline-model-parallel-layout balanced --global-batch-size 8",
    "qwen3_235b_a22b": "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 "
    "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout balanced --global-batch-size 8",
}


@pytest.fixture(scope="module")
def build() -> Iterator[Build]:
    """Answers what ``tests.planning.rank_parameters`` builds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.planning.rank_parameters"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None and process.stdout is not None

    def ask(argv: list[str], tp_rank: int, ep_rank: int) -> list[dict[str, list[int]]]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([[argv, tp_rank, ep_rank]]) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("chunks:"):
                found: list[list[dict[str, list[int]]]] = json.loads(line.removeprefix("chunks:"))
                return found[0]
        raise AssertionError("the process that builds models ended; its stderr says why")

    yield ask
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def arguments(name: str, layout: str = "") -> list[str]:
    # The published vocabulary: padding belongs to a layout and is a matter of its own.
    return ["--model", name, "--make-vocab-size-divisible-by", "1", *layout.split()]


def case_of(argv: list[str]) -> MemoryCase:
    config = load_config(argv)
    parallel = config.parallel
    world = (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.expert_model_parallel_size
    )
    return memory_case(config, world)


def chunk_places(case: MemoryCase) -> list[ChunkPlace]:
    """The chunks in the order that a batch takes."""
    stages = [places(case, stage) for stage in range(case.pipeline_parallel)]
    return [stages[stage][chunk] for chunk in range(case.chunks) for stage in range(case.pipeline_parallel)]


def check_built(build: Build, argv: list[str], tp_rank: int = 0, ep_rank: int = 0) -> None:
    """Every parameter of every chunk, in order, and the experts' biases."""
    case = case_of(argv)
    found = build(argv, tp_rank, ep_rank)
    for index, (chunk, place) in enumerate(zip(found, chunk_places(case), strict=True)):
        expected = chunk_tensors(
            case.shape,
            place,
            tensor_parallel=case.activations.tensor_parallel,
            expert_parallel=case.expert_parallel,
        )
        assert chunk["parameters"] == [tensor.numel for tensor in expected], (argv, index)
    count = count_parameters(case.shape)
    assert sum(sum(chunk["biases"]) for chunk in found) == count.buffers + count.mtp_buffers


def whole(shape: ModelShape, case: MemoryCase) -> int:
    """Parameters of all ranks together, each one counted once."""
    tensor, experts = case.activations.tensor_parallel, case.expert_parallel
    total = 0
    for index, place in enumerate(chunk_places(case)):
        for part in chunk_tensors(shape, place, tensor_parallel=tensor, expert_parallel=experts):
            # The first stage has the embedding; copies of it are the same parameters.
            if part.shared_embedding and index:
                continue
            total += part.numel * (1 if part.replicated else tensor) * (experts if part.expert else 1)
    return total


def test_every_published_model_has_a_preset() -> None:
    assert set(PUBLISHED) <= set(presets.names())


@pytest.mark.parametrize(("name", "expected"), PUBLISHED.items())
def test_published_totals(name: str, expected: int) -> None:
    count = count_parameters(model_shape(load_config(["--model", name])))
    assert count.total == expected
    biases = (V3_BIASES, V3_DEPTH_BIASES, V3_DEPTH) if name == "deepseek_v3" else (0, 0, 0)
    assert (count.buffers, count.mtp_buffers, count.mtp) == biases


@pytest.mark.parametrize("name", [name for name in presets.names() if not name.endswith("_tiny")])
def test_presets_agree_with_what_megatron_core_builds(build: Build, name: str) -> None:
    check_built(build, [*arguments(name), "--moe-grouped-gemm"])


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_one_module_per_expert_is_the_same(build: Build, name: str) -> None:
    vocabulary = "--vocab-size 4096" if name.endswith("_tiny") else ""
    check_built(build, [*arguments(name, vocabulary), "--no-moe-grouped-gemm"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_hold_what_is_predicted_and_add_up(build: Build, name: str) -> None:
    argv = [*arguments(name, LAYOUTS[name]), "--moe-grouped-gemm"]
    case = case_of(argv)
    count = count_parameters(case.shape)
    assert whole(case.shape, case) == count.trained
    if name in PUBLISHED:
        assert count.total == PUBLISHED[name]
    check_built(build, argv)
    check_built(build, argv, tp_rank=case.activations.tensor_parallel - 1, ep_rank=case.expert_parallel - 1)


def test_a_wrong_shape_is_noticed(build: Build) -> None:
    argv = arguments("mixtral_tiny", "--vocab-size 512")
    found = build(argv, 0, 0)
    shape: Any = dataclasses.replace(case_of(argv).shape, moe_ffn_hidden_size=176)
    place = ChunkPlace(layers=4, first=True, last=True)
    assert found[0]["parameters"] != [tensor.numel for tensor in chunk_tensors(shape, place)]


@pytest.mark.parametrize(
    "switches",
    [
        "--no-untie-embeddings-and-output-weights",
        "--position-embedding-type learned_absolute --normalization LayerNorm",
        "--mtp-num-layers 2 --no-untie-embeddings-and-output-weights",
        "--moe-layer-freq 2 --mtp-num-layers 2 --position-embedding-type learned_absolute",
    ],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_embeddings_that_stages_share(build: Build, switches: str, stages: int) -> None:
    layout = f"--vocab-size 512 --pipeline-model-parallel-size {stages} {switches}"
    check_built(build, arguments("deepseekv3_tiny", layout))


SMALL = (
    "--family deepseek --vocab-size 64 --make-vocab-size-divisible-by 1 --seq-length 8 --disable-bias-linear "
    "--max-position-embeddings 8 --num-attention-heads 4 --ffn-hidden-size 24"
)


@st.composite
def small_models(draw: st.DrawFn) -> list[str]:
    """The command line of a small model with experts, latent attention and further tokens, in some layout."""
    tensor, expert, stages = (draw(st.sampled_from([1, 2])) for _ in range(3))
    layers = stages * draw(st.integers(1, 3))
    kinds = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers).filter(any))
    argv = [
        *SMALL.split(),
        f"--num-layers={layers}",
        f"--hidden-size={draw(st.sampled_from([8, 16]))}",
        f"--num-experts={4 * draw(st.integers(1, 2))}",
        f"--moe-ffn-hidden-size={2 * draw(st.integers(1, 20))}",
        f"--moe-layer-freq=[{','.join(map(str, kinds))}]",
        f"--normalization={draw(st.sampled_from(['LayerNorm', 'RMSNorm']))}",
        f"--position-embedding-type={draw(st.sampled_from(['rope', 'learned_absolute']))}",
        f"--tensor-model-parallel-size={tensor}",
        f"--expert-model-parallel-size={expert}",
        f"--pipeline-model-parallel-size={stages}",
        f"--global-batch-size={2 * stages}",
        draw(st.sampled_from(["--moe-grouped-gemm", "--no-moe-grouped-gemm"])),
    ]
    if tensor > 1:
        argv.append("--sequence-parallel")
    if draw(st.booleans()):
        argv.append(f"--moe-shared-expert-intermediate-size={2 * draw(st.integers(1, 20))}")
    if draw(st.booleans()):
        argv += ["--moe-router-score-function=sigmoid", "--moe-router-enable-expert-bias"]
    if draw(st.booleans()):
        argv += ["--multi-latent-attention", f"--kv-lora-rank={draw(st.integers(1, 20))}"]
        argv += ["--qk-head-dim=6", "--qk-pos-emb-head-dim=4", f"--v-head-dim={draw(st.integers(1, 12))}"]
        if draw(st.booleans()):
            argv.append(f"--q-lora-rank={draw(st.integers(1, 20))}")
    for switch in ("--gated-linear-unit", "--qk-layernorm", "--untie-embeddings-and-output-weights"):
        if draw(st.booleans()):
            argv.append(switch)
    if draw(st.booleans()):
        argv.append(f"--mtp-num-layers={draw(st.integers(1, 2))}")
    return argv


@given(argv=small_models())
@settings(max_examples=40, deadline=None)
def test_random_models_agree_and_add_up(build: Build, argv: list[str]) -> None:
    check_built(build, argv)
    case = case_of(argv)
    assert whole(case.shape, case) == count_parameters(case.shape).trained
