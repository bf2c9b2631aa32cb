"""Healthy pairs of many layouts and models: the placement of every tensor, tried where it could be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_megatron.diverge.compare import compare, read_record
from tests.launch import run_ranks

TP2, PP2, CP2 = (f"--{kind}-parallel-size 2" for kind in ("tensor-model", "pipeline-model", "context"))
SP, ZERO1 = "--sequence-parallel", "--use-distributed-optimizer"
VPP2 = f"{PP2} --virtual-pipeline-model-parallel-size 2"
OVERLAP = f"{ZERO1} --overlap-grad-reduce --overlap-param-gather"
GPT = (
    "--no-untie-embeddings-and-output-weights --normalization LayerNorm --activation-func gelu "
    "--no-gated-linear-unit --add-bias-linear --position-embedding-type learned_absolute "
    "--max-position-embeddings 16 --qk-layernorm"
)
PER_TOKEN = "--calculate-per-token-loss"

VARIANTS: dict[str, tuple[str, dict[int, list[str]]]] = {
    "llama": (
        "",
        {
            4: [
                f"{TP2} {SP} {PP2}",
                f"{CP2} {TP2} {SP}",
                f"{CP2} {PP2}",
                TP2,
                f"{VPP2} {OVERLAP}",
                ZERO1,
                "--pipeline-model-parallel-size 4",
                f"{TP2} {SP} --recompute-granularity selective",
            ]
        },
    ),
    "tied_gpt_with_biases": (GPT, {2: [TP2, f"{TP2} {SP}", PP2, CP2], 4: [f"{TP2} {SP} {PP2}"]}),
    "every_token_counts_the_same": (
        PER_TOKEN,
        {1: ["--micro-batch-size 2"], 2: ["--micro-batch-size 2", CP2, f"{TP2} {SP}"]},
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_healthy_layouts_have_no_finding(tmp_path: Path, variant: str) -> None:
    flags, layouts = VARIANTS[variant]
    target = "tests.diverge.recordings:record"
    run_ranks(1, target, str(tmp_path), [("a", flags, None)], timeout=600)
    reference = read_record(tmp_path / "a", 1)
    for processes, wanted in layouts.items():
        sides = [(f"{processes}_{i}", f"{flags} {own}", None) for i, own in enumerate(wanted)]
        run_ranks(processes, target, str(tmp_path), sides, timeout=600)
        for name, own, _ in sides:
            found = compare(reference, read_record(tmp_path / name, processes))
            assert found.first is None, (own, found.first)
            assert found.only_a == found.only_b == found.not_placed == [], own
            worst = max(entry.error for entry in found.entries if entry.phase in ("forward", "backward"))
            assert worst < 1e-5, own
