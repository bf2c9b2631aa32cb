"""Every option is declared once, and what is declared of options of the model is so."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from mt_megatron.config.field_kinds import Kind, changes, declared, names_of
from mt_megatron.config.model_change import flat
from mt_megatron.config.parse import load_config
from mt_megatron.config.types import options
from tests.config.field_cases import drawn
from tests.launch import run_ranks


def test_every_option_is_declared_once() -> None:
    counted = Counter(name for name, _ in declared())
    assert [name for name, count in counted.items() if count > 1] == []
    missing, unknown = set(options()) - set(counted), set(counted) - set(options())
    assert not missing, f"declare in mt_megatron/config/field_kinds.py what they change: {sorted(missing)}"
    assert not unknown, f"no such options: {sorted(unknown)}"


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    [found] = run_ranks(1, "tests.config.field_cases:everything", 3, timeout=240)
    return dict(found)


def flattened(by_option: dict[str, dict[str, float]]) -> dict[str, float]:
    return {case: value for cases in by_option.values() for case, value in cases.items()}


def test_options_of_the_function_change_logits(measured: dict[str, Any]) -> None:
    assert set(drawn(random.Random(0))) == names_of(Kind.FUNCTION), "each is drawn"
    assert set(measured["function"]) == names_of(Kind.FUNCTION)
    still = [case for case, value in flattened(measured["function"]).items() if value < 1e-5]
    assert not still


def test_neutral_options_change_none(measured: dict[str, Any]) -> None:
    moved = {case: value for case, value in flattened(measured["neutral"]).items() if value > 1e-5}
    assert not moved
    assert len(measured["neutral"]) >= 30, "few are refused on this device"


def test_spellings_of_one_model_are_no_change() -> None:
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 8"
    before = flat(load_config(flags.split()).to_dict())
    now = {
        **before,
        "kv_channels": None,
        "num_query_groups": None,
        "rotary_seq_len_interpolation_factor": 1.0,
    }
    now |= {"moe_router_topk": 7, "beta_fast": 1.0, "max_position_embeddings": 8}
    assert changes(before, now) == changes(now, before) == []
    assert [each.name for each in changes(before, {**now, "kv_channels": 4})] == ["kv_channels"]
    mixture = {**before, "num_moe_experts": 4, "moe_layer_freq": 2, "moe_ffn_hidden_size": None}
    again = {
        **mixture,
        "moe_layer_freq": (1, 0),
        "moe_ffn_hidden_size": 64,
        "moe_router_topk_scaling_factor": 1.0,
    }
    assert changes(mixture, again) == []
    assert [each.name for each in changes(mixture, {**again, "moe_layer_freq": [1, 1]})] == ["moe_layer_freq"]
    [sinkhorn] = changes(mixture, {**mixture, "moe_router_load_balancing_type": "sinkhorn"})
    [losses] = changes(mixture, {**mixture, "moe_router_load_balancing_type": "none"})
    assert (sinkhorn.kind, losses.kind) == (Kind.FUNCTION, Kind.OBJECTIVE)
