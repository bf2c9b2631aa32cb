"""Another library: uses torch.cuda itself and must keep seeing the truth."""

import torch


def cuda_of(tensor: torch.Tensor) -> object:
    return tensor.cuda()


def cuda_is_available() -> bool:
    return torch.cuda.is_available()


def zeros_on_cuda() -> torch.Tensor:
    return torch.zeros(1, device="cuda")


def to_cuda(tensor: torch.Tensor) -> object:
    return tensor.to("cuda")
