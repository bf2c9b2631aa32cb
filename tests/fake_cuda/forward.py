"""Builds a model and runs it forward on ranks of jobs that do not exist, one after the other."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

from tests.coverage_gate.points import installed_root, list_points
from tests.coverage_gate.tracer import Tracer
from tests.fake_cuda.layouts import HIDDEN, MICRO_BATCH, SEQUENCE, flags, stages
from tests.fake_cuda.pairwise import Row


def run_share(jobs: list[tuple[Row, str | None]]) -> list[dict[str, Any]]:
    """``run`` for every n-th job, in the n-th of several independent processes."""
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return run(jobs[rank::processes])


def run(jobs: list[tuple[Row, str | None]]) -> list[dict[str, Any]]:
    """Every job's layout on its first, middle and last pipeline stage.

    A job is a row and the device of a tensor that is planted into the first layer, which adds it to
    its output, or None. Returns, for each rank, what it found: ``row``, ``plant``, ``stage``,
    ``rank``, ``error`` (a traceback or None), ``devices`` of all that the rank holds and puts out,
    the device touch ``points`` that it executed, and how often what was done.
    """
    warnings.simplefilter("ignore")
    import torch

    # Compiling for a device needs the device: what jit_fuser decorates runs as it is written.
    torch._dynamo.config.disable = True

    import mt_megatron
    from tests.fake_cuda.stand_in import RecordingCuda

    cuda = RecordingCuda()
    found = []
    with cuda.installed():
        patches = sorted(patch.id for patch in mt_megatron.patch("cuda").applied)
        tracer = _tracer()

        @contextlib.contextmanager
        def booked(name: str, wanted: bool = True) -> Iterator[None]:
            if tracer is None or not wanted:
                yield
                return
            tracer.start()
            try:
                with tracer.named(name):
                    yield
            finally:
                tracer.stop()

        with booked("imports"):
            _import_everything()
        imported = sorted(tracer.records["imports"]) if tracer else []
        for number, (row, plant) in enumerate(jobs):
            for stage, rank in stages(row).items():
                result: dict[str, Any] = {"row": row, "plant": plant, "stage": stage, "rank": rank}
                # Tracing nearly doubles the time, and later stages execute nothing that first ones do not.
                with booked(f"{number} {stage}", stage == "first" and plant is None):
                    result |= _one(row, plant, rank, cuda)
                result["device"] = f"cuda:{cuda.current}"
                result["patches"], result["imported"] = patches, imported
                result["points"] = sorted(tracer.records.get(f"{number} {stage}", ())) if tracer else []
                found.append(result)
    return found


def _one(row: Row, plant: str | None, rank: int, cuda: Any) -> dict[str, Any]:
    from tests.fake_cuda.fake_rank import fake_rank

    try:
        with fake_rank(rank, row["world"], cuda) as mode:
            return {"error": None} | _forward(row, mode, plant)
    except BaseException:  # noqa: BLE001 - reported, and the next rank goes on
        return {"error": traceback.format_exc()}


def _import_everything() -> None:
    # Inside FakeTensorMode, constants that a module makes at import would be fake for ever.
    for name in (
        "megatron.core.distributed",
        "megatron.core.models.gpt",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel",
        "mt_megatron.models.llama",
    ):
        importlib.import_module(name)


def _tracer() -> Tracer | None:
    """What books the device touch points of megatron.core to the ranks that execute them."""
    if sys.version_info[:2] != (3, 11):
        return None
    root = installed_root()
    return Tracer(root, list_points(root))


def _forward(row: Row, mode: Any, plant: str | None) -> dict[str, Any]:
    import torch

    import mt_megatron
    from mt_megatron.config.parse import load_config
    from mt_megatron.models.families import family_of
    from mt_megatron.seams.schedule import run_schedule
    from mt_megatron.training.distributed import joined
    from mt_megatron.training.model import build
    from mt_megatron.training.step import make_forward_step

    config = load_config(flags(row))
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family if row["build"] == "llama" else _PlainMegatron())
        if plant is not None:
            _plant(trainable, plant)
        for chunk in trainable.chunks:
            chunk.eval()
        outputs: list[Any] = []
        forward_step = make_forward_step(family, job.backend.device(job.backend.current_device()))

        def keep(batches: Any, model: Any) -> Any:
            output, loss = forward_step(batches, model)
            outputs.append(output)
            return output, loss

        reports = run_schedule(
            keep,
            trainable.chunks,
            [_batches() for _ in trainable.chunks],
            num_microbatches=row["pp"],
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=True,
        )
        held = [*_tensors(trainable), *outputs, *(value for report in reports for value in report.values())]
        return {
            "devices": sorted({str(tensor.device) for tensor in held if isinstance(tensor, torch.Tensor)}),
            "held": len(held),
            "forwards": len(outputs),
            "reports": len(reports),
            "hooks": mode.hooks,
        }


class _PlainMegatron:
    """GPT as a script that uses Megatron-Core alone would build it, the local layer spec."""

    def build_model(self, config: Any, layout: Any) -> list[Any]:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        from mt_megatron.planning.build import transformer_config

        core = transformer_config(config)
        built = []
        for chunk in range(layout.vpp or 1 if layout.interleaved else 1):
            if layout.interleaved:
                parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            spec = get_gpt_layer_local_spec(core.num_moe_experts, core.moe_grouped_gemm, core.qk_layernorm)
            built.append(
                GPTModel(
                    core,
                    spec,
                    vocab_size=config.model.vocab_size,
                    max_sequence_length=SEQUENCE,
                    pre_process=parallel_state.is_pipeline_first_stage(),
                    post_process=parallel_state.is_pipeline_last_stage(),
                    share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
                    position_embedding_type=config.model.position_embedding_type,
                )
            )
        return built


def _plant(trainable: Any, device: str) -> None:
    import torch

    layer = trainable.bare_chunks()[0].decoder.layers[0]
    planted = torch.ones(HIDDEN, device=device)
    layer.mlp.linear_fc2.register_forward_hook(
        lambda module, inputs, output: (output[0] + planted, output[1])
    )


def _batches() -> Iterator[dict[str, Any]]:
    import torch

    shape = (MICRO_BATCH, SEQUENCE)
    while True:
        yield {
            "tokens": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.zeros(shape, dtype=torch.int64),
            "position_ids": torch.zeros(shape, dtype=torch.int64),
            "loss_mask": torch.ones(shape),
        }


def _tensors(trainable: Any) -> Iterator[Any]:
    """Parameters, buffers, gradient buffers and what the optimizer holds."""
    for chunk in trainable.bare_chunks():
        yield from chunk.parameters()
        yield from chunk.buffers()
        for parameter in chunk.parameters():
            yield parameter.main_grad
    for group in trainable.optimizer.param_groups:
        yield from group["params"]
