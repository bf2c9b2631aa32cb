"""The ranks' side of the tests of FP8 state in checkpoints."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stdout
from typing import Any

from tests.training.loop_cases import run, start

COMMON = "--hidden-dropout 0 --attention-dropout 0 --bf16 --no-first-last-layers-bf16"
DELAYED = "--fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"


def stopped_at(folder: str, flags: str, steps: list[int], total: int) -> dict[str, Any]:
    """A whole run of ``total`` steps, and one that stops after each of ``steps`` and is continued."""
    start()
    flags = f"{COMMON} {flags} --train-iters {total} --eval-iters 0"
    whole = run(f"{flags} --save {folder}/whole", folder, "whole")
    parts: dict[Any, Any] = {}
    for number, step in enumerate([*steps, total]):
        # Stops after the next step that it divides, which is itself.
        stop = "" if step == total else f"--exit-interval {step}"
        found = run(f"{flags} --save {folder}/parts {stop}", folder, f"part{number}")
        assert found["iteration"] == step, found
        parts |= found["steps"]
    return {"whole": whole["steps"], "parts": parts}


def both_ways(folder: str) -> dict[str, Any]:
    """bf16 to FP8 and back, another recipe, another history."""
    start()
    found = {"bf16": run(f"{COMMON} --save {folder}/bf16 --exit-interval 3", folder, "bf16")}
    for name, source, flags in (
        ("to FP8", "bf16", DELAYED),
        ("back", "to FP8", ""),
        ("other history", "to FP8", DELAYED.replace("-len 4", "-len 8")),
        ("other recipe", "to FP8", "--fp8-recipe tensorwise"),
        ("to blockwise", "bf16", "--fp8-recipe blockwise"),
        ("blockwise to mxfp8", "to blockwise", "--fp8-recipe mxfp8 --fp8-telemetry-interval 1"),
        ("measured after bf16", "bf16", "--fp8-recipe rowwise --fp8-telemetry-interval 1"),
    ):
        places = f"--resume {folder}/{source.replace(' ', '_')}"
        save = f"--save {folder}/{name.replace(' ', '_')}"
        found[name] = run(
            f"{COMMON} {flags} {places} {save} --exit-interval 5", folder, name.replace(" ", "_")
        )
    return found


def moved(folder: str, before: str, after: str) -> dict[str, Any]:
    """Three steps under one layout, the rest under another."""
    start()
    whole = run(f"{COMMON} {before} --save {folder}/whole", folder, "whole")
    run(f"{COMMON} {before} --save {folder}/source --exit-interval 3", folder, "source")
    flags = f"{COMMON} {after} --resume {folder}/source --save {folder}/after"
    return {"whole": whole, "continued": run(flags, folder, "after")}


def output_layer(folder: str) -> dict[str, Any]:
    """A checkpoint without FP8 state of the output layer, one with it, and a tied model."""
    import mt_megatron
    from mt_megatron.training.distributed import joined
    from tests.fp8.cases import Run, config_of

    start()
    found: dict[str, Any] = {}
    flags, head = f"{COMMON} {DELAYED}", "--fp8-output-layer"
    printed = io.StringIO()
    with redirect_stdout(printed):
        run(f"{flags} --save {folder}/without --exit-interval 3", folder, "without")
        run(f"{flags} {head} --save {folder}/with --exit-interval 3", folder, "with")
        for name, source, more in (("on", "without", head), ("off", "with", "")):
            places = f"--resume {folder}/{source} --save {folder}/{name}"
            found[name] = run(f"{flags} {more} {places} --exit-interval 5", folder, name)
    found["notes"] = printed.getvalue()
    tied = f"--fp8-recipe tensorwise {head} --no-untie-embeddings-and-output-weights"
    with joined(config_of(tied), mt_megatron.backend()) as job:
        trained = Run(tied, job)
        weight = trained.trainable.bare_chunks()[0].shared_embedding_or_output_weight()
        found["tied"] = {"gathers": weight.gemm_recipe.gathers, "finite": math.isfinite(trained.step())}
    return found
