"""Closed-form parameter counts against models that were really built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_megatron.config.parse import load_config
from mt_megatron.planning.build import model_shape
from mt_megatron.planning.parameters import ModelShape, ParameterCount, count_parameters, padded_vocab_size

Oracle = Callable[[list[str]], list[int]]

# Totals of the Hugging Face classes on the meta device, which are the published ones.
PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3.1_405b": 405_853_388_800,
    "llama3_405b": 405_853_388_800,
}
MIXTRAL = (
    "--num-layers {0} --hidden-size {1} --ffn-hidden-size {2} --num-attention-heads {3} --num-query-groups 8 "
    "--vocab-size 32000 --num-experts 8 --moe-router-topk 2 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--seq-length 64"
)


def closed_form(argv: list[str]) -> ParameterCount:
    return count_parameters(model_shape(load_config(argv)))


@pytest.fixture(scope="module", params=["meta", "cpu"])
def oracle(request: pytest.FixtureRequest) -> Iterator[Oracle]:
    """Answers ``[total, active, embedding, head]`` for the command line of a configuration."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.planning.parameter_oracle", request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert process.stdin is not None and process.stdout is not None

    def ask(argv: list[str]) -> list[int]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([argv]) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("counts:"):
                counts: list[int] = json.loads(line.removeprefix("counts:"))[0]
                return counts
        raise AssertionError("the oracle's process ended; its stderr says why")

    yield ask
    process.stdin.close()
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(("name", "expected"), PUBLISHED.items())
def test_published_totals(name: str, expected: int) -> None:
    assert closed_form(["--model", name]).total == expected


@pytest.mark.parametrize(
    ("sizes", "total", "active"),
    [
        ((32, 4096, 14336, 32), 46_702_792_704, 12_879_925_248),
        ((56, 6144, 16384, 48), 140_620_634_112, None),
    ],
)
def test_published_totals_of_mixtral(sizes: tuple[int, ...], total: int, active: int | None) -> None:
    count = closed_form(MIXTRAL.format(*sizes).split())
    assert count.total == total
    assert active is None or count.active == active


@pytest.mark.parametrize("oracle", ["meta"], indirect=True)
@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "llama3.1_405b"])
def test_presets_agree_with_the_model_that_megatron_core_builds(oracle: Oracle, name: str) -> None:
    total, active, embedding, head = oracle(["--model", name])
    count = closed_form(["--model", name])
    assert [count.total, count.active, count.embedding, count.head] == [total, active, embedding, head]


@st.composite
def small_models(draw: st.DrawFn) -> list[str]:
    """The command line of a small model of any of the supported kinds."""
    groups = draw(st.sampled_from([1, 2, 4]))
    heads = groups * draw(st.sampled_from([1, 2, 3]))
    channels = draw(st.sampled_from([2, 4, 8]))
    # Upstream needs head sizes that add up to the hidden size unless kv_channels is given.
    argv = [
        f"--num-layers={draw(st.integers(1, 3))}",
        f"--hidden-size={draw(st.sampled_from([8, 16, 24]))}",
        f"--ffn-hidden-size={draw(st.integers(1, 40))}",
        f"--num-attention-heads={heads}",
        f"--num-query-groups={groups}",
        f"--kv-channels={channels}",
        f"--vocab-size={draw(st.integers(1, 50))}",
        f"--max-position-embeddings={draw(st.integers(1, 20))}",
        f"--normalization={draw(st.sampled_from(['LayerNorm', 'RMSNorm']))}",
        f"--position-embedding-type={draw(st.sampled_from(['rope', 'learned_absolute', 'none']))}",
    ]
    for switch in (
        "--gated-linear-unit",
        "--disable-bias-linear",
        "--add-qkv-bias",
        "--untie-embeddings-and-output-weights",
        "--qk-layernorm",
    ):
        if draw(st.booleans()):
            argv.append(switch)
    if draw(st.booleans()):
        experts = draw(st.integers(1, 5))
        argv += [f"--num-experts={experts}", f"--moe-router-topk={draw(st.integers(1, min(3, experts)))}"]
        # Grouped experts have no biases, and no name of their own in what is built. A softmax after the
        # choice of one would always be 1.
        argv += ["--no-moe-grouped-gemm", "--moe-router-pre-softmax"]
    return argv


@given(argv=small_models())
@settings(max_examples=60, deadline=None)
def test_closed_form_agrees_with_built_models(oracle: Oracle, argv: list[str]) -> None:
    count = closed_form(argv)
    assert [count.total, count.active, count.embedding, count.head] == oracle(argv)


def test_grouped_experts_have_no_biases() -> None:
    shape = model_shape(load_config(MIXTRAL.format(1, 64, 32, 8).split()))
    biased = ModelShape(**{**vars(shape), "add_bias_linear": True, "moe_grouped_gemm": True})
    assert count_parameters(biased).mlp == count_parameters(shape).mlp


@given(vocab=st.integers(1, 300_000), unit=st.integers(1, 256), tp=st.integers(1, 16))
def test_padded_vocabulary_is_the_next_multiple(vocab: int, unit: int, tp: int) -> None:
    padded = padded_vocab_size(vocab, divisible_by=unit, tensor_parallel=tp)
    assert padded % (unit * tp) == 0
    assert 0 <= padded - vocab < unit * tp
