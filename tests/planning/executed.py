"""The process that runs steps on one CPU rank and says what they took: memory at its worst, operations."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mt_megatron

_SHAPE = (
    "--num-layers 4 --hidden-size {0} --ffn-hidden-size {1} --num-attention-heads {2} --num-query-groups {3} "
    "--vocab-size {4} --make-vocab-size-divisible-by 8 --seq-length {5} --max-position-embeddings {5} "
    "--micro-batch-size {6} --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --train-iters 1 --lr 1e-3 --mock-data --hidden-dropout 0 "
    "--attention-dropout 0"
)
PEAK_SHAPE = _SHAPE.format(256, 704, 8, 2, 256, 256, 4) + " --swiglu"
_PEAK_MIXTURE = (
    "--family deepseek --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 352 "
    "--moe-shared-expert-intermediate-size 352 --moe-token-dispatcher-type alltoall"
)
_PEAK_LATENT = (
    "--family deepseek --multi-latent-attention --num-query-groups 8 --q-lora-rank 96 --kv-lora-rank 64 "
    "--qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32"
)
PEAKS = (
    "",
    "--bf16",
    "--no-bias-activation-fusion --no-cross-entropy-loss-fusion",
    "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2 --vocab-size 8192",
    "--bf16 --recompute-granularity selective --vocab-size 8192",
)
NEW_PEAKS = (
    f"--bf16 --moe-grouped-gemm {_PEAK_MIXTURE}",
    _PEAK_MIXTURE,
    f"--bf16 --moe-grouped-gemm {_PEAK_MIXTURE} {_PEAK_LATENT} --mtp-num-layers 1",
    f"{_PEAK_LATENT} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
)
MIXTURE = (
    "--swiglu --family deepseek --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
    "--moe-shared-expert-intermediate-size 40 --moe-token-dispatcher-type alltoall"
)
LATENT = (
    "--swiglu --family deepseek --multi-latent-attention --num-query-groups 4 --kv-lora-rank 24 "
    "--qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 10"
)
FLOPS_SHAPE = _SHAPE.format(48, 80, 4, 2, 96, 32, 2)
FLOPS = (
    "--swiglu",
    "--no-gated-linear-unit --activation-func gelu --num-query-groups 4 --kv-channels 20",
    "--swiglu --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--swiglu --recompute-granularity full --recompute-method block --recompute-num-layers 3",
    "--swiglu --recompute-granularity selective",
    MIXTURE,
    f"{MIXTURE} --moe-layer-freq [0,1,1,1] --moe-layer-recompute",
    f"{LATENT} --q-lora-rank 16",
    f"{LATENT} {MIXTURE} --mtp-num-layers 2",
    f"{LATENT} {MIXTURE} --mtp-num-layers 1 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
)


def peak(argv: list[str]) -> dict[str, int]:
    """Bytes beyond what was held before: by the allocator's events at their highest, and as predicted."""
    from mt_megatron.config.parse import load_config
    from mt_megatron.models.families import family_of
    from mt_megatron.planning.memory_estimate import memory_of
    from mt_megatron.seams import widened
    from mt_megatron.seams.schedule import run_schedule
    from mt_megatron.training.distributed import joined
    from mt_megatron.training.model import build
    from mt_megatron.training.step import make_forward_step
    from tests.planning.memory_ranks import batches

    config = load_config(argv)
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        forward_step = make_forward_step(family, job.backend.device(job.backend.current_device()))

        def run() -> None:
            for chunk in trainable.chunks:
                chunk.zero_grad_buffer()
            run_schedule(
                forward_step,
                trainable.chunks,
                [batches(config)],
                num_microbatches=1,
                seq_length=config.train.seq_length or 0,
                micro_batch_size=config.train.micro_batch_size,
            )

        with widened.chosen("fp32"):
            run()  # What is made once and kept is made here; quickly where torch has no bf16 kernels.
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            run()
        memory = memory_of(config, 1, on_cpu=True).worst
        return {"measured": _highest(profile), "predicted": memory.activations + memory.workspace}


def _highest(profile: Any) -> int:
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def counted(argv: list[str]) -> dict[str, float]:
    """Operations per token: as torch counts them, by the family's definition, and as executed."""
    from mt_megatron.config.parse import load_config
    from mt_megatron.models.families import family_of
    from mt_megatron.planning.flops import executed_flops, forward_flops
    from mt_megatron.planning.memory_estimate import padded_shape, recompute_of
    from mt_megatron.seams.schedule import run_schedule
    from mt_megatron.training.distributed import joined
    from mt_megatron.training.model import build
    from mt_megatron.training.step import make_forward_step
    from tests.planning.memory_ranks import batches

    config = load_config(argv)
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        step = make_forward_step(family, job.backend.device(job.backend.current_device()))
        sizes: dict[str, Any] = {
            "num_microbatches": 1,
            "seq_length": config.train.seq_length,
            "micro_batch_size": config.train.micro_batch_size,
        }
        # The counter knows matrix products, save for one in place; this kernel of attention is made of them.
        in_place: dict[Any, Any] = {torch.ops.aten.addmm_: _addmm}
        counter = FlopCounterMode(display=False, custom_mapping=in_place)
        # Its tracking of modules fails where a checkpointed one is given a tensor without history.
        counter.mod_tracker = _Nowhere()
        # Nor does it know oneDNN's products, some of which are rounded up.
        plain = torch.backends.mkldnn.flags(enabled=False)
        with sdpa_kernel(SDPBackend.MATH), plain, counter:
            run_schedule(step, trainable.chunks, [batches(config)], **sizes)
    flops = forward_flops(padded_shape(config), config.train.seq_length or 0)
    tokens = config.train.micro_batch_size * (config.train.seq_length or 0)
    recompute = recompute_of(config.model)
    return {
        "counted": counter.get_total_flops() / tokens,
        "family": family.flops(config),
        "training": flops.training,
        "executed": executed_flops(flops, recompute, [flops.pattern]),
    }


class _Nowhere:
    """Says that every operation is of no module in particular."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _Nowhere:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


def _addmm(into: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], *ignored: Any, **also: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    mt_megatron.patch("cpu")
    found = {
        "peaks": [peak([*PEAK_SHAPE.split(), *case.split()]) for case in (*PEAKS, *NEW_PEAKS)],
        "flops": [counted([*FLOPS_SHAPE.split(), *case.split()]) for case in FLOPS],
    }
    print("executed:" + json.dumps(found))
