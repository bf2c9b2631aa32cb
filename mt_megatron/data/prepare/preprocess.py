"""Text files become Megatron's indexed data: planned, shared out, merged, published; resumable throughout.

A shard is finished when ``PREFIX.preprocess/NAME.json`` lies there, and every step after that can be
repeated, so a run that was killed at any moment continues with what is done. The result does not
depend on how often that happened, on the number of workers, or on the size of shards.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mt_megatron.data.loader.tokenizer import TokenizerLike, open_tokenizer, train_tokenizer
from mt_megatron.data.prepare.findings import LEFT_OUT, bad_share, summary_of
from mt_megatron.data.prepare.inputs import Unit, find_inputs, units
from mt_megatron.data.prepare.merging import Merged, findings_of, merge_key, output_prefix
from mt_megatron.data.prepare.preprocess_options import PreprocessOptions, Progress, Result, Tally
from mt_megatron.data.prepare.preprocess_plan import (
    adopt_plan,
    already_made,
    is_output,
    locked,
    plan_of,
    remove_folder,
    require_unchanged,
)
from mt_megatron.data.prepare.reading import Reading, ShardReader
from mt_megatron.data.prepare.sidecar import FORMAT, sidecar_path
from mt_megatron.data.prepare.worker_pool import Task, run_tasks
from mt_megatron.errors import DataError

TRAINED = "tokenizer.json"
"""Name of the tokenizer that was trained, in the folder of an unfinished run."""

_SHOWN = 5


def judge(
    options: PreprocessOptions,
    folder: Path,
    tally: Tally,
    progress: Progress,
    *,
    final: bool,
) -> Path | None:
    """Report what was found; the report's file. Raises ``DataError`` when it is too much."""
    lost = sum(count for kind, count in tally.counts.items() if kind in LEFT_OUT)
    share = bad_share(
        tally.counts, tally.documents, lost_bytes=tally.lost_bytes, total_bytes=tally.total_bytes
    )
    too_much = (options.strict and lost > 0) or share > options.max_bad_share
    if not final and not too_much:
        return None
    shown: list[str] = []
    report = folder / "problems.jsonl"
    total = findings_of(folder, report, shown, limit=_SHOWN)
    if too_much:
        kept = Path(options.output_prefix + "_problems.jsonl")
        shutil.copyfile(report, kept)
        rule = "--strict allows nothing to be left out"
        if not options.strict:
            what = "input is bad or lost" if tally.lost_bytes else "documents are bad"
            rule = f"{share:.2%} of the {what}, more than --max-bad-share {options.max_bad_share} allows"
            if tally.counts["truncated"]:
                rule = "the loss of a truncated file is not known, and --max-bad-share 1 alone allows that"
        found = "\n".join(f"- {line}" for line in shown)
        raise DataError(
            f"{rule}. Found so far: {summary_of(tally.counts)}\n{found}\nAll of them are in {kept}. Change "
            "that option and run again, which continues; or repair the files and run again with --overwrite"
        )
    if not total:
        report.unlink()
        return None
    progress.say(f"found: {summary_of(tally.counts)}")
    for line in shown:
        progress.say(f"- {line}")
    return report


def publish(
    options: PreprocessOptions,
    folder: Path,
    plan: dict[str, Any],
    tokenizer: TokenizerLike,
    model: str | None,
    tally: Tally,
    report: Path | None,
    progress: Progress,
) -> Result:
    """Merge, then rename: the sidecar last, as it says that the pair beside it is whole."""
    if tally.documents == 0:
        raise DataError(
            "the input holds no document that can be used"
            + (f" ({summary_of(tally.counts)})" if tally.counts else "")
            + "; check --json-keys, --input-format and the files"
        )
    prefix = options.output_prefix
    try:
        sentences = options.split_sentences
        merged = [
            merge_key(folder, key, tokenizer.vocab_size, sentences=sentences)
            for key in range(len(options.json_keys))
        ]
        report_path = None
        if report is not None:
            report_path = f"{prefix}_problems.jsonl"
            os.replace(report, report_path)
        if options.train_bpe is not None:
            shutil.copyfile(folder / TRAINED, folder / "published.json")
            model = f"{prefix}_tokenizer.json"
            os.replace(folder / "published.json", model)
        for key, made in zip(options.json_keys, merged, strict=True):
            _publish_key(
                output_prefix(prefix, key, sentences),
                made,
                options,
                plan,
                tokenizer,
                model,
                tally,
                report_path,
            )
    except OSError as error:
        raise DataError(
            f"cannot write the result: {error.strerror} ({error.filename}). Free space or rights there, and "
            "run the same command again: nothing is encoded twice"
        ) from error
    remove_folder(folder)
    tokens = tuple(made.tokens for made in merged)
    prefixes = tuple(output_prefix(prefix, key, sentences) for key in options.json_keys)
    if tally.special_tokens:
        split = options.special_tokens["split_special_tokens"]
        progress.say(
            f"the text names {tally.special_tokens:,} special tokens, which are "
            + ("plain text" if split else "tokens; --split-special-tokens makes them plain text")
        )
    progress.say(
        f"{tally.documents:,} documents, {' + '.join(f'{count:,}' for count in tokens)} tokens in "
        + ", ".join(prefixes)
    )
    return Result(
        prefixes=prefixes,
        documents=tally.documents,
        tokens=tokens,
        counts=dict(tally.counts),
        report=report_path,
        tokenizer_model=model,
    )


def _publish_key(
    prefix: str,
    made: Merged,
    options: PreprocessOptions,
    plan: dict[str, Any],
    tokenizer: TokenizerLike,
    model: str | None,
    tally: Tally,
    report: str | None,
) -> None:
    sidecar = {
        "format": FORMAT,
        "tokenizer": {
            "type": "HuggingFaceTokenizer" if options.train_bpe else options.tokenizer_type,
            "model": model,
            "digest": tokenizer.identity,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
            **options.special_tokens,
        },
        "special_tokens_in_text": tally.special_tokens,
        "documents": tally.documents,
        "tokens": made.tokens,
        "dtype": made.dtype,
        "bin_crc32": made.crc32,
        "append_eod": options.append_eod,
        "split_sentences": options.split_sentences,
        "left_out": {kind: count for kind, count in sorted(tally.counts.items()) if kind in LEFT_OUT},
        "lost_bytes": tally.lost_bytes,
        "noticed": {kind: count for kind, count in sorted(tally.counts.items()) if kind not in LEFT_OUT},
        "report": report,
        "plan": plan,
    }
    part = made.bin.with_suffix(".sidecar")
    part.write_text(json.dumps(sidecar, indent=1) + "\n", encoding="utf-8")
    os.replace(made.bin, prefix + ".bin")
    os.replace(made.idx, prefix + ".idx")
    os.replace(part, sidecar_path(prefix))


_TRAINING_CHARACTERS = 200_000_000
_EARLY_CHECK = 1000


def preprocess(options: PreprocessOptions, progress: Progress) -> Result:
    """Write ``PREFIX_KEY_document.bin``, ``.idx`` and ``.json`` for each key.

    Memory is bounded by workers x (a few MiB + the largest document); the disk needs room for the
    result twice until it is complete. Bad documents are counted by kind and named, never silently
    left out.

    Raises ``DataError`` when there is nothing to read, an output or an unfinished run of other
    files or options is in the way, too much is bad, a worker dies or the disk is full. Unless the
    message says otherwise, what is done is kept and the same call continues.
    """
    files = find_inputs(options.inputs, options.input_format, partial(is_output, options))
    plan = plan_of(options, files)
    folder = Path(options.output_prefix + ".preprocess")
    done = already_made(options, plan, folder)
    if done is not None:
        # Killed between the last name and the end of the tidying up.
        remove_folder(folder)
        progress.say(f"{done.prefixes[0]} is already made from these files with these options")
        return done
    with locked(folder, progress.say):
        size, resumed = adopt_plan(folder, plan, files)
        work = list(units(files, size, text_documents=options.text_documents))
        tokenizer, model = _tokenizer(options, folder, work, size, progress)
        if not options.append_eod and not options.split_sentences:
            progress.say("documents end without an end-of-document token (no --append-eod)")
        tally = Tally(total_bytes=sum(file.size for file in files))
        _encode(options, folder, work, size, model, tally, progress, resumed)
        require_unchanged(files)
        report = judge(options, folder, tally, progress, final=True)
        return publish(options, folder, plan, tokenizer, model, tally, report, progress)


def _tokenizer(
    options: PreprocessOptions, folder: Path, work: list[Unit], size: int, progress: Progress
) -> tuple[TokenizerLike, str | None]:
    """The tokenizer and its file; trained first if that was asked for and is not done."""
    if options.train_bpe is None:
        kind, model = options.tokenizer_type, options.tokenizer_model
        opened = open_tokenizer(kind, model, vocab_size=options.vocab_size, **options.special_tokens)
        if options.special_tokens["include_special_tokens"] and (added := opened.encode("")):
            progress.say(
                f"the tokenizer adds its special tokens to each document, ids {added} "
                "(--tokenizer-hf-no-include-special-tokens leaves them out)"
            )
        return opened, model
    path = folder / TRAINED
    if not path.exists():
        progress.say(f"training a byte-level BPE of {options.train_bpe:,} tokens")
        part = folder / f"{TRAINED}.part"
        train_tokenizer(_texts(options, work, size), vocab_size=options.train_bpe, output=part)
        os.replace(part, path)
    return open_tokenizer("HuggingFaceTokenizer", str(path)), str(path)


def _texts(options: PreprocessOptions, work: list[Unit], size: int) -> Iterator[str]:
    """Texts to train a tokenizer on: of each unit its beginning, as much as its share of all bytes."""
    reader = ShardReader(_reading(options, size), lambda finding: None)
    weights = [sum(file.size for file in unit.files) for unit in work]
    try:
        for unit, weight in zip(work, weights, strict=True):
            left, shard = _TRAINING_CHARACTERS * weight // max(1, sum(weights)), 0
            while left > 0 and (
                not reader.ended or shard == 0 if unit.shards is None else shard < unit.shards
            ):
                for texts in reader.read(unit, shard):
                    yield from texts
                    left -= sum(map(len, texts))
                shard += 1
    finally:
        reader.close()


def _reading(options: PreprocessOptions, size: int) -> Reading:
    return Reading(
        keys=options.json_keys,
        max_document_bytes=options.max_document_bytes,
        text_documents=options.text_documents,
        shard_bytes=size,
    )


def _encode(
    options: PreprocessOptions,
    folder: Path,
    work: list[Unit],
    size: int,
    model: str | None,
    tally: Tally,
    progress: Progress,
    resumed: bool,
) -> None:
    ended: dict[int, bool] = {}
    kept = 0

    def finished(name: str, summary: dict[str, Any]) -> None:
        index = int(name.split("-")[0])
        ended[index] = ended.get(index, False) or summary["ended"]
        tally.add(summary)
        progress.advance(tally.done_bytes, tally.total_bytes, tally.documents, tally.tokens)
        if options.strict or tally.documents + sum(tally.counts.values()) > _EARLY_CHECK:
            judge(options, folder, tally, progress, final=False)

    def tasks() -> Iterator[Task]:
        nonlocal kept
        for index, unit in enumerate(work):
            shard = 0
            while shard < unit.shards if unit.shards is not None else not ended.get(index):
                name = shard_name(index, shard)
                summary = _finished_shard(folder, name)
                if summary is None:
                    yield Task(name, {"name": name, "unit": asdict(unit), "shard": shard})
                else:
                    kept += 1
                    finished(name, summary)
                shard += 1

    setup = {
        "tokenizer": {
            "type": "HuggingFaceTokenizer" if options.train_bpe else options.tokenizer_type,
            "model": model,
            "vocab_size": options.vocab_size,
        },
        "special_tokens": options.special_tokens,
        "folder": str(folder),
        "append_eod": options.append_eod,
        "split_sentences": options.split_sentences,
        "keys": list(options.json_keys),
        "max_document_bytes": options.max_document_bytes,
        "text_documents": options.text_documents,
        "shard_bytes": size,
    }
    most = sum(unit.shards or options.workers for unit in work)
    run_tasks(tasks(), setup, workers=max(1, min(options.workers, most)), on_done=finished)
    if resumed:
        progress.say(f"continued an interrupted run: {kept:,} shards were done before")


def shard_name(index: int, shard: int) -> str:
    """The name of shard ``shard`` of unit ``index``; names sort in the order of the documents."""
    return f"{index:08d}-{shard:08d}"


def _finished_shard(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        summary: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return summary
