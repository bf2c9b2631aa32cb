"""``mt-megatron preprocess`` against the ``tokenizers`` library alone, on the same text and threads.

The text is the source of Python's standard library (or --corpus), one document a file, as JSONL; the
tokenizer a byte-level BPE trained on it. One side is the whole command, from the start of its process
to its end: reading, parsing, checking, encoding in worker processes, merging, writing to the disk. The
other is ``encode_batch`` alone on the texts already in memory, by as many threads, its process's
start not counted. Both sides alternate; the figure is the median of the ratios of neighbours, and the
same ratio between two runs of the second side says how much of it is noise.

    python benchmarks/preprocess.py --pairs 3 --record results/

The exit code is 1 when the median ratio is below --least.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mt_megatron.data.loader.tokenizer import train_tokenizer
from mt_megatron.data.prepare.corpus import Skipped, open_source, read_documents

ROOT = Path(__file__).resolve().parent.parent

ALONE = """
import json, sys, time
import tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
tokenizer.encode_special_tokens = True
encode = getattr(tokenizer, sys.argv[3])
with open(sys.argv[2], encoding="utf-8") as lines:
    texts = [json.loads(line)["text"] for line in lines]
encode(texts[:2])
start = time.perf_counter()
tokens = 0
for first in range(0, len(texts), 1024):
    tokens += sum(len(each) for each in encode(texts[first : first + 1024], add_special_tokens=False))
print(time.perf_counter() - start, tokens)
"""


def environment(threads: int) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true",
    }


def alone(tokenizer: Path, corpus: Path, threads: int, function: str) -> tuple[float, int]:
    """Seconds that the library takes for all texts, and their tokens."""
    command = [sys.executable, "-c", ALONE, str(tokenizer), str(corpus), function]
    done = subprocess.run(command, env=environment(threads), check=True, capture_output=True, text=True)
    seconds, tokens = done.stdout.split()
    return float(seconds), int(tokens)


def command(tokenizer: Path, corpus: Path, threads: int, output: Path) -> tuple[float, int]:
    """Seconds from the start of ``mt-megatron preprocess`` to its end, and the tokens it wrote."""
    argv = [sys.executable, "-m", "mt_megatron.cli", "preprocess", "--input", str(corpus), "--json"]
    argv += ["--output-prefix", str(output), "--tokenizer-model", str(tokenizer), "--workers", str(threads)]
    start = time.perf_counter()
    done = subprocess.run(argv, env=environment(threads), check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    for written in output.parent.glob(f"{output.name}_*"):
        written.unlink()
    return seconds, json.loads(done.stdout)["tokens"][0]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    skipped: list[Skipped] = []
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer.json"
    texts = [document.text for document in read_documents(open_source(options.corpus), skipped)]
    texts = [text for text in texts if "\0" not in text]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    train_tokenizer(texts, vocab_size=options.vocab_size, output=tokenizer)
    del texts
    threads, runs = options.threads, []
    command(tokenizer, corpus, threads, folder / "warm")
    for pair in range(options.pairs):
        sides: dict[str, Any] = {}
        order = ["preprocess", "encode_batch", "encode_batch_again", "encode_batch_fast"]
        for side in order if pair % 2 == 0 else order[::-1]:
            if side == "preprocess":
                seconds, tokens = command(tokenizer, corpus, threads, folder / "out")
            else:
                seconds, tokens = alone(tokenizer, corpus, threads, side.removesuffix("_again"))
            sides[side] = {"mb_per_s": megabytes / seconds, "tokens": tokens}
            print(f"{side}: {megabytes / seconds:.2f} MB/s", file=sys.stderr, flush=True)
        assert len({each["tokens"] for each in sides.values()}) == 1, sides
        runs.append({side: figures["mb_per_s"] for side, figures in sides.items()})

    def ratio(above: str, below: str) -> dict[str, float]:
        found = [run[above] / run[below] for run in runs]
        return {"median": statistics.median(found), "min": min(found), "max": max(found)}

    return {
        "date": datetime.date.today().isoformat(),
        "megabytes": megabytes,
        "documents_left_out": len(skipped),
        "vocab_size": options.vocab_size,
        "threads": threads,
        "pairs": options.pairs,
        "mb_per_s": {side: statistics.median(run[side] for run in runs) for side in runs[0]},
        "ratio_to_encode_batch": ratio("preprocess", "encode_batch"),
        "ratio_to_encode_batch_fast": ratio("preprocess", "encode_batch_fast"),
        "control_encode_batch_to_itself": ratio("encode_batch_again", "encode_batch"),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_at_the_end": os.getloadavg()[0],
        },
        "runs": runs,
    }


def markdown(found: dict[str, Any]) -> str:
    """The record for people."""
    rows = "\n".join(f"| {side} | {rate:.2f} |" for side, rate in found["mb_per_s"].items())
    lines = [
        f"# `mt-megatron preprocess` against the `tokenizers` library alone, {found['date']}",
        "",
        f"{found['megabytes']:.1f} MB of Python source, a BPE of {found['vocab_size']:,} tokens, "
        f"{found['threads']} workers and threads, {found['pairs']} interleaved rounds, load "
        f"{found['machine']['load_at_the_end']:.1f} on {found['machine']['cores']} cores. Made by "
        "`benchmarks/preprocess.py`.",
        "",
        "| side | MB/s (median) |",
        "|---|---|",
        rows,
        "",
    ]
    for name in ("ratio_to_encode_batch", "ratio_to_encode_batch_fast", "control_encode_batch_to_itself"):
        each = found[name]
        lines.append(f"- {name}: {each['median']:.2f} ({each['min']:.2f} to {each['max']:.2f})")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", type=Path, help="a folder, JSONL or text file instead of the standard library"
    )
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--least", type=float, default=0.8, help="smallest median ratio to encode_batch")
    parser.add_argument("--record", type=Path, help="folder that also gets the figures as JSON and Markdown")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mt_megatron_preprocess_") as folder:
        found = measure(options, Path(folder))
    print(json.dumps(found, indent=1))
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        stem = options.record / f"preprocess-{found['date']}"
        stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(found))
    return 0 if found["ratio_to_encode_batch"]["median"] >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
