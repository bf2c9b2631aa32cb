"""The ranks' side of the tests of checkpoints of SGD and from before the first applied update."""

from __future__ import annotations

from typing import Any

from tests.second_lane import of_lane
from tests.training.loop_cases import run, start

TINY = (
    "--num-layers 2 --global-batch-size 4 --micro-batch-size 2 --eval-iters 0 "
    "--hidden-dropout 0 --attention-dropout 0 --train-iters 5 --lr 5e-3"
)
FP16 = "--fp16 --initial-loss-scale 4294967296 --hysteresis 1"
CASES = of_lane(
    {
        "sgd": "--optimizer sgd",
        "sgd_without_momentum": "--optimizer sgd --sgd-momentum 0",
        "sgd_bf16": "--optimizer sgd --bf16",
        "sgd_pipeline": "--optimizer sgd --pipeline-model-parallel-size 2",
        "empty_first_stage": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 0,2",
        "fp16": FP16,
        "fp16_distributed": f"{FP16} --use-distributed-optimizer",
        "fp16_sgd": f"{FP16} --optimizer sgd",
    },
    *("sgd", "fp16_distributed"),
)


def all_cases(folder: str) -> dict[str, Any]:
    """For each case a whole run, and one that ends after two steps and is continued. No update of the fp16
    ones has been applied by then."""
    start()
    found = {}
    for name, case in CASES.items():
        flags = f"{TINY} {case}"
        whole = run(f"{flags} --save {folder}/{name}_whole", folder, f"{name}_whole")
        first = run(f"{flags} --save {folder}/{name} --exit-interval 2", folder, f"{name}_first")
        second = run(f"{flags} --save {folder}/{name}", folder, f"{name}_second")
        found[name] = {"whole": whole, "first": first, "second": second}
    return found
