"""Module paths as in the whole model, whatever pipeline stage or chunk holds the module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from mt_megatron.errors import ConfigError

_LAYER = re.compile(r"^((?:.*\.)?(?:decoder|encoder)\.layers)\.(\d+)(?=\.|$)")
_LOCAL_EXPERT = re.compile(r"(\.local_experts\.)(\d+)(?=\.|$)")
_NUMBER = re.compile(r"^(?:.*\.)?layers\.(\d+)(?=\.|$)")


def whole_path(chunks: nn.Module | Sequence[nn.Module], module: nn.Module) -> str:
    """Path of ``module`` in the whole model, such as ``decoder.layers.7.self_attention``; empty for a model
    itself.

    ``chunks`` are this rank's model chunks, wrapped (data parallelism, half precision) or not. Layers of a
    decoder or encoder are numbered from 0 over all pipeline stages and virtual chunks, by the
    ``layer_number`` that they carry. Raises ``ConfigError`` for a module of none of the chunks.
    """
    for path, each in named_modules(chunks):
        if each is module:
            return path
    raise ConfigError(
        f"found a {type(module).__name__} that is in none of the {len(_listed(chunks))} model chunk(s); "
        "expected a module of this rank's chunks"
    )


def named_modules(chunks: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """``(whole path, module)`` of every module of ``chunks``, each module once, outer before inner.

    Wrappers are left out. Layers' paths differ among chunks; what every chunk has for itself (the model, path
    empty; ``decoder``; ``rotary_pos_emb``) has the same path in each.
    """
    for chunk in _listed(chunks):
        bare = unwrapped(chunk)
        for local, module in bare.named_modules():
            yield whole_name(bare, local), module


def layer_of(path: str) -> int | None:
    """The layer's number in ``path`` as ``whole_path`` gives it, from 0; of a prediction depth
    (``mtp.layers.0``) the depth's. None outside of layers."""
    found = _NUMBER.match(path)
    return int(found.group(1)) if found else None


def whole_name(model: nn.Module, local: str) -> str:
    """``local``, the path of a module or parameter of the unwrapped ``model``, with its layer's number in
    the whole model and its expert's in the whole layer."""
    expert = _LOCAL_EXPERT.search(local)
    if expert is not None:
        first = _first_expert(model.get_submodule(local[: expert.start()]))
        local_name = local[: expert.start(2)] + str(int(expert.group(2)) + first) + local[expert.end() :]
    else:
        local_name = local
    found = _LAYER.match(local)
    if found is None:
        return local_name
    number = getattr(model.get_submodule(found.group()), "layer_number", None)
    if number is None:
        return local_name
    return f"{found.group(1)}.{int(number) - 1}{local_name[found.end() :]}"


def _first_expert(experts: nn.Module) -> int:
    """Number in the whole layer of the first of this rank's ``experts``."""
    from megatron.core import parallel_state

    # Extended tensor parallelism divides every expert: each rank has a part of all of them.
    if getattr(getattr(experts, "config", None), "moe_extended_tp", False):
        return 0
    count = getattr(experts, "num_local_experts", 0)
    return int(parallel_state.get_expert_model_parallel_rank()) * int(count) if count else 0


def unwrapped(chunk: nn.Module) -> nn.Module:
    """The model inside of what wraps it as ``module``."""
    while True:
        inner = chunk._modules.get("module")
        if inner is None or len(chunk._modules) != 1:
            return chunk
        chunk = inner


def _listed(chunks: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    return (
        [chunks] if isinstance(chunks, nn.Module) and not isinstance(chunks, nn.ModuleList) else list(chunks)
    )
