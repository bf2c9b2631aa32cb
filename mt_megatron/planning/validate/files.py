"""Checks of what the configuration names on disk: data, tokenizer, checkpoints and how they are kept."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from mt_megatron.config.hub_names import download_hint
from mt_megatron.config.model_change import override_problems
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import DataError


def checkpoint_problems(config: TrainingConfig) -> list[str]:
    """One line per problem: found, expected, what to change."""
    return [*_kept(config), *_without_a_folder(config), *_skipping(config), *override_problems(config)]


def _skipping(config: TrainingConfig) -> list[str]:
    options = config.checkpoint
    if options.resume_skip_damaged and not options.verify_checkpoint:
        return [
            "resume_skip_damaged is set with --no-verify-checkpoint, which finds no damage; expected one of "
            "the two. Leave --no-verify-checkpoint or --resume-skip-damaged out."
        ]
    return []


def _kept(config: TrainingConfig) -> list[str]:
    options = config.checkpoint
    counts = {
        "save_keep_last": options.save_keep_last,
        "save_retain_interval": options.save_retain_interval,
    }
    return [
        f"{name} is {count}; expected at least 1. Set --{name.replace('_', '-')}."
        for name, count in counts.items()
        if count is not None and count < 1
    ]


def _without_a_folder(config: TrainingConfig) -> list[str]:
    options = config.checkpoint
    if options.save is not None:
        return []
    used = {
        "async_save": options.async_save,
        "save_keep_last": options.save_keep_last is not None,
        "save_retain_interval": options.save_retain_interval is not None,
    }
    return [f"{name} is set without save; expected a directory. Set --save." for name in used if used[name]]


_MOCK_VOCABULARY = 4095
"""MockGPTLowLevelDataset counts from 1 to at most 4094."""


def file_problems(config: TrainingConfig) -> list[str]:
    """One line per problem: found, expected, what to change."""
    return [
        *_sources(config),
        *_tokenizer(config),
        *_indexed(config),
        *_amounts(config),
        *_generated(config),
        *start_problems(config),
        *_outputs(config),
        *_folders(config),
    ]


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
            "generates tokens up to there. "
            + (
                "Set --vocab-size."
                if config.checkpoint.init_from_hf is None
                else "The weights of --init-from-hf have that many: give --train-data-path, not --mock-data."
            )
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
        missing = [suffix for suffix in (".bin", ".idx") if not is_file(prefix + suffix)]
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
    if not (is_file(data.tokenizer_model) or is_folder(data.tokenizer_model)):
        return [
            f"tokenizer_model is {data.tokenizer_model}, which does not exist; expected a file "
            "or a folder with a tokenizer.json. Correct --tokenizer-model."
        ]
    return []


def _indexed(config: TrainingConfig) -> list[str]:
    """Whether data files fit their index and the tokenizer; missing ones are named elsewhere."""
    data = config.data
    paths = [*data.data_path, *data.train_data_path, *data.valid_data_path, *data.test_data_path]
    there = dict.fromkeys(path for path in paths if is_file(path + ".idx") and is_file(path + ".bin"))
    if _tokenizer(config) or (data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None):
        return []
    if not there:
        return []
    # Not earlier: it imports numpy, which the checks of a configuration alone do without.
    from mt_megatron.data.prepare.sidecar import data_problems

    return [problem for prefix in there for problem in data_problems(prefix, config)]


def _amounts(config: TrainingConfig) -> list[str]:
    """Whether there is anything to train on, and a whole sample to validate on."""
    data, length, found = config.data, config.train.seq_length, []
    # Test data are left out: no sample of them is made.
    single = data.valid_data_path[:1] if length is not None else ()
    for prefix in dict.fromkeys((*data.data_path, *data.train_data_path, *data.valid_data_path)):
        tokens = _tokens(prefix)
        if tokens == 0:
            found.append(
                f"{prefix}.bin holds 0 tokens; expected some. Make the data again, or leave {prefix} out."
            )
        elif tokens is not None and length is not None and prefix in single and tokens <= length:
            found.append(
                f"{prefix}.bin holds {tokens} tokens; expected at least seq_length + 1 = {length + 1} for "
                "one sample. Use more data or a shorter --seq-length."
            )
    return found


def _tokens(prefix: str) -> int | None:
    """Tokens that the index of ``prefix`` names; None when it cannot be read, which is said elsewhere."""
    if not (is_file(prefix + ".idx") and is_file(prefix + ".bin")):
        return None
    from mt_megatron.data.prepare.indexed_files import read_header

    try:
        return read_header(Path(prefix + ".idx")).tokens
    except (OSError, ValueError):
        return None


def _generated(config: TrainingConfig) -> list[str]:
    """Whether the tokenizer can be read and is large enough for generated samples; for files of tokens
    ``_indexed`` says that."""
    data = config.data
    if not data.mock_data or data.tokenizer_model is None or _tokenizer(config):
        return []
    from mt_megatron.data.loader.tokenizer import load_tokenizer

    try:
        size = load_tokenizer(data, vocab_size=config.model.vocab_size).vocab_size
    except DataError as error:
        return [str(error)]
    if config.model.vocab_size is None and size < _MOCK_VOCABULARY:
        return [
            f"tokenizer_model is {data.tokenizer_model} with {size} tokens, and so is the vocabulary; "
            f"expected at least {_MOCK_VOCABULARY} with mock_data: Megatron-Core generates tokens up to "
            "there. Set --vocab-size."
        ]
    return []


def start_problems(config: TrainingConfig) -> list[str]:
    """Problems of the folders to start from and to save to, one line each."""
    checkpoint, found = config.checkpoint, []
    if checkpoint.save_interval is not None and checkpoint.save is None:
        found.append("save_interval is set without save; expected a directory. Set --save.")
    if (checkpoint.save_interval_in_mins or 0) > 0 and checkpoint.save is None:
        found.append("save_interval_in_mins is set without save; expected a directory. Set --save.")
    if checkpoint.load is not None and not is_folder(checkpoint.load):
        found.append(f"load is {checkpoint.load}, which is no directory; expected one. Correct --load.")
    if checkpoint.init_from_hf is not None and not is_folder(checkpoint.init_from_hf):
        found.append(
            f"init_from_hf is {checkpoint.init_from_hf}, which is no directory; expected one with "
            "config.json and safetensors files. "
            + (download_hint(checkpoint.init_from_hf) or "Correct --init-from-hf.")
        )
    if checkpoint.init_from_hf is not None and checkpoint.load is not None:
        found.append(
            "init_from_hf and load are both set; expected one place to start from. Leave --init-from-hf or "
            "--load out."
        )
    if checkpoint.resume not in ("auto", "never") and not is_folder(checkpoint.resume):
        found.append(
            f"resume is {checkpoint.resume}; expected auto, never or the directory of a checkpoint. "
            "Correct --resume."
        )
    return found


def _outputs(config: TrainingConfig) -> list[str]:
    """Whether the folders that the run writes to can be written to; they are made when they are needed."""
    logging, found = config.logging, []
    if logging.wandb_project is None:
        found += [
            f"{name} is set without wandb_project, without which nothing is logged there; expected both. Set "
            "--wandb-project."
            for name in ("wandb_exp_name", "wandb_save_dir")
            if getattr(logging, name) is not None
        ]
    path = logging.metrics_path
    if path is not None:
        if path == "":
            found.append("metrics_path is empty; expected the path of a file. Set --metrics-path.")
        elif is_folder(path):
            found.append(f"metrics_path is {path}, which is a folder; expected a file. Set --metrics-path.")
        else:
            found.extend(_unwritable("metrics_path", Path(path), file=True))
    for name, folder in (
        ("save", config.checkpoint.save),
        ("tensorboard_dir", logging.tensorboard_dir),
        ("wandb_save_dir", logging.wandb_save_dir),
        ("scan_dir", config.scan.scan_dir),
        ("scope_dir", config.scope.scope_dir),
    ):
        if folder == "":
            found.append(f"{name} is empty; expected a directory. Set --{name.replace('_', '-')}.")
        elif folder is not None:
            found.extend(_unwritable(name, Path(folder), file=False))
    return found


def is_file(path: str) -> bool:
    """Whether there is such a file; a name that none can have (too long, a zero byte) is none."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: str) -> bool:
    """Whether there is such a folder; a name that none can have is none."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def _unwritable(name: str, path: Path, *, file: bool) -> list[str]:
    change = f"Change --{name.replace('_', '-')}."
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            # Unlike pathlib's questions it complains of names that no file can have.
            os.stat(path)
        if not file and path.exists() and not path.is_dir():
            return [f"{name} is {path}, which is a file; expected a directory. {change}"]
        existing = path.absolute()
        while not existing.exists():
            existing = existing.parent
        if not (existing.is_dir() or existing == path.absolute()):
            return [f"{name} is {path}, and {existing} is a file; expected a directory. {change}"]
        if not os.access(existing, os.W_OK):
            return [f"{name} is {path}, and {existing} is not writable; expected that it is. {change}"]
    except (OSError, ValueError) as error:
        # A name that is too long, or with a zero byte in it.
        return [f"{name} is {str(path)!r}, which is no usable path ({error}); expected one. {change}"]
    return []


def _folders(config: TrainingConfig) -> list[str]:
    """Whether paths that a run reads from are empty."""
    data, found = config.data, []
    for name in ("data_cache_path", "tokenizer_model"):
        if getattr(data, name) == "":
            found.append(f"{name} is empty; expected a path. Set --{name.replace('_', '-')}.")
    return found
