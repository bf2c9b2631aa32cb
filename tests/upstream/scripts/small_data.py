"""The samples of small_script.py: a module beside the script, loaded by workers of its own."""

import torch
from torch.utils.data import Dataset

VOCABULARY, SEQUENCE = 32, 8


class Tokens(Dataset):
    """Sample ``i`` is random, and the same in every process."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        assert torch.cuda.is_available(), "a loader's worker sees the device too"
        return sample(index)


def sample(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=generator)
