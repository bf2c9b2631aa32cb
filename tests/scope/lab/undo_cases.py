"""The ranks' side: a run with a perturbation that is undone against one that never had it."""

from __future__ import annotations

import random
from typing import Any

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


def undone(flags: str, model: str, names: list[str], seeds: int = 0, folder: str | None = None) -> list[Any]:
    """For each trial: the digests after the same number of steps, of a run that was perturbed and undone
    and of one that was not, and whether the perturbation had changed anything."""
    start()
    with bench(flags, model=model) as clean:
        clean.step()
        states = [clean.digest()]
        for _ in range(7):
            clean.step()
            states.append(clean.digest())
    found = []
    rng = random.Random(f"{flags} {model} {seeds}")
    for name in names:
        with bench(flags, model=model, folder=folder) as run:
            before, during, after = rng.randint(0, 3), rng.randint(1, 3), rng.randint(1, 2)
            for _ in range(1 + before):
                run.step()
            if name == "pair":
                told = run.lab.handlers["pair"](entry(**PERTURBATIONS["noise"]))
                changed = told["baseline"]["loss"] != told["perturbed"]["loss"]
                during = 0
            else:
                run.lab.handlers["arm"](entry(**PERTURBATIONS[name], seed=rng.randrange(1000)))
                for _ in range(during):
                    run.step()
                changed = run.digest() != states[before + during]
                told = run.lab.handlers["undo"]({})
                assert told["step"] == 1 + before, told
            back = run.digest() == states[before]
            for _ in range(after):
                run.step()
            same = run.digest() == states[before + after]
            found.append({"name": name, "back": back, "same": same, "changed": changed})
            assert run.lab.perturbed is None
    return found
