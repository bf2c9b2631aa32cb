"""The ranks' side of the tests of FP8 training."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.backends.distributed.namespace import local_device, prepare_environment
from mt_megatron.checkpoint.load import Progress, load_weights
from mt_megatron.checkpoint.save import save_checkpoint
from mt_megatron.config.parse import load_config
from mt_megatron.errors import MtMegatronError
from mt_megatron.fp8.linear import Fp8Linear
from mt_megatron.fp8.state import KINDS, Fp8State, states_of
from mt_megatron.models.families import family_of
from mt_megatron.planning.memory_estimate import memory_of
from mt_megatron.training.distributed import joined
from mt_megatron.training.model import build
from mt_megatron.training.step import Shape, make_forward_step, train_step
from tests.parity.case import Chain
from tests.second_lane import DAILY

SEQUENCE = 32
MODEL = (
    f"--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 4 "
    f"--vocab-size 128 --make-vocab-size-divisible-by 16 --seq-length {SEQUENCE} --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --mock-data "
    "--tokenizer-type NullTokenizer --no-first-last-layers-bf16"
)
MIXTURE = (
    "--family deepseek --num-moe-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 "
    "--moe-shared-expert-intermediate-size 32 --moe-layer-freq [0,1,1,1] --moe-router-score-function sigmoid "
    "--moe-router-dtype fp32 --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall "
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 16 --num-query-groups none"
)
ROUNDS = 4 if DAILY else 2
"""Micro-batches of a step on ranks that share their samples."""

TRAINING = (
    f"--micro-batch-size 2 --global-batch-size {2 * ROUNDS} "
    "--train-iters 20 --lr 4e-3 --lr-warmup-iters 2 --bf16"
)


class Run:
    """A model of ``flags`` that takes steps on generated tokens."""

    def __init__(self, flags: str, job: Any, seed: int = 3) -> None:
        self.config = config_of(flags)
        family = family_of(self.config)
        self.job = job
        self.trainable = build(self.config, job, family)
        self.states: list[Fp8State] = states_of(self.trainable.chunks)
        self._forward = make_forward_step(family, job.backend.device(job.backend.current_device()))
        micro = self.config.train.micro_batch_size
        self.rounds = self.config.num_microbatches(job.layout.world_size)
        self.shape = Shape(num_microbatches=self.rounds, micro_batch_size=micro, seq_length=SEQUENCE)
        from mt_megatron.data.loader.batches import train_batches

        data = Chain(seed, 400)
        self.batches = [
            train_batches(
                data,
                consumed_samples=0,
                micro_batch_size=micro,
                data_parallel_rank=job.at.dp,
                data_parallel_size=job.layout.dp,
            )
            for _ in self.trainable.chunks
        ]
        self.iteration = 0

    def step(self) -> float:
        self.iteration += 1
        result = train_step(
            self.trainable, self._forward, self.batches, self.shape, self.job, iteration=self.iteration
        )
        self.norm = result.grad_norm
        return result.loss


def config_of(flags: str) -> Any:
    # Its checks want a real vocabulary for generated data.
    return load_config(f"{MODEL} {TRAINING} {flags}".split())


def begin() -> None:
    """Patch, and make one default group for all runs of this process: a store keeps the addresses of a group
    that was destroyed."""
    mt_megatron.patch(os.environ.get("MT_MEGATRON_TEST_BACKEND", "cpu"))
    gc.freeze()
    backend = mt_megatron.backend()
    prepare_environment(backend, nodes=1)
    backend.set_device(local_device(backend))
    dist.init_process_group(backend.collective)


def trained(folder: str, layouts: dict[str, str], steps: int) -> dict[str, Any]:
    """Losses, counts of the last step, state of each linear, for each layout; of every rank. All start from
    the weights in ``folder``, which one process alone makes."""
    begin()
    found: dict[str, Any] = {}
    for name, flags in layouts.items():
        config = config_of(flags)
        with joined(config, mt_megatron.backend()) as job:
            try:
                run = Run(flags, job)
            except MtMegatronError as error:
                found[name] = {"error": str(error)}
                continue
            common = Path(folder) / ("mixture" if "num-moe-experts" in flags else "dense")
            if not common.exists():
                assert job.layout.world_size == 1
                save_checkpoint(common, run.trainable, Progress(), job, manifest={})
            load_weights(common / "iter_0000000", run.trainable)
            losses, norms, counts = [], [], {}
            for _ in range(steps):
                for state in run.states:
                    state.counts.clear()
                losses.append(run.step())
                norms.append(run.norm)
                counts = dict(run.states[0].counts) if run.states else {}
            found[name] = {
                "losses": losses,
                "norms": norms,
                "counts": counts,
                "rounds": run.rounds,
                "rows": {
                    linear: state.row(linear).tolist() for state in run.states for linear in state.linears
                },
                "slots": len(KINDS),
            }
    return found


def weights_are_cast_anew(flags: str) -> dict[str, Any]:
    """Whether codes follow the weights from step to step, and outside of steps."""
    begin()
    config = config_of(flags)
    with joined(config, mt_megatron.backend()) as job:
        run = Run(flags, job)
        layer = run.trainable.bare_chunks()[0].decoder.layers[1]
        weight = layer.mlp.linear_fc1.weight
        recipe = weight.gemm_recipe
        x = torch.randn(8, 1, weight.shape[1], dtype=weight.dtype)

        def output() -> torch.Tensor:
            with torch.no_grad():
                return copy.deepcopy(layer.mlp.linear_fc1(x)[0])

        before = output()
        run.step()
        run.step()
        after = output()
        weight.data.mul_(2)
        doubled = output()
        return {
            "changed by the step": not torch.equal(before, after),
            "follows .data": bool(torch.allclose(doubled.float(), 2 * after.float(), rtol=0.02, atol=1e-3)),
            "kept between steps": len(recipe._weights),
        }


def kept_casts(layouts: dict[str, str]) -> dict[str, dict[str, int]]:
    """Bytes of cast weights at the end of a step, and the plan's for this rank's stage."""
    begin()
    found: dict[str, dict[str, int]] = {}
    for name, flags in layouts.items():
        config = config_of(flags)
        with joined(config, mt_megatron.backend()) as job:
            run = Run(flags, job)
            sizes: dict[int, int] = {}
            kept: list[Fp8Linear] = []

            def end_step(
                linear: Fp8Linear, sizes: dict[int, int] = sizes, kept: list[Fp8Linear] = kept
            ) -> None:
                for _, made in linear._weights.values():
                    for each in (made.codes, made.inverse, made.second, made._values):
                        if each is not None:
                            sizes[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
                kept.append(linear)

            original, Fp8Linear.end_step = Fp8Linear.end_step, end_step  # type: ignore[method-assign]
            try:
                run.step()
            finally:
                Fp8Linear.end_step = original  # type: ignore[method-assign]
            for linear in kept:
                linear.end_step()
            planned = memory_of(config, job.layout.world_size, on_cpu=True).stages[job.at.pp]
            plain = memory_of(config_of(without_fp8(flags)), job.layout.world_size, on_cpu=True)
            found[name] = {
                "kept": sum(sizes.values()),
                "planned": planned.casts,
                "beside": planned.total - plain.stages[job.at.pp].total,
            }
    return found


def without_fp8(flags: str) -> str:
    """``flags`` without those of FP8."""
    words = flags.split()
    at = words.index("--fp8-recipe")
    return " ".join(word for word in words[:at] + words[at + 2 :] if not word.startswith("--fp8"))


def names(flags: str) -> list[str]:
    """The linears that compute in FP8, by their global names."""
    begin()
    config = config_of(flags)
    with joined(config, mt_megatron.backend()) as job:
        return [name for state in Run(flags, job).states for name in state.linears]
