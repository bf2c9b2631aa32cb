"""How long products, attention and a training step take: medians, figures for a report and no test."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F

import mt_megatron
from tests.device.result import checked

REPEATS = 11


def run(large: bool) -> list[dict[str, Any]]:
    """One result per size; ``large`` takes the sizes of an accelerator instead of a host's."""
    mt_megatron.patch(os.environ["MT_MEGATRON_TEST_BACKEND"])
    backend = mt_megatron.backend()
    backend.set_device(0)
    device = backend.device(backend.current_device())
    dtypes = [torch.float32, *([torch.bfloat16] if backend.bf16_supported() else [])]
    results = []

    def timed(name: str, operations: float, dtype: torch.dtype, work: Callable[[], Any]) -> None:
        def measure() -> dict[str, Any]:
            seconds = _median(work, backend)
            rate = operations / seconds
            peak = backend.peak_flops(dtype)
            share = {} if peak is None else {"share_of_peak": round(rate / peak, 3)}
            return {"milliseconds": round(1000 * seconds, 4), "tflops": round(rate / 1e12, 3), **share}

        results.append(asdict(checked("timing", name, measure)))

    for dtype in dtypes:
        short = str(dtype).removeprefix("torch.")
        for size in (2048, 4096, 8192) if large else (256, 512):
            a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            timed(f"product {size}x{size}x{size} {short}", 2.0 * size**3, dtype, lambda a=a, b=b: a @ b)
        batch, heads, length, head = (4, 32, 4096, 128) if large else (1, 4, 256, 64)
        q, k, v = (torch.randn(batch, heads, length, head, device=device).to(dtype) for _ in range(3))
        timed(
            f"causal attention {batch}x{heads}x{length}x{head} {short}",
            2.0 * batch * heads * length**2 * head,
            dtype,
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        )
        results.append(asdict(checked("timing", f"training step {short}", lambda d=dtype: _step(d, large))))
    return results


def _median(work: Callable[[], Any], backend: Any) -> float:
    for _ in range(3):
        work()
    backend.synchronize()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        backend.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _step(dtype: torch.dtype, large: bool) -> dict[str, Any]:
    """Forward, backward and update of a Llama of this trainer, batches from memory."""
    from mt_megatron.config.parse import load_config
    from mt_megatron.models.families import family_of
    from mt_megatron.training.distributed import joined
    from mt_megatron.training.model import build
    from mt_megatron.training.step import Shape, make_forward_step, train_step

    layers, hidden, heads, ffn, length, vocabulary = (
        (8, 2048, 16, 5504, 2048, 32000) if large else (2, 128, 4, 352, 128, 1024)
    )
    flags = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --ffn-hidden-size {ffn} "
        f"--vocab-size {vocabulary} --seq-length {length} --position-embedding-type rope "
        "--normalization RMSNorm --activation-func silu --gated-linear-unit --no-add-bias-linear "
        "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
        "--micro-batch-size 1 --train-iters 10 --lr 1e-4 --mock-data"
    ).split()
    config = load_config([*flags, *(["--bf16"] if dtype is torch.bfloat16 else [])])
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        tokens = torch.randint(vocabulary, (1, length + 1), generator=torch.Generator().manual_seed(1))
        batch = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": torch.ones(1, length),
            "position_ids": torch.arange(length)[None],
        }
        shape = Shape(num_microbatches=1, micro_batch_size=1, seq_length=length)
        forward_step = make_forward_step(family, job.backend.device(job.backend.current_device()))
        done = iter(range(1, 1000))

        def step() -> None:
            train_step(trainable, forward_step, [iter([dict(batch)])], shape, job, iteration=next(done))

        seconds = _median(step, job.backend)
        rate = family.flops(config) * length / seconds
        peak = job.backend.peak_flops(dtype)
        return {
            "milliseconds": round(1000 * seconds, 3),
            "tokens_per_second": round(length / seconds, 1),
            "parameters": sum(each.numel() for chunk in trainable.chunks for each in chunk.parameters()),
            "tflops": round(rate / 1e12, 3),
            "peak_memory_bytes": job.backend.max_memory_allocated(),
            **({} if peak is None else {"share_of_peak": round(rate / peak, 3)}),
        }
