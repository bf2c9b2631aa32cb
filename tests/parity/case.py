"""What every parity run has in common: a tiny Llama, its data, and the layouts that are compared."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import TrainingConfig

VOCABULARY = 128
SEQUENCE = 32
GLOBAL_BATCH = 8
MICRO_BATCH = 2
DAILY = os.environ.get("MT_MEGATRON_DAILY") == "1"
"""True when the second lane runs too: every layout then, otherwise one of each kind for fewer steps."""

STEPS = 20 if DAILY else 5
LEARNS = 0.05 * STEPS
"""By how much the loss of every reference falls at least."""

CLIP = 1.0

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 176 "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32 --seq-length {SEQUENCE} "
    "--position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --activation-func silu "
    "--gated-linear-unit --no-add-bias-linear --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.08"
)
MIXTURE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32 --seq-length {SEQUENCE} --family deepseek "
    "--position-embedding-type rope --rotary-base 10000 --normalization RMSNorm --activation-func silu "
    "--gated-linear-unit --no-add-bias-linear --hidden-dropout 0 --attention-dropout 0 "
    "--init-method-std 0.08 --multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
    "--num-moe-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--moe-shared-expert-intermediate-size 48 --moe-layer-freq [0,1,1,1] --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-group-score-topk 1 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
    "--moe-token-dispatcher-type alltoall --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
)
"""DeepSeek-V3's architecture: a dense layer, groups of experts, latent attention, multi-token prediction."""

OPTIMIZER = (
    f"--train-iters {STEPS} --lr 4e-3 --min-lr 4e-4 --lr-warmup-iters 4 --lr-decay-style cosine "
    f"--weight-decay 0.1 --adam-beta2 0.95 --clip-grad {CLIP} --micro-batch-size {MICRO_BATCH} "
    f"--global-batch-size {GLOBAL_BATCH}"
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run the same training."""

    name: str
    world: int = 1
    flags: str = ""
    tied: bool = False
    """Whether embedding and output layer share their weights."""

    per_token: bool = False
    """Whether every token of the global batch weighs the same, not every micro-batch."""

    mixture: bool = False
    """Whether the model is ``MIXTURE``."""

    sabotage: str | None = None
    """A deliberate mistake (see ``run``); the comparison must then fail."""

    bf16_always: bool = False
    """Whether it runs in bf16 too, also without ``--soak``."""

    @property
    def reference(self) -> str:
        """The run of one process that it is compared with."""
        return "one" + "_tied" * self.tied + "_per_token" * self.per_token + "_mixture" * self.mixture


VPP = "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2"
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CP = "--context-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

REFERENCES = (
    Layout(name="one"),
    Layout(name="one_tied", tied=True),
    *((Layout(name="one_per_token", per_token=True),) if DAILY else ()),
    Layout(name="one_mixture", mixture=True),
)

_CONTEXT_PARALLEL = (Layout(name="cp2", world=2, flags=CP, bf16_always=DAILY),)
_CONTEXT_PARALLEL_DAILY = (
    Layout(name="cp2_tp2_sp", world=4, flags=f"{CP} --tensor-model-parallel-size 2 --sequence-parallel"),
    Layout(name="cp2_pp2", world=4, flags=f"{CP} --pipeline-model-parallel-size 2"),
)
_CONTEXT_PARALLEL_SOAK = (
    Layout(name="cp2_ring", world=2, flags=f"{CP} --cp-comm-type p2p"),
    Layout(name="cp2_recompute", world=2, flags=f"{CP} {RECOMPUTE}"),
    Layout(name="cp2_recompute_selective", world=2, flags=f"{CP} --recompute-granularity selective"),
    Layout(name="cp2_per_token", world=2, flags=CP, per_token=True),
    Layout(name="cp4", world=4, flags="--context-parallel-size 4"),
    Layout(name="cp4_ring", world=4, flags="--context-parallel-size 4 --cp-comm-type p2p"),
    Layout(name="cp2_dp2_zero1", world=4, flags=f"{CP} {ZERO1}"),
    Layout(name="cp2_vpp2", world=4, flags=f"{CP} {VPP}"),
    Layout(name="cp2_pp2_per_token", world=4, flags=f"{CP} --pipeline-model-parallel-size 2", per_token=True),
)
CONTEXT_PARALLEL = (
    *_CONTEXT_PARALLEL,
    *(_CONTEXT_PARALLEL_DAILY if DAILY else ()),
    *(_CONTEXT_PARALLEL_SOAK if os.environ.get("MT_MEGATRON_SOAK") == "1" else ()),
)
"""Sequences spread over processes; more of them in the second lane, many more with ``--soak``."""

_LAYOUTS_DAILY = (
    Layout(name="pp2", world=2, flags="--pipeline-model-parallel-size 2"),
    Layout(name="dp2_overlap", world=2, flags="--overlap-grad-reduce --bucket-size 20000"),
    Layout(name="tp2", world=2, flags="--tensor-model-parallel-size 2"),
    Layout(name="recompute_selective", flags="--recompute-granularity selective"),
    Layout(name="dp2_zero1_buckets", world=2, flags=f"{ZERO1} --bucket-size 20000"),
    Layout(name="pp2_tied", world=2, flags="--pipeline-model-parallel-size 2", tied=True),
    Layout(name="tp2_pp2", world=4, flags="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    Layout(name="pp2_dp2_zero1", world=4, flags=f"--pipeline-model-parallel-size 2 {ZERO1}"),
    Layout(name="vpp2_dp2_zero1", world=4, flags=f"{VPP} {ZERO1}"),
    Layout(
        name="tp2_sp_dp2_zero1", world=4, flags=f"--tensor-model-parallel-size 2 --sequence-parallel {ZERO1}"
    ),
)
LAYOUTS = (
    Layout(name="recompute", flags=RECOMPUTE, bf16_always=DAILY),
    Layout(
        name="tp2_sp", world=2, flags="--tensor-model-parallel-size 2 --sequence-parallel", bf16_always=DAILY
    ),
    Layout(name="vpp2", world=2, flags=VPP, bf16_always=DAILY),
    Layout(name="dp2_zero1", world=2, flags=ZERO1, bf16_always=DAILY),
    Layout(
        name="tp2_sp_pp2_tied",
        world=4,
        flags="--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
        tied=True,
    ),
    *(_LAYOUTS_DAILY if DAILY else ()),
    *CONTEXT_PARALLEL,
)

EP = "--expert-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"
ALLGATHER = "--moe-token-dispatcher-type allgather"
TP_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
_MIXTURES_SOAK = (
    Layout(name="mixture_vpp2", world=2, flags=VPP, mixture=True),
    Layout(name="mixture_tp2_sp", world=2, flags=TP_SP, mixture=True),
    Layout(
        name="mixture_ep2_allgather",
        world=2,
        flags=f"{EP} --moe-token-dispatcher-type allgather",
        mixture=True,
    ),
    Layout(name="mixture_dp2_zero1", world=2, flags=ZERO1, mixture=True),
    Layout(name="mixture_selective", flags="--recompute-granularity selective", mixture=True),
    Layout(
        name="mixture_ep2_pp2_zero1",
        world=4,
        flags=f"{EP} --pipeline-model-parallel-size 2 {ZERO1}",
        mixture=True,
    ),
)
_MIXTURES_DAILY = (
    Layout(name="mixture_pp2", world=2, flags=PP, mixture=True),
    Layout(name="mixture_recompute", flags=f"{RECOMPUTE} --recompute-mla-up-proj", mixture=True),
    Layout(name="mixture_sequential", flags="--no-moe-grouped-gemm", mixture=True),
    Layout(name="mixture_ep2", world=2, flags=EP, mixture=True),
    Layout(name="mixture_tp2_ep2", world=4, flags=f"{TP_SP} {EP}", mixture=True),
    Layout(
        name="mixture_ep2_pp2_dense_stage",
        world=4,
        flags=f"{EP} {PP} --pipeline-model-parallel-layout 1,3",
        mixture=True,
    ),
)
MIXTURES = (
    Layout(name="mixture_ep2_zero1", world=2, flags=f"{EP} {ZERO1}", mixture=True),
    *(_MIXTURES_DAILY if DAILY else ()),
    *(_MIXTURES_SOAK if os.environ.get("MT_MEGATRON_SOAK") == "1" else ()),
)
"""Experts, their routing, latent attention and multi-token prediction, spread in every way. In fp32 alone:
where rounding chooses other experts, trainings part."""

_DROPPING = "--hidden-dropout 0.1 --attention-dropout 0.1"
_DROPOUT_SOAK = (
    Layout(name="tp2_dropout", world=2, flags=f"{_DROPPING} --tensor-model-parallel-size 2"),
    Layout(
        name="tp2_sp_dropout",
        world=2,
        flags=f"{_DROPPING} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
)
_DROPOUT_DAILY = (
    Layout(name="dropout", flags=_DROPPING),
    Layout(name="dropout_recompute", flags=f"{_DROPPING} {RECOMPUTE}"),
)
DROPOUT = (
    *(_DROPOUT_DAILY if DAILY else ()),
    *(_DROPOUT_SOAK if os.environ.get("MT_MEGATRON_SOAK") == "1" else ()),
)
"""Masks differ from layout to layout, but not between devices, nor when a forward pass is repeated."""

_SABOTAGED_DAILY = (
    Layout(
        name="no_norm_all_reduce",
        world=2,
        flags="--tensor-model-parallel-size 2 --sequence-parallel",
        sabotage="no_norm_all_reduce",
    ),
    Layout(name="cp2_leaking_mask", world=2, flags=CP, sabotage="leaking_mask"),
    Layout(name="doubled_gradient", sabotage="double_gradient"),
    Layout(name="dropped_layer", sabotage="drop_layer"),
    Layout(
        name="mixture_unmoved_bias", flags="--moe-router-bias-update-rate 0", mixture=True, sabotage="flags"
    ),
)
SABOTAGED = (
    Layout(name="zeroed_gradient", sabotage="zero_gradient"),
    Layout(name="ep2_half_gradient", world=2, flags=EP, mixture=True, sabotage="half_expert_gradient"),
    *(_SABOTAGED_DAILY if DAILY else ()),
)


def by_name(name: str) -> Layout:
    """The layout called ``name``."""
    every = (*REFERENCES, *LAYOUTS, *MIXTURES, *DROPOUT, *SABOTAGED)
    return next(each for each in every if each.name == name)


def config_of(layout: Layout, *, seed: int, bf16: bool = False) -> TrainingConfig:
    """The configuration of ``layout``."""
    untied = (
        "--no-untie-embeddings-and-output-weights" if layout.tied else "--untie-embeddings-and-output-weights"
    )
    model = MIXTURE if layout.mixture else MODEL
    flags = f"{model} {OPTIMIZER} {layout.flags} {untied} --seed {seed} --mock-data"
    flags += " --calculate-per-token-loss" * layout.per_token
    return load_config([*flags.split(), *(["--bf16"] if bf16 else [])])


class Chain:
    """Samples of a Markov chain with two likely successors per token: a model learns it in 20 steps.

    Every seventh position does not count towards the loss, so that masks matter.
    """

    def __init__(self, seed: int, samples: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        successors = torch.randint(VOCABULARY, (VOCABULARY, 2), generator=generator)
        tokens = torch.empty(samples, SEQUENCE + 1, dtype=torch.int64)
        tokens[:, 0] = torch.randint(VOCABULARY, (samples,), generator=generator)
        choices = torch.randint(10, (samples, SEQUENCE), generator=generator)
        for position in range(SEQUENCE):
            second = (choices[:, position] == 0).long()
            tokens[:, position + 1] = successors[tokens[:, position], second]
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._tokens[index]
        positions = torch.arange(SEQUENCE)
        return {
            "tokens": row[:-1],
            "labels": row[1:],
            "loss_mask": ((positions + index) % 7 != 0).float(),
            "position_ids": positions,
        }


def training_data(seed: int) -> Chain:
    """The samples of all steps, the same for every layout."""
    return Chain(seed, STEPS * GLOBAL_BATCH)
