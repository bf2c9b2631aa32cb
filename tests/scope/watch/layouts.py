"""The layouts in which watched values are compared with the oracle's."""

from __future__ import annotations

from dataclasses import dataclass

from tests.parity.case import DAILY, MODEL, OPTIMIZER

EXPERTS = (
    "--family mixtral --num-moe-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0"
)
TP, SP, PP = "--tensor-model-parallel-size 2", "--sequence-parallel", "--pipeline-model-parallel-size 2"
CP, EP = "--context-parallel-size 2", "--expert-model-parallel-size 2"
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
VPP = f"{PP} --virtual-pipeline-model-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TIED = "--no-untie-embeddings-and-output-weights"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run a model."""

    name: str
    world: int
    flags: str = ""
    experts: bool = False
    tied: bool = False
    token_loss: bool = False
    deferred: bool = False
    """Statistics are made as on an accelerator: by the host, of single kernels' results."""

    @property
    def model(self) -> str:
        """Name of the weights that it starts from."""
        return "experts" if self.experts else "tied" if self.tied else "dense"

    @property
    def all_flags(self) -> str:
        """Of the run."""
        untied = TIED if self.tied else "--untie-embeddings-and-output-weights"
        loss = "--calculate-per-token-loss" if self.token_loss else ""
        return f"{MODEL} {OPTIMIZER} {untied} {EXPERTS * self.experts} {loss} {self.flags}"


LAYOUTS = (
    Layout(name="one", world=1),
    Layout(name="one_experts", world=1, experts=True),
    Layout(name="deferred_experts", world=1, experts=True, deferred=True),
    Layout(name="tp2_sp", world=2, flags=f"{TP} {SP}"),
    Layout(name="cp2_token_loss", world=2, flags=CP, token_loss=True),
    Layout(name="vpp2", world=2, flags=VPP),
    Layout(name="ep2_zero1", world=2, flags=f"{EP} {ZERO1}", experts=True),
    Layout(name="deferred_tp2_sp_zero1", world=2, flags=f"{TP} {SP} {ZERO1}", deferred=True),
)
FURTHER = (
    Layout(name="one_tied", world=1, tied=True),
    Layout(name="recompute", world=1, flags=RECOMPUTE),
    Layout(name="recompute_selective", world=1, flags="--recompute-granularity selective"),
    Layout(name="deferred", world=1, deferred=True),
    Layout(name="deferred_recompute", world=1, flags=RECOMPUTE, deferred=True),
    Layout(name="deferred_tp2", world=2, flags=TP, deferred=True),
    Layout(name="deferred_vpp2", world=2, flags=VPP, deferred=True),
    Layout(name="deferred_cp2", world=2, flags=CP, deferred=True),
    Layout(name="deferred_ep2_zero1", world=2, flags=f"{EP} {ZERO1}", experts=True, deferred=True),
    Layout(name="tp2", world=2, flags=TP),
    Layout(name="pp2", world=2, flags=PP),
    Layout(name="cp2", world=2, flags=CP),
    Layout(name="dp2", world=2),
    Layout(name="dp2_token_loss", world=2, token_loss=True),
    Layout(name="dp2_zero1", world=2, flags=ZERO1),
    Layout(name="cp2_ring", world=2, flags=f"{CP} --cp-comm-type p2p"),
    Layout(name="pp2_tied", world=2, flags=PP, tied=True),
    Layout(name="tp2_tied", world=2, flags=TP, tied=True),
    Layout(name="tp2_recompute", world=2, flags=f"{TP} {RECOMPUTE}"),
    Layout(name="ep2", world=2, flags=EP, experts=True),
    Layout(name="experts_pp2", world=2, flags=PP, experts=True),
    Layout(name="experts_cp2", world=2, flags=CP, experts=True),
    Layout(name="experts_tp2_sp", world=2, flags=f"{TP} {SP}", experts=True),
    Layout(name="ep2_tp2_sp", world=4, flags=f"{EP} {TP} {SP}", experts=True),
    Layout(name="ep2_pp2_zero1", world=4, flags=f"{EP} {PP} {ZERO1}", experts=True),
    Layout(name="cp2_tp2_sp", world=4, flags=f"{CP} {TP} {SP}"),
    Layout(name="cp2_pp2", world=4, flags=f"{CP} {PP}"),
    Layout(name="tp2_pp2", world=4, flags=f"{TP} {PP}"),
    Layout(name="tp2_sp_dp2_zero1", world=4, flags=f"{TP} {SP} {ZERO1}"),
    Layout(name="cp2_dp2_zero1", world=4, flags=f"{CP} {ZERO1}"),
)
CHECKED = (*LAYOUTS, *(FURTHER if DAILY else ()))
"""One layout of each kind, and all of them in the second lane."""


def by_name(name: str) -> Layout:
    """The layout called ``name``."""
    return next(each for each in (*LAYOUTS, *FURTHER) if each.name == name)
