"""The ranks' side of the tests of FP8 state in checkpoints."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stdout
from pathlib import Path
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


def as_scripts_save(folder: str) -> dict[str, Any]:
    """``model.sharded_state_dict()`` and ``state_dict()`` saved and loaded as Megatron-LM does, under another
    layout and with other recipes. Experts, latent attention and the output layer among the linears."""
    import torch
    from megatron.core import dist_checkpointing

    import mt_megatron
    from mt_megatron.checkpoint.load import run_state
    from mt_megatron.checkpoint.progress import Progress
    from mt_megatron.fp8.state import states_of
    from mt_megatron.models.families import family_of
    from mt_megatron.training.distributed import joined
    from tests.fp8.cases import MIXTURE, Run, config_of

    start()
    plain_mixture = f"{MIXTURE} --moe-ffn-hidden-size 64"
    mixture, tp2 = f"{plain_mixture} --fp8-output-layer", "--tensor-model-parallel-size 2 --sequence-parallel"
    found: dict[str, Any] = {}

    def built(flags: str, job: Any) -> Any:
        config = config_of(flags)
        [model] = family_of(config).build_model(config, job.layout)
        return model.bfloat16()

    def rows(model: Any) -> dict[str, list[float]]:
        return {
            name: state.row(name).tolist() for state in states_of([model]) for name in sorted(state.linears)
        }

    flags = f"{DELAYED} {mixture} {tp2}"
    with joined(config_of(flags), mt_megatron.backend()) as job:
        run_ = Run(flags, job)
        run_.step()
        run_.step()
        model = run_.trainable.bare_chunks()[0]
        run_.states[0].demote("layers.2.mlp.experts.linear_fc1")
        found["saved"], found["step"] = rows(model), run_.states[0].step
        Path(f"{folder}/dist").mkdir(exist_ok=True)
        dist_checkpointing.save({"model": model.sharded_state_dict()}, f"{folder}/dist")
        plain = model.state_dict()
        ours = run_state(run_.trainable, Progress(), is_loading=False)["model"]
        found["in ours"] = [
            key for key, value in ours.items() if key.endswith("_extra_state") and value.data is not None
        ]
        twin = built(flags, job)
        twin.load_state_dict(plain)
        found["by state_dict"] = rows(twin)
    for name, other in (
        ("another layout", f"{DELAYED} {mixture}"),
        ("another history", f"{DELAYED.replace('-len 4', '-len 8')} {mixture}"),
        ("another recipe", f"--fp8-recipe blockwise {mixture}"),
        ("bf16", plain_mixture),
    ):
        with joined(config_of(other), mt_megatron.backend()) as job:
            model = built(other, job)
            before = rows(model)
            loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, f"{folder}/dist")
            model.load_state_dict(loaded["model"])
            found[name] = {"rows": rows(model), "untouched": rows(model) == before}
            found[name]["steps"] = [state.step for state in states_of([model])]
            if name == "bf16":
                Path(f"{folder}/bf16").mkdir(exist_ok=True)
                dist_checkpointing.save({"model": model.sharded_state_dict()}, f"{folder}/bf16")
    flags = f"{DELAYED} {mixture}"
    with joined(config_of(flags), mt_megatron.backend()) as job:
        model = built(flags, job)
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, f"{folder}/bf16")
        model.load_state_dict(loaded["model"])
        found["from bf16"] = bool(torch.isfinite(torch.tensor(list(rows(model).values()))).all())
    return found
