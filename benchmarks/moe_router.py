"""Cost of choosing experts on a CPU, beside transformers' routers, which use ``torch.topk``.

    python benchmarks/moe_router.py [--rounds 15] [--threads 2] [--record results/]

Weights and experts of 4,096 tokens from given logits, forward and backward, of Mixtral (8 experts, 2 chosen),
DeepSeek-V2-Lite (64, 6) and DeepSeek-V3 (256, 8, of 4 of 8 groups, with a bias). The product that makes
the logits is the same for all and left out. Sides take turns in every round; ratios are of the same round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recording import machine, record, spread, table
from torch import Tensor

from mt_megatron.layers.moe.router_topk import RouterOptions, choose_experts

TOKENS = 4096
MODELS = {
    "Mixtral": RouterOptions(num_experts=8, topk=2),
    "DeepSeek-V2-Lite": RouterOptions(num_experts=64, topk=6, pre_softmax=True),
    "DeepSeek-V3": RouterOptions(
        num_experts=256,
        topk=8,
        score_function="sigmoid",
        num_groups=8,
        group_topk=4,
        group_score_topk=2,
        topk_scaling_factor=2.5,
    ),
}
Choose = Callable[[Tensor], Tensor]


def published(name: str, options: RouterOptions) -> Any:
    """transformers' router, whose weight is the identity: its logits are its input."""
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
    from transformers.models.mixtral import modeling_mixtral as mixtral

    experts, topk = options.num_experts, options.topk
    common = {"hidden_size": experts, "num_attention_heads": 1, "num_experts_per_tok": topk}
    if name == "Mixtral":
        router: Any = mixtral.MixtralTopKRouter(mixtral.MixtralConfig(num_local_experts=experts, **common))
    elif name == "DeepSeek-V3":
        config = v3.DeepseekV3Config(
            n_routed_experts=experts, n_group=8, topk_group=4, routed_scaling_factor=2.5, **common
        )
        router = v3.DeepseekV3TopkRouter(config)
    else:
        router = v2.DeepseekV2TopkRouter(
            v2.DeepseekV2Config(
                n_routed_experts=experts, topk_method="greedy", routed_scaling_factor=1.0, **common
            )
        )
    router.weight.data = torch.eye(experts)
    router.weight.requires_grad_(False)
    return router


def sides(name: str, options: RouterOptions) -> dict[str, Choose]:
    """The weights [tokens, experts] that both routers give to logits."""
    router = published(name, options)
    bias = torch.zeros(options.num_experts) if options.score_function == "sigmoid" else None

    def ours(logits: Tensor) -> Tensor:
        return choose_experts(logits, options, bias).weights

    def theirs(logits: Tensor) -> Tensor:
        weights: Tensor = router(logits)[1]
        return weights

    return {"ours": ours, "transformers": theirs}


def products_of(options: RouterOptions) -> Choose:
    """What the identity's product costs transformers' side, to be taken off."""
    identity = torch.eye(options.num_experts)
    return lambda logits: torch.nn.functional.linear(logits, identity)


def seconds_of(choose: Choose, logits: Tensor) -> float:
    """One forward and backward pass."""
    leaf = logits.detach().requires_grad_()
    began = time.perf_counter()
    choose(leaf).square().sum().backward()
    return time.perf_counter() - began


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Seconds per round of both sides, and their ratios."""
    options = MODELS[name]
    contenders = {**sides(name, options), "product": products_of(options)}
    seconds: dict[str, list[float]] = {each: [] for each in contenders}
    for number in range(rounds + 1):
        logits = torch.randn(TOKENS, options.num_experts, generator=torch.Generator().manual_seed(number))
        for each, choose in contenders.items() if number % 2 else reversed(list(contenders.items())):
            taken = seconds_of(choose, logits)
            if number:
                seconds[each].append(taken)
    product = spread(seconds.pop("product"))["median"]
    theirs = [max(taken - product, 0.0) for taken in seconds["transformers"]]
    ratios = [a / b for a, b in zip(theirs, seconds["ours"], strict=True)]
    return {"model": name, "seconds": {**seconds, "transformers": theirs}, "ratio": spread(ratios)}


def main() -> None:
    """Measure, print a table, and write it down where ``--record`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path, help="directory for a dated JSON and Markdown file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    about = machine()
    cases = [measure(name, args.rounds) for name in MODELS]
    rows = []
    for case in cases:
        times = {side: spread(taken)["median"] * 1e3 for side, taken in case["seconds"].items()}
        ratio = case["ratio"]
        rows.append(
            [
                case["model"],
                f"{times['ours']:.2f} ms",
                f"{times['transformers']:.2f} ms",
                f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})",
            ]
        )
    shown = table(["router", "ours", "transformers", "times as fast"], rows)
    print(shown)
    if args.record is not None:
        figures = {"machine": about, "tokens": TOKENS, "threads": args.threads, "cases": cases}
        for path in record(args.record, "moe-router", "Choosing experts on a CPU", figures, shown):
            print(path)


if __name__ == "__main__":
    main()
