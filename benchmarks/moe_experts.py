"""One mixture-of-experts layer on a CPU: grouped experts beside ``SequentialMLP`` and torch's grouped kernel.

    python benchmarks/moe_experts.py [--experts 8 64 256] [--dtypes ...] [--rounds 7] [--record results/]

Forward and backward of dispatch, experts and combination (hidden 512, experts 256 wide, 4,096 tokens, 6
experts each), the choices given and new in every round, as they are in training. Weight gradients are added
to fp32 ``main_grad`` buffers, as the trainer does. Every side is a process of two threads that waits while
another one steps: a kernel compiled for one would serve the others too. Ratios are of the same round.
"upstream rows" is ``SequentialMLP`` with Megatron-Core's own permutation, "sequential" the same with ours,
"kernel" grouped experts with ``torch._grouped_mm``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from recording import machine, record, spread, table

HERE = Path(__file__).resolve().parent
TOKENS, HIDDEN, WIDTH, TOPK = 4096, 512, 256, 6
AIMS = {64: 1.5}
SIDES = ("upstream rows", "sequential", "grouped", "kernel")
ROWS = ("permute", "unpermute")
Case = dict[str, torch.Tensor]
Step = Callable[[Case], torch.Tensor]


def prepare() -> dict[str, Any]:
    """One rank of Megatron-Core on the cpu backend, with the trainer's settings of the C library. Returns
    upstream's functions that move rows."""
    import mt_megatron

    warnings.filterwarnings("ignore")
    from megatron.core.transformer.moe import moe_utils

    upstream = {name: getattr(moe_utils, name) for name in ROWS}
    mt_megatron.patch("cpu")
    from megatron.core import parallel_state, tensor_parallel

    from mt_megatron.backends.host_process import keep_freed_memory

    keep_freed_memory(True)
    store = dist.FileStore(f"{tempfile.mkdtemp()}/store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return upstream


def layer(experts: int, dtype: torch.dtype, grouped: bool) -> Any:
    """A layer whose experts depend on nothing but their number, with its gradient buffers."""
    from megatron.core.models.gpt.gpt_layer_specs import _get_mlp_module_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        ffn_hidden_size=WIDTH,
        num_moe_experts=experts,
        moe_router_topk=TOPK,
        moe_grouped_gemm=grouped,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=True,
        gradient_accumulation_fusion=True,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    spec = _get_mlp_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=grouped)
    made = build_module(spec, config=config)
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(experts, 2 * WIDTH, HIDDEN, generator=generator) * 0.04
    second = torch.randn(experts, HIDDEN, WIDTH, generator=generator) * 0.04
    with torch.no_grad():
        if grouped:
            made.experts.weight1.copy_(first)
            made.experts.weight2.copy_(second)
        else:
            for expert, one, other in zip(made.experts.local_experts, first, second, strict=True):
                expert.linear_fc1.weight.copy_(one)
                expert.linear_fc2.weight.copy_(other)
    for weight in made.experts.parameters():
        weight.main_grad = torch.zeros(weight.shape)
    return made


def contender(made: Any) -> Step:
    """Forward and backward of ``made`` for given tokens and choices."""

    def step(case: Case) -> torch.Tensor:
        hidden, probs = case["hidden"].detach().requires_grad_(), case["probs"].detach().requires_grad_()
        rows, counts = made.token_dispatcher.token_permutation(hidden, probs, case["indices"])
        output, _ = made.token_dispatcher.token_unpermutation(*made.experts(rows, counts))
        output.backward(case["grad"])
        assert hidden.grad is not None
        return hidden.grad

    return step


def tokens(experts: int, dtype: torch.dtype, seed: int) -> Case:
    """Random tokens whose choices are spread as an untrained router's are: unevenly."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, experts, generator=generator) + torch.randn(experts, generator=generator) / 2
    found = logits.topk(TOPK, dim=1)
    return {
        "hidden": torch.randn(TOKENS, 1, HIDDEN, generator=generator).to(dtype),
        "grad": torch.randn(TOKENS, 1, HIDDEN, generator=generator).to(dtype),
        "probs": found.values.softmax(1).to(dtype),
        "indices": found.indices,
    }


def with_others(step: Step, places: list[Any], names: dict[str, Any]) -> Step:
    """``step`` while the modules ``places`` have other objects under ``names``."""

    def run(case: Case) -> torch.Tensor:
        own = [(place, name, getattr(place, name)) for place in places for name in names]
        for place, name, _ in own:
            setattr(place, name, names[name])
        try:
            return step(case)
        finally:
            for place, name, value in own:
                setattr(place, name, value)

    return run


def contenders(experts: int, dtype: torch.dtype, upstream: dict[str, Any]) -> dict[str, Step]:
    """Every side's step. What is the same for two of them is the same object."""
    from megatron.core.transformer.moe import token_dispatcher

    from mt_megatron.layers.moe import experts as expert_layers
    from mt_megatron.seams import grouped_gemm

    grouped = contender(layer(experts, dtype, True))
    sequential = contender(layer(experts, dtype, False))
    kernel = {"has_grouped_kernel": lambda a, b: True}
    return {
        "upstream rows": with_others(sequential, [token_dispatcher], upstream),
        "sequential": sequential,
        "grouped": grouped,
        "kernel": with_others(grouped, [expert_layers, grouped_gemm], kernel),
    }


def flops() -> float:
    """Operations of the products, forward and backward."""
    return 3 * 2.0 * TOKENS * TOPK * 3 * HIDDEN * WIDTH


def work(side: str, experts: int, dtype: torch.dtype, threads: int, warm_up: int) -> None:
    """One side: a step for every seed on stdin, answered by its seconds and a few of its gradients."""
    torch.set_num_threads(threads)
    step = contenders(experts, dtype, prepare())[side]
    for seed in range(warm_up):
        step(tokens(experts, dtype, 1000 + seed))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        case = tokens(experts, dtype, int(line))
        began, used = time.perf_counter(), time.process_time()
        gradient = step(case)
        answer = {"seconds": time.perf_counter() - began, "processor": time.process_time() - used}
        print(json.dumps(answer | {"gradient": gradient[:8].float().view(-1).tolist()}), flush=True)


class Side:
    """A process that runs ``work``."""

    def __init__(self, name: str, experts: int, dtype: str, args: argparse.Namespace) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", name, "--experts", str(experts)]
        command += ["--dtypes", dtype, "--threads", str(args.threads), "--warm-up", str(args.warm_up)]
        path = f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(args.threads)},
        )
        self._answer()

    def step(self, seed: int) -> dict[str, Any]:
        """One step's answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = self._answer()
        return answer

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a side ended before its answer; its error is above")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def measure(experts: int, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds by side, one per round, and how far the sides' gradients are from each other."""
    sides = {name: Side(name, experts, dtype, args) for name in SIDES}
    clocks: dict[str, dict[str, list[float]]] = {
        clock: {name: [] for name in SIDES} for clock in ("seconds", "processor")
    }
    apart = 0.0
    for number in range(args.rounds):
        found = {}
        for name in SIDES if number % 2 == 0 else reversed(SIDES):
            found[name] = sides[name].step(number)
            for clock, values in clocks.items():
                values[name].append(found[name][clock])
        expected = torch.tensor(found["upstream rows"]["gradient"])
        for answer in found.values():
            difference = torch.tensor(answer["gradient"]) - expected
            apart = max(apart, float(difference.norm() / expected.norm()))
    for side in sides.values():
        side.close()
    seconds = clocks[args.clock]
    return {
        "experts": experts,
        "dtype": dtype,
        **clocks,
        "apart": apart,
        "over_upstream": _ratios(seconds, "upstream rows", "grouped"),
        "over_sequential": _ratios(seconds, "sequential", "grouped"),
        "over_kernel": _ratios(seconds, "kernel", "grouped"),
        "aim": AIMS.get(experts),
    }


def _ratios(seconds: dict[str, list[float]], over: str, under: str) -> dict[str, float]:
    return spread([a / b for a, b in zip(seconds[over], seconds[under], strict=True)])


def _text(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f})"


def main() -> None:
    """Measure, print a table, and write it down where ``--record`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16", "float32"]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument(
        "--clock", choices=("seconds", "processor"), default="seconds", help="what the ratios are of"
    )
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help="directory for a dated JSON and Markdown file")
    args = parser.parse_args()
    if args.worker:
        dtype = getattr(torch, args.dtypes[0])
        work(args.worker, args.experts[0], dtype, args.threads, args.warm_up)
        return
    about = machine()
    cases, rows = [], []
    for dtype in args.dtypes:
        for experts in args.experts:
            case = measure(experts, dtype, args)
            cases.append(case)
            times = {name: spread(each)["median"] for name, each in case[args.clock].items()}
            aim = f" >= {case['aim']}" if case["aim"] else ""
            rows.append(
                [
                    str(experts),
                    dtype,
                    *(f"{times[name] * 1e3:.0f} ms" for name in SIDES),
                    f"{_text(case['over_upstream'])}{aim}",
                    f"{_text(case['over_sequential'])}{aim}",
                    _text(case["over_kernel"]),
                    f"{flops() / times['grouped'] / 1e9:,.0f}",
                    f"{case['apart']:.0e}",
                ]
            )
            print(" ".join(rows[-1]), flush=True)
    header = ["experts", "dtype", *SIDES, *(f"{name} / grouped" for name in SIDES if name != "grouped")]
    header += ["grouped, GFLOP/s", "gradients apart"]
    tables = table(header, rows)
    print(f"\n{tables}")
    if args.record is not None:
        figures = {"machine": about, "rounds": args.rounds, "threads": args.threads}
        figures |= {"clock": args.clock, "cases": cases}
        for path in record(args.record, "moe-experts", "Experts on a CPU", figures, tables):
            print(path)


if __name__ == "__main__":
    main()
