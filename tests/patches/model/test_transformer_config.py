"""Megatron-Core's own TransformerConfig accepts what later versions do, wherever it was subclassed."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

import mt_megatron
from mt_megatron.errors import PatchError
from tests.launch import run_command

_SCRIPT = """
import copy, dataclasses, json, pickle, warnings
from dataclasses import dataclass
warnings.simplefilter("ignore")
from megatron.core.transformer.transformer_config import TransformerConfig
import megatron.core.transformer as package
import mt_megatron
from mt_megatron.errors import ConfigError

@dataclass
class Early(TransformerConfig):
    mine: int = 3
def state():
    return {
        (cls.__name__, name): id(value)
        for cls in (TransformerConfig, Early)
        for name, value in vars(cls).items()
        if name != "__slotnames__"  # copy and pickle leave it on every class that they meet
    } | {("module", name): id(value) for name, value in vars(package).items()}
SIZES = dict(num_layers=3, hidden_size=8, num_attention_heads=2)
MIXTURE = dict(SIZES, num_moe_experts=4, moe_ffn_hidden_size=6, moe_layer_freq=[0, 1, 1])
def refused(make, **values):
    try:
        make(**values)
    except (ConfigError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
def without_closures(config):
    config.init_method = config.output_layer_init_method = None
    return config

found = {"unpatched": refused(TransformerConfig, **MIXTURE), "off": []}
plain = without_closures(TransformerConfig(**SIZES))
before = state()
mt_megatron.patch("cpu", features=["model_config", "moe", "mla", "rope"])
@dataclass
class Late(TransformerConfig):
    yours: int = 4
for cls in (TransformerConfig, Early, Late):
    one = without_closures(cls(**MIXTURE))
    other = without_closures(dataclasses.replace(one, moe_ffn_hidden_size=10))
    found[cls.__name__] = {
        "values": [one.moe_ffn_hidden_size, one.moe_layer_freq, other.moe_ffn_hidden_size],
        "unlike": one != other,
        "copies": [copy.deepcopy(one) == one, pickle.loads(pickle.dumps(one)) == one],
        "dict": dataclasses.asdict(one)["moe_layer_freq"],
        "refused": refused(cls, **dict(MIXTURE, moe_layer_freq=[1])),
        "unknown": refused(cls, **SIZES, moe_ffn_size=3),
    }
now = without_closures(TransformerConfig(**SIZES))
found["off"] = [name for name, value in vars(plain).items() if vars(now)[name] != value]
found["of_before"] = [plain.moe_layer_freq, plain.multi_latent_attention]
found["positions"] = list(Early.__match_args__)[-1]

from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig as again
latent = without_closures(MLATransformerConfig(**SIZES, max_position_embeddings=128))
found["latent"] = [
    MLATransformerConfig is again, latent.multi_latent_attention, latent.q_lora_rank, latent.rope_type,
    latent.rotary_scaling_factor, latent.normalization, latent.original_max_position_embeddings,
    pickle.loads(pickle.dumps(latent)) == latent,
]
unstretched = MLATransformerConfig(**SIZES, rope_type="rope", max_position_embeddings=128)
found["unstretched"] = [
    unstretched.rotary_scaling_factor, unstretched.mscale, unstretched.original_max_position_embeddings,
    refused(MLATransformerConfig, **SIZES, rope_type="rope", rotary_scaling_factor=8.0),
]
found["two_lengths"] = refused(
    MLATransformerConfig, **SIZES, max_position_embeddings=1, original_max_position_embeddings=2
)
capacity = dict(MIXTURE, moe_token_dispatcher_type="alltoall", moe_expert_capacity_factor=1.0)
found["capacity"] = [
    TransformerConfig(**capacity, moe_router_load_balancing_type=kind).moe_router_load_balancing_type
    for kind in ("seq_aux_loss", "none")
] + [refused(TransformerConfig, **capacity, moe_router_load_balancing_type="sinkhorn")]
mt_megatron.unpatch()
after = state()
keys = before.keys() | after.keys()
found["restored"] = sorted(str(key) for key in keys if before.get(key) != after.get(key))
found["again"] = refused(TransformerConfig, **MIXTURE)
found["gone"] = not hasattr(package, "MLATransformerConfig")
found["late_class"] = Late(**MIXTURE).moe_ffn_hidden_size

LATENT = dict(SIZES, multi_latent_attention=True, kv_lora_rank=4)
YARN = dict(rope_type="yarn", rotary_scaling_factor=4.0)
def with_features(*features):
    with mt_megatron.patched("cpu", features=["model_config", *features]):
        return {
            "mixture": refused(TransformerConfig, **MIXTURE),
            "latent": refused(TransformerConfig, **LATENT, **YARN),
            "stretched": refused(TransformerConfig, **SIZES, **YARN),
            "depths": refused(TransformerConfig, **SIZES, mtp_num_layers=1),
            "fp8": refused(TransformerConfig, **SIZES, fp8_recipe="tensorwise"),
            "upstreams fp8": refused(TransformerConfig, **SIZES, fp8="hybrid"),
            "upstreams": refused(TransformerConfig, **SIZES, num_moe_experts=4),
        }
found["none"] = with_features()
found["some"] = with_features("mla", "fp8")
found["no rope"] = with_features("mla", "moe")
found["enough"] = with_features("moe", "mla", "rope", "mtp", "fp8", "linear")
print("found:" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = run_command([sys.executable, "-c", _SCRIPT], timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.split("found:")[1]))


@pytest.mark.parametrize("name", ["TransformerConfig", "Early", "Late"])
def test_subclasses_of_before_and_after_take_the_fields(found: dict[str, Any], name: str) -> None:
    seen = found[name]
    assert seen["values"] == [6, [0, 1, 1], 10]
    assert seen["unlike"] and seen["copies"] == [True, True] and seen["dict"] == [0, 1, 1]
    assert "moe_layer_freq has 1 entries; expected one per layer = 3" in seen["refused"]
    assert seen["unknown"].startswith("TypeError")


def test_fields_left_unset_change_no_other_and_exist_on_older_objects(found: dict[str, Any]) -> None:
    assert found["off"] == []
    assert found["of_before"] == [1, False]
    assert found["positions"] == "mine"


def test_the_later_configuration_of_latent_attention_has_its_defaults(found: dict[str, Any]) -> None:
    assert found["latent"] == [True, True, 512, "yarn", 40.0, "RMSNorm", 128, True]
    assert "max_position_embeddings is 1 and original_max_position_embeddings is 2" in found["two_lengths"]


def test_its_numbers_of_yarn_are_not_there_without_yarn(found: dict[str, Any]) -> None:
    assert found["unstretched"][:3] == [1.0, 1.0, 4096]
    assert "rotary_scaling_factor is 8.0 with rope_type rope" in found["unstretched"][3]


def test_a_capacity_goes_with_the_balancing_of_sequences(found: dict[str, Any]) -> None:
    assert found["capacity"][:2] == ["seq_aux_loss", "none"]
    assert "sinkhorn" not in found["capacity"][2] and found["capacity"][2].startswith("ValueError")


def test_unpatching_restores_everything(found: dict[str, Any]) -> None:
    assert found["restored"] == [] and found["gone"]
    assert found["unpatched"].startswith("TypeError") and found["again"] == found["unpatched"]
    assert found["late_class"] == 6, "a class that was made meanwhile keeps the fields that it was made with"


@pytest.mark.parametrize("feature", ["moe", "mla", "mtp", "rope"])
def test_features_that_read_the_fields_are_refused_without_them(feature: str) -> None:
    with pytest.raises(PatchError, match=f"features {feature} read fields.*model_config"):
        mt_megatron.patch("cpu", features=["device", feature])


def test_fields_that_no_feature_in_force_reads_are_refused(found: dict[str, Any]) -> None:
    assert set(found["enough"].values()) == {"accepted"}
    needs = {"mixture": "moe", "latent": "mla", "stretched": "rope", "depths": "mtp", "fp8": "fp8"}
    for name, feature in needs.items():
        assert f"would be ignored; expected {feature}" in found["none"][name], name
        assert found["none"][name].startswith("ConfigError"), name
    assert found["none"]["upstreams"] == found["some"]["upstreams"] == "accepted"
    assert "multi_latent_attention is True and would be ignored; expected moe" in found["some"]["latent"]
    assert "fp8 is 'hybrid' and Transformer Engine is not installed" in found["none"]["upstreams fp8"]
    assert found["no rope"]["latent"] == "accepted", "latent attention reads its rope_type without help"
    assert "fp8_recipe is 'tensorwise' and would be ignored; expected linear" in found["some"]["fp8"]
