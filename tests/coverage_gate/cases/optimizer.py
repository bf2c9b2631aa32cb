"""One optimizer step in every precision, compared with torch's AdamW on fp32 copies."""

from __future__ import annotations

from typing import Any

from tests.coverage_gate import models
from tests.coverage_gate.case import case
from tests.coverage_gate.target import DEVICE, torch

_LR, _CLIP, _DECAY = 0.1, 0.05, 0.01


class _Setup:
    """A linear model under Megatron's DDP and optimizer, and the same in plain torch."""

    def __init__(self, dtype: torch.dtype, distributed: bool = False, **options: Any) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import MegatronModule

        class Model(MegatronModule):
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                torch.manual_seed(3)
                self.layer = torch.nn.Linear(6, 4, dtype=dtype)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x)

        settings = models.config(params_dtype=dtype)
        self.model = DistributedDataParallel(
            settings,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, check_for_nan_in_grad=True
            ),
            Model(settings).to(DEVICE),
        )
        config = OptimizerConfig(
            lr=_LR,
            weight_decay=_DECAY,
            clip_grad=_CLIP,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            use_distributed_optimizer=distributed,
            log_num_zeros_in_grad=True,
            **options,
        )
        self.optimizer = get_megatron_optimizer(config, [self.model])
        self.dtype = dtype
        reference = [p.detach().float().clone().requires_grad_() for p in self.model.parameters()]
        self.reference = dict(zip(("weight", "bias"), reference, strict=True))
        self.torch_optimizer = torch.optim.AdamW(
            [
                {"params": [self.reference["weight"]], "weight_decay": _DECAY},
                {"params": [self.reference["bias"]], "weight_decay": 0.0},
            ],
            lr=_LR,
        )

    def step(self) -> tuple[bool, float | None, float | None]:
        """One step on each rank's own batch; afterwards the reference took the same step."""
        self.optimizer.zero_grad()
        self.model.zero_grad_buffer()
        self._follow_param_groups()
        inputs = [torch.linspace(-1, 1, 12).reshape(2, 6) * (rank + 1) for rank in range(2)]
        mine = inputs[torch.distributed.get_rank()].to(self.dtype)
        loss = self.model(mine).float().square().mean()
        self.optimizer.scale_loss(loss).backward()
        self.model.finish_grad_sync()
        outcome = self.optimizer.step()
        # The reference's gradients are those of the model, averaged over the ranks.
        weight = self.reference["weight"].detach().to(self.dtype).requires_grad_()
        bias = self.reference["bias"].detach().to(self.dtype).requires_grad_()
        for batch in inputs:
            out = torch.nn.functional.linear(batch.to(self.dtype), weight, bias)
            (out.float().square().mean() / 2).backward()
        self.reference["weight"].grad, self.reference["bias"].grad = weight.grad.float(), bias.grad.float()
        self.norm = torch.nn.utils.clip_grad_norm_(list(self.reference.values()), _CLIP).item()
        self.torch_optimizer.step()
        return outcome

    def _follow_param_groups(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = _LR
            group["weight_decay"] = _DECAY * group["wd_mult"]

    def check(self, outcome: tuple[bool, float | None, float | None], tolerance: float) -> None:
        success, norm, zeros = outcome
        assert success and zeros == 0, outcome
        assert abs(norm - self.norm) <= max(tolerance, 1e-5) * self.norm, (norm, self.norm)
        assert self.norm > _CLIP, "the case must clip"
        for parameter, expected in zip(self.model.parameters(), self.reference.values(), strict=True):
            assert parameter.dtype == self.dtype and parameter.device.type == DEVICE
            assert torch.allclose(parameter.float(), expected, rtol=tolerance, atol=tolerance)


@case(world=2)
def fp32_step() -> None:
    setup = _Setup(torch.float32)
    assert setup.optimizer.get_loss_scale().device.type == DEVICE
    for _ in range(2):
        setup.check(setup.step(), 1e-5)


@case(world=2)
def bf16_step_with_fp32_master_weights() -> None:
    setup = _Setup(torch.bfloat16)
    for _ in range(2):
        setup.check(setup.step(), 2e-2)
    (inner,) = getattr(setup.optimizer, "chained_optimizers", [setup.optimizer])
    masters = [p for group in inner.fp32_from_float16_groups for p in group]
    assert len(masters) == 2 and all(m.dtype == torch.float32 for m in masters)
    assert torch.equal(inner.get_loss_scale(), torch.ones(1))
    for master, model in zip(masters, [p for group in inner.float16_groups for p in group], strict=True):
        assert torch.equal(master.to(torch.bfloat16), model)
        assert not torch.equal(master, model.float()), "the master must hold more than the model's bits"


@case(world=2)
def fp32_parameters_among_bf16_ones() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    half = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    full = torch.nn.Parameter(torch.ones(3))
    # Not float64, which the emulated device refuses before the optimizer sees it.
    other = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    config = OptimizerConfig(lr=_LR, bf16=True)
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.AdamW([half, full], lr=_LR), config, None, lambda _: None
    )
    assert [p for g in optimizer.float16_groups for p in g][0] is half
    assert [p for g in optimizer.fp32_from_fp32_groups for p in g][0] is full
    try:
        Float16OptimizerWithFloat16Params(torch.optim.AdamW([other], lr=_LR), config, None, lambda _: None)
    except TypeError:
        return
    raise AssertionError("a parameter of no known type must be refused")


@case(world=2)
def fp16_step_with_a_dynamic_loss_scale() -> None:
    setup = _Setup(torch.float16, initial_loss_scale=2.0**10, hysteresis=1, loss_scale_window=1)
    setup.check(setup.step(), 5e-3)
    (inner,) = getattr(setup.optimizer, "chained_optimizers", [setup.optimizer])
    assert setup.optimizer.get_loss_scale().item() == 2.0**11, "one good step must double the scale"
    before = [p.detach().clone() for p in setup.model.parameters()]
    setup.optimizer.zero_grad()
    setup.model.zero_grad_buffer()
    for parameter in setup.model.parameters():
        parameter.main_grad.fill_(float("inf"))
    success, _, _ = setup.optimizer.step()
    assert not success and setup.optimizer.get_loss_scale().item() == 2.0**10
    for parameter, value in zip(setup.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value), "an overflow must not change a parameter"
    saved = inner.grad_scaler.state_dict()
    inner.grad_scaler.update(True)
    assert inner.grad_scaler.scale.item() == 2.0**9
    inner.grad_scaler.load_state_dict(saved)
    assert inner.grad_scaler.scale.item() == 2.0**10 and inner.grad_scaler.scale.device.type == DEVICE


@case(world=2)
def distributed_optimizer_step_and_resume() -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        setup = _Setup(dtype, distributed=True)
        for _ in range(2):
            setup.check(setup.step(), tolerance)
        (old,) = getattr(setup.optimizer, "chained_optimizers", [setup.optimizer])
        state = old.state_dict()
        fresh = _Setup(dtype, distributed=True)
        (new,) = getattr(fresh.optimizer, "chained_optimizers", [fresh.optimizer])
        new.load_state_dict(state)
        steps = {float(s["step"]) for s in new.optimizer.state.values()}
        assert steps == {2.0}, f"Adam's step must survive a resume, found {steps}"
        for entry in new.optimizer.state.values():
            assert entry["exp_avg"].device.type == DEVICE and entry["exp_avg"].dtype == torch.float32


@case(world=2)
def norms_and_zeros_of_gradients() -> None:
    from megatron.core import parallel_state
    from megatron.core.optimizer import clip_grads

    group = parallel_state.get_data_parallel_group()
    rank = torch.distributed.get_rank()
    grads = [torch.tensor([3.0, -4.0 - rank]), torch.tensor([0.0])]
    assert clip_grads.get_grad_norm_fp32(grads, float("inf"), group) == 5.0
    expected = (9 + 16 + 9 + 25) ** 0.5
    assert abs(clip_grads.get_grad_norm_fp32(grads, 2, group) - expected) < 1e-5
    # A rank that holds no gradient must still take part in the sum.
    partial = clip_grads.get_grad_norm_fp32(grads if rank == 0 else [], 2, group)
    assert abs(partial - 5.0) < 1e-6
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([0.0, 2.0, 0.0, 4.0 + rank])
    assert clip_grads.count_zeros_fp32([parameter], group) == (4 if _counted(parameter) else 0)
    clip_grads.clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=2.0)
    assert torch.allclose(parameter.grad, torch.tensor([0.0, 1.0, 0.0, (4.0 + rank) / 2]), atol=1e-5)
    kept = parameter.grad.clone()
    clip_grads.clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=0.5)
    assert torch.equal(parameter.grad, kept)


def _counted(parameter: torch.nn.Parameter) -> bool:
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    return bool(param_is_not_tensor_parallel_duplicate(parameter))


@case(world=2)
def gradient_buffers_live_on_the_device_and_name_a_nan() -> None:
    setup = _Setup(torch.float32, distributed=True)
    (buffer,) = setup.model.buffers
    for data in (buffer.grad_data, buffer.param_data):
        assert data.device.type == DEVICE and data.dtype == torch.float32 and not data.requires_grad
    weight = next(setup.model.parameters())
    begin = buffer.param_data.data_ptr()
    assert begin <= weight.data_ptr() < begin + buffer.param_data.nbytes, "parameters are views of it"
    setup.model.zero_grad_buffer()
    for parameter in setup.model.parameters():
        parameter.main_grad.fill_(float("nan"))
    try:
        setup.model.finish_grad_sync()
    except AssertionError as error:
        assert "found NaN" in str(error) and "Device: " in str(error), error
    else:
        raise AssertionError("a NaN gradient must be named before it is reduced")
