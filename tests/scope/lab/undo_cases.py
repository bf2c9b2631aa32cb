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
