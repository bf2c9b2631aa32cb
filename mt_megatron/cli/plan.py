"""``mt-megatron plan``: exact parameter counts of a model, without building it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.models.parameters import ParameterCount, count_parameters, padded_vocab_size
from mt_megatron.training.arguments import load_config
from mt_megatron.training.config import TrainingConfig
from mt_megatron.training.config_build import model_shape


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="exact parameter counts of a model",
        description="Count a model's parameters exactly, per kind of module, without building it.\n"
        "Takes --model NAME and every option of the configuration's model section.",
        epilog="example:\n  mt-megatron plan --model llama3_8b --json\n"
        "  mt-megatron plan --model llama3_8b --num-layers 16 --tensor-model-parallel-size 4",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run, config_arguments=True)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the plan. Raises ``ConfigError`` when the model is not described completely."""
    if not args.config_argv:
        raise ConfigError("no model is given. Name a preset, such as --model llama3_8b.")
    plan = make_plan(load_config(args.config_argv))
    print(json.dumps(plan, indent=2) if args.json else _text(plan))
    return 0


def make_plan(config: TrainingConfig) -> dict[str, Any]:
    """The plan as plain data.

    ``parameters`` counts the published model; ``padded`` what is stored when the vocabulary is
    padded for the configured tensor-parallel size. Raises ``ConfigError``.
    """
    shape = model_shape(config)
    padded = padded_vocab_size(
        shape.vocab_size,
        divisible_by=config.model.make_vocab_size_divisible_by,
        tensor_parallel=config.parallel.tensor_model_parallel_size,
    )
    count = count_parameters(shape)
    return {
        "model": config.model.preset,
        "parameters": count.total,
        "active_parameters": count.active,
        "modules": _modules(count),
        "padded": {
            "vocab_size": padded,
            "parameters": count_parameters(dataclasses.replace(shape, vocab_size=padded)).total,
        },
        "shape": dataclasses.asdict(shape),
    }


def _modules(count: ParameterCount) -> dict[str, int]:
    return {
        "embedding": count.embedding,
        "attention": count.attention,
        "mlp": count.mlp,
        "router": count.router,
        "norms": count.norms,
        "head": count.head,
    }


def _text(plan: dict[str, Any]) -> str:
    shape = plan["shape"]
    lines = [
        (
            f"{plan['model'] or 'model'}: {shape['num_layers']} layers, hidden {shape['hidden_size']}, "
            f"ffn {shape['ffn_hidden_size']}, {shape['num_attention_heads']} heads, "
            f"{shape['num_query_groups']} query groups, vocabulary {shape['vocab_size']}"
        ),
        "",
    ]
    total = plan["parameters"]
    for name, value in plan["modules"].items():
        if value:
            lines.append(f"  {name:<11}{value:>20,}  {value / total:6.1%}")
    lines.append(f"  {'parameters':<11}{total:>20,}")
    if plan["active_parameters"] != total:
        lines.append(f"  {'active':<11}{plan['active_parameters']:>20,}  per token")
    if plan["padded"]["parameters"] != total:
        padded = plan["padded"]
        lines.append(
            f"  {'stored':<11}{padded['parameters']:>20,}  vocabulary padded to {padded['vocab_size']}"
        )
    return "\n".join(lines)
