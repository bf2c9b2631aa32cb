"""The ranks' side: a run with a perturbation that is undone against one that never had it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.errors import ConfigError
from mt_megatron.scope.lab.agreement import read_alike
from tests.scope.lab.bench import bench, entry, start

LAYERS = "decoder.layers.1.*"

PERTURBATIONS: dict[str, dict[str, Any]] = {
    "flip": {
        "kind": "bit_flip",
        "bit": 14,
        "on": "weight",
        "module": "decoder.layers.0.mlp.*",
        "index": [3, 1],
    },
    "noise": {"kind": "gaussian", "sigma": 0.1, "on": "activation", "module": "decoder.layers.1.mlp"},
    "mask": {"kind": "mask", "on": "activation", "module": "*.core_attention", "heads": [1]},
    "scale": {"kind": "scale", "factor": 3, "on": "gradient", "module": "decoder.layers.0"},
    "stuck": {
        "kind": "stuck",
        "value": 1,
        "on": "weight_gradient",
        "module": "*.linear_proj",
        "fraction": 0.01,
    },
    "uniform": {"kind": "uniform", "low": -1, "high": 1, "on": "weight", "module": LAYERS, "fraction": 0.1},
}


def undone(flags: str, model: str, names: list[str], seed: int = 0) -> list[dict[str, Any]]:
    """One run that is perturbed and undone again and again, beside one that never is: for each trial
    whether they are equal after the undo and after further steps, and whether the perturbation had changed
    anything."""
    start()
    rng = random.Random(f"{flags} {model} {seed}")
    plan = [(name, rng.randint(1, 2), rng.randint(0, 1), rng.randrange(1000)) for name in names]
    with bench(flags, model=model) as clean:
        states = [clean.digest()]
        for _ in range(1 + sum(during + after for _, during, after, _ in plan)):
            clean.step()
            states.append(clean.digest())
    found = []
    with bench(flags, model=model) as run:
        run.step()
        for name, during, after, drawn in plan:
            before = run.trainer.iteration
            if name == "pair":
                told = run.lab.handlers["pair"](entry(**PERTURBATIONS["noise"], seed=drawn))
                changed = told["baseline"]["loss"] != told["perturbed"]["loss"]
            else:
                run.lab.handlers["arm"](entry(**PERTURBATIONS[name], seed=drawn))
                assert run.lab.perturbed is None, "armed, and nothing is changed yet"
                for _ in range(during):
                    run.step()
                assert run.lab.perturbed == "p" and run.lab.withholds_checkpoints
                changed = run.digest() != states[before + during]
                told = run.lab.handlers["undo"]({})
                assert told["step"] == before, told
            assert run.lab.perturbed is None and not run.lab.withholds_checkpoints
            back = run.digest() == states[before]
            for _ in range(after):
                run.step()
            same = run.digest() == states[before + after]
            found.append({"name": name, "back": back, "same": same, "changed": changed})
    return found


def failing_pair() -> dict[str, Any]:
    """A pair whose backward raises an error on all ranks once some gradients are being reduced: the losses
    that follow, and those of a run without it."""
    start()
    flags = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 4000"
    given = entry(kind="scale", factor=2, on="activation", module="decoder.layers.1.mlp")
    found: dict[str, Any] = {}
    with bench(flags) as run:
        found["clean"] = [run.step().loss for _ in range(3)]

    seen: list[int] = []

    def fails(gradient: torch.Tensor) -> None:
        seen.append(1)
        # Reductions begin in the last micro-batch; the first step of the pair is whole.
        if len(seen) == 2 * run.shape.num_microbatches:
            raise MemoryError("no room")

    with bench(flags) as run:
        losses = [run.step().loss]
        weights = dict(run.trainable.bare_chunks()[0].named_parameters())
        hook = weights["decoder.layers.0.self_attention.linear_qkv.weight"].register_hook(fails)
        try:
            run.lab.handlers["pair"](given)
        except MemoryError as error:
            found["error"] = str(error)
        hook.remove()
        found["losses"] = [*losses, *(run.step().loss for _ in range(2))]
    return found


def files_that_differ(folder: str) -> list[str]:
    """Answers of this rank about a lab's file that another one has otherwise, has not, and has alike."""
    start()
    said = []
    with bench(""):
        rank = dist.get_rank()
        for seeds in ((1, 2), (1, None), (3, 3)):
            path = Path(folder) / f"{rank}-{seeds}.yaml"
            if seeds[rank] is not None:
                one = "{name: a, kind: mask, on: weight, module: '*.linear_fc2'}"
                path.write_text(f"seed: {seeds[rank]}\nperturbations: [{one}]\n")
            try:
                said.append(str(read_alike(path).perturbations[0].seed))
            except ConfigError as error:
                said.append(str(error))
    return said
