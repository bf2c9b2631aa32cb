"""``config.json`` to options and back, for every preset and as transformers reads it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.convert.hf_config import ARCHITECTURES, config_json, options_of
from mt_megatron.convert.settings import as_yaml, configuration
from mt_megatron.errors import CheckpointError, ConfigError
from mt_megatron.models import presets
from mt_megatron.training.arguments import load_config
from mt_megatron.training.config import TrainingConfig
from mt_megatron.training.field_kinds import Kind
from mt_megatron.training.model_change import changes_from
from tests.convert import published
from tests.convert.published import FAMILIES

PRESETS = sorted(path.stem for path in presets.path("llama3_8b").parent.glob("*.yaml"))


def changed(options: dict[str, Any], config: TrainingConfig) -> set[str]:
    """Names of what the model depends on and the two say differently."""
    found = changes_from(options, config)
    return {each.name for each in found if each.kind in (Kind.SHAPE, Kind.FUNCTION)}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_published_form(preset: str) -> None:
    config = load_config(["--model", preset, "--vocab-size", "4096"])
    document = json.loads(json.dumps(config_json(config.model, dtype="bfloat16")))
    assert document["architectures"] == [ARCHITECTURES[document["model_type"]].name]
    options = options_of(document)
    assert changed(options, config) == set()
    # And what it says is enough: the same model, without the preset.
    again = configuration(options, [], published=True, say=print)
    assert changed(options, again) == set()
    assert options_of(config_json(again.model, dtype="bfloat16")) == options


@pytest.mark.parametrize("preset", PRESETS)
def test_transformers_reads_the_same_shape(preset: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = load_config(["--model", preset, "--vocab-size", "4096"])
    document = config_json(config.model, dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(document))
    theirs = AutoConfig.from_pretrained(tmp_path)
    model = config.model
    assert theirs.hidden_size == model.hidden_size
    assert theirs.num_hidden_layers == model.num_layers
    assert theirs.vocab_size == 4096
    assert theirs.rope_parameters["rope_theta"] == model.rotary_base
    assert theirs.tie_word_embeddings is not model.untie_embeddings_and_output_weights
    if model.rope_type != "rope":
        assert theirs.rope_parameters["rope_type"] == model.rope_type
        assert theirs.rope_parameters["factor"] == model.rotary_scaling_factor


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    shape = published.draw(family, random.Random(family))
    published.write(tmp_path, family, shape, seed=0)
    document = json.loads((tmp_path / "config.json").read_text())
    options = options_of(document)
    legacy = {"model_type": family, **shape}
    assert {name: value for name, value in options_of(legacy).items() if name in options} == options


def test_every_difference_is_named() -> None:
    config = load_config(["--model", "llama3_8b"])
    options = options_of(config_json(config.model, dtype="bfloat16"))
    options |= {"hidden_size": 1, "rotary_base": 3.0, "layernorm_epsilon": 1e-4, "rope_type": "yarn"}
    assert changed(options, config) == {"hidden_size", "rotary_base", "layernorm_epsilon", "rope_type"}


def test_options_make_a_file_that_loads(tmp_path: Path) -> None:
    config = load_config(["--model", "deepseek_v3"])
    options = options_of(config_json(config.model, dtype="bfloat16"))
    path = tmp_path / "model.yaml"
    path.write_text(as_yaml(options))
    assert changed(options, load_config([], path)) == set()


def test_entries_of_an_earlier_file_are_kept_unless_they_would_contradict() -> None:
    config = load_config(["--model", "llama3_8b"])
    like = {"model_type": "llama", "eos_token_id": 7, "rope_parameters": {"rope_theta": 1.0}, "auto_map": {}}
    document = config_json(config.model, dtype="bfloat16", like=like)
    assert document["eos_token_id"] == 7
    assert "rope_parameters" not in document and "auto_map" not in document
    other = config_json(config.model, dtype="bfloat16", like={**like, "model_type": "qwen2"})
    assert "eos_token_id" not in other


@pytest.mark.parametrize(
    ("preset", "options", "said"),
    [
        ("llama3_8b", ["--normalization", "LayerNorm"], "normalization"),
        ("llama3_8b", ["--qk-layernorm"], "qk_layernorm"),
        ("mixtral_8x7b", ["--moe-router-pre-softmax"], "moe_router_pre_softmax"),
        ("qwen2.5_7b", ["--no-add-qkv-bias"], "add_qkv_bias"),
        ("deepseek_v3", ["--no-moe-router-enable-expert-bias"], "expert_bias"),
        ("deepseek_v3", ["--moe-router-group-score-topk", "1"], "two best scores"),
        ("deepseek_v2", ["--moe-shared-expert-intermediate-size", "100"], "whole shared experts"),
    ],
)
def test_what_has_no_published_form_is_refused(preset: str, options: list[str], said: str) -> None:
    config = load_config(["--model", preset, *options])
    with pytest.raises(ConfigError, match=said):
        config_json(config.model, dtype="bfloat16")


def test_yarn_without_its_factors_is_what_transformers_takes_it_for() -> None:
    shape = published.draw("qwen3", random.Random(0))
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    options = options_of({"model_type": "qwen3", **shape, "rope_scaling": scaling})
    assert (options["mscale"], options["mscale_all_dim"]) == (1.0, 0.0)
    with pytest.raises(CheckpointError, match="without mscale"):
        options_of({"model_type": "qwen3", **shape, "rope_scaling": {**scaling, "mscale_all_dim": 1.0}})
