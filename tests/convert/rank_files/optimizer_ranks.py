"""The ranks' side of ``test_optimizer.py``: runs that are stopped, converted and continued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mt_megatron
from mt_megatron.checkpoint.load import load_checkpoint
from mt_megatron.config.parse import load_config
from mt_megatron.convert import optimizer_state
from mt_megatron.convert.inputs import open_megatron
from mt_megatron.convert.rank_files.arguments import arguments_of, load_trusted
from mt_megatron.convert.rank_files.writer import module_order
from mt_megatron.convert.settings import model_of
from mt_megatron.convert.tensors.state_names import kind_of
from mt_megatron.models.families import family_of
from mt_megatron.training.distributed import joined
from mt_megatron.training.model import build
from tests.convert.ranks import _rank_folder, resolve_by_pointer
from tests.convert.recorded_run import Quiet, converted
from tests.second_lane import DAILY
from tests.training.loop_cases import MODEL, TRAINING, run, start

PLAIN = f"--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --micro-batch-size {2 if DAILY else 4}"


def continued(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """For every case a run of three steps, which goes on for three more: from its own checkpoint, and from
    what its chain of conversions made of it."""
    start()
    return {name: _one(Path(folder) / name, **case) for name, case in cases.items()}


def _one(
    folder: Path,
    model: str,
    before: str,
    chain: list[list[str]],
    after: str,
    by_rank: bool = False,
    taken: bool = True,
    control: bool = False,
) -> dict[str, Any]:
    source = folder / "source"
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    flags = f"{PLAIN} {model}"
    first = run(f"{flags} {before} --save {source} --exit-interval 3", str(folder), "first")
    if "error" in first:
        return first
    said = _converted(source, folder, chain)
    last = folder / str(len(chain) - 1)
    found: dict[str, Any] = {
        "own": run(f"{flags} {before} --resume {source}", str(folder), "own"),
        "converted": run(f"{flags} {after} --resume {last}", str(folder), "converted"),
        "said": said,
        "tensors": _differing(source, last),
    }
    if by_rank:
        found |= _by_rank(folder, source, f"{flags} {before}", taken)
    if control:
        with mock.patch.object(optimizer_state.WithState, "parts", _without_moments):
            _converted(source, folder / "control", chain)
        found["control"] = run(
            f"{flags} {after} --resume {folder / 'control' / str(len(chain) - 1)}", str(folder), "control"
        )
    return found


def _converted(source: Path, folder: Path, chain: list[list[str]]) -> list[str]:
    progress = Quiet()
    if dist.get_rank() == 0:
        for index, (form, *arguments) in enumerate(chain):
            given = source if index == 0 else folder / str(index - 1)
            converted(
                given, folder / str(index), form, *arguments, weights_only=False, progress=progress, workers=1
            )
    dist.barrier()
    return progress.lines


def _without_moments(self: Any, name: str) -> list[Tensor]:
    kind = kind_of(name)
    parts = (self.state if name in self.state.rows else self.weights).parts(name)
    return [torch.zeros_like(part) for part in parts] if kind in ("exp_avg", "exp_avg_sq") else parts


def _differing(one: Path, other: Path) -> list[str]:
    """Names of tensors, the optimizer's among them, that are not equal to the bit. What only one form has
    are master weights of a run in fp32, which are its weights."""
    if dist.get_rank() > 0:
        return []
    ours, theirs = (open_megatron(each).checkpoint for each in (one, other))
    assert ours is not None and theirs is not None
    ours_state, theirs_state = getattr(ours, "state", {}), getattr(theirs, "state", {})
    moments = [name for name in ours_state if kind_of(name) != "fp32_param" or name in theirs_state]
    names = [*ours.tensors, *moments]
    assert len(moments) >= 2 * (len(ours.tensors) // 2)
    return [name for name in names if not torch.equal(ours.read(name), theirs.read(name))]


def _by_rank(folder: Path, source: Path, flags: str, taken: bool) -> dict[str, Any]:
    """Every rank's optimizer takes the files by rank that are written, and what it writes is read."""
    written, saved = folder / "written", folder / "as_saved"
    config = load_config(f"{MODEL} {TRAINING} --scan off --scope off {flags}".split())
    parallel = config.parallel
    layout = [
        f"--{name}-model-parallel-size={getattr(parallel, f'{name}_model_parallel_size')}"
        for name in ("tensor", "pipeline", "expert")
    ]
    if config.model.num_moe_experts:
        layout.append("--moe-grouped-gemm" if config.model.moe_grouped_gemm else "--no-moe-grouped-gemm")
    _converted(source, written, [["torch", *layout]])
    from megatron.core import parallel_state

    found: dict[str, Any] = {}
    with joined(config, mt_megatron.backend()) as job:
        trainable = build(config, job, family_of(config))
        [checkpoint] = source.glob("iter_*")
        load_checkpoint(checkpoint, trainable, job)
        names = [name for name, _ in trainable.bare_chunks()[0].named_parameters()]
        first = parallel_state.is_pipeline_first_stage()
        found["order"] = names == sorted(names, key=lambda name: module_order(name, is_first_stage=first))
        model = model_of(config, tensor=parallel.tensor_model_parallel_size)
        state = {
            "args": arguments_of(config, model.sizes.padded_vocab_size, 3, progress={"consumed_samples": 24}),
            "iteration": 3,
            "checkpoint_version": 3.0,
            "model": trainable.bare_chunks()[0].state_dict_for_save_checkpoint(),
            "optimizer": trainable.optimizer.state_dict(),
            "opt_param_scheduler": trainable.scheduler.state_dict(),
        }
        path = _rank_folder(saved)
        if not path.exists():
            path.mkdir(parents=True, exist_ok=True)
        torch.save(state, path / "model_optim_rng.pt")
        before = [each.clone() for each in _tensors(trainable.optimizer.state_dict())]
        theirs = load_trusted(_rank_folder(resolve_by_pointer(written / "0")) / "model_optim_rng.pt")
        for each in _tensors(trainable.optimizer.state_dict()):
            each.fill_(7)
        if taken:
            trainable.optimizer.load_state_dict(theirs["optimizer"])
        else:
            with pytest.raises(RuntimeError, match="size of tensor"):
                trainable.optimizer.load_state_dict(theirs["optimizer"])
        after = list(_tensors(trainable.optimizer.state_dict()))
        found["taken"] = len(before) == len(after) > 20 and all(
            torch.equal(a, b) for a, b in zip(before, after, strict=True)
        )
        dist.barrier()
    found["read"] = _differing(source, saved)
    dist.barrier()
    return found


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state.detach()
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from _tensors(state[key])
    elif isinstance(state, list):
        for each in state:
            yield from _tensors(each)
