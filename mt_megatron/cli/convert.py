"""``mt-megatron convert``: weights between Hugging Face's folders and Megatron's checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from mt_megatron.cli import progress
from mt_megatron.convert.folders import check_destination, check_published, megatron_folder
from mt_megatron.errors import CheckpointError, ConfigError
from mt_megatron.host import limits


class ConsoleProgress(progress.ConsoleProgress):
    """Counts bytes from several threads."""

    command = "convert"

    def __init__(self, *, plain: bool | None = None) -> None:
        super().__init__(plain=plain)
        self._lock = threading.Lock()
        self._done = self._total = 0

    def expect(self, total: int) -> None:
        """So many bytes will be written."""
        self._total = total
        self.started = time.monotonic()

    def advance(self, count: int) -> None:
        """So many more are."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            rate = self.rate(now, self._done)
            done, total, rate = (each / progress.MB for each in (self._done, self._total, rate))
            self.show(now, self._done, self._total, f"{done:,.0f} of {total:,.0f} MB, {rate:,.0f} MB/s")


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST_WORKERS = 8


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "convert",
        description="Convert weights between a folder in Hugging Face's form and Megatron checkpoints, or\n"
        "between the two forms of those. No model is built and no device is used. A conversion\n"
        "that was interrupted goes on where it was when the same command is given again.\n"
        "Every option of mt-megatron pretrain that describes the model or its layout is taken.",
        epilog="examples:\n"
        "  mt-megatron convert --from-hf models/llama-3-8b --to-megatron checkpoints/llama-3-8b\n"
        "  mt-megatron convert --from-megatron runs/mine --to-hf models/mine --dtype bf16\n"
        "  mt-megatron convert --from-hf models/llama-3-8b --to-torch checkpoints/for-0.9 \\\n"
        "    --tensor-model-parallel-size 8 --transformer-impl transformer_engine\n"
        "  mt-megatron convert --from-hf models/llama-3-8b --to-config llama-3-8b.yaml\n"
        "  mt-megatron convert --from-megatron runs/old --to-megatron runs/new --with-optimizer\n\n"
        "exit codes: 0 converted, 1 the weights cannot be converted, 2 wrong use",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-hf", type=Path, metavar="DIR", help="folder with config.json and safetensors")
    source.add_argument(
        "--from-megatron",
        type=Path,
        metavar="DIR",
        help="checkpoint (torch_dist or torch), the folder --save named, or a run with 'checkpoints' in it",
    )
    destination = parser.add_mutually_exclusive_group(required=True)
    destination.add_argument("--to-hf", type=Path, metavar="DIR", help="folder that transformers loads")
    destination.add_argument(
        "--to-megatron", type=Path, metavar="DIR", help="distributed checkpoint (torch_dist), any layout"
    )
    destination.add_argument(
        "--to-torch", type=Path, metavar="DIR", help="Megatron-LM 0.9's mp_rank_* files, for one layout"
    )
    destination.add_argument("--to-config", type=Path, metavar="FILE", help="only the model's configuration")
    add = parser.add_argument
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="of the result (as it is stored)")
    add("--max-shard-size", type=_size, metavar="SIZE", help="of a file, such as 5GB")
    add(
        "--fp8",
        nargs="?",
        const="all",
        choices=("all", "blockwise"),
        help="write DeepSeek's block-scaled FP8 weights (with --to-hf): all linears, or with 'blockwise' "
        "those that fp8_recipe blockwise trains in FP8, with its scales",
    )
    add("--no-mtp", action="store_true", help="leave layers of multi-token prediction out")
    add(
        "--with-optimizer",
        action="store_true",
        help="between Megatron checkpoints: the optimizer's state as well, so that the run can be resumed",
    )
    add(
        "--hf-files", type=Path, metavar="DIR", help="folder with tokenizer files and config.json for --to-hf"
    )
    add(
        "--no-verify-checkpoint",
        action="store_true",
        help="read a Megatron checkpoint without comparing its checksums first",
    )
    add("--workers", type=_positive, metavar="N", help="threads (the cores, at most 8)")
    add("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(func=run, config_arguments=True)
    return parser


def run(args: argparse.Namespace) -> int:
    """Convert. Raises ``CheckpointError`` and ``ConfigError``."""
    # Deprecations of torch's that megatron-core's import sets off; nothing the reader can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.core\.")
    _check_places(args)
    # Not earlier: it takes seconds to import.
    import torch

    from mt_megatron.checkpoint.files import write_durably
    from mt_megatron.convert.request import Request
    from mt_megatron.convert.run import configuration_file, convert

    if args.to_config is not None:
        write_durably(args.to_config, configuration_file(args.from_hf, prediction=not args.no_mtp))
        print(f"wrote {args.to_config}", file=sys.stderr)
        return 0
    forms = (("huggingface", args.to_hf), ("torch_dist", args.to_megatron), ("torch", args.to_torch))
    form, destination = next((form, path) for form, path in forms if path is not None)
    workers = args.workers or min(_MOST_WORKERS, limits.processors())
    # Each file has a thread of its own; torch's would only get into each other's way.
    torch.set_num_threads(1)
    with ConsoleProgress() as progress:
        outcome = convert(
            Request(
                source=args.from_hf or args.from_megatron,
                published=args.from_hf is not None,
                destination=destination,
                form=form,  # type: ignore[arg-type]
                arguments=tuple(args.config_argv),
                dtype=args.dtype,
                max_shard_size=args.max_shard_size,
                fp8=args.fp8 is not None,
                fp8_recipe="blockwise" if args.fp8 == "blockwise" else None,
                prediction=not args.no_mtp,
                weights_only=not args.with_optimizer,
                side_files=args.hf_files,
                verify=not args.no_verify_checkpoint,
                workers=workers,
            ),
            progress,
        )
    # A result that was there already took no time: it has no rate.
    took = (
        f" in {outcome.seconds:.1f} s ({outcome.bytes / 1e6 / outcome.seconds:,.0f} MB/s)"
        if outcome.seconds
        else ""
    )
    if args.json:
        print(json.dumps({**dataclasses.asdict(outcome), "folder": str(outcome.folder)}, indent=2))
    else:
        print(f"{outcome.folder}: {outcome.tensors:,} tensors, {outcome.bytes / 1e6:,.0f} MB{took}")
    return 0


def _check_places(args: argparse.Namespace) -> None:
    if args.to_config is not None and args.from_hf is None:
        raise ConfigError("--to-config reads the config.json of --from-hf; a checkpoint has config.yaml")
    if args.to_config is not None:
        _check_alone(args)
    try:
        if args.from_hf is not None:
            check_published(args.from_hf)
        else:
            megatron_folder(args.from_megatron)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    destination = args.to_hf or args.to_megatron or args.to_torch
    if destination is not None:
        check_destination(args.from_hf or args.from_megatron, destination)


def _check_alone(args: argparse.Namespace) -> None:
    """Raise ``ConfigError`` that names every option that ``--to-config`` would not read."""
    given = {
        "--dtype": args.dtype,
        "--max-shard-size": args.max_shard_size,
        "--fp8": args.fp8,
        "--with-optimizer": args.with_optimizer,
        "--hf-files": args.hf_files,
        "--no-verify-checkpoint": args.no_verify_checkpoint,
        "--workers": args.workers,
        "--json": args.json,
    }
    names = [name for name, value in given.items() if value not in (None, False)]
    names += [word.partition("=")[0] for word in args.config_argv if word.startswith("-")]
    names = names or args.config_argv
    if names:
        raise ConfigError(
            f"--to-config is given with {', '.join(names)}; expected --from-hf and --no-mtp alone: the file "
            f"says what config.json says. Leave {'it' if len(names) == 1 else 'them'} out; options of a run "
            "are for mt-megatron pretrain."
        )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}; expected at least 1")
    return value


def _size(text: str) -> int:
    number = text.rstrip("KMGIBkmgib")
    unit = text[len(number) :].upper()
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a size such as 500MB or 5GB")
    return max(1, int(float(number) * _UNITS[unit]))
