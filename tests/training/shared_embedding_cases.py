"""The ranks' side of the test of shared embeddings under the distributed optimizer."""

from __future__ import annotations

from typing import Any

from tests.second_lane import DAILY
from tests.training.loop_cases import run, start

FIRST, HALF, STEPS = (1, 6, 11) if DAILY else (1, 3, 5)
"""The step after which a layout takes over from one process, that at which it stops, and the last one."""

TIED = "--no-untie-embeddings-and-output-weights"
PREDICTING = "--mtp-num-layers 1"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --virtual-pipeline-model-parallel-size 2"
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
QWEN = f"{TIED} --family qwen --layernorm-epsilon 1e-6 --add-qkv-bias --rotary-base 1000000 --num-layers 2"

DEEPSEEK = (
    "--family deepseek --layernorm-epsilon 1e-6 --multi-latent-attention --qk-layernorm --num-query-groups 4 "
    "--kv-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 20 --num-moe-experts 4 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 56 --moe-shared-expert-intermediate-size 56 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    f"--moe-token-dispatcher-type alltoall --moe-layer-freq [0,1,1,1] {PREDICTING}"
)
MODELS = {
    "llama": TIED,
    "predicting": f"{TIED} {PREDICTING}",
    "narrow": f"{QWEN} --hidden-size 128 --num-attention-heads 2",
    "qwen": f"{QWEN} --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14",
    "deepseek": DEEPSEEK,
}
PLAIN = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --clip-grad 1 --lr 1e-3"


def references(folder: str, models: list[str]) -> dict[str, Any]:
    """Each model in one process: ``FIRST`` steps, saved, and the rest of ``STEPS``."""
    start()
    found = {}
    for name in models:
        flags = f"{PLAIN} {MODELS[name]} --use-distributed-optimizer --train-iters {STEPS}"
        first = run(f"{flags} --save {folder}/{name}_first --exit-interval {FIRST}", folder, f"{name}_first")
        if "error" in first:
            raise AssertionError(first["error"])
        found[name] = run(
            f"{flags} --resume {folder}/{name}_first --save {folder}/{name}", folder, f"{name}_rest"
        )
    return found


def layouts(folder: str, cases: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Each layout from the first step of its reference, stopped half way, saved and continued."""
    start()
    found = {}
    for name, (model, flags) in cases.items():
        flags = f"{PLAIN} {MODELS[model]} {flags} --train-iters {STEPS} --save {folder}/{name}"
        halves = [
            run(f"{flags} --resume {folder}/{model}_first --exit-interval {HALF}", folder, f"{name}_half"),
            run(flags, folder, f"{name}_rest"),
        ]
        found[name] = halves
    return found
