"""A T5 in one process, or its encoder and decoder in one each: first weights, a step, a checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.models import t5_case
from tests.patches import small_gpt
from tests.patches.errata.dropout_ranks import features_without

MICROBATCHES = 2


def start(without: list[str]) -> None:
    """Process groups of encoder and decoder as pretrain_t5.py asks for them."""
    import torch.distributed as dist

    import mt_megatron

    mt_megatron.patch("cpu", features=features_without(without))
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo")
    apart = dist.get_world_size() > 1
    parallel_state.initialize_model_parallel(
        encoder_pipeline_model_parallel_size=int(apart),
        get_embedding_ranks=list,
        get_position_embedding_ranks=list,
    )
    # Megatron-LM's seeds differ from stage to stage.
    torch.manual_seed(1 + 100 * dist.get_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def everything(tied: bool, without: list[str], save: str, load: str) -> dict[str, Any]:
    """The embeddings as drawn; losses, gradients, their norm and the weights after a step from weights
    by name; the weights of a new model after loading. ``save`` and ``load`` are folders, or empty."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    start(without)
    model = t5_case.build(tied=tied, config={"gradient_accumulation_fusion": True})
    drawn = {name: each.tolist() for name, each in model.embedding.named_parameters()}
    t5_case.fill(model)
    wrapped = small_gpt.distributed(model.config, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=0.5), [wrapped]
    )
    wrapped.zero_grad_buffer()
    found: dict[str, Any] = {"drawn": drawn, "losses": _step(wrapped), "gradients": _sums(model, "main_grad")}
    _, found["norm"], _ = optimizer.step()
    found["weights"] = _sums(model)
    if save:
        dist_checkpointing.save(model.sharded_state_dict(), save)
    if load:
        model = t5_case.build(tied=tied)
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), load))
        found["loaded"] = _sums(model)
    return found


def _sums(model: Any, of: str = "data") -> dict[str, float]:
    """Sum of the squares of each parameter, or of its gradient."""
    tensors = ((name, getattr(each, of)) for name, each in model.named_parameters())
    return {name: each.double().square().sum().item() for name, each in tensors}


def _step(model: Any) -> list[float]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    reported = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iter([t5_case.batch(seed) for seed in range(MICROBATCHES)]),
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=t5_case.SOURCE,
        decoder_seq_length=t5_case.TARGET,
        micro_batch_size=t5_case.BATCH,
    )
    return [entry["loss"] for entry in reported]


def _forward(batches: Any, model: Any) -> Any:
    data = next(batches)
    return model(**data), partial(_loss, data["lm_labels"] >= 0)


def _loss(kept: Any, output: Any) -> Any:
    mean = output[kept].mean()
    return mean, {"loss": mean.item()}
