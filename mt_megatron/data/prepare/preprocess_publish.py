"""What was found is judged and reported; what was made gets its names, the sidecar last."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from mt_megatron.data.loader.tokenizer import TokenizerLike
from mt_megatron.data.prepare.findings import LEFT_OUT, bad_share, summary_of
from mt_megatron.data.prepare.merging import Merged, findings_of, merge_key, output_prefix
from mt_megatron.data.prepare.preprocess_options import PreprocessOptions, Progress, Result, Tally
from mt_megatron.data.prepare.sidecar import FORMAT, sidecar_path
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
    share = bad_share(tally.counts, tally.documents)
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
            limit = options.max_bad_share
            rule = f"{share:.2%} of the documents are bad, more than --max-bad-share {limit} allows"
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
        merged = [merge_key(folder, key, tokenizer.vocab_size) for key in range(len(options.json_keys))]
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
                output_prefix(prefix, key), made, options, plan, tokenizer, model, tally, report_path
            )
    except OSError as error:
        raise DataError(
            f"cannot write the result: {error.strerror} ({error.filename}). Free space or rights there, and "
            "run the same command again: nothing is encoded twice"
        ) from error
    shutil.rmtree(folder, ignore_errors=True)
    tokens = tuple(made.tokens for made in merged)
    progress.say(
        f"{tally.documents:,} documents, {' + '.join(f'{count:,}' for count in tokens)} tokens in "
        + ", ".join(output_prefix(prefix, key) for key in options.json_keys)
    )
    return Result(
        prefixes=tuple(output_prefix(prefix, key) for key in options.json_keys),
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
        },
        "documents": tally.documents,
        "tokens": made.tokens,
        "dtype": made.dtype,
        "bin_crc32": made.crc32,
        "append_eod": options.append_eod,
        "left_out": {kind: count for kind, count in sorted(tally.counts.items()) if kind in LEFT_OUT},
        "noticed": {kind: count for kind, count in sorted(tally.counts.items()) if kind not in LEFT_OUT},
        "report": report,
        "plan": plan,
    }
    part = made.bin.with_suffix(".sidecar")
    part.write_text(json.dumps(sidecar, indent=1) + "\n", encoding="utf-8")
    os.replace(made.bin, prefix + ".bin")
    os.replace(made.idx, prefix + ".idx")
    os.replace(part, sidecar_path(prefix))
