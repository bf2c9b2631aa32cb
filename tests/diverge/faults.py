"""Faults of the kind that porting makes, planted in one module each, and the module each must be found in.

Imported with ``MT_TEST_PLANT=<name>`` in the environment (``mt-megatron diverge --b-import``) it plants that
fault for the rest of the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import mt_megatron.models.llama as llama

LAYER = "decoder.layers.{}."


def _module(chunks: list[Any], name: str) -> Any:
    """The module of the whole model's ``name`` (its layer counted from 0); None when on another rank."""
    _, _, layer, rest = name.split(".", 3)
    for chunk in chunks:
        for each in chunk.decoder.layers:
            if each.layer_number - 1 == int(layer):
                return each.get_submodule(rest)
    return None


def wrong_scale(attention: Any) -> None:
    attention.softmax_scale *= 1.01


def swapped_weight(linear: Any) -> None:
    """Gate and up projection in the other order, as a converter might store them."""

    def swap(module: Any, incompatible: Any) -> None:
        with torch.no_grad():
            module.weight.copy_(torch.cat(module.weight.chunk(2)[::-1]))

    linear.register_load_state_dict_post_hook(swap)


def bf16_cast(linear: Any) -> None:
    forward = linear.forward
    linear.forward = lambda hidden: (forward(hidden)[0].bfloat16().float(), None)


def missing_all_reduce(linear: Any) -> None:
    """Every rank goes on with its own partial sum."""
    from megatron.core.tensor_parallel import layers

    forward = linear.forward

    def alone(hidden: Any) -> Any:
        reduce = layers.reduce_from_tensor_model_parallel_region
        layers.reduce_from_tensor_model_parallel_region = lambda partial_sum: partial_sum
        try:
            return forward(hidden)
        finally:
            layers.reduce_from_tensor_model_parallel_region = reduce

    linear.forward = alone


def mask_off_by_one(attention: Any) -> None:
    """Every token sees the next one too; the last has none to see."""
    from megatron.core.transformer.enums import AttnMaskType

    forward = attention.forward

    def leaking(query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        size = query.size(0)
        forbidden = torch.ones(1, 1, size, size, dtype=torch.bool).triu(2)
        others["attn_mask_type"] = AttnMaskType.padding
        return forward(query, key, value, forbidden, **others)

    attention.forward = leaking


def not_finite(linear: Any) -> None:
    """One number of one token."""
    forward = linear.forward

    def spoiled(hidden: Any) -> Any:
        output = forward(hidden)[0].clone()
        output[3, -1, 5] = float("nan")
        return output, None

    linear.forward = spoiled


def wrong_backward(linear: Any) -> None:
    """Its output is right; the gradient that it hands back is 5 % too large."""
    forward = linear.forward

    class Enlarged(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, hidden: Any) -> Any:
            return hidden.view_as(hidden)

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            return gradient * 1.05

    linear.forward = lambda hidden: forward(Enlarged.apply(hidden))


def fp8_scale(linear: Any) -> None:
    """What the codes of its input are multiplied by is wrong by two powers of two."""
    recipe = linear.weight.gemm_recipe
    cast = recipe.cast

    def wrong(role: Any, kind: Any, *operands: Any, **how: Any) -> Any:
        made = cast(role, kind, *operands, **how)
        if kind == "input":
            made.inverse = made.inverse * 4
        return made

    recipe.cast = wrong


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "wrong_scale": (wrong_scale, LAYER.format(1) + "self_attention.core_attention"),
    "swapped_weight": (swapped_weight, LAYER.format(0) + "mlp.linear_fc1"),
    "bf16_cast": (bf16_cast, LAYER.format(1) + "mlp.linear_fc2"),
    "missing_all_reduce": (missing_all_reduce, LAYER.format(0) + "self_attention.linear_proj"),
    "mask_off_by_one": (mask_off_by_one, LAYER.format(0) + "self_attention.core_attention"),
    "not_finite": (not_finite, LAYER.format(1) + "mlp.linear_fc1"),
    "wrong_backward": (wrong_backward, LAYER.format(1) + "mlp.linear_fc2"),
}
"""Fault -> what plants it, and where."""

FP8_FAULTS = {"fp8_scale": (fp8_scale, LAYER.format(1) + "mlp.linear_fc1")}
"""The same of models whose linears compute in FP8."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Models built within have the fault called ``name``."""
    if name is None:
        yield
        return
    plant, where = {**FAULTS, **FP8_FAULTS}[name]
    build = llama.LlamaFamily.build_model

    def build_with_fault(self: Any, config: Any, layout: Any) -> Any:
        chunks = build(self, config, layout)
        module = _module(chunks, where)
        if module is not None:
            plant(module)
        return chunks

    llama.LlamaFamily.build_model = build_with_fault  # type: ignore[method-assign]
    try:
        yield
    finally:
        llama.LlamaFamily.build_model = build  # type: ignore[method-assign]


if os.environ.get("MT_TEST_PLANT"):
    # Held by a name: a generator that nobody holds is closed, and would take the fault back.
    _for_good = planted(os.environ["MT_TEST_PLANT"])
    _for_good.__enter__()
