"""``config.json`` to options and back, for every preset and as transformers reads it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.config import presets
from mt_megatron.config.field_kinds import Kind
from mt_megatron.config.model_change import changes_from
from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.convert.hf.config import ARCHITECTURES, config_json, options_of
from mt_megatron.convert.settings import as_yaml, configuration
from mt_megatron.errors import CheckpointError, ConfigError
from tests.convert import published
from tests.convert.hf import drawn_configs
from tests.convert.published import FAMILIES

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# The family bert has no published form.
PRESETS = sorted(
    path.stem for path in presets.path("llama3_8b").parent.glob("*.yaml") if not path.stem.startswith("bert_")
)


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
    ("preset", "entries"),
    [
        ("llama3.1_8b", {"layer_types": ["full_attention"] * 3, "original_max_position_embeddings": 4096}),
        ("qwen3_30b_a3b", {"num_local_experts": 4}),
        ("deepseek_v3", {"num_local_experts": 4, "num_mtp_layers": 3}),
    ],
)
def test_entries_of_another_size_of_the_architecture_are_left_out(
    preset: str, entries: dict[str, Any]
) -> None:
    config = load_config(["--model", preset, "--vocab-size", "4096"])
    plain = config_json(config.model, dtype="bfloat16")
    like = {"model_type": plain["model_type"], **entries}
    assert config_json(config.model, dtype="bfloat16", like=like) == plain


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_an_entry_that_contradicts_the_export_is_refused(entries: dict[str, Any], said: str) -> None:
    config = load_config(["--model", "mixtral_8x7b"])
    with pytest.raises(ConfigError, match=f"--hf-files.* contradicts the model.*{said}"):
        config_json(config.model, dtype="bfloat16", like={"model_type": "mixtral", **entries})


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


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_settings_are_resolved_as_transformers_does(family: str) -> None:
    """Both spellings, one beside the other, nulls, defaults of the architecture: or refused."""
    from transformers import AutoConfig

    rng = random.Random(f"rotary {family}")
    both = 0
    for _ in range(150):
        document = {"model_type": family, **drawn_configs.plain(family, rng)}
        for name in ("rope_scaling", "rope_parameters"):
            if rng.random() < 0.6:
                document[name] = rng.choice([drawn_configs.rotary(rng), None, {}])
        if rng.random() < 0.4:
            del document["rope_theta"]
        try:
            options = options_of(document)
        except CheckpointError:
            continue
        theirs = AutoConfig.for_model(**json.loads(json.dumps(document))).rope_parameters
        both += 1
        assert theirs["rope_theta"] == options["rotary_base"], document
        assert theirs["rope_type"].replace("default", "rope") == options["rope_type"], document
        for name, ours in (
            ("factor", "rotary_scaling_factor"),
            ("original_max_position_embeddings", "original_max_position_embeddings"),
            ("beta_slow", "beta_slow"),
            ("high_freq_factor", "rope_high_freq_factor"),
        ):
            if theirs.get(name) is not None and options["rope_type"] != "rope":
                assert theirs[name] == options[ours], document
    assert both > 30


@pytest.mark.parametrize(
    ("family", "entries", "said"),
    [
        ("llama", {"rope_theta": None}, "rope_theta = None; expected a number above 0"),
        ("llama", {"num_hidden_layers": "3"}, "num_hidden_layers = '3'; expected a whole number"),
        ("llama", {"hidden_size": 72.0}, "hidden_size = 72.0; expected a whole number"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True; expected False"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05; expected 1e-06"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, "some layer has experts"),
        ("deepseek_v3", {"n_group": 3}, "cannot be built"),
        ("deepseek_v3", {"head_dim": 6}, "head_dim = 6"),
        ("mixtral", {"head_dim": None, "rope_scaling": _YARN}, "a number with YaRN"),
        ("deepseek_v3", {"topk_group": 5, "n_group": 4}, "at most n_group = 4"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 3}, "cannot be built"),
        ("mixtral", {"num_key_value_heads": None}, "num_key_value_heads = None"),
        ("qwen3", {"head_dim": None}, "head_dim = None"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "at least 2"),
    ],
)
def test_what_a_reader_takes_otherwise_is_refused(family: str, entries: dict[str, Any], said: str) -> None:
    document = {"model_type": family, **drawn_configs.plain(family, random.Random(5)), "num_hidden_layers": 3}
    configuration(options_of(document), [], published=True, say=print)
    with pytest.raises(CheckpointError) as caught:
        configuration(options_of({**document, **entries}), [], published=True, say=print)
    assert said in str(caught.value)


def test_defaults_are_the_architectures() -> None:
    """A Mixtral without rope_theta has another one than a Llama."""
    for family, theta in (("mixtral", 1e6), ("llama", 1e4)):
        document = {"model_type": family, **drawn_configs.plain(family, random.Random(5))}
        del document["rope_theta"]
        assert options_of(document)["rotary_base"] == theta
        assert options_of({**document, "hidden_act": "swish"}) == options_of(document)


def test_yarn_without_its_factors_is_what_transformers_takes_it_for() -> None:
    shape = published.draw("qwen3", random.Random(0))
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    options = options_of({"model_type": "qwen3", **shape, "rope_scaling": scaling})
    assert (options["mscale"], options["mscale_all_dim"]) == (1.0, 0.0)
    with pytest.raises(CheckpointError, match="without mscale"):
        options_of({"model_type": "qwen3", **shape, "rope_scaling": {**scaling, "mscale_all_dim": 1.0}})
