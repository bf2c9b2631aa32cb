"""Write the tables of layouts in the examples' READMEs: memory per rank, as ``mt-megatron plan`` has it.

    python examples/layout_tables.py            # rewrite the tables
    python examples/layout_tables.py --check    # say whether they are what would be written

``examples/layouts/FOLDER.yaml`` names a layout for every model and number of devices, chosen by
``mt-megatron plan --suggest`` for H100s of 80 GiB, or, where nothing fits, the one that needs least.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.planning.hardware import DEVICES
from mt_megatron.planning.memory import MemoryCase, estimate_memory
from mt_megatron.planning.memory_estimate import memory_case

EXAMPLES = Path(__file__).resolve().parent
FOLDERS = ("mixtral", "deepseekv3", "qwen3", "bert")
BEGIN, END = "<!-- layouts: written by examples/layout_tables.py -->", "<!-- end of layouts -->"
_GIB = 2**30
_HEADER = (
    "| devices | TP x PP (VPP) x CP x DP | EP | micro-batch | layers of chunks | recomputed | weights, "
    "gradients, optimizer | activations | in all | 80 GiB |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def table(model: str, entry: dict[str, Any]) -> str:
    """The layouts of one model as Markdown."""
    rows = [f"**{model}**, {entry['global_batch_size']:,} sequences a step", "", _HEADER]
    rows += [row(model, entry["global_batch_size"], int(n), text) for n, text in entry["layouts"].items()]
    return "\n".join(rows)


def row(model: str, batch: int, devices: int, options: str) -> str:
    """One layout. Memory is that of the rank that needs most."""
    config = load_config(["--model", model, "--global-batch-size", str(batch), *options.split()])
    case = memory_case(config, devices)
    worst = estimate_memory(case).worst
    state = worst.weights + worst.gradients + worst.optimizer
    fits = worst.total <= DEVICES["h100"].usable_bytes
    cells = [
        f"{devices:,}",
        _sizes(case),
        str(case.expert_parallel) if case.shape.num_moe_experts else "-",
        str(case.activations.micro_batch),
        _counts(case),
        _recomputed(config),
        f"{state / _GIB:,.1f} GiB",
        f"{(worst.total - state) / _GIB:,.1f} GiB",
        f"{worst.total / _GIB:,.1f} GiB",
        "yes" if fits else "no",
    ]
    return f"| {' | '.join(cells)} |"


def _sizes(case: MemoryCase) -> str:
    options = case.activations
    pipeline = f"{case.pipeline_parallel} ({case.chunks})" if case.chunks > 1 else str(case.pipeline_parallel)
    return f"{options.tensor_parallel} x {pipeline} x {options.context_parallel} x {case.data_parallel}"


def _counts(case: MemoryCase) -> str:
    counts = case.layers or ()
    if len(set(counts)) < 2:
        return str(counts[0]) if counts else ""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in runs)


def _recomputed(config: TrainingConfig) -> str:
    model = config.model
    parts = ["up-projections"] * model.recompute_mla_up_proj + ["experts"] * model.moe_layer_recompute
    if model.recompute_granularity != "full":
        return model.recompute_granularity or " and ".join(parts) or "nothing"
    return "all layers" if model.recompute_method == "uniform" else f"{model.recompute_num_layers} a chunk"


def written(folder: Path) -> str:
    """The README of ``folder`` with its tables as they should be."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    entries = yaml.safe_load((EXAMPLES / "layouts" / f"{folder.name}.yaml").read_text(encoding="utf-8"))
    tables = "\n\n".join(table(model, entry) for model, entry in entries.items())
    return f"{before}{BEGIN}\n{tables}\n\n{END}{after}"


def main() -> int:
    """Rewrite, or compare and return 1 when something is stale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when stale")
    check, stale = parser.parse_args().check, []
    for name in FOLDERS:
        folder = EXAMPLES / name
        text, readme = written(folder), folder / "README.md"
        if text == readme.read_text(encoding="utf-8"):
            continue
        stale.append(name)
        if not check:
            readme.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'stale' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
