"""Seconds of a GPT step from the layer spec for Transformer Engine, which is absent, and from the local one.

    python benchmarks/layers/te_spec_step.py [--backend cpu] [--hidden 512 --layers 4 --tokens 1024]
        [--pairs 20] [--record results/]
    python benchmarks/layers/te_spec_step.py --toy        # a tiny model, to see that it runs

One process with three models of the same weights: the spec's, the local spec's, and the local spec's again,
whose ratio to the second (A/A) says what the machine lets tell apart. Each pair is two steps in turn, the
order changes from pair to pair. Processor seconds leave out what other processes take; wall seconds do not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from recording import machine, median_interval, record, table

import mt_megatron


class Side:
    """One model, its optimizer and its batch."""

    def __init__(self, args: argparse.Namespace, spec: Any, device: torch.device) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer import TransformerConfig

        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=args.layers,
            hidden_size=args.hidden,
            num_attention_heads=max(1, args.hidden // 64),
            normalization="RMSNorm",
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
        )
        self.model = GPTModel(config, spec, args.vocabulary, args.sequence, position_embedding_type="rope")
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        rows = args.tokens // args.sequence
        self.tokens = torch.randint(0, args.vocabulary, (rows, args.sequence), device=device)
        self.positions = torch.arange(args.sequence, device=device).expand(rows, -1)

    def step(self) -> tuple[float, float, float]:
        """Seconds by the wall and of the processor, and the loss."""
        backend = mt_megatron.backend()
        backend.synchronize()
        wall, processor = time.perf_counter(), time.process_time()
        loss = self.model(self.tokens, self.positions, None, labels=self.tokens).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        backend.synchronize()
        return time.perf_counter() - wall, time.process_time() - processor, float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    if args.toy:
        args.hidden, args.layers, args.tokens, args.sequence, args.pairs = 64, 2, 64, 32, 2
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    mt_megatron.patch(args.backend)
    backend = mt_megatron.backend()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs

    from mt_megatron.backends.distributed.rendezvous import loopback_store

    store, _ = loopback_store()
    backend.set_device(0)
    dist.init_process_group(backend.collective, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    about = machine()
    local = gpt_layer_specs.get_gpt_layer_local_spec()
    engine = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    device = backend.device(0)
    sides = {name: Side(args, spec, device) for name, spec in (("te", engine), ("a", local), ("b", local))}
    torch.manual_seed(2)
    for side in sides.values():
        side.tokens = sides["te"].tokens
        side.step()
    ratios: dict[str, dict[str, list[float]]] = {
        pair: {"wall": [], "processor": []} for pair in ("te / local", "local / local")
    }
    for number in range(args.pairs):
        for pair, (first, second) in zip(ratios, (("te", "a"), ("b", "a")), strict=True):
            order = (first, second) if number % 2 else (second, first)
            took = {name: sides[name].step() for name in order}
            for clock, index in (("wall", 0), ("processor", 1)):
                ratios[pair][clock].append(took[first][index] / took[second][index])
    rows = [
        {"pair": pair, "clock": clock, "median": median, "low": low, "high": high, "ratios": values}
        for pair, clocks in ratios.items()
        for clock, values in clocks.items()
        for median, low, high in [median_interval(values)]
    ]
    shown = [
        [row["pair"], row["clock"], *(f"{row[name]:.4f}" for name in ("median", "low", "high"))]
        for row in rows
    ]
    tables = table(["ratio", "seconds", "median", "95 % low", "high"], shown)
    print(tables)
    dist.destroy_process_group()
    if args.record is not None:
        name = {"cpu": "te-spec-step"}.get(args.backend, f"te-spec-step-{args.backend}")
        title = "Step from the layer spec for Transformer Engine, which is absent, and from the local one"
        sizes = {"hidden": args.hidden, "layers": args.layers, "tokens": args.tokens}
        record(args.record, name, title, {"machine": about, **sizes, "rows": rows}, tables)


if __name__ == "__main__":
    main()
