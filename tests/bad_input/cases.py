"""Valid configurations drawn at random, and how one is written down as flags, YAML or both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.config.types import options


@dataclass(kw_only=True)
class Case:
    """Values by option name, and the number of processes; a rule breaks it in one place."""

    values: dict[str, Any]
    world: int = 1
    extra_flags: list[str] = field(default_factory=list)
    """Appended as they are, whatever the rest is written as."""

    yaml_text: str | None = None
    """Instead of what ``values`` would be as YAML."""

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name, options()[name].default)

    def __setitem__(self, name: str, value: Any) -> None:
        self.values[name] = value


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What the error about one broken rule has to say."""

    option: str
    """The name or the flag that is wrong, as it must appear."""

    found: str
    """The value that was found, as it must appear."""

    change: str
    """What to change, as it must appear: a flag, or words."""


def valid_case(rng: Random) -> Case:
    """A configuration that passes every check, on 1 to 48 processes, dense or with experts."""
    tensor, context = rng.choice([1, 2, 4]), rng.choice([1, 1, 2])
    stages, chunks = rng.choice([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
    data = rng.choice([1, 2, 3])
    sequence_parallel = tensor > 1 and rng.random() < 0.5
    groups = tensor * rng.choice([1, 2])
    heads = groups * rng.choice([1, 2, 3])
    micro, microbatches = rng.choice([1, 2, 4]), stages * rng.choice([1, 2])
    iterations = rng.randrange(10, 500)
    values: dict[str, Any] = {
        "num_layers": stages * chunks * rng.choice([1, 2]),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": 2 * rng.choice([4, 8, 16]),
        "hidden_size": 8 * heads,
        "ffn_hidden_size": tensor * rng.randrange(8, 80),
        "vocab_size": rng.randrange(4096, 70_000),
        "position_embedding_type": "rope",
        "seq_length": 2 * context * tensor * rng.choice([8, 16]),
        "tensor_model_parallel_size": tensor,
        "context_parallel_size": context,
        "pipeline_model_parallel_size": stages,
        "micro_batch_size": micro,
        "global_batch_size": micro * data * microbatches,
        "train_iters": iterations,
        "lr": rng.choice([1e-3, 3e-4]),
        "min_lr": rng.choice([0.0, 1e-5]),
        "lr_warmup_iters": rng.randrange(0, 5),
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "hidden_dropout": rng.choice([0.0, 0.1]),
    }
    if chunks > 1:
        values["virtual_pipeline_model_parallel_size"] = chunks
    if sequence_parallel:
        values["sequence_parallel"] = True
    if rng.random() < 0.3:
        values["bf16"] = True
    if rng.random() < 0.3:
        values["use_distributed_optimizer"] = True
    return Case(values=values, world=tensor * context * stages * data)


def as_argv(case: Case, folder: Path, rng: Random) -> list[str]:
    """The command line of ``case``: all flags, all in a YAML file, or some in each."""
    style = "yaml" if case.yaml_text is not None else rng.choice(["flags", "yaml", "both"])
    names = list(case.values)
    in_yaml = {"flags": [], "yaml": names, "both": [name for name in names if rng.random() < 0.5]}[style]
    argv: list[str] = []
    if style != "flags":
        file = folder / "run.yaml"
        text = case.yaml_text if case.yaml_text is not None else as_yaml({n: case.values[n] for n in in_yaml})
        file.write_text(text)
        argv += ["--config", str(file)]
    for name in names:
        if name not in in_yaml and case.yaml_text is None:
            argv += as_flag(name, case.values[name])
    return argv + case.extra_flags


def as_flag(name: str, value: Any) -> list[str]:
    """One option as typed."""
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + flag[2:]]
    if isinstance(value, tuple | list):
        return [flag, *map(str, value)]
    return [f"{flag}={'none' if value is None else value}"]


def as_yaml(values: dict[str, Any]) -> str:
    """The options in their sections."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        plain = list(value) if isinstance(value, tuple) else value
        sections.setdefault(options()[name].section, {})[name] = plain
    return yaml.safe_dump(sections)


def loaded(case: Case, folder: Path, rng: Random) -> TrainingConfig:
    """``case`` read back from what it was written as."""
    from mt_megatron.config.parse import load_config

    return load_config(as_argv(case, folder, rng))
