"""Configuration of a conversion: the source's model options, and the options of the request."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mt_megatron.config.model_change import changes_from, notes, override_problems, refused
from mt_megatron.config.parse import load_config
from mt_megatron.config.resolve import assemble
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.config.types import options as known_options
from mt_megatron.convert.tensors.table import Sizes, expand
from mt_megatron.errors import CheckpointError, ConfigError
from mt_megatron.models.weights import TensorRow
from mt_megatron.planning.parameters import padded_vocab_size
from mt_megatron.planning.validate.experts import expert_problems
from mt_megatron.planning.validate.model import model_problems

_NAMES_A_MODEL = ("--config", "--model", "--preset")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as a conversion sees it."""

    config: TrainingConfig
    """With local layers, whatever it is trained with: tables then have one form."""

    rows: dict[str, TensorRow]
    """Every single tensor's row, first layers first."""

    sizes: Sizes


def configuration(
    options: Mapping[str, Any], argv: Sequence[str], *, published: bool, say: Callable[[str], None]
) -> TrainingConfig:
    """The configuration that ``options`` (by name, from the source) and ``argv`` (what was typed) make.

    ``argv`` may describe the model itself (``--config``, ``--model``) or parts of it. Raises ``ConfigError``
    that names every difference from the source; ``say`` takes those that are about training alone.
    """
    if published:
        buildable(options)
    if any(word.split("=")[0] in _NAMES_A_MODEL for word in argv):
        config = load_config(argv)
    else:
        with tempfile.TemporaryDirectory(prefix="mt_megatron.") as folder:
            path = Path(folder) / "source.yaml"
            path.write_text(as_yaml(options), encoding="utf-8")
            config = load_config(argv, path)
    if not options:
        return config
    # A Megatron checkpoint holds the vocabulary padded: the real size may have to be given.
    found = changes_from(options, config, ignored=() if published else ("vocab_size",))
    wrong = [*override_problems(config), *refused(found, config, "the source")]
    if wrong:
        raise ConfigError(
            "the configuration is not of the model that is converted:\n"
            + "\n".join(f"- {line}" for line in wrong)
        )
    for line in notes(found, config, "the source"):
        say(line)
    return config


def buildable(options: Mapping[str, Any]) -> TrainingConfig:
    """The configuration of a ``config.json``'s options. Raises ``CheckpointError`` for a model that no run
    could be of."""
    config = assemble(options)
    found = [*model_problems(config), *expert_problems(config, 1)]
    if found:
        raise CheckpointError(
            "config.json describes a model that cannot be built; expected, in terms of the options that it "
            "is read as:\n" + "\n".join(f"- {line}" for line in found) + "\nCorrect its entries"
        )
    return config


def as_yaml(options: Mapping[str, Any]) -> str:
    """``options`` by name as one of our YAML files."""
    sections: dict[str, dict[str, Any]] = {}
    known = known_options()
    for name, value in options.items():
        plain = list(value) if isinstance(value, tuple) else value
        sections.setdefault(known[name].section, {})[name] = plain
    text: str = yaml.safe_dump(sections, sort_keys=False)
    return text


def model_of(config: TrainingConfig, *, tensor: int = 1) -> Model:
    """The model of ``config``, whose vocabulary is padded for tensor-parallel size ``tensor``."""
    from mt_megatron.models.families import family_of

    if config.model.vocab_size is None:
        raise ConfigError(
            "the vocabulary's size is not known: the source holds it padded. Give --vocab-size, the number "
            "of entries of the tokenizer's model"
        )
    local = replace(config, model=replace(config.model, transformer_impl="local"))
    rows = expand(family_of(local).convert_table(local), local.model.num_layers)
    padded = padded_vocab_size(
        local.model.vocab_size or 0,
        divisible_by=local.model.make_vocab_size_divisible_by,
        tensor_parallel=tensor,
    )
    order = sorted(rows, key=_first_layers_first)
    return Model(config=local, rows={name: rows[name] for name in order}, sizes=Sizes.of(local, padded))


def _first_layers_first(name: str) -> tuple[int, int]:
    """Sorts as data passes through: embedding, layers, final norm, output layer, prediction layers."""
    words = name.split(".")
    if words[0] == "embedding":
        return 0, 0
    if words[:2] == ["decoder", "layers"]:
        return 1, int(words[2])
    return (2, 0) if words[0] == "decoder" else (3, 0) if words[0] == "output_layer" else (4, int(words[2]))
