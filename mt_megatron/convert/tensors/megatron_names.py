"""Names of tensors: in a whole model, and the keys of a distributed checkpoint, where layers of one kind
and experts are further axes of one tensor.

``decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight`` is
``decoder.layers.mlp.experts.experts.linear_fc1.weight`` at [3, 5], or without the layer's axis
``decoder.layers.3.mlp.experts.experts.linear_fc1.weight`` at [5] where layers differ in kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mt_megatron.convert.tensors.state_names import kind_of, weight_name
from mt_megatron.models.tables.fused import fused_name, local_name

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.(\d+)\.(.*)")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_STACKED = "decoder.layers."
_EXPERTS = ".mlp.experts.experts."


@dataclass(frozen=True, kw_only=True)
class KeyLocation:
    """Where a tensor of the whole model lies in a distributed checkpoint."""

    key: str
    axes: tuple[int, ...]
    """How long each axis before the tensor's own is."""

    index: tuple[int, ...]
    """Where on each of them the tensor is."""


@dataclass(frozen=True, kw_only=True)
class KeyStyle:
    """What the keys of a distributed checkpoint depend on beside the tensors' names."""

    num_layers: int
    moe_layers: tuple[int, ...] = ()
    num_experts: int = 0
    latent: bool = False
    """Multi-latent attention."""

    uniform: bool = True
    """All layers are of one kind and share keys; else every layer has its own."""

    transformer_engine: bool = False
    """The keys of Transformer Engine's layers; else those of Megatron-Core's local ones."""

    expert_optimizer: bool = False
    """Experts are spread over processes and have an optimizer of their own."""

    def place(self, name: str) -> KeyLocation:
        """Where the tensor ``name`` (as local layers name it), or an optimizer's of that name, goes."""
        kind = kind_of(name)
        if kind is not None:
            found = self.place(weight_name(name))
            which = f"chained_{int(bool(_EXPERT.fullmatch(name)))}." if self.expert_optimizer else ""
            return replace(found, key=f"{which}optimizer.state.{kind}.{found.key}")
        axes: list[int] = []
        index: list[int] = []
        layer = _LAYER.fullmatch(name)
        key = self._key(name, None if layer is None else int(layer[1]))
        layer = _LAYER.fullmatch(key)
        if layer is not None and self.uniform:
            axes.append(self.num_layers)
            index.append(int(layer[1]))
            key = f"{_STACKED}{layer[2]}"
        expert = _EXPERT.fullmatch(key)
        if expert is not None:
            axes.append(self.num_experts)
            index.append(int(expert[2]))
            key = f"{expert[1]}experts.{expert[3]}"
        return KeyLocation(key=key, axes=tuple(axes), index=tuple(index))

    def _key(self, name: str, layer: int | None) -> str:
        if self.transformer_engine:
            is_moe = layer in self.moe_layers if layer is not None else bool(self.moe_layers)
            return fused_name(name, is_moe=is_moe, latent=self.latent)
        if self.latent:
            return name
        # Upstream's map for its local layers, which it applies to mixtures as well.
        return fused_name(name, is_moe=False, latent=False)


def names_of(key: str, shape: tuple[int, ...]) -> tuple[int, list[tuple[tuple[int, ...], str]]]:
    """The tensors of the whole model that lie under ``key`` of a distributed checkpoint of ``shape``.

    Returns how many axes come before the tensors' own, and for each index on them the tensor's name in
    local layers, whichever kind of layers wrote the key.
    """
    stacked = key.startswith(_STACKED) and not key[len(_STACKED)].isdigit()
    mixture = _EXPERTS in key
    found = []
    for index in _indices(shape[: stacked + mixture]):
        name = key
        if stacked:
            name = f"{_STACKED}{index[0]}.{key[len(_STACKED) :]}"
        if mixture:
            name = name.replace(_EXPERTS, f".mlp.experts.local_experts.{index[-1]}.")
        found.append((index, local_name(name)))
    return stacked + mixture, found


def split_state_key(key: str) -> tuple[str, str] | None:
    """The kind of an optimizer's tensor and the key of the model's tensor it belongs to; None for the key
    of something else."""
    matched = _STATE.fullmatch(key)
    return None if matched is None else (matched[1], matched[2])


def has_uniform_layers(keys: Iterable[str]) -> bool:
    """Whether ``keys`` of a distributed checkpoint are of layers that share keys."""
    return not any(_LAYER.fullmatch(key) for key in keys)


def _indices(axes: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    if not axes:
        return [()]
    return [(first, *rest) for first in range(axes[0]) for rest in _indices(axes[1:])]
