"""Rank files with an optimizer that torch numbered: what is read from them, and what is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mt_megatron.convert.inputs import open_megatron
from mt_megatron.convert.rank_files.arguments import load_trusted
from mt_megatron.convert.run_state import RunState, common_entry
from mt_megatron.convert.tensors.state_names import kind_of, state_name
from mt_megatron.convert.torch_dist import reader as dist_reader
from mt_megatron.convert.torch_dist.metadata import StoredObject, read_metadata
from mt_megatron.errors import CheckpointError, ConfigError
from tests.convert import published
from tests.convert.recorded_run import Quiet, converted

STATE = "iter_0000001/mp_rank_00/model_optim_rng.pt"
VOCABULARY = ("--vocab-size", "101")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in rank files, as one process has it."""
    folder = tmp_path_factory.mktemp("refused")
    shape = published.draw("llama", random.Random(2)) | {"vocab_size": 101, "tie_word_embeddings": False}
    published.write(folder / "source", "llama", shape, seed=0, dtype=torch.float32)
    converted(folder / "source", folder / "weights", "torch")
    return folder / "weights"


def trained(weights: Path, to: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> Path:
    """The same with the optimizer that torch makes of its tensors; ``change`` may spoil it."""
    state = load_trusted(weights / STATE)
    parameters = {name: tensor for name, tensor in state["model"].items() if tensor is not None}
    for tensor in parameters.values():
        tensor.requires_grad_(True)
    groups = [
        {"params": [each for each in parameters.values() if each.dim() > 1], "wd_mult": 1.0},
        {"params": [each for each in parameters.values() if each.dim() == 1], "wd_mult": 0.0},
    ]
    # As a later stage meets them: a norm first.
    optimizer = torch.optim.AdamW(reversed(groups), lr=0.0)
    for _ in range(2):
        for tensor in parameters.values():
            tensor.grad = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel()))
        optimizer.step()
    state["model"] = {name: None if each is None else each.detach() for name, each in state["model"].items()}
    state["optimizer"] = optimizer.state_dict()
    state["opt_param_scheduler"] = {"num_steps": 16}
    state["args"].consumed_train_samples = 16
    change(state)
    (to / STATE).parent.mkdir(parents=True)
    (to / "latest_checkpointed_iteration.txt").write_text("1\n")
    torch.save(state, to / STATE)
    moments: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            moments[state_name(kind, name)] = optimizer.state[tensor][kind]
    torch.save(moments, to / "moments.pt")
    return to


def convert(source: Path, to: Path, form: str = "torch_dist", *options: str, **more: Any) -> Quiet:
    progress = Quiet()
    converted(source, to, form, *VOCABULARY, *options, weights_only=False, progress=progress, **more)
    return progress


def test_numbers_stand_for_the_parameters_that_torch_gave_them(weights: Path, tmp_path: Path) -> None:
    source = trained(weights, tmp_path / "trained")
    convert(source, tmp_path / "dist", "torch_dist", "--tensor-model-parallel-size", "2")
    found = open_megatron(tmp_path / "dist")
    assert found.optimizer is not None
    expected = torch.load(source / "moments.pt")
    state = found.optimizer.checkpoint
    assert set(state.state) == set(expected)
    for name, tensor in expected.items():
        # The vocabulary is padded for two ranks.
        read = state.read(name)
        assert torch.equal(read[: len(tensor)], tensor) and not read[len(tensor) :].any(), name
        assert tensor.abs().max() > 0
    run = found.optimizer.run_state()
    assert run.step == 2 and run.scheduler == {"num_steps": 16}
    assert [group["wd_mult"] for group in run.groups] == [1.0, 0.0]
    assert found.optimizer.progress["consumed_samples"] == 16


def test_without_the_option_the_state_is_left_behind_and_said(weights: Path, tmp_path: Path) -> None:
    source, progress = trained(weights, tmp_path / "trained"), Quiet()
    converted(source, tmp_path / "dist", "torch_dist", *VOCABULARY, progress=progress)
    assert any("left behind" in line and "--with-optimizer" in line for line in progress.lines)
    assert not open_megatron(tmp_path / "dist").has_optimizer
    published_form = Quiet()
    converted(source, tmp_path / "hf", "huggingface", *VOCABULARY, progress=published_form)
    # The option is refused there: it is not offered.
    assert any("left behind" in line and "only --to-megatron" in line for line in published_form.lines)


def _drop_parameter(state: dict[str, Any]) -> None:
    state["optimizer"]["param_groups"][1]["params"].pop()


def _other_shape(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)


def _no_moment(state: dict[str, Any]) -> None:
    del state["optimizer"]["state"][1]


def _other_steps(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][2]["step"] = torch.tensor(9.0)


def _no_schedule(state: dict[str, Any]) -> None:
    del state["opt_param_scheduler"]


def _no_group(state: dict[str, Any]) -> None:
    del state["optimizer"]["param_groups"][0]


def _half(state: dict[str, Any]) -> None:
    state["model"] = {
        name: None if each is None else each.to(torch.bfloat16) for name, each in state["model"].items()
    }
    state["args"].bf16 = True


def _flat(state: dict[str, Any]) -> None:
    state["optimizer"] = {"optimizer": {"param_groups": [{"step": 2}]}}


def _none(state: dict[str, Any]) -> None:
    del state["optimizer"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop_parameter, "group 1 of the optimizer has"),
        (_other_shape, "exp_avg of .* is \\(3,\\), expected"),
        (_no_moment, "2 missing"),
        (_other_steps, "one number of steps for all parameters \\(found \\[2.0, 9.0\\]"),
        (_no_schedule, "opt_param_scheduler \\(found NoneType"),
        (_no_group, "parameters have no optimizer"),
        (_half, "without master weights and weights of bfloat16, and the configuration says bf16"),
        (_flat, "flat buffers \\(distrib_optim.pt\\)"),
        (_none, "it holds none"),
    ],
)
def test_what_does_not_belong_together_is_named(
    weights: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    source = trained(weights, tmp_path / "trained", change)
    with pytest.raises(CheckpointError, match=words):
        convert(source, tmp_path / "dist")
    assert not (tmp_path / "dist" / "iter_0000001").exists()


def test_a_file_of_flat_buffers_is_enough(weights: Path, tmp_path: Path) -> None:
    source, progress = trained(weights, tmp_path / "trained"), Quiet()
    (source / STATE).with_name("distrib_optim.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="flat buffers"):
        convert(source, tmp_path / "dist")
    converted(source, tmp_path / "weights", "torch_dist", *VOCABULARY, progress=progress)
    assert any("left behind" in line and "flat buffers" in line for line in progress.lines)


@pytest.mark.parametrize("kind", ["param_state", "gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg"])
def test_flat_buffers_of_a_distributed_checkpoint_are_refused(
    weights: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(weights, tmp_path / "dist", "torch_dist", *VOCABULARY)
    contents = read_metadata(tmp_path / "dist" / "iter_0000001")
    place = StoredObject(file="__0_0.distcp", offset=0, length=1)
    contents.objects[f"optimizer.distributed.dp_group_idx_0.{kind}"] = place
    monkeypatch.setattr(dist_reader, "read_metadata", lambda folder: contents)
    with pytest.raises(CheckpointError, match="flat buffers .* --ckpt-fully-parallel-save"):
        convert(tmp_path / "dist", tmp_path / "other")


def test_what_has_no_place_for_it_is_refused(weights: Path, tmp_path: Path) -> None:
    source = trained(weights, tmp_path / "trained")
    for words, form, options, more in (
        ("published folder has no optimizer", "huggingface", (), {}),
        ("leave --dtype out", "torch_dist", (), {"dtype": "bf16"}),
        ("flat buffers, which are not written", "torch", ("--use-distributed-optimizer",), {}),
    ):
        with pytest.raises(ConfigError, match=words):
            convert(source, tmp_path / "other", form, *options, **more)


def test_experts_get_an_optimizer_of_their_own_and_lose_it() -> None:
    dense = [{"wd_mult": 0.0, "lr": 3.0}, {"wd_mult": 1.0, "lr": 3.0}]
    run = RunState(step=5.0, groups=tuple(dense), scheduler={})
    spread = common_entry(run, master=True, distributed=True, expert_optimizer=True)
    assert [group["wd_mult"] for group in spread[0]["optimizer"]["param_groups"]] == [1.0, 0.0]
    [experts] = spread[1]["optimizer"]["param_groups"]
    assert experts == {"wd_mult": 1.0, "lr": 3.0, "is_expert_parallel": True, "step": 5.0}
    again = RunState.of(spread, {}, "")
    together = common_entry(again, master=False, distributed=False, expert_optimizer=False)
    assert together["param_groups"] == [dense[1], dense[0]]
    assert together["state"]["common_step"] == 5.0
    assert kind_of(state_name("exp_avg", "a.b")) == "exp_avg" and kind_of("a.b") is None
