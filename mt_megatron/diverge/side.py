"""One side of a comparison: its backend, configuration and processes; and which pairs can be compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.data.loader.tokenizer import load_tokenizer
from mt_megatron.errors import BackendError, ConfigError
from mt_megatron.planning.parameters import padded_vocab_size
from mt_megatron.training.init_from_hf import load_run
from mt_megatron.training.validate import problems

_MOCK_VOCABULARY = 4096
"""Megatron-Core's generated tokens go up to 4095."""

_SAME_TOKENS = "both sides must compute the same loss from the same tokens"


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one side runs."""

    name: str
    """``a`` or ``b``: its folder below the run's."""

    backend: str
    arguments: tuple[str, ...]
    """Options for ``load_run``."""

    processes: int
    imports: tuple[str, ...] = ()
    """Modules, or paths of Python files, that are imported before the model is built."""

    dropout_switched_off: bool = False
    """Whether the configuration asked for dropout and does not get it."""

    def config(self) -> TrainingConfig:
        """The configuration of this side."""
        return load_run(self.arguments)

    def write(self, path: Path) -> None:
        """As JSON, for the processes of this side."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Side:
        """Read what ``write`` wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        found |= {name: tuple(found[name]) for name in ("arguments", "imports")}
        return cls(**found)


def make_side(
    name: str,
    *,
    backend: str,
    common: Sequence[str],
    own: Sequence[str] = (),
    processes: int | None = None,
    imports: Sequence[str] = (),
    check_files: bool = True,
) -> Side:
    """A checked side: ``common`` options, then its ``own``, on ``processes`` (the fewest that its parallel
    sizes need). ``check_files`` is that of ``validate``. Raises ``ConfigError`` when the configuration is
    wrong for that many."""
    if _config_at(own) is not None:
        # A side's own file is read in the place of the one that both have.
        common = _without_config(common)
    arguments = [*common, *own, "--backend", backend]
    config = load_run(arguments)
    if config.data.mock_data and config.data.tokenizer_model is None:
        # Generated tokens need no text.
        if config.data.tokenizer_type == "HuggingFaceTokenizer":
            arguments += ["--tokenizer-type", "NullTokenizer"]
        if config.model.vocab_size is None:
            arguments += ["--vocab-size", str(_MOCK_VOCABULARY)]
    if config.train.train_iters is None:
        arguments += ["--train-iters", "1"]
    dropout = bool(_core_value(config, "hidden_dropout") or _core_value(config, "attention_dropout"))
    if dropout:
        # Dropout masks belong to a layout: there is nothing to compare.
        arguments += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    config = load_run(arguments)
    if processes is None:
        processes = config.fewest_processes
    found = problems(config, world_size=processes, check_files=check_files)
    if found:
        lines = "\n".join(f"- {line}" for line in found)
        raise ConfigError(f"side {name}, {processes} process(es) on {backend}, cannot run:\n{lines}")
    return Side(
        name=name,
        backend=backend,
        arguments=tuple(arguments),
        processes=processes,
        imports=tuple(imports),
        dropout_switched_off=dropout,
    )


def _config_at(words: Sequence[str]) -> int | None:
    return next((at for at, word in enumerate(words) if word.partition("=")[0] == "--config"), None)


def _without_config(words: Sequence[str]) -> list[str]:
    at = _config_at(words)
    if at is None:
        return list(words)
    return [*words[:at], *words[at + (1 if "=" in words[at] else 2) :]]


def check_pair(a: Side, b: Side) -> list[str]:
    """Raise ``ConfigError`` when the two sides do not do the same work; else what is worth a note."""
    one, other = a.config(), b.config()
    found: list[str] = []

    def same(what: str, x: object, y: object, why: str = _SAME_TOKENS) -> None:
        if x != y:
            found.append(f"{what} is {x} on side a and {y} on side b; {why}")

    same("seed", one.train.seed, other.train.seed)
    same("seq_length", one.train.seq_length, other.train.seq_length)
    batch, other_batch = one.global_batch_size(a.processes), other.global_batch_size(b.processes)
    same("global_batch_size", batch, other_batch, "give --global-batch-size")
    same("data", one.data, other.data)
    same("load", one.checkpoint.load, other.checkpoint.load, "both sides start from the same weights")
    per_token = [bool(_core_value(each, "calculate_per_token_loss")) for each in (one, other)]
    same("calculate_per_token_loss", per_token[0], per_token[1])
    if not all(per_token):
        why = "the loss is a mean per micro-batch: use the same, or --calculate-per-token-loss"
        same("micro_batch_size", one.train.micro_batch_size, other.train.micro_batch_size, why)
    why = "choose --make-vocab-size-divisible-by so that both agree"
    same("the padded vocabulary", _padded(one), _padded(other), why)
    if found:
        raise ConfigError("the two sides cannot be compared:\n" + "\n".join(f"- {line}" for line in found))
    notes = []
    if a.dropout_switched_off or b.dropout_switched_off:
        notes.append("dropout is switched off on both sides: its masks differ between layouts and devices")
    return notes


def check_devices(*sides: Side) -> None:
    """Raise ``ConfigError`` when a side's backend cannot be used here. Imports torch."""
    from mt_megatron.backends.registry import select

    for side in sides:
        try:
            select(side.backend)
        except BackendError as error:
            raise ConfigError(f"side {side.name}: {error}") from error


def _core_value(config: TrainingConfig, name: str) -> object:
    sections = config.to_dict().values()
    return next((section[name] for section in sections if name in section), None)


def _padded(config: TrainingConfig) -> int:
    size = config.model.vocab_size
    return padded_vocab_size(
        load_tokenizer(config.data).vocab_size if size is None else size,
        divisible_by=config.model.make_vocab_size_divisible_by,
        tensor_parallel=config.parallel.tensor_model_parallel_size,
    )
