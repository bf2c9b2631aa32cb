"""Trainings of a few steps on one device, in one process: what no layout of the parity suite has."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import mt_megatron
from mt_megatron.backends import registry
from mt_megatron.checkpoint.load import Progress, load_weights
from mt_megatron.checkpoint.save import save_checkpoint
from mt_megatron.config.parse import load_config
from mt_megatron.fp8.recipe import native_recipes
from mt_megatron.models.families import family_of
from mt_megatron.training.distributed import joined, seed_everything
from mt_megatron.training.model import build
from mt_megatron.training.step import Shape, make_forward_step, train_step
from tests.device.result import Unsupported, checked
from tests.fp8 import cases as fp8
from tests.parity.case import GLOBAL_BATCH, MICRO_BATCH, MIXTURE, MODEL, OPTIMIZER, SEQUENCE
from tests.scope.watch import identity_ranks, ranks
from tests.scope.watch.layouts import EXPERTS, ZERO1

CHECKS: dict[str, Callable[[Any], dict[str, Any]]] = {}
STEPS = 8
_UNTIED = "--untie-embeddings-and-output-weights"
_DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
_LONG = 4096

_FORKED = """
import os, sys
import mt_megatron
mt_megatron.patch(sys.argv[1])
child = os.fork()
if not child:
    try:
        backend = mt_megatron.backend()
        backend.set_device(0)
        import torch
        os._exit(0 if torch.ones(3, device=backend.device(backend.current_device())).sum().item() == 3 else 1)
    finally:
        os._exit(2)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def check(function: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Register a check; it takes the backend and returns figures."""
    CHECKS[function.__name__] = function
    return function


def run() -> list[dict[str, Any]]:
    """Every check, on device 0."""
    return run_some(list(CHECKS))


def run_some(names: list[str]) -> list[dict[str, Any]]:
    """The checks ``names``."""
    # Without it cuBLAS may choose another kernel from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    ranks.begin()
    backend = mt_megatron.backend()
    return [asdict(checked("training", name, lambda f=CHECKS[name]: f(backend))) for name in names]


@check
def auto_selects_the_device(backend: Any) -> dict[str, Any]:
    found, why = registry.select("auto")
    if backend.name != "cpu":
        assert found.name == backend.name, (found.name, why)
    return {"selected": found.name, "why": why}


@check
def a_forked_process_can_use_the_device(backend: Any) -> dict[str, Any]:
    """``patch`` begins to use no device: the ranks of a launcher within Python are forked after it."""
    command = [sys.executable, "-W", "ignore", "-c", _FORKED, backend.name]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, f"exit code {ran.returncode}: {ran.stderr[-2000:]}"
    return {}


@check
def long_attention_keeps_no_square(backend: Any) -> dict[str, Any]:
    """Grouped heads of 4,096 tokens, forward and backward, in less memory than their scores would take."""
    if backend.device_type == "cpu":
        raise Unsupported("the host's counter of memory is the process's")
    from megatron.core.transformer.enums import AttnMaskType

    from mt_megatron.layers.attention.core import DotProductAttention

    heads, groups, size = 16, 4, 64
    config: Any = SimpleNamespace(context_parallel_size=1, kv_channels=size, attention_dropout=0.0)
    config.window_size, config.cp_comm_type = None, None
    figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        attention = DotProductAttention.__new__(DotProductAttention)
        torch.nn.Module.__init__(attention)
        attention.config, attention.exchange = config, None
        attention.attn_mask_type, attention.softmax_scale = AttnMaskType.causal, size**-0.5
        attention.attention_dropout = torch.nn.Dropout(0.0)
        q, k, v = (
            torch.randn(
                _LONG,
                1,
                count,
                size,
                device=backend.device(backend.current_device()),
                dtype=dtype,
                requires_grad=True,
            )
            for count in (heads, groups, groups)
        )
        backend.synchronize()
        torch.get_device_module(backend.device_type).reset_peak_memory_stats()
        before = backend.memory_allocated()
        attention(q, k, v, None).float().square().sum().backward()
        backend.synchronize()
        grown = backend.max_memory_allocated() - before
        square = heads * _LONG**2 * dtype.itemsize
        figures[f"{dtype} grew"], figures[f"{dtype} scores"] = grown, square
        assert grown < square / 2, f"{dtype}: {grown:,} bytes; the scores have {square:,}"
    return figures


def _parted(left: list[Any], right: list[Any]) -> list[int]:
    return [step for step, (a, b) in enumerate(zip(left, right, strict=True), 1) if a != b]


def _scope(name: str, flags: str) -> None:
    @check
    def watched(backend: Any) -> dict[str, Any]:
        """Twice not watched and once watched from the same weights: all steps have the same bits."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                ways = {"on": True, "off": False, "off again": False}
                found = {
                    way: identity_ranks._train(Path(folder), flags, STEPS, watch=watch)
                    for way, watch in ways.items()
                }
        finally:
            torch.use_deterministic_algorithms(False)
        steps = {way: each["steps"] for way, each in found.items()}
        own = _parted(steps["off"], steps["off again"])
        if own:
            raise Unsupported(f"two runs that are not watched part in steps {own} by themselves")
        parted = _parted(steps["on"], steps["off"])
        assert not parted, f"loss, norm, gradients, weights or random numbers part in steps {parted}"
        assert found["on"]["calls"] == found["off"]["calls"], "watching added a collective"
        assert found["on"]["frames"]["stats"] >= STEPS // identity_ranks.INTERVAL, found["on"]["lines"]
        assert len({step[3] for step in steps["on"]}) == STEPS, "the weights did not move"
        return {"steps": STEPS, **{f"frames of {kind}": n for kind, n in found["on"]["frames"].items()}}

    CHECKS[f"scope_changes_no_bit_{name}"] = CHECKS.pop("watched")


_scope("fp32", f"{MODEL} {OPTIMIZER} {_UNTIED} {_DROPOUT}")
_scope("bf16", f"{MODEL} {OPTIMIZER} {_UNTIED} {_DROPOUT} --bf16")
_scope("bf16_experts", f"{MODEL} {OPTIMIZER} {_UNTIED} {EXPERTS} --bf16")
_scope("bf16_deepseek_zero", f"{MIXTURE} {OPTIMIZER} {_UNTIED} --bf16 {ZERO1}")


@check
def fp8_trains_with_the_devices_products(backend: Any) -> dict[str, Any]:
    """Dense and with experts, by every recipe that the device has kernels for: losses follow bf16's."""
    names = native_recipes(backend.fp8_granularities())
    if not names:
        raise Unsupported("the backend claims no FP8 GEMM for this device")
    figures: dict[str, Any] = {}
    for model, flags in (("dense", ""), ("experts", fp8.MIXTURE)):
        losses = {}
        with tempfile.TemporaryDirectory() as folder:
            for name in ("bf16", *names):
                recipe = "" if name == "bf16" else f"--fp8-recipe {name}"
                with joined(fp8.config_of(f"{flags} {recipe}"), mt_megatron.backend()) as job:
                    training = fp8.Run(f"{flags} {recipe}", job)
                    if name == "bf16":
                        save_checkpoint(Path(folder), training.trainable, Progress(), job, manifest={})
                    load_weights(Path(folder) / "iter_0000000", training.trainable)
                    losses[name] = [training.step() for _ in range(6)]
        expected = losses["bf16"]
        for name in names:
            assert all(map(math.isfinite, losses[name])) and losses[name] != expected, (name, losses[name])
            away = max(abs(a / b - 1) for a, b in zip(losses[name], expected, strict=True))
            figures[f"{model} {name}, largest relative difference"] = away
            assert away <= 0.02, (model, name, losses[name], expected)
    return figures


@check
def overlapped_shared_experts_equal_the_others(backend: Any) -> dict[str, Any]:
    """On a stream of their own, with gathered parameters of the distributed optimizer, against in turn."""
    if backend.device_type == "cpu":
        raise Unsupported("the cpu has no streams")
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (("in turn", ""), ("beside", "--moe-shared-expert-overlap")):
            config = load_config(
                f"{MIXTURE} {OPTIMIZER} {_UNTIED} {ZERO1} {more} --seed 5 --mock-data".split()
            )
            with joined(config, mt_megatron.backend()) as job:
                family = family_of(config)
                trainable = build(config, job, family)
                if name == "in turn":
                    save_checkpoint(Path(folder), trainable, Progress(), job, manifest={})
                load_weights(Path(folder) / "iter_0000000", trainable)
                seed_everything(5, job)
                shape = Shape(
                    num_microbatches=GLOBAL_BATCH // MICRO_BATCH,
                    micro_batch_size=MICRO_BATCH,
                    seq_length=SEQUENCE,
                )
                forward_step = make_forward_step(family, job.backend.device(job.backend.current_device()))
                batches = [ranks.batches_of(job, 5, STEPS)]
                losses[name] = [
                    train_step(trainable, forward_step, batches, shape, job, iteration=i).loss
                    for i in range(1, STEPS + 1)
                ]
    pairs = list(zip(losses["in turn"], losses["beside"], strict=True))
    away = max(abs(a / b - 1) for a, b in pairs)
    assert away <= 1e-4, losses
    assert losses["in turn"][-1] < losses["in turn"][0], "nothing was learnt"
    return {"largest relative difference": away}
