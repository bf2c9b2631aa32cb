"""``mt-megatron scan selftest``: nodes and links before a run, compared across ranks."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "selftest",
        help="measure nodes and links before a run and compare them",
        description="Measure matrix products, memory, disk and the links between ranks for some seconds,\n"
        "and name what is slower than its like. Start it with torchrun as the run itself; alone it\n"
        "only measures.",
        epilog="example:\n"
        "  torchrun --nproc-per-node 4 -m mt_megatron.cli scan selftest --json selftest.json\n\n"
        "exit codes: 0 nothing stands out (of one rank nothing is compared), 1 something does, 2 wrong use",
    )
    parser.add_argument("--backend", default="auto", metavar="NAME", help="auto, cpu, cuda or musa")
    parser.add_argument("--folder", type=Path, default=Path(), metavar="D", help="try the disk here (.)")
    parser.add_argument(
        "--size", type=int, metavar="N", help="side of the matrices (384 on a host, 4096 on a device)"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures to this file too")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure; rank 0 reports. The same exit code on every rank."""
    if not args.folder.is_dir():
        raise ConfigError(f"--folder is {args.folder}; expected a folder that exists here")
    if args.json is not None and not args.json.resolve().parent.is_dir():
        raise ConfigError(f"--json is {args.json}; expected a file in a folder that exists")
    if args.size is not None and args.size < 1:
        raise ConfigError(f"--size is {args.size}; expected at least 1")
    from mt_megatron.backends import registry
    from mt_megatron.backends.distributed.namespace import (
        let_group_threads_rest,
        local_device,
        node_count,
        prepare_environment,
    )
    from mt_megatron.scan.respond.measures import Measures
    from mt_megatron.scan.respond.selftest import selftest

    backend, _ = registry.select(args.backend)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    backend.set_device(local_device(backend))
    if world_size == 1:
        measures = Measures(backend, size=args.size)
        found = selftest(backend, rank=0, world_size=1, folder=args.folder, measures=measures)
    else:
        import torch.distributed as dist

        prepare_environment(backend, nodes=node_count())
        dist.init_process_group(backend.collective)
        try:
            measures = Measures(backend, size=args.size)
            found = selftest(backend, rank=rank, world_size=world_size, folder=args.folder, measures=measures)
        finally:
            let_group_threads_rest()
            dist.destroy_process_group()
    if rank == 0:
        print("\n".join(found.lines()), flush=True)
        if world_size == 1:
            # Ranks of a CPU share it; a device has one rank.
            count = max(backend.device_count(), 1 + (backend.device_type == "cpu"))
            where = f"--nproc-per-node {count}"
            if count == 1:
                where += " --nnodes N --rdzv-backend c10d --rdzv-endpoint HOST:29400"
            print(
                f"to compare ranks: torchrun {where} -m mt_megatron.cli scan selftest "
                f"--backend {backend.name}"
            )
        if args.json is not None:
            args.json.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    return int(bool(found.outliers))
