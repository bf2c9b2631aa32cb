"""Measurements on the emulated musa device: the ranks' side. It proves the paths, not a speed."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mt_megatron.backends import registry
from mt_megatron.backends.distributed.namespace import (
    let_group_threads_rest,
    local_device,
    prepare_environment,
)
from mt_megatron.cli.main import main
from mt_megatron.scan.format.run_files import run_files, write_run
from mt_megatron.scan.respond import agent, measures
from mt_megatron.scan.respond.confirm import Request, measure

from .live_ranks import Slow

SIZE = 64


def measured(folder: str) -> dict[str, Any]:
    """The command on all ranks; then, of three ranks, that rank 1 is slow and the link between 0 and 2 is."""
    found: dict[str, Any] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        command = ["scan", "selftest", "--backend", "musa", "--size", str(SIZE), "--folder", folder]
        found["code"] = main([*command, "--json", f"{folder}/selftest.json"])
    found["said"] = said.getvalue()
    backend, _ = registry.select("musa")
    backend.set_device(local_device(backend))
    prepare_environment(backend, nodes=1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    # The command had a group of its own, whose keys are still there.
    again = dist.PrefixStore("again", store)
    dist.init_process_group(backend.collective, store=again, rank=rank, world_size=world)
    slow = Slow(backend, size=SIZE)
    found["device"] = str(slow._a.device)
    found["text"] = slow.broadcast("äöü" if rank == 0 else "")
    for what, ranks in (("compute", (1,)), ("compute", (0,)), ("link", (0, 2)), ("link", (0, 1))):
        request = Request(identity=what, what=what, ranks=ranks)  # type: ignore[arg-type]
        found[f"{what} {ranks}"] = measure(request, slow, rank, ["here"] * world).to_dict()
    found["asked"] = _asked(Path(folder), backend, rank, world)
    let_group_threads_rest()
    dist.destroy_process_group()
    return found


def _asked(folder: Path, backend: Any, rank: int, world: int) -> list[dict[str, Any]]:
    """What `scan confirm` makes the ranks of a job do: asked for in a file, measured between two steps."""
    files = run_files(folder)
    if rank == 0:
        write_run(files, {"world_size": world})
    # What a device's matrices measure in is too much for what emulates one.
    original = measures.Measures
    measures.Measures = lambda given: Slow(given, size=SIZE)  # type: ignore[assignment,misc]
    attends = agent.Attendant(
        files,
        rank=rank,
        hosts=dict.fromkeys(range(world), "here"),
        backend=backend,
        progress=lambda: 0,
        note=lambda note: None,
        say=lambda line: None,
    )
    try:
        if rank == 0:
            request = Request(identity="asked", what="compute", ranks=(1,))
            agent.request_path(files).write_text(request.to_json())
            attends._look_for_request()
            assert attends.wants_measurement
        attends.measure()
        assert not attends.wants_measurement
    finally:
        measures.Measures = original  # type: ignore[misc]
    path = agent.measurements_path(files)
    dist.barrier()
    return [json.loads(line) for line in path.read_text().splitlines()]
