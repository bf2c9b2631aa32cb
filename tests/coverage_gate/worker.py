"""One rank of a shared launch: patches, imports, then runs named tests and records what they execute."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.coverage_gate.case import Case, Layout, all_cases
from tests.coverage_gate.points import installed_root, list_points
from tests.coverage_gate.target import BACKEND, COLLECTIVE, DEVICE
from tests.coverage_gate.tracer import Tracer

IMPORTS_CASE = "imports.every_module"
# Where one of these is installed upstream takes other paths; the list of unreachable points is about
# a machine that has none of them.
ABSENT = (
    "transformer_engine",
    "apex",
    "amp_C",
    "mamba_ssm",
    "grouped_gemm",
    "fused_weight_gradient_mlp_cuda",
)
TIMEOUT = timedelta(seconds=45)


def run(names: list[str], without: list[str], folder: str, traced: bool = True) -> dict[str, Any]:
    """Run the named cases in this rank and write what each executed to ``folder`` (``traced``).

    Returns ``cases`` (name -> ``{"error": traceback or None, "seconds": float}``) and ``patches`` (ids of
    those applied). A case that fails on one rank is followed by fresh process groups, so that the next
    one starts clean.
    """
    rank = os.environ["RANK"]
    root = installed_root()
    for name in ABSENT:
        sys.modules[name] = None  # type: ignore[assignment]
    tracer = Tracer(root, list_points(root))
    if traced:
        tracer.start()
    try:
        import mt_megatron
        from mt_megatron.backends.distributed.namespace import local_device, prepare_environment

        mt_megatron.patch(BACKEND, features=_features(without))
        gc.freeze()  # else every collection at the end of a run visits the modules
        prepare_environment(mt_megatron.backend(), nodes=1)
        mt_megatron.backend().set_device(local_device(mt_megatron.backend()))
        if traced:
            _trace_backward(tracer)
        outcomes = _run_cases([found for found in all_cases() if found.name in set(names)], tracer)
    finally:
        tracer.stop()
    for name, keys in tracer.records.items():
        path = Path(folder) / f"{name}.{rank}.json"
        path.write_text(json.dumps({"test": name, "rank": int(rank), "points": sorted(keys)}))
    return {"cases": outcomes, "patches": sorted(patch.id for patch in mt_megatron.report().applied)}


def _trace_backward(tracer: Tracer) -> None:
    """Autograd runs a device's backward passes in a thread that C++ starts; Python cannot trace it from
    outside, so a backward pass there does."""
    import torch

    if DEVICE == "cpu":
        return

    class Start(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            tracer.start()
            return gradient

    Start.apply(torch.ones(1, device=DEVICE, requires_grad=True)).backward()  # type: ignore[no-untyped-call]


def _features(without: list[str]) -> list[str] | None:
    """What to select so that everything but ``without`` is; None means all."""
    if not without:
        return None
    from mt_megatron.backends import registry
    from mt_megatron.patches import collect

    return sorted({patch.feature for patch in collect(registry.get(BACKEND))} - set(without))


def _run_cases(cases: list[Case], tracer: Tracer) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    groups = _Groups()
    # Whatever a module touches while it is imported belongs to the case about imports.
    for found in sorted(cases, key=lambda item: item.name != IMPORTS_CASE):
        started = time.monotonic()
        error = None
        try:
            # Setting up groups touches the device too, and is no test of it.
            groups.enter(found.layout)
            with tracer.named(found.name):
                found.run()
        except BaseException:  # noqa: BLE001 - reported, and the other cases go on
            error = traceback.format_exc()
        outcomes[found.name] = {"error": error, "seconds": round(time.monotonic() - started, 3)}
        if groups.any_failed(found.name, error is not None):
            groups.leave()
    groups.leave()
    return outcomes


class _Groups:
    """The process groups of the current layout; neighbours with one layout share them."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=TIMEOUT
        )
        self.layout: Layout | None = None
        self.generation = 0

    def enter(self, layout: Layout) -> None:
        if layout == self.layout:
            return
        self.leave()
        self.layout = layout
        if not layout.world:
            return
        import torch.distributed as dist

        self.generation += 1
        dist.init_process_group(
            COLLECTIVE,
            store=dist.PrefixStore(f"generation{self.generation}", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=TIMEOUT,
        )
        if layout.bare:
            return
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vpp,
            expert_model_parallel_size=layout.ep,
            context_parallel_size=layout.cp,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1234)

    def leave(self) -> None:
        import torch.distributed as dist

        self.layout = None
        if dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    def any_failed(self, name: str, failed: bool) -> bool:
        """Whether a rank failed; also the point where the ranks wait for each other."""
        self.store.set(f"{name}/{self.rank}", "failed" if failed else "passed")
        answers = [self.store.get(f"{name}/{rank}") for rank in range(self.size)]
        return b"failed" in answers
