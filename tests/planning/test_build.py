"""What is built from a configuration: Megatron-Core's own objects hold what was asked for."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from mt_megatron.config.parse import load_config
from tests.launch import run_command

_BUILD = """
import dataclasses, json, sys, torch, warnings
warnings.simplefilter("ignore")
import mt_megatron
mt_megatron.patch("cpu")
from mt_megatron.planning.build import ddp_config, optimizer_config, transformer_config
from mt_megatron.config.parse import load_config
def plain(value):
    if callable(value):
        return "callable:" + value.__qualname__
    return str(value) if type(value).__name__ == "dtype" else value
def fields(obj):
    names = [f.name for f in dataclasses.fields(obj) if not f.name.startswith("_")]
    return {name: plain(getattr(obj, name)) for name in names}
def drawn(config):
    methods = config.init_method, config.output_layer_init_method
    return [float(draw(torch.empty(64, 64)).std()) for draw in methods]
found = []
for argv in json.loads(sys.argv[1]):
    c = load_config(argv)
    transformer = transformer_config(c)
    transformer_fields = fields(transformer) | {"drawn": drawn(transformer)}
    found.append([transformer_fields, fields(optimizer_config(c)), fields(ddp_config(c))])
print("built:" + json.dumps(found))
"""

SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
COMMANDS = {
    "defaults": SMALL,
    "llama3_8b": "--model llama3_8b",
    "llama3_70b": "--model llama3_70b",
    "llama3.1_405b": "--model llama3.1_405b",
    "llama3_tiny": "--model llama3_tiny",
    "deepseek_v3": "--model deepseek_v3",
    "parallel": SMALL
    + " --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    + " --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer --overlap-grad-reduce"
    + " --overlap-param-gather --bf16 --ddp-bucket-size 1000 --no-check-for-nan-in-grad",
    "fp16": SMALL + " --fp16 --loss-scale 128 --autocast-dtype float16 --recompute-activations",
    "squared_relu": SMALL + " --squared-relu --init-method-xavier-uniform --no-grad-reduce-in-fp32",
    "mixture": SMALL
    + " --num-experts 8 --disable-bias-linear --moe-ffn-hidden-size 24 --moe-layer-freq [0,1,1,1]"
    + " --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid"
    + " --pipeline-model-parallel-layout 1,3 --pipeline-model-parallel-size 2 --bf16",
    "balanced": SMALL
    + " --num-layers 7 --vocab-size 4096 --max-position-embeddings 32"
    + " --pipeline-model-parallel-layout balanced"
    + " --pipeline-model-parallel-size 2",
    "latent": SMALL
    + " --multi-latent-attention --q-lora-rank 8 --rope-type yarn --rotary-base 50000"
    + " --position-embedding-type rope",
    "swiglu": SMALL + " --swiglu --ffn-hidden-size 96 --lr 1e-3 --adam-beta2 0.95",
}
CASES = {name: command.split() for name, command in COMMANDS.items()}


@pytest.fixture(scope="module")
def built() -> dict[str, list[dict[str, Any]]]:
    """Fields of the three objects of every case, built by one patched process."""
    done = run_command([sys.executable, "-c", _BUILD, json.dumps(list(CASES.values()))], timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("built:")[1])
    return dict(zip(CASES, found, strict=True))


def same(ours: object, theirs: object) -> bool:
    """Whether a value by name is the object that it names."""
    if isinstance(theirs, str) and theirs.startswith("callable:"):
        named = {
            "normal": "init_method_normal",
            "scaled_normal": "scaled_init_method_normal",
            "xavier_uniform": "xavier_uniform_",
        }
        return theirs.removeprefix("callable:").split(".")[0] == named.get(str(ours), ours)
    if isinstance(theirs, str) and theirs.startswith("torch."):
        return ours is None or theirs == f"torch.{ours}"
    return (list(ours) if isinstance(ours, tuple) else ours) == theirs


@pytest.mark.parametrize("case", CASES)
def test_every_value_of_the_configuration_arrives(built: dict[str, list[dict[str, Any]]], case: str) -> None:
    config = load_config(CASES[case])
    transformer, optimizer, ddp = built[case]
    for section, theirs in (
        (config.model.core, transformer),
        (config.optimizer, optimizer),
        (config.ddp, ddp),
    ):
        for name, value in section.values.items():
            if value == "balanced":
                continue  # numbers by then: see below
            assert same(value, theirs[name]), (name, value, theirs[name])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("defaults", "float32"), ("parallel", "bfloat16"), ("fp16", "float16"), ("llama3_8b", "bfloat16")],
)
def test_precision_reaches_all_of_them(built: dict[str, list[dict[str, Any]]], case: str, dtype: str) -> None:
    transformer, optimizer, _ = built[case]
    assert transformer["params_dtype"] == transformer["pipeline_dtype"] == f"torch.{dtype}"
    assert optimizer["params_dtype"] == f"torch.{dtype}"
    for each in (transformer, optimizer):
        assert (each["bf16"], each["fp16"]) == (dtype == "bfloat16", dtype == "float16")


def test_layout_reaches_all_of_them(built: dict[str, list[dict[str, Any]]]) -> None:
    transformer, optimizer, ddp = built["parallel"]
    assert transformer["virtual_pipeline_model_parallel_size"] == 2
    assert transformer["sequence_parallel"] is True
    assert transformer["tensor_model_parallel_size"] == transformer["pipeline_model_parallel_size"] == 2
    assert (transformer["overlap_p2p_comm"], transformer["batch_p2p_comm"]) == (True, False)
    for each in (optimizer, ddp):
        assert each["use_distributed_optimizer"] is True
        assert each["overlap_grad_reduce"] is True
        assert each["overlap_param_gather"] is True
    assert (ddp["bucket_size"], ddp["check_for_nan_in_grad"]) == (1000, False)
    assert ddp["grad_reduce_in_fp32"] is True
    assert built["squared_relu"][2]["grad_reduce_in_fp32"] is False


def test_added_fields_reach_the_transformer(built: dict[str, list[dict[str, Any]]]) -> None:
    mixture, balanced, latent = (built[name][0] for name in ("mixture", "balanced", "latent"))
    assert mixture["moe_layer_freq"] == [0, 1, 1, 1] and mixture["moe_grouped_gemm"] is True
    assert mixture["pipeline_model_parallel_layout"] == [1, 3] and mixture["rotary_base"] is None
    assert len(balanced["pipeline_model_parallel_layout"]) == 2
    assert sum(balanced["pipeline_model_parallel_layout"]) == 7
    assert latent["rotary_base"] == 50000 and latent["q_lora_rank"] == 8
    assert built["defaults"][0]["moe_grouped_gemm"] is False


def test_initial_weights_are_as_wide_as_the_presets_say(built: dict[str, list[dict[str, Any]]]) -> None:
    """DeepSeek's papers draw output layers as all others; elsewhere they are narrower with depth."""
    for case, wide, output in (("deepseek_v3", 0.006, 0.006), ("llama3_8b", 0.02, 0.02 / 64**0.5)):
        assert built[case][0]["drawn"] == pytest.approx([wide, output], rel=0.1)
    for name in ("deepseek_v2", "deepseek_v2_lite"):
        model = load_config(["--model", name]).model
        assert (model.init_method_std, model.output_layer_init_method) == (0.006, "normal")


def test_squared_relu_is_relu_times_relu() -> None:
    code = (
        "import torch\nfrom mt_megatron.planning.build import squared_relu\n"
        "x = torch.linspace(-2, 2, 9)\n"
        "assert torch.equal(squared_relu(x), torch.relu(x) * torch.relu(x))"
    )
    run_command([sys.executable, "-c", code], check=True, timeout=60)
