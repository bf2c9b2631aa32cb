"""The ranks' side of a parity run: train a layout from the common checkpoint and write down what happened."""

from __future__ import annotations

import copy
import gc
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.backends.distributed.namespace import local_device, prepare_environment
from mt_megatron.checkpoint import load as checkpoint
from mt_megatron.checkpoint.load import Progress, load_weights
from mt_megatron.checkpoint.save import save_checkpoint
from mt_megatron.data.loader.batches import train_batches
from mt_megatron.models.families import family_of
from mt_megatron.seams import events
from mt_megatron.training.distributed import Job, joined
from mt_megatron.training.model import Trainable, build
from mt_megatron.training.step import Shape, make_forward_step, train_step
from tests.parity.case import CLIP, MICRO_BATCH, SEQUENCE, STEPS, Layout, by_name, config_of, training_data

Pieces = list[tuple[str, list[int], list[int], torch.Tensor]]
"""Name of a whole tensor, its shape, where the piece lies, the piece; NaN marks what is elsewhere."""


def run_layouts(names: list[str], folder: str, seed: int, bf16: bool) -> dict[str, Any]:
    """Train every layout of ``names`` one after the other in this set of processes."""
    mt_megatron.patch(os.environ.get("MT_MEGATRON_TEST_BACKEND", "cpu"))
    gc.freeze()  # else every collection at the end of a run visits the modules
    backend = mt_megatron.backend()
    prepare_environment(backend, nodes=1)
    backend.set_device(local_device(backend))
    # One default group for all layouts: a store keeps the addresses of a group that was destroyed.
    dist.init_process_group(backend.collective)
    return {name: _train(by_name(name), Path(folder), seed, bf16) for name in names}


def record_folder(bf16: bool, backend: str) -> str:
    """Where the records of one precision and backend lie, so that backends share initial weights."""
    return ("bf16" if bf16 else "fp32") + ("" if backend == "cpu" else f"_{backend}")


def _train(layout: Layout, folder: Path, seed: int, bf16: bool) -> dict[str, Any]:
    config = config_of(layout, seed=seed, bf16=bf16)
    common = folder / ("initial" + "_tied" * layout.tied + "_mixture" * layout.mixture)
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        if layout.name == layout.reference and not common.exists():
            save_checkpoint(common, trainable, Progress(), job, manifest={})
        load_weights(common / "iter_0000000", trainable)
        _sabotage_model(layout.sabotage, trainable)
        gradients: Pieces = []
        forwards = {"layer": 0, "attention": 0}

        def listener(phase: str, name: str, attrs: Mapping[str, Any]) -> None:
            if (phase, name) == ("begin", "layer"):
                forwards["layer"] += 1
            elif (phase, name) == ("begin", "optimizer"):
                _sabotage_gradients(layout.sabotage, trainable)
                if not gradients:
                    gradients.extend(_pieces(trainable, lambda parameter: _gradient(trainable, parameter)))

        def count_attention(*ignored: Any) -> None:
            forwards["attention"] += 1

        for chunk in trainable.bare_chunks():
            for layer in chunk.decoder.layers:
                layer.self_attention.core_attention.register_forward_hook(count_attention)
        shape = Shape(
            num_microbatches=config.num_microbatches(job.layout.world_size),
            micro_batch_size=MICRO_BATCH,
            seq_length=SEQUENCE,
        )
        forward_step = make_forward_step(family, job.backend.device(job.backend.current_device()))
        batches = [_batches(job, seed) for _ in trainable.chunks]
        losses, norms = [], []
        stop_listening = events.subscribe(listener)
        for iteration in range(1, STEPS + 1):
            result = train_step(trainable, forward_step, batches, shape, job, iteration=iteration)
            losses.append(result.loss)
            norms.append(result.grad_norm)
        stop_listening()
        with checkpoint.synchronised_parameters(trainable):
            weights = _pieces(trainable, lambda parameter: parameter.detach().cpu().clone())
        target = folder / record_folder(bf16, job.backend.name) / layout.name
        target.mkdir(parents=True, exist_ok=True)
        torch.save({"gradients": gradients, "weights": weights}, target / f"rank_{job.rank}.pt")
        return {
            "losses": losses,
            "norms": norms,
            "clipped": sum(norm > CLIP for norm in norms),
            "layer_forwards": forwards["layer"],
            "attention_forwards": forwards["attention"],
        }


def _batches(job: Job, seed: int) -> Any:
    return train_batches(
        training_data(seed),
        consumed_samples=0,
        micro_batch_size=MICRO_BATCH,
        data_parallel_rank=job.at.dp,
        data_parallel_size=job.layout.dp,
    )


def _gradient(trainable: Trainable, parameter: torch.Tensor) -> torch.Tensor | None:
    """The parameter's reduced gradient; NaN where another data-parallel rank holds it. Buffers have none."""
    if not isinstance(parameter, torch.nn.Parameter):
        return None
    gradient = parameter.main_grad.detach().float().cpu().clone()
    if not torch.isfinite(gradient).all():
        raise AssertionError("a gradient is not finite")
    if not trainable.chunks[0].ddp_config.use_distributed_optimizer:
        return gradient
    owned = torch.full_like(gradient.view(-1), math.nan)
    # A mixture has an optimizer for what all data-parallel ranks share, and one for experts.
    for optimizer in getattr(trainable.optimizer, "chained_optimizers", [trainable.optimizer]):
        if parameter in optimizer.model_param_gbuf_map:
            part = optimizer._get_model_param_range_map(parameter)["param"]
            owned[part.start : part.end] = gradient.view(-1)[part.start : part.end]
    return owned.view_as(gradient)


def _pieces(trainable: Trainable, value: Callable[[torch.Tensor], torch.Tensor | None]) -> Pieces:
    """``value`` of every parameter and buffer of this rank (None: it has none), placed within the whole
    model by Megatron's own description of the sharding (tensor, pipeline, virtual pipeline and expert
    parallel)."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories

    state = checkpoint._model_state(trainable)
    seen = 0
    for sharded in nested_values(state):
        if isinstance(sharded, ShardedTensor | ShardedTensorFactory):
            sharded.data = value(sharded.data)
            seen += 1
    assert seen >= sum(1 for chunk in trainable.chunks for _ in chunk.parameters()), (
        "a parameter has no place"
    )
    state = _without_nothing(state)
    apply_factories(state)
    return [
        (
            sharded.key,
            list(sharded.global_shape),
            list(sharded.global_offset),
            sharded.data.reshape((1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)).clone(),
        )
        for sharded in nested_values(state)
        if isinstance(sharded, ShardedTensor)
    ]


def _without_nothing(state: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    _, rest = extract_matching_values(state, lambda v: isinstance(v, ShardedTensor) and v.data is None)
    return rest  # type: ignore[return-value]


def _sabotage_model(what: str | None, trainable: Trainable) -> None:
    if what == "drop_layer":
        layer = trainable.bare_chunks()[0].decoder.layers[1]
        layer.forward = lambda hidden_states, **others: (hidden_states, None)
    elif what == "no_norm_all_reduce":

        def only_data_parallel(model: list[Any], num_tokens: Any = None) -> None:
            for chunk in model:
                chunk.finish_grad_sync()

        trainable.core.finalize_model_grads_func = only_data_parallel
    elif what == "leaking_mask":
        # In one layer every token sees the next one.
        attention = trainable.bare_chunks()[0].decoder.layers[1].self_attention
        attention.attn_mask_type = type(attention.attn_mask_type).padding
        attention.core_attention.config = copy.copy(trainable.core)
        attention.core_attention.config.window_size = (SEQUENCE, 1)


def _sabotage_gradients(what: str | None, trainable: Trainable) -> None:
    factor = {"zero_gradient": 0.0, "double_gradient": 2.0}.get(what or "")
    if factor is not None:
        trainable.bare_chunks()[0].decoder.layers[2].mlp.linear_fc2.weight.main_grad.mul_(factor)
    elif what == "half_expert_gradient":
        for parameter in trainable.bare_chunks()[0].decoder.layers[2].mlp.experts.parameters():
            parameter.main_grad.mul_(0.5)
