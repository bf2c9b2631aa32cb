"""Point-to-point exchange between stages, and the three schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.coverage_gate import models
from tests.coverage_gate.case import case
from tests.coverage_gate.target import DEVICE, torch


def _config(**changes: Any) -> Any:
    from megatron.core import ModelParallelConfig

    return ModelParallelConfig(
        **{"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32, **changes}
    )


def _exchange(config: Any, shape: tuple[int, int, int]) -> None:
    """Stage 0 sends forward and gets a gradient back; both check values, device and dtype."""
    from megatron.core.pipeline_parallel import p2p_communication as p2p

    values = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    if torch.distributed.get_rank() == 0:
        assert p2p.recv_forward(shape, config) is None
        p2p.send_forward(values, config)
        got = p2p.recv_backward(shape, config)
        assert torch.equal(got, -values)
    else:
        got = p2p.recv_forward(shape, config)
        assert torch.equal(got, values) and got.requires_grad
        p2p.send_backward(-values, config)
    assert got.device.type == DEVICE and got.dtype == torch.float32


@case(world=2, pp=2)
def exchange_of_known_shapes() -> None:
    _exchange(_config(), (2, 3, 4))


@case(world=2, pp=2)
def exchange_without_batching() -> None:
    _exchange(_config(batch_p2p_comm=False), (2, 3, 4))


@case(world=2, pp=2)
def exchange_of_shapes_that_the_receiver_asks_for() -> None:
    # The shape handed in is wrong on purpose: the sender's own must win.
    _exchange(_config(variable_seq_lengths=True), (1, 1, 1))


@case(world=2, pp=2)
def exchange_in_both_directions_at_once() -> None:
    from megatron.core.pipeline_parallel import p2p_communication as p2p

    for variable in (False, True):
        config = _config(variable_seq_lengths=variable)
        rank = torch.distributed.get_rank()
        mine = torch.full((2, 1, 3), float(rank + 1))
        if rank == 0:
            got = p2p.send_forward_recv_backward(mine, (2, 1, 3), config)
        else:
            got = p2p.send_backward_recv_forward(mine, (2, 1, 3), config)
        assert torch.equal(got, torch.full((2, 1, 3), float(2 - rank)))


def _steps(chunks: int, **changes: Any) -> tuple[list[Any], list[dict[str, float]]]:
    """Two micro-batches through upstream's schedule; the chunks and the last stage's losses."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = models.config(**changes)
    parts = []
    for index in range(chunks):
        if chunks > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        parts.append(
            models.gpt(
                config,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
            )
        )
    if chunks > 1:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)

    def batches() -> Iterator[torch.Tensor]:
        for index in range(2):
            yield (torch.arange(16).reshape(2, 8) + index) % models.VOCABULARY

    def forward_step(iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        tokens = next(iterator)
        output = model(tokens, models.positions(tokens), None, labels=tokens)

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            return losses.mean(), {"loss": losses.mean().item(), "dtype": str(losses.dtype)}

        return output, loss

    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches() for _ in range(chunks)] if chunks > 1 else batches(),
        model=parts if chunks > 1 else parts[0],
        num_microbatches=2,
        seq_length=8,
        micro_batch_size=2,
        forward_only=False,
    )
    return parts, losses


def _check(parts: list[Any], losses: list[dict[str, float]]) -> None:
    from megatron.core import parallel_state

    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        assert len(losses) == 2
        for entry in losses:
            # Fresh weights with std 0.02 are close to a uniform guess.
            assert abs(entry["loss"] - torch.tensor(float(models.VOCABULARY)).log().item()) < 0.2, losses
    else:
        assert losses == []
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.device.type == DEVICE and parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name


@case(world=1)
def schedule_without_pipelining() -> None:
    _check(*_steps(1))


@case(world=2, pp=2)
def schedule_1f1b() -> None:
    _check(*_steps(1, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32))


@case(world=2, pp=2, vpp=2)
def schedule_interleaved() -> None:
    changes = {
        "num_layers": 4,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_dtype": torch.float32,
    }
    _check(*_steps(2, **changes))


@case(world=1)
def schedule_under_autocast() -> None:
    """The schedule's ``torch.autocast('cuda')`` must switch on autocast of the active device."""
    from megatron.core.pipeline_parallel.schedules import forward_step

    seen: list[torch.dtype] = []

    class Linear(torch.nn.Linear):
        model_type = None
        config = None

        def set_input_tensor(self, tensor: Any) -> None:
            assert tensor == [None]

    model = Linear(4, 4).to(DEVICE)
    config = models.config(enable_autocast=True, autocast_dtype=torch.bfloat16)
    model.config = config

    def step(iterator: Any, module: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        output = module(torch.ones(2, 4))
        seen.append(output.dtype)
        return output, lambda value: (value.float().mean(), {"mean": value.float().mean().item()})

    store: list[Any] = []
    output, _ = forward_step(step, None, model, 1, None, store, config)
    assert seen == [torch.bfloat16] and len(store) == 1 and output.device.type == DEVICE
    assert not torch.is_autocast_enabled("cpu")
