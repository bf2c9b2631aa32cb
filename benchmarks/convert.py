"""``mt-megatron convert`` against a plain read and write of the same bytes by the ``safetensors`` library.

The model is a Llama of random weights in bf16, in files of --shard-size. One side converts it into a
distributed checkpoint, or that back; it makes every file durable (fsync) and sums it. The other loads
each file with ``load_file`` and writes it with ``save_file``, one after another; once more with fsync.
Each run is a process of its own, whose start and imports are not counted, and all sides alternate.
The figure is the median over rounds of the rate of the one over that of the other in the same round;
the same ratio between two runs of the plain side says how much of it is noise.

Memory is the most anonymous memory (``RssAnon``) that the process had beyond what it had before, sampled
every 2 ms; pages of mapped files, which the kernel takes back when it needs them, are told apart.

    python benchmarks/convert.py --megabytes 1000 --rounds 3 --record results/

The exit code is 1 when a median ratio is below --least.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, FFN, VOCABULARY = 2048, 5632, 32001
SIDES = ("to_megatron", "to_hf", "plain", "plain_again", "plain_fsync")


class Memory:
    """The most anonymous and file-backed memory while the context lasts, in bytes."""

    def __enter__(self) -> Memory:
        self.start = self.anonymous = self._now()[0]
        self.mapped = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            anonymous, mapped = self._now()
            self.anonymous, self.mapped = max(self.anonymous, anonymous), max(self.mapped, mapped)

    @staticmethod
    def _now() -> tuple[int, int]:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return tuple(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]


def make(folder: Path, megabytes: int, shard: int, hidden: int, ffn: int, vocabulary: int) -> int:
    """A published Llama of about so many megabytes; returns its layers."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randint(0, 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)

    narrow = hidden // 4
    ends = 4 * vocabulary * hidden
    layer = 2 * hidden * (2 * hidden + 2 * narrow + 3 * ffn)
    layers = max(2, (megabytes * 10**6 - ends) // layer)
    tensors = {"model.embed_tokens.weight": tensor(vocabulary, hidden)}
    for index in range(layers):
        prefix = f"model.layers.{index}."
        for name, rows in (("q", hidden), ("k", narrow), ("v", narrow), ("o", hidden)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = tensor(rows, hidden)
        for name in ("gate", "up"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = tensor(ffn, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = tensor(hidden, ffn)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = tensor(hidden)
    tensors |= {"model.norm.weight": tensor(hidden), "lm_head.weight": tensor(vocabulary, hidden)}
    folder.mkdir()
    files: list[dict[str, Any]] = [{}]
    used = 0
    for name, each in tensors.items():
        if files[-1] and used + each.nbytes > shard:
            files.append({})
            used = 0
        files[-1][name] = each
        used += each.nbytes
    weight_map = {}
    for number, part in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return int(layers)


def side(name: str, source: Path, output: Path, workers: int, shard: int) -> dict[str, float]:
    """One run of one side in this process."""
    import torch

    torch.set_num_threads(1)
    action: Callable[[], object]
    if name.startswith("plain"):
        from safetensors.torch import load_file, save_file

        def action() -> None:
            output.mkdir()
            for path in sorted(source.glob("*.safetensors")):
                save_file(load_file(path), output / path.name)
                if name.endswith("fsync"):
                    with open(output / path.name, "rb") as stream:
                        os.fsync(stream.fileno())
    else:
        from mt_megatron.convert.request import Request
        from mt_megatron.convert.run import convert

        class Silent:
            def say(self, line: str) -> None:
                pass

            def expect(self, total: int) -> None:
                pass

            def advance(self, count: int) -> None:
                pass

        def converted(source: Path, output: Path, published: bool) -> None:
            request = Request(
                source=source,
                published=published,
                destination=output,
                form="torch_dist" if published else "huggingface",
                max_shard_size=shard,
                workers=workers,
            )
            convert(request, Silent())

        # What is imported on the way is not counted, no more than the start of the process.
        with tempfile.TemporaryDirectory(prefix="mt_megatron.") as scratch:
            small = Path(scratch)
            make(small / "source", 0, shard, 64, 64, 65)
            converted(small / "source", small / "megatron", True)
            converted(small / "megatron", small / "back", False)

        def action() -> None:
            converted(source, output, name == "to_megatron")

    with Memory() as memory:
        started = time.perf_counter()
        action()
        seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "anonymous": memory.anonymous - memory.start,
        "mapped": memory.mapped,
    }


def run(name: str, source: Path, output: Path, workers: int, shard: int) -> dict[str, float]:
    """``side`` in a process of its own; what it wrote is removed."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-W", "ignore", __file__, "--side", name, "--source", str(source)]
    command += ["--output", str(output), "--workers", str(workers), "--shard-size", str(shard)]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shard-size", type=int, default=100 * 10**6)
    parser.add_argument("--least", type=float, default=0.5)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(side(args.side, args.source, args.output, args.workers, args.shard_size)))
        return 0
    with tempfile.TemporaryDirectory(prefix="mt_megatron.") as scratch:
        folder = Path(scratch)
        layers = make(folder / "source", args.megabytes, args.shard_size, HIDDEN, FFN, VOCABULARY)
        size = sum(path.stat().st_size for path in (folder / "source").glob("*.safetensors"))
        run("to_megatron", folder / "source", folder / "megatron", args.workers, args.shard_size)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
        for _ in range(args.rounds):
            for name in SIDES:
                source = folder / ("megatron" if name == "to_hf" else "source")
                runs[name].append(run(name, source, folder / "out", args.workers, args.shard_size))
                shutil.rmtree(folder / "out")
    rate = {n: statistics.median(size / 1e6 / each["seconds"] for each in runs[n]) for n in SIDES}
    ratios = {
        f"{name}_over_{plain}": statistics.median(
            b["seconds"] / a["seconds"] for a, b in zip(runs[name], runs[plain], strict=True)
        )
        for name in ("to_megatron", "to_hf", "plain_again")
        for plain in ("plain", "plain_fsync")
    }
    memory = {n: max(each["anonymous"] for each in runs[n]) / 1e6 for n in SIDES}
    group = 2 * VOCABULARY * HIDDEN / 1e6
    lines = [
        f"{size / 1e6:,.0f} MB, Llama of {layers} layers, {args.workers} threads, files of "
        f"{args.shard_size / 1e6:,.0f} MB; the largest tensor has {group:,.0f} MB",
        *(f"{name:<12} {rate[name]:>8,.0f} MB/s   memory {memory[name]:>8,.1f} MB" for name in SIDES),
        *(f"{name:<32} {value:.2f}x" for name, value in ratios.items()),
    ]
    print("\n".join(lines))
    if args.record:
        _record(args, lines, {"rates": rate, "ratios": ratios, "memory": memory, "runs": runs, "bytes": size})
    return int(min(ratios["to_megatron_over_plain"], ratios["to_hf_over_plain"]) < args.least)


def _record(args: argparse.Namespace, lines: list[str], figures: dict[str, Any]) -> None:
    import torch

    date = datetime.date.today().isoformat()
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    args.record.mkdir(parents=True, exist_ok=True)
    path = args.record / f"convert-{date}"
    path.with_suffix(".json").write_text(json.dumps(figures | {"machine": machine}, indent=2) + "\n")
    text = "\n".join(f"    {line}" for line in lines)
    words = ", ".join(f"{name} {value}" for name, value in machine.items())
    path.with_suffix(".md").write_text(f"# Conversion beside safetensors, {date}\n\n{words}\n\n{text}\n")


if __name__ == "__main__":
    sys.exit(main())
