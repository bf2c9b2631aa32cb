"""``mt-megatron pretrain``: one process of a training run; torchrun starts several."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from typing import Any

import mt_megatron
from mt_megatron.config import presets
from mt_megatron.config.parse import option_help
from mt_megatron.errors import ConfigError
from mt_megatron.planning.validate.environment import check_environment
from mt_megatron.training.init_from_hf import load_run
from mt_megatron.training.validate import validate

COMMON = """common options:
  model      --model NAME  --config FILE  --init-from-hf FOLDER
  data       --train-data-path PREFIX  --valid-data-path PREFIX  --tokenizer-model FILE  --mock-data
  length     --train-iters N  --seq-length N  --micro-batch-size N  --global-batch-size N
  learning   --lr X  --min-lr X  --lr-warmup-iters N  --lr-decay-style STYLE  --weight-decay X
  parallel   --tensor-model-parallel-size N  --pipeline-model-parallel-size N  --context-parallel-size N
             --expert-model-parallel-size N  --sequence-parallel  --use-distributed-optimizer
  precision  --bf16  --fp8-recipe NAME  --recompute-granularity full|selective
  saving     --save FOLDER  --save-interval N  --eval-interval N  --load FOLDER
  machine    --backend cpu|cuda|musa  --scan LEVEL  --scope MODE"""
"""Options that most runs set, by group."""


class _ListOptions(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, word: Any, *ignored: Any
    ) -> None:
        print(option_help(word))
        parser.exit()


class _ListModels(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> None:
        print(presets.listing())
        parser.exit()


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "pretrain",
        description="Train a model on prepared data. Alone it is a run of one process; torchrun starts\n"
        "several. Options are Megatron-Core's field names and Megatron-LM 0.9's argument names, over a\n"
        "YAML file (--config FILE), over a preset (--model NAME); --list-options and --list-models name\n"
        "them all.\n\n" + COMMON,
        epilog="example:\n"
        "  mt-megatron prepare --output data\n"
        "  torchrun --nproc-per-node 2 -m mt_megatron.cli pretrain --model llama3_tiny \\\n"
        "    --train-data-path data/train --valid-data-path data/valid \\\n"
        "    --tokenizer-model data/tokenizer.json --train-iters 100 --global-batch-size 8 \\\n"
        "    --lr 2e-3 --save runs/tiny\n\n"
        "exit codes: 0 trained, or ended as asked; 1 a problem was found; 2 wrong use; 75 a rank is stuck\n"
        "or gone; 79 a straggler was confirmed (--scan-on-straggler)",
    )
    parser.add_argument(
        "--list-options",
        action=_ListOptions,
        nargs="?",
        metavar="WORD",
        help="print every option, or those with WORD in their name or meaning, and stop",
    )
    parser.add_argument(
        "--list-models", action=_ListModels, nargs=0, help="print every preset of --model and stop"
    )
    parser.set_defaults(func=run, config_arguments=True)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train. Returns 0 when the run ended as it was told to, by a request to stop as well, and
    ``scan.act.EXIT_CODE`` when it ended because of a straggler."""
    if not args.config_argv:
        raise ConfigError("nothing says what to train. Start with --model NAME or --config FILE; see --help.")
    config = load_run(args.config_argv)
    if config.launch.print_config:
        print(config.to_yaml(), end="")
        return 0
    validate(config, world_size=check_environment(os.environ))
    # Not earlier: torch takes seconds to import, and the checks above need none of it.
    from mt_megatron.training.loop import train

    _quieten()
    mt_megatron.patch(config.launch.backend)
    outcome = train(config)
    if outcome.straggler:
        from mt_megatron.scan.respond.straggler_policy import EXIT_CODE

        return EXIT_CODE
    return 0


def _quieten() -> None:
    """Keep upstream's remarks about its own past off the screen; warnings of ours still show."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    with warnings.catch_warnings(record=True):
        # It insists on its deprecation whatever the filters say; once imported it is silent.
        import torch.distributed._sharded_tensor  # noqa: F401
