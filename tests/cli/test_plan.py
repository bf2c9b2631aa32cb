"""``mt-megatron plan``."""

from __future__ import annotations

import json
import shlex

import pytest

from mt_megatron.cli.main import main
from mt_megatron.cli.plan import command
from mt_megatron.config import presets
from mt_megatron.config.parse import load_config
from mt_megatron.planning.hardware import DEVICES
from mt_megatron.planning.layouts import Layout
from mt_megatron.planning.suggest import Suggestion


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["plan", "--json", *arguments]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3.1_405b", 405_853_388_800),
        ("llama3_405b", 405_853_388_800),
    ],
)
def test_parameters_are_exact(capsys: pytest.CaptureFixture[str], name: str, expected: int) -> None:
    found = plan(capsys, "--model", name)
    assert found["parameters"] == found["active_parameters"] == expected
    assert sum(found["modules"].values()) == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", presets.names())
def test_the_comment_of_each_preset_states_its_true_count(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    vocabulary = ["--vocab-size", "4096"] if name.endswith("_tiny") else []
    found = plan(capsys, "--model", name, *vocabulary)
    text = presets.path(name).read_text()
    assert f"{found['parameters']:,} parameters" in text
    if found["active_parameters"] != found["parameters"]:
        assert f"a token uses {found['active_parameters']:,}" in " ".join(text.replace("#", "").split())


def test_options_change_the_model_and_padding_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--model", "llama3_8b", "--tensor-model-parallel-size", "4", "--num-layers", "31")
    layer = (8_030_261_248 - 2 * 128256 * 4096 - 4096) // 32
    assert found["parameters"] == 8_030_261_248 - layer
    padded = found["padded"]
    assert isinstance(padded, dict)
    assert padded["vocab_size"] == 128512
    assert padded["parameters"] == found["parameters"] + 2 * 256 * 4096  # type: ignore[operator]


def test_text_names_model_parts_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama3_8b", "--tensor-model-parallel-size=4"]) == 0
    text = capsys.readouterr().out
    for part in ("llama3_8b: 32 layers", "8,030,261,248", "attention", "vocabulary padded to 128512"):
        assert part in text
    assert "router" not in text


def test_text_names_active_parameters_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama3_8b", "--num-experts", "8"]) == 0
    text = capsys.readouterr().out
    assert "router" in text and "active" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model is given. Name a preset"),
        (("--model", "llama3_tiny"), "vocab_size not set. Set --vocab-size"),
        (("--num-layers", "2"), "hidden_size"),
        (("--model", "llama3_8b", "--hidden-size", "4095"), "no multiple of num_attention_heads"),
    ],
)
def test_incomplete_models_are_wrong_use(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


LAYOUT = (
    *("--tensor-model-parallel-size", "8", "--sequence-parallel", "--pipeline-model-parallel-size", "4"),
    *("--use-distributed-optimizer", "--global-batch-size", "512"),
)


def test_operations_and_memory_have_their_promised_names(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--model", "llama3_70b", "--world-size", "64", *LAYOUT)
    memory, stages = found["memory_per_rank_bytes"], found["memory_per_stage_bytes"]
    assert isinstance(memory, dict) and isinstance(stages, list)
    assert memory == max(stages, key=lambda stage: int(stage["total"])) and len(stages) == 4
    parts = {name: value for name, value in memory.items() if name not in ("total", "pipeline_stage")}
    names = {"weights", "gradients", "optimizer", "activations", "workspace", "communication", "casts"}
    assert set(parts) == names and parts["casts"] == 0
    assert memory["total"] == sum(parts.values())
    assert found["flops_per_step"] == found["flops_per_token"] * 512 * 8192  # type: ignore[operator]
    assert found["world_size"] == 64 and found["not_estimated"] == []


def test_recomputation_adds_operations_and_saves_memory(capsys: pytest.CaptureFixture[str]) -> None:
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    plain = plan(capsys, "--model", "llama3_8b")
    again = plan(capsys, "--model", "llama3_8b", *full)
    assert again["flops_per_token"] == plain["flops_per_token"] == plain["executed_flops_per_token"]
    assert again["executed_flops_per_token"] > plain["executed_flops_per_token"]  # type: ignore[operator]
    less, more = again["memory_per_rank_bytes"], plain["memory_per_rank_bytes"]
    assert less["total"] < more["total"]  # type: ignore[index]


def test_what_cannot_be_estimated_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    piped = plan(capsys, "--model", "llama3_8b", "--pipeline-model-parallel-size", "4")
    assert "--global-batch-size" in str(piped["not_estimated"])


V3 = (
    *("--model", "deepseek_v3", "--pipeline-model-parallel-size", "16", "--expert-model-parallel-size", "64"),
    *("--pipeline-model-parallel-layout", "balanced", "--use-distributed-optimizer"),
    *("--world-size", "2048", "--global-batch-size", "15360"),
)


def test_experts_latents_and_further_tokens_have_their_promised_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = plan(capsys, *V3)
    assert found["parameters"] == 671_026_404_352 and found["expert_bias_buffers"] == 14_848
    assert found["expert_parameters"] == 58 * 256 * 3 * 7168 * 2048
    assert found["active_expert_parameters"] == 58 * 8 * 3 * 7168 * 2048
    assert found["shared_expert_parameters"] == 58 * 3 * 7168 * 2048
    assert found["mtp_parameters"] == 11_610_067_968 and found["mtp_expert_bias_buffers"] == 256
    assert sum(found["modules"].values()) == found["parameters"]  # type: ignore[attr-defined]
    assert found["expert_data_parallel_size"] == 2 and found["expert_imbalance_assumed"] == 1.2
    layers, states = found["layers_per_chunk"], found["expert_state_per_stage_bytes"]
    assert isinstance(layers, list) and isinstance(states, list)
    assert sum(layers) == 61 and len(layers) == len(states) == 16
    # The first stage has three dense layers; a mixture's experts are 4 of 256 on each rank.
    assert states[0]["weights"] == pytest.approx((layers[0] - 3) * 4 * 3 * 7168 * 2048 * 2, rel=1e-3)
    for state, stage in zip(states, found["memory_per_stage_bytes"], strict=True):  # type: ignore[call-overload]
        assert all(state[name] <= stage[name] for name in ("weights", "gradients", "optimizer"))


def test_the_imbalance_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    even, uneven = (plan(capsys, *V3, "--expert-imbalance", by) for by in ("1", "1.5"))
    less, more = (each["memory_per_rank_bytes"]["activations"] for each in (even, uneven))  # type: ignore[index]
    assert less < more
    assert main(["plan", *V3, "--expert-imbalance", "0.9"]) == 2
    assert "--expert-imbalance is 0.9" in capsys.readouterr().err


def test_text_tells_of_experts_and_uneven_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *V3]) == 0
    text = capsys.readouterr().out
    for part in ("256 experts of 2048, 8 used", "latent attention 1536 q, 512 kv", "multi-token prediction"):
        assert part in text
    assert "layers of each model chunk: 4,4," in text and "data-parallel size is 2" in text


def test_text_tells_memory_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama3_70b", "--world-size", "64", *LAYOUT]) == 0
    text = capsys.readouterr().out
    for part in ("per token", "per step of 4,194,304 tokens", "optimizer", "GiB", "pipeline stage 0 of 4"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tensor-model-parallel-size", "16"), "num_query_groups is 8"),
        (("--pipeline-model-parallel-size", "5"), "num_layers is 32"),
        (("--world-size", "6", "--tensor-model-parallel-size", "4"), "world size is 6"),
        (("--suggest",), "--suggest needs --world-size and --device-memory"),
        (
            ("--suggest", "--world-size", "8", "--device-memory", "H100", "--no-bf16"),
            "this run is in fp32 and the known peaks are those of bf16",
        ),
        (("--suggest", "--world-size", "8", "--device-memory", "lots"), "--device-memory is 'lots'"),
        (("--suggest", "--world-size", "8", "--device-memory", "H100", "--top", "0"), "--top is 0"),
        (
            ("--suggest", "--world-size", "8", "--device-memory", "4090"),
            "--device-memory is 4090: 4090 bytes a device, and a layer has 2",
        ),
        (("--suggest", "--world-size", "8", "--device-memory", "24"), "with its unit, such as 24GiB"),
    ],
)
def test_impossible_layouts_are_wrong_use(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["plan", "--model", "llama3_8b", *arguments]) == 2
    assert message in capsys.readouterr().err


SUGGEST = ("--suggest", "--world-size", "8", "--device-memory", "H100", "--global-batch-size", "64")


def test_suggestions_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama3_8b", *SUGGEST, "--top", "3"]) == 0
    text = capsys.readouterr().out
    for part in ("8 x H100", "not measurements", "TP", "MFU", "more (--top", "The others:", "GiB"):
        assert part in text
    assert max(map(len, text.splitlines())) > 120, "the command is one line to paste"
    assert "still missing to be added (data, steps, --save; --lr 0.0003 and --bf16 from the preset)" in text


def test_nothing_that_fits_leaves_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--suggest", "--world-size", "1", "--device-memory", "8GiB")
    assert main(["plan", "--model", "llama3_8b", *words]) == 1
    text = capsys.readouterr().out
    assert "No layout fits.\n\nWhy not:\n" in text and "The others:" not in text


def test_the_table_has_expert_parallelism_where_there_are_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("--suggest", "--world-size", "64", "--device-memory", "H100", "--global-batch-size", "256")
    for model, expected in (("mixtral_8x7b", True), ("llama3_8b", False)):
        assert main(["plan", "--model", model, *argv, "--pipeline-model-parallel-size", "4"]) == 0
        head = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("TP "))
        assert ("EP" in head.split()) == expected


def test_suggestions_as_json_have_a_command_that_loads(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--model", "llama3_8b", *SUGGEST, "--top", "2", "--inter-node-gbps", "25")
    layouts = found["layouts"]
    assert isinstance(layouts, list) and len(layouts) == 2
    assert found["assumptions"]["inter_node_gbps"] == 25.0  # type: ignore[index]
    words = shlex.split(layouts[0]["command"])
    assert words[:4] == ["mt-megatron", "launch", "--gpus-per-node", "8"]
    config = load_config(words[words.index("--") + 1 :])
    assert config.parallel.tensor_model_parallel_size == layouts[0]["layout"]["tensor"]
    assert layouts[0]["memory_per_rank_bytes"]["total"] < 80 * 2**30
    assert layouts[0]["step_seconds_estimate"]["total"] <= layouts[1]["step_seconds_estimate"]["total"]


def test_uneven_layers_are_told_with_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--suggest", "--world-size", "16", "--device-memory", "H200", "--global-batch-size", "64")
    found = plan(capsys, "--model", "deepseek_v2_lite", *argv, "--pipeline-model-parallel-size", "4")
    layouts = found["layouts"]
    assert isinstance(layouts, list) and layouts
    for each in layouts:
        layout = each["layout"]
        counts = layout["layers_per_chunk"]
        assert layout["balanced"] and sum(counts) == 27 and len(counts) == 4 * layout["chunks"]
        assert layout["first_layers"] == sum(counts[::4]) and layout["last_layers"] == sum(counts[3::4])
        assert "--pipeline-model-parallel-layout balanced" in each["command"]


@pytest.mark.parametrize(
    ("devices", "tensor", "nodes", "per_node"),
    [(8, 2, None, 8), (16, 8, 2, 8), (12, 4, 3, 4), (12, 2, 2, 6), (7, 1, None, 7)],
)
def test_the_command_starts_exactly_the_devices(
    devices: int, tensor: int, nodes: int | None, per_node: int
) -> None:
    config = load_config(["--model", "llama3_8b", "--global-batch-size", "168"])
    found = Suggestion(config=config, world_size=devices, hardware=DEVICES["h100"], assumed=[])
    words = command(Layout(tensor=tensor), found, []).split()
    assert words[3] == str(per_node) and ("--nodes" in words) == (nodes is not None)
    if nodes is not None:
        assert words[words.index("--nodes") + 1] == str(nodes) and nodes * per_node == devices


def test_when_nothing_fits_the_exit_code_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--model", "llama3_8b", "--suggest", "--world-size", "1", "--device-memory", "40GiB"]
    assert main([*argv, "--global-batch-size", "8"]) == 1
    text = capsys.readouterr().out
    assert "No layout fits." in text and "what would fit: devices of at least" in text
