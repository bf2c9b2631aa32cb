"""The optimizer of one rank in the ``torch`` form, whose tensors have numbers for names, and its parameters.

Megatron-Core 0.9.0 (``optimizer/__init__.py``) goes through the parameters of a rank's model in order, sorts
them into groups (what has weight decay, what has none, experts that are spread over processes), and torch
numbers them group by group. A distributed optimizer keeps flat buffers in files of their own instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.convert.run_state import RunState, inner_of, parts_of
from mt_megatron.convert.tensors.state_names import MASTER
from mt_megatron.errors import CheckpointError

MASTERS = "fp32_from_fp16_params"
_NARROW = (torch.float16, torch.bfloat16)
_WITH_OWN_RATE = ("embedding.word_embeddings.weight", "output_layer.weight")

Chunks = Sequence[Mapping[str, Any]]
"""The state of each of a rank's model chunks: name -> tensor, in the order of the modules."""

Key = tuple[int, str]
"""A parameter: the chunk it is in, and its name there."""


@dataclass(frozen=True)
class _Signature:
    """What decides the group of a parameter."""

    experts: bool
    decayed: bool
    own_rate: bool


def has_state_by_parameter(optimizer: Any) -> bool:
    """Whether the entry ``optimizer`` of a rank's file holds tensors for each parameter."""
    return all("state" in inner_of(part) for part in parts_of(optimizer))


def state_by_parameter(
    optimizer: Any, chunks: Chunks, *, spread: bool, where: str
) -> dict[str, dict[Key, Tensor]]:
    """The tensors of ``optimizer`` by kind and parameter. ``spread``: experts are spread over processes.

    Raises ``CheckpointError`` naming ``where`` when its groups are not those of the parameters.
    """
    found: dict[str, dict[Key, Tensor]] = {}
    left = dict(_parameters(chunks))
    for part in parts_of(optimizer):
        inner = inner_of(part)
        masters = part.get(MASTERS, part.get("fp32_from_fp16", ()))
        for index, group in enumerate(inner["param_groups"]):
            members = _members(left, group, spread=spread)
            if len(members) != len(group["params"]):
                raise CheckpointError(
                    f"{where}: group {index} of the optimizer has {len(group['params'])} parameters, "
                    f"expected the model's {len(members)} that are alike; the two do not belong together, or "
                    "were not written by Megatron-Core 0.9.0"
                )
            for number, place in zip(group["params"], members, strict=True):
                for kind, tensor in inner["state"].get(number, {}).items():
                    if kind != "step":
                        _put(found, kind, place, tensor, left[place], where)
            if masters:
                narrow = [place for place in members if left[place].dtype in _NARROW]
                if len(narrow) != len(masters[index]):
                    raise CheckpointError(
                        f"{where}: group {index} has {len(masters[index])} master weights for {len(narrow)} "
                        "parameters in half precision; give a complete copy of it"
                    )
                for place, tensor in zip(narrow, masters[index], strict=True):
                    _put(found, MASTER, place, tensor, left[place], where)
            for place in members:
                del left[place]
    if left:
        raise CheckpointError(
            f"{where}: {len(left)} parameters have no optimizer, {next(iter(left))[1]} among them; they were "
            "not trained. Leave --with-optimizer out to take the weights alone"
        )
    return found


def optimizer_document(
    run: RunState,
    chunks: Chunks,
    state: Mapping[str, Chunks],
    *,
    spread: bool,
    master: bool,
) -> Any:
    """The entry ``optimizer`` of a rank's file for the parameters of ``chunks``; ``state`` has as many chunks
    of each kind, with the same names.

    Parameters with weight decay come first, as with ``patches/optimizer/param_groups.py``. Upstream alone
    begins with the first parameter it meets, which differs on later pipeline stages of local layers: there it
    refuses groups of other sizes. A stage without experts has an optimizer for them
    (``patches/optimizer/expert_optimizer.py``).
    """
    parameters = dict(_parameters(chunks))
    optimizers = []
    for experts in (False, True) if spread else (None,):
        settings = {_signature_of(group): group for group in run.groups_of(experts=experts)}
        members: dict[_Signature, list[Key]] = {}
        for place, tensor in parameters.items():
            signature = _signature(place, tensor, settings, spread=spread)
            if experts is None or signature.experts == experts:
                members.setdefault(signature, []).append(place)
        missing = [places[0][1] for signature, places in members.items() if signature not in settings]
        if missing:
            raise CheckpointError(
                f"the source's optimizer has no parameter group for {missing}: Megatron-Core's has. Leave "
                "--with-optimizer out to take the weights alone"
            )
        ordered = {each: members.get(each, []) for each in settings if each in members or experts}
        optimizers.append(_one(run, ordered, settings, state, master=master))
    return optimizers[0] if len(optimizers) == 1 else optimizers


def _one(
    run: RunState,
    members: Mapping[_Signature, list[Key]],
    settings: Mapping[_Signature, Mapping[str, Any]],
    state: Mapping[str, Chunks],
    *,
    master: bool,
) -> dict[str, Any]:
    groups, tensors, masters, number = [], {}, [], 0
    for signature, places in members.items():
        groups.append({**settings[signature], "params": list(range(number, number + len(places)))})
        if not places:
            groups[-1]["step"] = run.step
        for chunk, name in places:
            tensors[number] = {
                "step": torch.tensor(run.step, dtype=torch.float32),
                **{kind: chunks[chunk][name] for kind, chunks in state.items() if kind != MASTER},
            }
            number += 1
        if master:
            masters.append([state[MASTER][chunk][name] for chunk, name in places])
    inner = {"state": tensors, "param_groups": groups}
    if not master:
        return inner
    scaler = {} if run.grad_scaler is None else {"grad_scaler": dict(run.grad_scaler)}
    return {"optimizer": inner, MASTERS: masters, **scaler}


def _parameters(chunks: Chunks) -> Iterator[tuple[Key, Tensor]]:
    for index, chunk in enumerate(chunks):
        seen = set()
        for name, tensor in chunk.items():
            # The bias of experts is a buffer.
            if not isinstance(tensor, Tensor) or name.endswith(("_extra_state", ".expert_bias")):
                continue
            # Tied weights are one parameter under two names.
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield (index, name), tensor


def _members(parameters: Mapping[Key, Tensor], group: Mapping[str, Any], *, spread: bool) -> list[Key]:
    wanted = _signature_of(group)
    rates = {wanted: group}
    return [
        place
        for place, tensor in parameters.items()
        if _signature(place, tensor, rates, spread=spread) == wanted
    ]


def _signature_of(group: Mapping[str, Any]) -> _Signature:
    return _Signature(
        experts=bool(group.get("is_expert_parallel")),
        decayed=group.get("wd_mult", 1.0) != 0.0,
        own_rate=bool(group.get("is_decoupled_lr")),
    )


def _signature(place: Key, tensor: Tensor, settings: Mapping[_Signature, Any], *, spread: bool) -> _Signature:
    name = place[1]
    return _Signature(
        experts=spread and ".mlp.experts." in name,
        decayed=not (name.endswith(".bias") or tensor.dim() == 1),
        own_rate=name in _WITH_OWN_RATE and any(each.own_rate for each in settings),
    )


def _put(
    found: dict[str, dict[Key, Tensor]],
    kind: str,
    place: Key,
    tensor: Any,
    like: Tensor,
    where: str,
) -> None:
    if not isinstance(tensor, Tensor) or tensor.shape != like.shape:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise CheckpointError(
            f"{where}: {kind} of {place[1]} is {shape}, expected {tuple(like.shape)}; the optimizer and the "
            "model do not belong together"
        )
    found.setdefault(kind, {})[place] = tensor
