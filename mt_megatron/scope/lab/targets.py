"""Modules, parameters and heads of this rank that a perturbation's pattern, layers and heads mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from mt_megatron.errors import ConfigError
from mt_megatron.near_names import hint
from mt_megatron.scope.lab.placement import (
    ParameterPlace,
    activation_place,
    features_of,
    output_size,
    parameter_places,
)
from mt_megatron.scope.lab.specification import Perturbation
from mt_megatron.scope.lab.values import Along, Places, Selection, require_type
from mt_megatron.seams import taps
from mt_megatron.seams.taps.names import whole_name

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class ParameterTarget:
    """One parameter of this rank that a perturbation means."""

    path: str
    """In the whole model."""

    parameter: nn.Parameter
    place: ParameterPlace
    shape: tuple[int, ...]
    """Of the whole parameter."""

    along: Along | None

    def selection(self, one: Perturbation) -> tuple[Places, Selection]:
        """Places of its elements, on the host, and which are meant. Raises ``ConfigError`` for an index
        outside of the whole parameter."""
        places = self.place.places()
        wanted = None
        if one.index is not None:
            wanted = torch.tensor([_flat(each, places, self.path) for each in one.index], dtype=torch.int64)
        return places, Selection(places=wanted, along=self.along, share=one.fraction)


@dataclass(frozen=True, kw_only=True)
class ModuleTarget:
    """One module of this rank that a perturbation means."""

    path: str
    module: nn.Module
    features: int | None
    """Of its whole output, where it says so."""

    heads: tuple[int, ...] | None

    def selection(self, one: Perturbation, places: Places) -> Selection:
        """Which elements of an output with ``places`` are meant. Raises ``ConfigError``."""
        if not places.whole and (one.index is not None or self.heads is not None):
            raise ConfigError(
                f"found an output of {self.path} that is not [tokens, micro-batch, features]; expected one "
                f"for {'an index' if one.index is not None else 'heads'}. Choose another module"
            )
        wanted, features = None, places.shape[-1]
        if one.index is not None:
            sequence = places.shape[0]
            self._require_inside(one.index, sequence, features)
            wanted = torch.tensor([activation_place(each, sequence, features) for each in one.index])
        along = None
        if self.heads is not None:
            chosen = head_coordinates(self.path, self.module, features, self.heads)
            along = Along(stride=1, size=features, chosen=chosen)
        return Selection(places=wanted, along=along, share=one.fraction)

    def require_index(self, one: Perturbation, sequence: int) -> None:
        """Raise ``ConfigError`` for an index that no output has; ``sequence``: tokens of a whole one."""
        if one.index is not None:
            self._require_inside(one.index, sequence, output_size(self.module))

    def _require_inside(self, index: Sequence[Sequence[int]], sequence: int, features: int | None) -> None:
        for position, _, feature in index:
            if position >= sequence or (features is not None and feature >= features):
                most = "" if features is None else f" and features below {features}"
                raise ConfigError(
                    f"found index [{position}, sample, {feature}] of {self.path}; expected positions below "
                    f"{sequence}{most}"
                )


def parameter_targets(one: Perturbation, chunks: Sequence[nn.Module]) -> list[ParameterTarget]:
    """Parameters of this rank that ``one`` means; ``chunks`` are without wrappers. Raises ``ConfigError``
    for heads of what has none, and for a bit that the type does not have."""
    found = []
    for number, name, parameter, place in parameter_places(chunks):
        path = _whole_name(chunks[number], name, parameter)
        if not matches(one, path, or_owner=True) or not parameter.requires_grad:
            continue
        require_type(one, parameter.dtype if one.on == "weight" else _gradient_type(parameter), path)
        shape = place.shape()
        along = None
        if one.heads is not None:
            along = _heads_along(
                path, chunks[number].get_submodule(name.rpartition(".")[0]), shape, one.heads
            )
        found.append(ParameterTarget(path=path, parameter=parameter, place=place, shape=shape, along=along))
    return found


def module_targets(one: Perturbation, chunks: Sequence[nn.Module]) -> list[ModuleTarget]:
    """The same of modules."""
    found = []
    for path, module in _modules(chunks):
        if not path or not matches(one, path) or isinstance(module, nn.ModuleList):
            continue
        features = features_of(module)
        if one.heads is not None:
            if path.rpartition(".")[2] == "linear_proj":
                raise ConfigError(
                    f"found heads for the output of {path}, each feature of which is a sum over all heads; "
                    "expected core_attention, whose output is heads', or the projection's weight"
                )
            head_coordinates(path, module, features or 1, one.heads)
        found.append(ModuleTarget(path=path, module=module, features=features, heads=one.heads))
    return found


def matches(one: Perturbation, path: str, *, or_owner: bool = False) -> bool:
    """Whether ``one`` means ``path``; with ``or_owner`` also whether it means the module that has it."""
    if one.layers is not None and _layer_of_model(path) not in one.layers:
        return False
    if fnmatchcase(path, one.module):
        return True
    return or_owner and fnmatchcase(path.rpartition(".")[0], one.module)


def _layer_of_model(path: str) -> int | None:
    """Number of the model's layer in ``path``; depths of multi-token prediction are none of its layers."""
    return None if path.startswith("mtp.") else taps.layer_of(path)


def nothing_found(one: Perturbation, every: Sequence[str]) -> ConfigError:
    """The error for a pattern that no rank has; ``every``: paths of the whole model."""
    layers = "" if one.layers is None else f" in layers {', '.join(map(str, one.layers))}"
    what = "parameter" if one.on in ("weight", "weight_gradient") else "module"
    return ConfigError(
        f"found no {what} {one.module!r}{layers} on any rank; expected a pattern of paths such as "
        f"{', '.join(repr(each) for each in every[1:40:13])}.{hint(one.module, every)}"
    )


def paths_of(one: Perturbation, chunks: Sequence[nn.Module]) -> list[str]:
    """Paths of this rank that a pattern of ``one`` could mean."""
    if one.on in ("weight", "weight_gradient"):
        return [
            _whole_name(chunk, name, parameter)
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
        ]
    return [path for path, _ in _modules(chunks) if path]


# Heads.


def head_coordinates(path: str, module: nn.Module, size: int, heads: Sequence[int]) -> torch.Tensor:
    """bool [size]: which rows, columns or features of ``module`` belong to ``heads``. Raises
    ``ConfigError``."""
    config: Any = getattr(module, "config", None)
    name = path.rpartition(".")[2]
    count = int(getattr(config, "num_attention_heads", 0) or 0)
    if name not in _OF_HEADS or not count:
        raise ConfigError(
            f"found heads for {path}; expected a module whose rows or features are heads': "
            f"{', '.join(_OF_HEADS)}"
        )
    if max(heads) >= count:
        raise ConfigError(f"found head {max(heads)} of {path}; expected 0 to {count - 1}")
    chosen = torch.zeros(size, dtype=torch.bool)
    if name == "linear_qkv":
        groups = int(config.num_query_groups or count)
        each, head = count // groups, size // (groups * (count // groups + 2))
        for number in heads:
            start = (number // each) * (each + 2) * head + (number % each) * head
            chosen[start : start + head] = True
        return chosen
    head = size // count
    for number in heads:
        chosen[number * head : (number + 1) * head] = True
    return chosen


_OF_HEADS = (
    "linear_qkv",
    "core_attention",
    "linear_proj",
    "linear_q_proj",
    "linear_q_up_proj",
    "linear_kv_up_proj",
)


def _heads_along(path: str, module: nn.Module, shape: tuple[int, ...], heads: Sequence[int]) -> Along:
    owner, _, name = path.rpartition(".")
    if owner.rpartition(".")[2] in _OF_HEADS and name not in ("weight", "bias"):
        # Transformer Engine keeps the norm before a linear among the linear's own parameters.
        raise ConfigError(
            f"found heads for {path}; expected the weight or bias of a linear, such as {owner}.weight"
        )
    # The projection's columns are heads', its bias is of none.
    columns = owner.endswith("linear_proj")
    if columns and len(shape) < 2:
        raise ConfigError(
            f"found heads for {path}; expected a weight, since a projection's bias is no head's"
        )
    size = shape[-1] if columns else shape[0]
    stride = 1 if columns or len(shape) == 1 else shape[-1]
    return Along(stride=stride, size=size, chosen=head_coordinates(owner, module, size, heads))


# Names and places.


def _flat(index: Sequence[int], places: Places, path: str) -> int:
    shape = places.shape
    missing = len(shape) - len(index)
    # Of an expert that is a module by itself the path says which it is.
    optional = int(places.whole and ".local_experts." in path)
    if not 0 <= missing <= optional:
        fewer = f", or {len(shape) - 1} without the expert's" if optional else ""
        raise ConfigError(
            f"found index {list(index)} of {path}; expected {len(shape)} numbers, shape {list(shape)}{fewer}"
        )
    first = int(sum(int(part[0]) for part in places.parts))
    whole = [*_coordinates(first, shape)[:missing], *index]
    for at, size in zip(whole, shape, strict=True):
        if at >= size:
            raise ConfigError(f"found index {list(index)} of {path}; expected one within shape {list(shape)}")
    flat = 0
    for at, size in zip(whole, shape, strict=True):
        flat = flat * size + at
    return flat


def _coordinates(flat: int, shape: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        found.append(at)
    return found[::-1]


def _whole_name(chunk: nn.Module, name: str, parameter: nn.Parameter) -> str:
    if getattr(parameter, "shared_embedding", False):
        # The last stage's copy of tied weights is the same tensor of the whole model.
        return _EMBEDDING
    return whole_name(chunk, name)


def _modules(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for chunk in chunks:
        for local, module in chunk.named_modules():
            yield whole_name(chunk, local), module


def _gradient_type(parameter: nn.Parameter) -> torch.dtype:
    gradient = getattr(parameter, "main_grad", None)
    return parameter.dtype if gradient is None else gradient.dtype
