"""Checks of what the configuration names on disk: data, tokenizer, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

from mt_megatron.training.config import TrainingConfig
from mt_megatron.training.data.sidecar import data_problems

_MOCK_VOCABULARY = 4095
"""MockGPTLowLevelDataset counts from 1 to at most 4094."""


def file_problems(config: TrainingConfig) -> list[str]:
    """One line per problem: found, expected, what to change."""
    return [*_sources(config), *_tokenizer(config), *_indexed(config), *_checkpoints(config)]


def _sources(config: TrainingConfig) -> list[str]:
    data, found = config.data, []
    per_split = {
        "train_data_path": data.train_data_path,
        "valid_data_path": data.valid_data_path,
        "test_data_path": data.test_data_path,
    }
    kinds = [bool(data.data_path), any(per_split.values()), data.mock_data]
    if sum(kinds) != 1:
        found.append(
            f"{sum(kinds)} sources of data are given; expected one of: --data-path with --split, "
            "--train-data-path (and --valid-data-path, --test-data-path), or --mock-data."
        )
    if any(per_split.values()) and not data.train_data_path:
        found.append(
            "valid_data_path or test_data_path is given without train_data_path; expected it. "
            "Set --train-data-path."
        )
    if data.split is None and data.data_path:
        found.append("data_path is given without split; expected its shares. Set --split, such as 98,2,0.")
    if data.split is not None:
        found.extend(_split(data.split, bool(data.data_path)))
    vocabulary = config.model.vocab_size
    if data.mock_data and vocabulary is not None and vocabulary < _MOCK_VOCABULARY:
        found.append(
            f"vocab_size is {vocabulary} with mock_data; expected at least {_MOCK_VOCABULARY}: Megatron-Core "
            "generates tokens up to there. Set --vocab-size."
        )
    for name, blend in {"data_path": data.data_path, **per_split}.items():
        found.extend(_blend(name, blend))
    return found


def _split(split: str, used: bool) -> list[str]:
    if not used:
        return [f"split is {split!r} without data_path, all it divides; expected both. Leave --split out."]
    try:
        shares = [float(each) for each in split.split(",")]
    except ValueError:
        shares = []
    if (
        1 <= len(shares) <= 3
        and sum(shares) > 0
        and all(math.isfinite(each) and each >= 0 for each in shares)
    ):
        return []
    return [
        (
            f"split is {split!r}; expected the shares of training, validation and test such as 98,2,0. "
            "Change --split."
        )
    ]


def _blend(name: str, blend: tuple[str, ...]) -> list[str]:
    # Megatron-Core's rule: one prefix; or weights and prefixes in turn, when the first is a number.
    prefixes, found = list(blend), []
    if len(blend) > 1 and _number(blend[0]) is not None:
        prefixes = list(blend[1::2])
        weights = [_number(each) for each in blend[::2]]
        if len(blend) % 2 or any(weight is None or weight <= 0 for weight in weights):
            return [
                (
                    f"{name} is {' '.join(blend)}; expected a weight above 0 before each prefix. Change "
                    f"--{name.replace('_', '-')}."
                )
            ]
    for prefix in prefixes:
        missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
        if missing:
            found.append(
                f"{name} names {prefix}, but {' and '.join(prefix + each for each in missing)} "
                f"{'do' if len(missing) > 1 else 'does'} not exist; expected a prefix without .bin and .idx. "
                f"Make the data with `mt-megatron prepare`, or correct --{name.replace('_', '-')}."
            )
    return found


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _tokenizer(config: TrainingConfig) -> list[str]:
    data = config.data
    if data.tokenizer_type in ("NullTokenizer", "ByteLevelTokenizer"):
        return []
    if data.tokenizer_model is None:
        if data.mock_data and config.model.vocab_size is not None:
            return []
        return [
            (
                "tokenizer_model is not set; expected the path of a tokenizer.json. Set "
                "--tokenizer-model, or --tokenizer-type NullTokenizer with --vocab-size."
            )
        ]
    if not Path(data.tokenizer_model).exists():
        return [
            f"tokenizer_model is {data.tokenizer_model}, which does not exist; expected a file "
            "or a folder with a tokenizer.json. Correct --tokenizer-model."
        ]
    return []


def _indexed(config: TrainingConfig) -> list[str]:
    """Whether data files fit their index and the tokenizer; missing ones are named elsewhere."""
    data = config.data
    paths = [*data.data_path, *data.train_data_path, *data.valid_data_path, *data.test_data_path]
    there = dict.fromkeys(
        path for path in paths if Path(path + ".idx").is_file() and Path(path + ".bin").is_file()
    )
    if _tokenizer(config) or (data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None):
        return []
    return [problem for prefix in there for problem in data_problems(prefix, config)]


def _checkpoints(config: TrainingConfig) -> list[str]:
    checkpoint, found = config.checkpoint, []
    if checkpoint.save_interval is not None and checkpoint.save is None:
        found.append("save_interval is set without save; expected a directory. Set --save.")
    if checkpoint.load is not None and not Path(checkpoint.load).is_dir():
        found.append(f"load is {checkpoint.load}, which is no directory; expected one. Correct --load.")
    if checkpoint.resume not in ("auto", "never") and not Path(checkpoint.resume).is_dir():
        found.append(
            f"resume is {checkpoint.resume}; expected auto, never or the directory of a checkpoint. "
            "Correct --resume."
        )
    return found
