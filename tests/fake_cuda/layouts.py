"""The layouts and model choices that are built on fake CUDA ranks, and which of them go together."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from tests.fake_cuda.pairwise import Row, covering_rows

SEQUENCE, MICRO_BATCH, VOCABULARY = 32, 2, 512
HIDDEN = 512
"""Every parameter's size is a multiple of 128 on each rank: with tied embeddings in another bucket,
0.9.0's distributed optimizer stops at a parameter that begins between two multiples."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "build": ("llama", "megatron"),
    "world": (8, 64),
    "tp": (1, 2, 4),
    "sp": (False, True),
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "cp": (1, 2) if importlib.util.find_spec("mt_megatron.layers.attention.context_parallel") else (1,),
    "experts": ("dense", "allgather", "alltoall", "alltoall_seq"),
    "ep": (1, 2),
    "optimizer": ("plain", "distributed", "distributed_overlap"),
    "recompute": ("none", "selective", "full"),
    "tied": (False, True),
    "bias": (False, True),
    "norm": ("RMSNorm", "LayerNorm"),
    "dtype": ("fp32", "bf16"),
    "dropout": (0.0, 0.1),
    "activation": ("swiglu", "gelu"),
    "positions": ("rope", "learned_absolute"),
    "qk_norm": (False, True),
}


def legal(row: Row) -> bool:
    """Whether the part of a layout in ``row`` can be completed without breaking one of Megatron's rules."""
    tp, pp, cp, ep = (row.get(name, 1) for name in ("tp", "pp", "cp", "ep"))
    dense = row.get("experts") == "dense"
    return not any(
        (
            row.get("world", 64) % (tp * pp * cp * ep),
            row.get("sp") is True and row.get("tp") == 1,
            row.get("vpp") == 2 and row.get("pp") == 1,
            row.get("build") == "llama" and row.get("experts", "dense") != "dense",
            dense and ep > 1,
            # Experts are split by expert parallelism together with sequence parallelism alone.
            not dense and "experts" in row and row.get("tp", 1) > 1 and row.get("sp") is False,
            # The trainer refuses experts with biases, whatever their dispatcher.
            not dense and "experts" in row and row.get("bias") is True,
        )
    )


@functools.cache
def covering() -> list[Row]:
    """The layouts that are tested."""
    return covering_rows(FACTORS, legal)


def stages(row: Row) -> dict[str, int]:
    """``first``, ``middle`` and ``last`` -> a rank of that pipeline stage, where there are so many."""
    per_stage = row["world"] // row["pp"]
    # Not rank 0 of the stage, where a wrong index of 0 would go unnoticed.
    inside = (per_stage // 2 + 1) % per_stage
    last = row["pp"] - 1
    named = (
        {"first": 0}
        | ({"middle": row["pp"] // 2} if row["pp"] > 2 else {})
        | ({"last": last} if last else {})
    )
    return {name: stage * per_stage + inside for name, stage in named.items()}


def flags(row: Row) -> list[str]:
    """``row`` on the command line of the trainer."""
    words = (
        f"--num-layers {row['pp'] * row['vpp'] * (2 if row['pp'] == 1 else 1)} --hidden-size {HIDDEN} "
        "--num-attention-heads 4 --num-query-groups 4 --ffn-hidden-size 512 "
        f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32 --seq-length {SEQUENCE} "
        f"--max-position-embeddings {SEQUENCE} --position-embedding-type {row['positions']} "
        f"--normalization {row['norm']} --hidden-dropout {row['dropout']} "
        f"--attention-dropout {row['dropout']} "
        f"--tensor-model-parallel-size {row['tp']} --pipeline-model-parallel-size {row['pp']} "
        f"--context-parallel-size {row['cp']} --expert-model-parallel-size {row['ep']} "
        f"--micro-batch-size {MICRO_BATCH} --mock-data --train-iters 1 --lr 1e-3 "
        # Ranks that stand alone cannot agree on another transport.
        "--p2p-transport collective"
    ).split()
    switches = {
        "--sequence-parallel": row["sp"],
        f"--virtual-pipeline-model-parallel-size {row['vpp']}": row["vpp"] > 1,
        "--use-distributed-optimizer": row["optimizer"] != "plain",
        "--overlap-grad-reduce --overlap-param-gather": row["optimizer"] == "distributed_overlap",
        "--recompute-granularity selective": row["recompute"] == "selective",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": (
            row["recompute"] == "full"
        ),
        "--untie-embeddings-and-output-weights": not row["tied"],
        "--no-add-bias-linear": not row["bias"],
        "--bf16": row["dtype"] == "bf16",
        "--activation-func silu --gated-linear-unit": row["activation"] == "swiglu",
        "--qk-layernorm": row["qk_norm"],
        f"--num-moe-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type {row['experts']}": (
            row["experts"] != "dense"
        ),
    }
    for words_of, wanted in switches.items():
        words += words_of.split() if wanted else []
    return words
