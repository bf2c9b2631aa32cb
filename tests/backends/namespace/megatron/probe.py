"""Code as Megatron writes it, in a module of Megatron's namespace: seen by the redirection."""

from collections.abc import Callable

import torch
from torch import device as device_class
from torch.cuda import _lazy_call as lazy_call

FACTORIES = {
    "arange": lambda d: torch.arange(3, device=d),
    "as_tensor": lambda d: torch.as_tensor([1, 2], device=d),
    "asarray": lambda d: torch.asarray([1, 2], device=d),
    "bartlett_window": lambda d: torch.bartlett_window(4, device=d),
    "blackman_window": lambda d: torch.blackman_window(4, device=d),
    "empty": lambda d: torch.empty(2, 3, device=d),
    "empty_like": lambda d: torch.empty_like(torch.zeros(2), device=d),
    "empty_permuted": lambda d: torch.empty_permuted((2, 3), (1, 0), device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (3, 1), device=d),
    "eye": lambda d: torch.eye(2, device=d),
    "full": lambda d: torch.full((2,), 5.0, device=d),
    "full_like": lambda d: torch.full_like(torch.zeros(2), 5.0, device=d),
    "hamming_window": lambda d: torch.hamming_window(4, device=d),
    "hann_window": lambda d: torch.hann_window(4, device=d),
    "kaiser_window": lambda d: torch.kaiser_window(4, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 3, device=d),
    "logspace": lambda d: torch.logspace(0, 1, 3, device=d),
    "normal": lambda d: torch.normal(0.0, 1.0, (2,), device=d),
    "ones": lambda d: torch.ones(2, device=d),
    "ones_like": lambda d: torch.ones_like(torch.zeros(2), device=d),
    "rand": lambda d: torch.rand(2, device=d),
    "rand_like": lambda d: torch.rand_like(torch.zeros(2), device=d),
    "randint": lambda d: torch.randint(0, 5, (2,), device=d),
    "randint_like": lambda d: torch.randint_like(torch.zeros(2), 5, device=d),
    "randn": lambda d: torch.randn(2, device=d),
    "randn_like": lambda d: torch.randn_like(torch.zeros(2), device=d),
    "randperm": lambda d: torch.randperm(4, device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(1.0, device=d),
    "sparse_coo_tensor": lambda d: torch.sparse_coo_tensor([[0]], [1.0], (2,), device=d),
    "tensor": lambda d: torch.tensor([1.0], device=d),
    "tril_indices": lambda d: torch.tril_indices(2, 2, device=d),
    "triu_indices": lambda d: torch.triu_indices(2, 2, device=d),
    "zeros": lambda d: torch.zeros(2, device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.zeros(2), device=d),
    "new_empty": lambda d: torch.zeros(1).new_empty((2,), device=d),
    "new_full": lambda d: torch.zeros(1).new_full((2,), 1.0, device=d),
    "new_ones": lambda d: torch.zeros(1).new_ones((2,), device=d),
    "new_tensor": lambda d: torch.zeros(1).new_tensor([1.0], device=d),
    "new_zeros": lambda d: torch.zeros(1).new_zeros((2,), device=d),
    "to_positional": lambda d: torch.zeros(2).to(d),
    "to_keyword": lambda d: torch.zeros(2).to(device=d),
    "to_with_dtype": lambda d: torch.zeros(2).to(d, torch.float64),
    "module_to": lambda d: torch.nn.Linear(2, 2).to(d).weight,
    "module_to_keyword": lambda d: torch.nn.Linear(2, 2).to(device=d).weight,
}


def cuda_of(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return tensor.cuda(*args, **kwargs)


def module_cuda() -> torch.Tensor:
    return torch.nn.Linear(2, 2).cuda().weight


def cuda_is_available() -> bool:
    return torch.cuda.is_available()


def call_lazily(function: Callable[[], None]) -> None:
    lazy_call(function)


def is_device(value: object) -> bool:
    return isinstance(value, torch.device) and isinstance(value, device_class)
