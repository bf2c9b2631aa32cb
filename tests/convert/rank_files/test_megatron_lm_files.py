"""Rank files as Megatron-LM's own ``pretrain_gpt.py`` leaves them: its meaning of ``args``, not ours."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_megatron.config.model_change import changes_from
from mt_megatron.config.parse import load_config
from mt_megatron.convert.rank_files.arguments import arguments_of, load_trusted, options_from_arguments
from mt_megatron.convert.rank_files.reader import STATE, TorchFolder
from mt_megatron.errors import CheckpointError
from mt_megatron.layers.transformer_checks import field_problems
from tests.convert import published
from tests.convert.published import differing, read
from tests.convert.recorded_run import converted


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "llama"
    shape = published.draw("llama", random.Random(3))
    shape |= {"num_hidden_layers": 4, "tie_word_embeddings": False, "rope_scaling": None}
    published.write(folder, "llama", shape, seed=3)
    return folder


def rank_files(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Rank files at TP2 x PP2 of ``source`` whose ``args`` and weights ``change`` has edited."""
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    converted(source, folder, "torch", *layout.split())
    files = sorted(folder.rglob("model_optim_rng.pt"))
    assert len(files) == 4
    for file in files:
        state = load_trusted(file)
        change(state)
        torch.save(state, file)
    return folder


def as_megatron_lm(state: dict[str, Any]) -> None:
    """What ``pretrain_gpt.py --tokenizer-type NullTokenizer`` writes for the same vocabulary."""
    args = vars(state["args"])
    args["vocab_size"] -= 1
    args["tokenizer_type"] = "NullTokenizer"
    del args["model_family"]


def test_the_null_tokenizers_end_of_document_is_kept(llama: Path, tmp_path: Path) -> None:
    ranks = rank_files(llama, tmp_path / "ranks", as_megatron_lm)
    converted(ranks, tmp_path / "back", "huggingface")
    assert differing(read(tmp_path / "back"), read(llama)) == []


def test_one_token_less_is_another_vocabulary(llama: Path, tmp_path: Path) -> None:
    """Negative control: the same ``args`` under another tokenizer lose the last row."""

    def without_the_token(state: dict[str, Any]) -> None:
        as_megatron_lm(state)
        state["args"].tokenizer_type = "GPT2BPETokenizer"

    ranks = rank_files(llama, tmp_path / "ranks", without_the_token)
    converted(ranks, tmp_path / "back", "huggingface")
    rows = read(tmp_path / "back")["model.embed_tokens.weight"].shape[0]
    assert rows == read(llama)["model.embed_tokens.weight"].shape[0] - 1


def test_files_of_ours_count_every_token(llama: Path, tmp_path: Path) -> None:
    def of_ours(state: dict[str, Any]) -> None:
        state["args"].tokenizer_type = "NullTokenizer"

    ranks = rank_files(llama, tmp_path / "ranks", of_ours)
    first = load_trusted(next(iter(sorted(ranks.rglob("model_optim_rng.pt")))))
    assert options_from_arguments(first["args"])["vocab_size"] == first["args"].vocab_size
    converted(ranks, tmp_path / "back", "huggingface")
    assert differing(read(tmp_path / "back"), read(llama)) == []


_LATENT = {
    "num_layers": 2,
    "multi_latent_attention": True,
    "max_position_embeddings": 2048,
    "rotary_scaling_factor": 40.0,
    "mscale_all_dim": 1.0,
    "rope_type": None,
}


def test_latent_attention_of_a_later_version_is_stretched_by_yarn() -> None:
    options = options_from_arguments(argparse.Namespace(**_LATENT))
    assert (options["rope_type"], options["original_max_position_embeddings"]) == ("yarn", 2048)
    assert (options["rotary_scaling_factor"], options["mscale_all_dim"]) == (40.0, 1.0)
    own_length = options_from_arguments(argparse.Namespace(**_LATENT, original_max_position_embeddings=64))
    assert own_length["original_max_position_embeddings"] == 64
    plain = options_from_arguments(argparse.Namespace(**{**_LATENT, "rope_type": "rope"}))
    assert plain["rope_type"] == "rope" and "original_max_position_embeddings" not in plain
    assert "rotary_scaling_factor is 40.0 with rope_type rope" in field_problems(plain)[0]


def test_files_of_ours_say_how_latent_attention_is_stretched() -> None:
    of_ours = options_from_arguments(argparse.Namespace(**_LATENT, model_family="deepseek"))
    assert "rope_type" not in of_ours
    words = "--model deepseek_v2_lite --vocab-size 4096"
    config = load_config(words.split())
    back = options_from_arguments(arguments_of(config, 4096, 1))
    assert changes_from(back, config) == []


def test_numbers_that_no_stretching_reads_are_left_out() -> None:
    given = argparse.Namespace(num_layers=2, mscale=1.0, mscale_all_dim=1.0, rotary_scaling_factor=1.0)
    assert field_problems(options_from_arguments(given)) == []


_MIXTURE = {"num_layers": 2, "num_experts": 4, "moe_token_drop_policy": "position"}


def test_a_capacity_of_experts_is_kept_both_ways() -> None:
    given = {**_MIXTURE, "moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
    options = options_from_arguments(argparse.Namespace(**given, moe_token_dispatcher_type="flex"))
    names = ("moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity")
    assert {name: options[name] for name in names} == {name: given[name] for name in names}
    assert options["moe_token_dispatcher_type"] == "alltoall"
    words = "--model mixtral_8x7b --moe-expert-capacity-factor 1.5 --moe-token-dispatcher-type alltoall_seq"
    back = options_from_arguments(arguments_of(load_config(words.split()), 32000, 1))
    assert (back["moe_expert_capacity_factor"], back["moe_token_dispatcher_type"]) == (1.5, "alltoall_seq")


def test_without_a_capacity_tokens_travel_as_the_run_says() -> None:
    options = options_from_arguments(argparse.Namespace(**_MIXTURE, moe_expert_capacity_factor=None))
    assert "moe_expert_capacity_factor" not in options and "moe_token_dispatcher_type" not in options
    negative = options_from_arguments(argparse.Namespace(**_MIXTURE, moe_expert_capacity_factor=-1.0))
    assert negative == options


def test_a_gpt_2_like_model_is_named(llama: Path, tmp_path: Path) -> None:
    def with_biases(state: dict[str, Any]) -> None:
        name = "decoder.layers.0.self_attention.linear_proj"
        weight = state["model"][f"{name}.weight"]
        state["model"][f"{name}.bias"] = torch.zeros(weight.shape[0])

    ranks = rank_files(llama, tmp_path / "ranks", with_biases)
    with pytest.raises(CheckpointError, match="GPT-2-like model .* is not converted"):
        converted(ranks, tmp_path / "back", "huggingface")


def test_experts_cut_over_expert_ranks_are_refused(tmp_path: Path) -> None:
    args = argparse.Namespace(
        **_MIXTURE, hidden_size=8, expert_model_parallel_size=2, moe_extended_tp=True, swiglu=True
    )
    for rank in range(2):
        (tmp_path / f"mp_rank_00_{rank:03d}").mkdir()
        torch.save({"args": args, "model": {}}, tmp_path / f"mp_rank_00_{rank:03d}" / STATE)
    with pytest.raises(CheckpointError, match="run with --moe-extended-tp, which cuts every expert"):
        TorchFolder(tmp_path)
    args.moe_extended_tp = False
    for path in tmp_path.glob(f"*/{STATE}"):
        torch.save({"args": args, "model": {}}, path)
    assert not TorchFolder(tmp_path).tensors
