"""Names of an optimizer's tensors: each is of one kind and belongs to one tensor of the model.

``exp_avg/decoder.final_layernorm.weight`` is the first moment of ``decoder.final_layernorm.weight``. The
kinds are those that Megatron-Core writes: ``exp_avg``, ``exp_avg_sq`` and ``fp32_param``, the master weight.
"""

from __future__ import annotations

MASTER = "fp32_param"
_MARK = "/"


def state_name(kind: str | None, name: str) -> str:
    """The name of the tensor of ``kind`` for the model's tensor ``name``; without a kind that name itself."""
    return name if kind is None else f"{kind}{_MARK}{name}"


def weight_name(name: str) -> str:
    """The model's tensor that ``name`` belongs to, or is."""
    return name.rpartition(_MARK)[2]


def kind_of(name: str) -> str | None:
    """The kind of an optimizer's tensor; None for a tensor of the model."""
    return name.partition(_MARK)[0] if _MARK in name else None
