"""Documents kept apart: each by itself (packed) against one mask of the whole sequence, forward and backward.

One model, one micro-batch, both ways in turn; the figure is the median of the ratios of neighbours,
with the ratio of the packed way to itself as a control, in wall time and in processor time (which
a busy machine changes less; with one thread it is the time of the step). Making the mask, which the
loader does, is not counted.

    python benchmarks/packed_sequences.py --seq-length 2048 --document 256 --record results/
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import mt_megatron
from mt_megatron.config.parse import load_config
from mt_megatron.layers.attention.packed_sequences import document_borders, document_mask
from mt_megatron.models.families import family_of
from mt_megatron.training.distributed import joined

VOCABULARY = 4096
CLOCKS = ("wall", "processor")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = load_config(
        f"--model llama3_tiny --num-layers {options.layers} --hidden-size 512 --ffn-hidden-size 1792 "
        f"--num-attention-heads 8 --num-query-groups 4 --vocab-size {VOCABULARY} --seq-length "
        f"{options.seq_length} --max-position-embeddings {options.seq_length} --train-iters 1 --lr 1e-3 "
        "--mock-data --tokenizer-type NullTokenizer --no-gradient-accumulation-fusion".split()
    )
    mt_megatron.patch("cpu")
    torch.set_num_threads(options.threads)
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        (model,) = family.build_model(config, job.layout)
        tokens = torch.randint(VOCABULARY - 1, (1, options.seq_length + 1))
        tokens[0, options.document - 1 :: options.document] = VOCABULARY - 1
        batch = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": torch.ones(1, options.seq_length),
            "position_ids": torch.arange(options.seq_length)[None],
        }
        borders = document_borders(batch["tokens"], VOCABULARY - 1)
        mask = document_mask(borders, 1, torch.device("cpu"))
        sides = {
            "packed": {**batch, "cu_seqlens": borders},
            "masked": {**batch, "attention_mask": mask},
            "causal": batch,
            "packed_again": {**batch, "cu_seqlens": borders},
        }

        def seconds(side: str) -> tuple[tuple[float, float], float]:
            start, spent = time.perf_counter(), time.process_time()
            output, loss = family.loss(model, family.get_batch(iter([sides[side]]), torch.device("cpu")))
            value = loss(output)[0]
            value.backward()
            return (time.perf_counter() - start, time.process_time() - spent), float(value.detach())

        losses = {side: seconds(side)[1] for side in sides}
        assert abs(losses["packed"] - losses["masked"]) < 1e-4 < abs(losses["packed"] - losses["causal"]), (
            losses
        )
        runs = []
        for turn in range(options.rounds):
            order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
            runs.append({side: seconds(side)[0] for side in order})

    def ratio(above: str) -> dict[str, Any]:
        return {
            kind: _spread([run[above][i] / run["packed"][i] for run in runs]) for i, kind in enumerate(CLOCKS)
        }

    return {
        "date": datetime.date.today().isoformat(),
        "seq_length": options.seq_length,
        "document": options.document,
        "layers": options.layers,
        "threads": options.threads,
        "rounds": options.rounds,
        "seconds": {side: statistics.median(run[side][0] for run in runs) for side in sides},
        "masked_over_packed": ratio("masked"),
        "causal_over_packed": ratio("causal"),
        "control_packed_over_itself": ratio("packed_again"),
        "load_at_the_end": os.getloadavg()[0],
    }


def _spread(found: list[float]) -> dict[str, float]:
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--document", type=int, default=256, help="tokens of each document")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", type=Path, help="folder that also gets the figures as JSON")
    options = parser.parse_args()
    found = measure(options)
    text = json.dumps(found, indent=1) + "\n"
    sys.stdout.write(text)
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        (options.record / f"packed-{options.seq_length}-{found['date']}.json").write_text(text)


if __name__ == "__main__":
    main()
