"""What an earlier run left under the same prefix: the same result, an unfinished run, or something else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.data.loader.tokenizer import Tokenizer, open_tokenizer
from mt_megatron.data.prepare.indexed_files import pair_problem
from mt_megatron.data.prepare.inputs import InputFile, shard_bytes
from mt_megatron.data.prepare.merging import output_prefix
from mt_megatron.data.prepare.preprocess_options import PreprocessOptions, Result
from mt_megatron.data.prepare.sidecar import FORMAT, read_sidecar, sidecar_path
from mt_megatron.errors import DataError

_PLAN = "plan.json"
_LOCK = ".lock"
_WITHOUT_A_CHOICE = {
    "include_special_tokens": False,
    "split_special_tokens": True,
    "split_sentences": False,
}
_KEPT_BY = {
    ("include_special_tokens", False): " (--tokenizer-hf-no-include-special-tokens keeps it)",
    ("split_special_tokens", True): " (--split-special-tokens keeps it)",
}


def plan_of(options: PreprocessOptions, files: list[InputFile]) -> dict[str, Any]:
    decisive = asdict(options) | options.special_tokens
    for name in ("inputs", "output_prefix", "workers", "strict", "max_bad_share"):
        del decisive[name]
    if options.tokenizer_type != "NullTokenizer" and options.train_bpe is None:
        opened = open_tokenizer(options.tokenizer_type, options.tokenizer_model)
        decisive["tokenizer_digest"] = opened.identity
        if isinstance(opened, Tokenizer) and opened.truncation_and_padding is not None:
            decisive["truncation_and_padding"] = opened.truncation_and_padding
        if options.append_eod:
            decisive["tokenizer_eod"] = opened.eod
        del decisive["tokenizer_model"]
    plain = json.loads(json.dumps(decisive))
    return {"format": FORMAT, "options": plain, "files": [asdict(file) for file in files]}


def is_output(options: PreprocessOptions, path: str) -> bool:
    """True for a ``path`` of the result or of its making: both may lie in a folder of inputs, and symbolic
    links may lead to either."""
    folder, name = os.path.split(options.output_prefix)
    prefix, path = os.path.join(os.path.realpath(folder), name), os.path.realpath(path)
    pairs = [output_prefix(prefix, key, options.split_sentences) for key in options.json_keys]
    made = {each + suffix for each in pairs for suffix in (".bin", ".idx", ".json")}
    made |= {f"{prefix}_problems.jsonl", f"{prefix}_tokenizer.json"}
    return path in made or path.startswith(f"{prefix}.preprocess{os.sep}")


def already_made(options: PreprocessOptions, plan: dict[str, Any], folder: Path) -> Result | None:
    """The finished result, when it is there and is this one."""
    prefixes = [
        output_prefix(options.output_prefix, key, options.split_sentences) for key in options.json_keys
    ]
    found = [read_sidecar(prefix) for prefix in prefixes]
    if folder.exists() and not all(found):
        return None
    for prefix, sidecar in zip(prefixes, found, strict=True):
        there = [suffix for suffix in (".bin", ".idx") if Path(prefix + suffix).exists()]
        if sidecar is None and there:
            raise DataError(
                f"{prefix}{there[0]} exists and nothing beside it says what it is; it would be overwritten. "
                "Choose another --output-prefix, or move it away"
            )
        if sidecar is not None:
            differences = _differences(_plan_of_result(sidecar), plan)
            if differences:
                raise DataError(
                    f"{prefix}.bin was made otherwise ({'; '.join(differences)}). Runs may depend on it: "
                    f"choose another --output-prefix, or use --overwrite"
                )
    if not all(found):
        return None
    for prefix in prefixes:
        problem = pair_problem(prefix)
        if problem is not None:
            raise DataError(
                f"{sidecar_path(prefix)} says that this data is complete, and it is not: {problem}. "
                "Use --overwrite to make it anew"
            )
    first = found[0] or {}
    return Result(
        prefixes=tuple(prefixes),
        documents=first["documents"],
        tokens=tuple(sidecar["tokens"] for sidecar in found if sidecar),
        counts=first["left_out"] | first["noticed"],
        report=first["report"],
        tokenizer_model=first["tokenizer"]["model"],
        already=True,
    )


def _plan_of_result(sidecar: dict[str, Any]) -> dict[str, Any]:
    """The plan that a result was made by. That of an earlier version does not name the end of documents,
    which the sidecar does."""
    plan: dict[str, Any] = sidecar["plan"]
    end = sidecar["tokenizer"].get("eod")
    return plan | {"options": {"tokenizer_eod": end} | plan["options"]} if end is not None else plan


def overwrite(options: PreprocessOptions) -> None:
    """Remove what an earlier run under the same prefix left, finished or not.

    Raises ``DataError`` while another process works there.
    """
    folder = Path(options.output_prefix + ".preprocess")
    with locked(folder, lambda line: None):  # The run that follows says it.
        Path(options.output_prefix + "_problems.jsonl").unlink(missing_ok=True)
        for key in options.json_keys:
            prefix = output_prefix(options.output_prefix, key, options.split_sentences)
            for path in (sidecar_path(prefix), Path(prefix + ".bin"), Path(prefix + ".idx")):
                path.unlink(missing_ok=True)
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove the folder of a run, its lock last: until then it keeps other processes out."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name != _LOCK:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Make ``folder`` and keep other processes out of it; ``say`` hears where its storage has no file locks.

    Raises ``DataError`` while another process works there, or when the folder cannot be made.
    """
    with _lock(folder) as lock:
        if lock.state == "busy":
            raise DataError(
                f"another process is working in {folder}; wait for it, or choose another --output-prefix"
            )
        if lock.state == "unsupported":
            say(
                f"the storage of {folder} has no file locks ({lock.reason}): start no second process with "
                "this --output-prefix"
            )
        yield


def _lock(folder: Path) -> FileLock:
    while True:
        _make_folder(folder)
        try:
            lock = FileLock(folder / _LOCK, create=True)
        except FileNotFoundError:
            continue  # Another process has removed the folder.
        if lock.state != "held" or lock.names_the_file():
            return lock
        # The file was removed by the process that held it: a third one would lock the next file.
        lock.close()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot make the folder {folder}: {error.strerror}; choose another --output-prefix"
        ) from error


def adopt_plan(folder: Path, plan: dict[str, Any], files: list[InputFile]) -> tuple[int, bool]:
    """The size of shards, and whether this continues an interrupted run."""
    path = folder / _PLAN
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        size = shard_bytes(files)
        part = folder / f"{_PLAN}.part"
        part.write_text(json.dumps(plan | {"shard_bytes": size}), encoding="utf-8")
        os.replace(part, path)
        return size, False
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); use --overwrite to start anew") from error
    differences = _differences(before, plan)
    if differences:
        raise DataError(
            f"{folder} holds an unfinished run that was started otherwise ({'; '.join(differences)}); its "
            "documents would not fit. Restore that and run again, or use --overwrite to start anew"
        )
    return int(before["shard_bytes"]), True


def require_unchanged(files: list[InputFile]) -> None:
    """Raise ``DataError`` when one of ``files`` is no longer what was planned with."""
    changed = [file.path for file in files if file.changed()]
    if changed:
        more = f" and {len(changed) - 1} more" if changed[1:] else ""
        raise DataError(
            f"{changed[0]} changed while it was read{more}; the data would be of no one state of it. Run "
            "again with --overwrite when nothing writes to it any more"
        )


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two plans, in words; at most a few files are named."""
    # Plans of earlier versions do not name the end of documents, and have no choice of special tokens.
    unsaid = {"tokenizer_eod": now["options"].get("tokenizer_eod"), **_WITHOUT_A_CHOICE}
    earlier = {name: before["options"].get(name, unsaid.get(name)) for name in now["options"]}
    found = [
        f"{name} {earlier[name]} -> {value}{_KEPT_BY.get((name, earlier[name]), '')}"
        for name, value in now["options"].items()
        if earlier[name] != value
    ]
    old, new = ({file["path"]: file for file in plan["files"]} for plan in (before, now))
    for verb, names in (
        ("is gone from the input", [name for name in old if name not in new]),
        ("is new in the input", [name for name in new if name not in old]),
        ("has changed", [name for name in new if name in old and new[name] != old[name]]),
    ):
        found += [f"{name} {verb}" for name in names[:3]]
        if len(names) > 3:
            found.append(f"{len(names) - 3} more files: {verb}")
    if not found and list(old) != list(new):
        found.append("the files come in another order")
    return found
