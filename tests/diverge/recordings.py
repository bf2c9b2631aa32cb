"""Sides of comparisons, many of them recorded by one set of processes: starting Python is what costs."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch

from mt_megatron.diverge.side import Side, make_side
from tests.diverge.faults import planted

SEQUENCE, VOCABULARY, BATCH = 16, 64, 4
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32 --seq-length {SEQUENCE} "
    "--position-embedding-type rope --normalization RMSNorm --activation-func silu --gated-linear-unit "
    "--no-add-bias-linear --untie-embeddings-and-output-weights --init-method-std 0.08 --seed 3 --lr 1e-3 "
    f"--train-iters 1 --weight-decay 0.1 --global-batch-size {BATCH} --micro-batch-size 1 "
    "--train-data-path given-by-the-test --tokenizer-type NullTokenizer"
)


class Tokens:
    """Random tokens; every fifth does not count towards the loss."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self._tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row, at = self._tokens[index], torch.arange(SEQUENCE)
        counted = ((at + index) % 5 != 0).float()
        return {"tokens": row[:-1], "labels": row[1:], "loss_mask": counted, "position_ids": at}


def side(name: str, flags: str = "", processes: int | None = 1, backend: str = "cpu") -> Side:
    """The side called ``name``; the configuration names data that only the test has."""
    return make_side(
        name,
        backend=backend,
        common=MODEL.split(),
        own=flags.split(),
        processes=processes,
        check_files=False,
    )


def record(folder: str, wanted: list[tuple[str, str, str | None]], backend: str = "cpu") -> dict[str, Any]:
    """Record every (name, flags, fault) of ``wanted`` in this process and its peers."""
    import torch.distributed as dist

    import mt_megatron
    from mt_megatron.diverge.worker import record_side

    mt_megatron.patch(backend)
    gc.freeze()  # else every collection at the end of a run visits the modules
    processes = int(os.environ["WORLD_SIZE"])
    # One default group for all: a store keeps the addresses of a group that was destroyed.
    dist.init_process_group(mt_megatron.backend().collective)
    for name, flags, fault in wanted:
        with planted(fault):
            record_side(side(name, flags, processes, backend), Path(folder), Tokens())
    return {"recorded": [name for name, _, _ in wanted]}
