"""``torch_musa.optim``: the fused optimizers' names and arguments, on torch's own arithmetic."""

from __future__ import annotations

from typing import Any

import torch


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


class FusedAdamW(_OnDeviceOnly, torch.optim.AdamW):
    """``torch.optim.AdamW``; ``step`` is a tensor per parameter, on the host."""

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
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable,
            differentiable=differentiable, foreach=False,
        )  # fmt: skip

    def step(self, closure: Any = None) -> Any:
        self._require_device()
        return super().step(closure)


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
