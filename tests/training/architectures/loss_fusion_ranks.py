"""What the rank of ``test_loss_fusion.py`` runs: steps of the trainer with and without the fused loss."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import torch

SEQUENCE, VOCABULARY, BATCH = 16, 64, 2
MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --num-query-groups 2 "
    f"--vocab-size {VOCABULARY} --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --mock-data "
    f"--tokenizer-type NullTokenizer --seq-length {SEQUENCE} --train-iters 9 --lr 1e-2 "
    f"--micro-batch-size {BATCH} --global-batch-size {3 * BATCH}"
)


def _batches(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": (torch.rand(BATCH, SEQUENCE, generator=generator) > 0.3).float(),
            "position_ids": torch.arange(SEQUENCE).expand(BATCH, -1),
        }


def _twice(forward_step: Any) -> Any:
    """A loss of the user's own, twice what was announced; it is learnt from with half the loss scale."""

    def step(batches: Any, model: Any) -> Any:
        output, loss = forward_step(batches, model)

        def doubled(losses: Any) -> Any:
            total, *rest = loss(losses)
            return (2.0 * total, *rest)

        return output, doubled

    return step


def _train(flags: str, *, doubled: bool = False, hooked: bool = False) -> dict[str, Any]:
    import mt_megatron
    from mt_megatron.config.parse import load_config
    from mt_megatron.layers.loss.cross_entropy import Panels
    from mt_megatron.layers.loss.cross_entropy_blocks import Blocks
    from mt_megatron.models.families import family_of
    from mt_megatron.training.distributed import joined
    from mt_megatron.training.model import build
    from mt_megatron.training.step import Shape, make_forward_step, train_step

    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    config = load_config([*MODEL.split(), *flags.split()])
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        forward_step = make_forward_step(family, job.backend.device(job.backend.current_device()))
        if hooked:
            for name, module in trainable.chunks[0].named_modules():
                if name.endswith("output_layer"):
                    module.register_forward_hook(lambda *given: None)
        if doubled:
            forward_step = _twice(forward_step)
        shape = Shape(num_microbatches=3, micro_batch_size=BATCH, seq_length=SEQUENCE)
        batches = [_batches(1)]
        # fp32 on a CPU has arithmetic of its own.
        used: Any = Blocks if config.train.bf16 or config.train.fp16 else Panels
        with (
            mock.patch.object(used, "losses", autospec=True, side_effect=used.losses) as fused,
            mock.patch.object(used, "gradients", autospec=True, side_effect=used.gradients) as again,
        ):
            results = [
                train_step(trainable, forward_step, batches, shape, job, iteration=number)
                for number in (1, 2, 3)
            ]
        return {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "fused": fused.call_count,
            "again": again.call_count,
        }


def trained() -> dict[str, dict[str, Any]]:
    """Every way to train, with the fused loss and without."""
    ways = {
        "plain": "--untie-embeddings-and-output-weights",
        "tied": "",
        "per token": "--calculate-per-token-loss",
        "one by one": "--no-gradient-accumulation-fusion",
        "fp16": "--fp16 --initial-loss-scale 1024",
        "bf16": "--bf16",
    }
    found = {}
    for name, flags in ways.items():
        found[f"{name}, fused"] = _train(flags)
        found[name] = _train(f"{flags} --no-cross-entropy-loss-fusion")
    found["doubled, fused"] = _train("", doubled=True)
    found["doubled"] = _train("--no-cross-entropy-loss-fusion", doubled=True)
    found["hooked, fused"] = _train("", hooked=True)
    return found
