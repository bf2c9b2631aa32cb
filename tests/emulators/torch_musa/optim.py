"""``torch_musa.optim``: the fused optimizers' names and arguments, on torch's own arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw


class _OnDeviceOnly:
    """The real ones refuse parameters that are elsewhere at the first step."""

    param_groups: list[dict[str, Any]]

    def _require_device(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.device.type != "musa":
                    raise RuntimeError(
                        f"fused optimizers of torch_musa need parameters on musa, found {parameter.device}"
                    )


class FusedAdam(_OnDeviceOnly, torch.optim.Adam):
    """``torch.optim.Adam``; ``step`` is a tensor per parameter, on the host."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable,
            differentiable=differentiable, foreach=False,
        )  # fmt: skip

    def step(self, closure: Any = None) -> Any:
        self._require_device()
        return super().step(closure)


class FusedAdamW(_OnDeviceOnly, torch.optim.Optimizer):
    """Arithmetic of ``torch.optim.AdamW``, of which it is no subclass; ``step`` is a tensor per parameter, on
    the host, also after loading."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        options |= {"maximize": maximize, "capturable": capturable, "differentiable": differentiable}
        super().__init__(params, {**options, "fused": True})

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = torch.as_tensor(state["step"]).to("cpu", torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._require_device()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            for each in trained:
                if not self.state[each]:
                    self.state[each]["step"] = torch.zeros(())
                    self.state[each]["exp_avg"] = torch.zeros_like(each)
                    self.state[each]["exp_avg_sq"] = torch.zeros_like(each)
                    if group["amsgrad"]:
                        self.state[each]["max_exp_avg_sq"] = torch.zeros_like(each)
            states = [self.state[each] for each in trained]
            beta1, beta2 = group["betas"]
            adamw(
                trained,
                [each.grad for each in trained],
                [each["exp_avg"] for each in states],
                [each["exp_avg_sq"] for each in states],
                [each["max_exp_avg_sq"] for each in states if group["amsgrad"]],
                [each["step"] for each in states],
                foreach=False,
                amsgrad=group["amsgrad"],
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )
        return loss


class FusedLAMB(torch.optim.Optimizer):
    """Only its name: torch has no LAMB to take the arithmetic from."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        raise NotImplementedError("the torch_musa emulator has no LAMB")

    def zero_grad(self, set_to_none: bool = True) -> None:
        raise NotImplementedError("the torch_musa emulator has no LAMB")

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("the torch_musa emulator has no LAMB")
