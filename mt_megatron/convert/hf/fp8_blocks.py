"""FP8 weights with one scale for each block, as DeepSeek-V3's files hold them.

``weight`` is float8_e4m3fn [m, n]; ``weight_scale_inv`` is float32 [ceil(m / 128), ceil(n / 128)] and
what a block's numbers are multiplied with. The last blocks of either dimension may be cropped
(DeepSeek-V3's README_WEIGHTS, "FP8 Weight Documentation").
"""

from __future__ import annotations

import torch
from torch import Tensor

from mt_megatron.errors import CheckpointError
from mt_megatron.fp8.formats import E4M3
from mt_megatron.fp8.quantise import scale_of

BLOCK = (128, 128)
SUFFIX = "_scale_inv"
"""What a scale's name has behind the weight's."""

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def dequantise(
    weight: Tensor, scale: Tensor, dtype: torch.dtype, *, block: tuple[int, int] = BLOCK, name: str = "weight"
) -> Tensor:
    """``weight`` times its blocks' ``scale`` in ``dtype`` [m, n]; the product is made in float32.

    Raises ``CheckpointError`` when the scales are not one for each block.
    """
    rows, columns = weight.shape
    expected = scale_shape(rows, columns, block)
    if tuple(scale.shape) != expected:
        raise CheckpointError(
            f"{name}{SUFFIX} is {tuple(scale.shape)}, expected {expected} for a weight of "
            f"{tuple(weight.shape)} in blocks of {block}. Check weight_block_size in config.json"
        )
    result = torch.empty(rows, columns, dtype=dtype)
    for index, first in enumerate(range(0, rows, block[0])):
        strip = weight[first : first + block[0]].float()
        result[first : first + block[0]] = strip.mul_(_per_column(scale[index], columns, block[1]))
    return result


def quantise(
    tensor: Tensor, *, block: tuple[int, int] = BLOCK, name: str = "weight", power_of_2: bool = False
) -> tuple[Tensor, Tensor]:
    """``tensor`` [m, n] as FP8 and its scales: each block's largest magnitude becomes 448, e4m3's largest
    number; a block of zeros has the scale 1. With ``power_of_2`` scales are those of training with
    fp8_recipe blockwise, the next power of two. Raises ``CheckpointError`` for NaN and infinity."""
    rows, columns = tensor.shape
    weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(scale_shape(rows, columns, block), dtype=torch.float32)
    padding = scale.shape[1] * block[1] - columns
    for index, first in enumerate(range(0, rows, block[0])):
        strip = tensor[first : first + block[0]].float()
        largest = torch.nn.functional.pad(strip.abs().amax(dim=0), (0, padding))
        largest = largest.view(-1, block[1]).amax(dim=1)
        if not bool(largest.isfinite().all()):
            raise CheckpointError(
                f"{name} holds NaN or infinity, which FP8 cannot; check where it comes from"
            )
        scale[index] = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
        if power_of_2:
            scale[index] = scale_of(largest, E4M3, power_of_2=True).reciprocal()
        scaled = strip / _per_column(scale[index], columns, block[1])
        # Division may round a hair past the largest number, and casts differ in what they make of that.
        weight[first : first + block[0]] = scaled.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return weight, scale


def scale_shape(rows: int, columns: int, block: tuple[int, int] = BLOCK) -> tuple[int, int]:
    """How many scales a [rows, columns] weight has."""
    return -(-rows // block[0]), -(-columns // block[1])


def _per_column(scales: Tensor, columns: int, width: int) -> Tensor:
    return scales.float().repeat_interleave(width)[:columns]
