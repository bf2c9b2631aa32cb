"""The family bert: its model beside Hugging Face's, its losses, its layouts, a run that goes on."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.data.prepare.prepare import prepare_corpus
from mt_megatron.planning.build import model_shape
from mt_megatron.planning.flops import forward_flops
from mt_megatron.planning.parameter_tensors import ChunkPlace, chunk_tensors
from mt_megatron.planning.parameters import count_parameters
from mt_megatron.training.validate import problems
from tests.launch import run_ranks
from tests.second_lane import of_lane
from tests.training.architectures.bert_cases import HALF, MODEL, PLAIN, STEPS, TOLERANCE_FP64, TRAINING

HERE = "tests.training.architectures.bert_cases"
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sentences of the docstrings of some modules, and a WordPiece of 600 tokens."""
    folder = tmp_path_factory.mktemp("bert")
    texts = [json, inspect, pytest.approx, json.JSONDecoder, json.JSONEncoder, inspect.Signature, Path]
    sources = [inspect.getsource(each) for each in texts]
    parts = [part for source in sources for part in source.split('"""')[1::2] if len(part) > 80]
    lines = "".join(json.dumps({"text": part}) + "\n" for part in parts)
    (folder / "texts.jsonl").write_text(lines)
    prepare_corpus(
        folder / "data",
        corpus=folder / "texts.jsonl",
        vocab_size=600,
        validation_fraction=0.2,
        split_sentences=True,
        log=lambda line: None,
    )
    return str(folder / "data")


@pytest.mark.parametrize(
    ("seed", "layers", "hidden", "heads", "binary"),
    of_lane(
        {
            "two_heads": (1, 2, 24, 3, True),
            "masked_words": (2, 1, 16, 2, False),
            "deeper": (3, 5, 64, 8, True),
            "one_head": (4, 2, 20, 1, True),
        },
        "two_heads",
    ).values(),
)
def test_logits_equal_hugging_face(seed: int, layers: int, hidden: int, heads: int, binary: bool) -> None:
    [found] = run_ranks(1, f"{HERE}:beside_hugging_face", seed, layers, hidden, heads, binary)
    # Differences are parts of the largest logit.
    assert found.pop("difference") <= TOLERANCE_FP64 * 1e-6, found
    assert min(found.values()) > TOLERANCE_FP64, found


def test_losses_are_those_of_the_formula(tmp_path: Path, data: str) -> None:
    [found] = run_ranks(1, f"{HERE}:losses_by_hand", str(tmp_path), data)
    assert found["masked"] > 8
    # Sums of the logarithms of 600 words, in fp32.
    assert found["recorded"] == pytest.approx(found["by_hand"], abs=1e-6 * found["by_hand"][0])


def test_a_run_goes_on_under_every_layout(tmp_path: Path, data: str) -> None:
    before = f"{PLAIN} {ZERO1}"
    tensor, stages = (f"{PLAIN} --use-distributed-optimizer {flags}" for flags in (TP2, PP2))
    after = of_lane(
        {
            "same": before,
            "tp2_sp": f"{tensor} --sequence-parallel",
            "pp2": stages,
            "tp2": tensor,
            "vpp2": f"{stages} --virtual-pipeline-model-parallel-size 2",
            "zb_h1": f"{stages} --pipeline-schedule zb_h1",
            "recomputed": f"{before} {FULL}",
        },
        *("same", "tp2_sp", "pp2"),
    )
    found = run_ranks(2, f"{HERE}:moved", str(tmp_path), data, before, after, timeout=300)[0]
    whole = found.pop("whole")
    assert not {name: each["error"] for name, each in found.items() if "error" in each}
    for name, one in found.items():
        for step in map(str, range(HALF + 1, STEPS + 1)):
            expected, record = whole["records"][step], one["records"][step]
            if name == "same":
                assert one["steps"][step] == whole["steps"][step]
            for key in ("loss", "sentence_order_loss", "grad_norm"):
                assert record[key] == pytest.approx(expected[key], abs=1e-5 * expected["loss"]), (name, key)
        assert one["valid"][-1][2] == whole["valid"][-1][2]


RESUMED = of_lane(
    {
        "zero1_bf16": f"{DROPOUT} {ZERO1} --bf16",
        "tp2_sp": f"{DROPOUT} {TP2} --sequence-parallel",
        "pp2": f"{DROPOUT} {PP2} {FULL}",
        "no_order": f"{DROPOUT} --bert-no-binary-head --calculate-per-token-loss",
        "rope": f"{DROPOUT} --position-embedding-type rope --rotary-base 500 {ZERO1}",
    },
    "zero1_bf16",
)


def test_a_resumed_run_continues_to_the_bit(tmp_path: Path, data: str) -> None:
    found = run_ranks(2, f"{HERE}:interrupted", str(tmp_path), data, RESUMED, timeout=300)[0]
    for name, parts in found.items():
        assert "error" not in parts["whole"], parts["whole"]
        assert {**parts["first"]["steps"], **parts["second"]["steps"]} == parts["whole"]["steps"], name
        assert parts["second"]["valid"][-1] == parts["whole"]["valid"][-1], name


LAYOUTS = {"one": (1, ""), "tp2": (2, TP2), "pp2": (2, PP2), "no_order": (1, "--bert-no-binary-head")}


@pytest.mark.parametrize("name", of_lane(LAYOUTS, "one", "pp2"))
def test_the_plan_counts_every_parameter(name: str) -> None:
    ranks, flags = LAYOUTS[name]
    built = run_ranks(ranks, f"{HERE}:parameters", flags)
    config = load_config(f"{MODEL} --vocab-size 96 {flags}".split())
    shape, parallel = model_shape(config), config.parallel
    stages, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    places = [
        ChunkPlace(layers=4 // stages, first=stage == 0, last=stage == stages - 1) for stage in range(stages)
    ]
    planned = [[each.numel for each in chunk_tensors(shape, at, tensor_parallel=tp)] for at in places]
    assert built == (planned if stages > 1 else planned * ranks)
    if ranks == 1:
        assert count_parameters(shape).total == sum(built[0])


def test_published_sizes_and_floating_point_operations() -> None:
    # arXiv:1909.08053, table 4, to as many digits as it has.
    for name, billions in (("bert_336m", "0.336"), ("bert_1.3b", "1.3"), ("bert_3.9b", "3.9")):
        shape = model_shape(load_config(["--model", name]))
        assert f"{count_parameters(shape).total / 1e9:.{len(billions) - 2}f}" == billions
    flops = forward_flops(shape, 512)
    hidden, words = shape.hidden_size, shape.vocab_size
    layer = 2 * (4 + 8) * hidden * hidden + 4 * 512 * hidden
    assert flops.total == shape.num_layers * layer + 2 * hidden * (hidden + words)


def test_what_the_family_has_not_is_refused() -> None:
    flags = f"{MODEL} {TRAINING} --mock-data --vocab-size 96"
    found = problems(load_config(flags.split()), check_files=False)
    assert len(found) == 1 and "mock_data is True; expected False: the family bert" in found[0]
    for more, text in (
        ("--num-experts 2", "num_moe_experts is 2; expected None: the family bert"),
        ("--context-parallel-size 2", "context_parallel_size is 2; expected 1: the family bert"),
        ("--reset-attention-mask", "reset_attention_mask is True; expected False: the family bert"),
        ("--mask-prob 1", "mask_prob is 1.0; expected 0 < share < 1. Set --mask-prob"),
    ):
        lines = problems(load_config(f"{flags} {more}".split()), world_size=2, check_files=False)
        assert any(text in line for line in lines), (more, lines)


def test_a_conversion_names_the_family() -> None:
    from mt_megatron.errors import ConfigError
    from mt_megatron.models.families import family_of

    config = load_config(f"{MODEL} --vocab-size 96".split())
    with pytest.raises(ConfigError, match="the family bert has no conversion"):
        family_of(config).convert_table(config)


def test_a_tokenizer_without_berts_tokens_is_refused(tmp_path: Path, data: str) -> None:
    found: Any = run_ranks(
        1,
        f"{HERE}:interrupted",
        str(tmp_path),
        data,
        {"null": "--tokenizer-type NullTokenizer --vocab-size 600"},
    )[0]
    assert "the tokenizer has no [CLS] [SEP] [PAD] [MASK]" in found["null"]["whole"]["error"]
