"""Optimizer state beside the tensors, in the forms that Megatron-Core 0.9.0 writes.

One optimizer is a dictionary of its own, or lies under ``optimizer`` where there are master weights; with
experts spread over processes there are two, the second for experts: a list in rank files, numbered in
distributed checkpoints. Steps are counted with each parameter, once for all of them, or in each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mt_megatron.errors import CheckpointError

_OF_THE_FORM = ("params", "step")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run that is continued, but for its tensors."""

    step: float
    """Updates done, which bias correction counts by."""

    groups: tuple[Mapping[str, Any], ...]
    """Settings of the parameter groups; rates and weight decay among them."""

    scheduler: Mapping[str, Any]
    """Of the learning rate and weight decay."""

    grad_scaler: Mapping[str, Any] | None = None
    """Of fp16."""

    @classmethod
    def of(cls, optimizer: Any, scheduler: Any, where: str) -> RunState:
        """From the entry ``optimizer`` of a checkpoint. Raises ``CheckpointError`` naming ``where``."""
        found = parts_of(optimizer)
        steps = {step for part in found for step in _steps(part)}
        groups = [group for part in found for group in inner_of(part).get("param_groups", ())]
        if len(steps) != 1 or not groups or not isinstance(scheduler, Mapping):
            raise CheckpointError(
                f"{where}: expected an optimizer with one number of steps for all parameters (found "
                f"{sorted(steps)}), parameter groups (found {len(groups)}) and opt_param_scheduler (found "
                f"{type(scheduler).__name__}). Leave --with-optimizer out to take the weights alone"
            )
        return cls(
            step=steps.pop(),
            groups=tuple(
                {name: value for name, value in group.items() if name not in _OF_THE_FORM} for group in groups
            ),
            scheduler=scheduler,
            grad_scaler=next((part["grad_scaler"] for part in found if "grad_scaler" in part), None),
        )

    def groups_of(self, *, experts: bool | None) -> list[dict[str, Any]]:
        """The groups of the optimizer for experts or of that for the rest; None: of one for both.

        In the order of what has weight decay and what has none.
        """
        dense = [dict(group) for group in self.groups if not group.get("is_expert_parallel")]
        if not experts:
            return sorted(dense, key=_decayed_first)
        own = [dict(group) for group in self.groups if group.get("is_expert_parallel")]
        if own:
            return own
        return [
            {**group, "is_expert_parallel": True}
            for group in dense
            if group.get("wd_mult") != 0.0 and not group.get("is_decoupled_lr")
        ]


def parts_of(optimizer: Any) -> list[Mapping[str, Any]]:
    """The optimizers of an entry ``optimizer``, first those for all but experts."""
    if isinstance(optimizer, Sequence):
        return list(optimizer)
    if all(isinstance(key, int) for key in optimizer):
        return [optimizer[key] for key in sorted(optimizer)]
    return [optimizer]


def inner_of(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """torch's own dictionary of an optimizer."""
    inner: Mapping[str, Any] = part.get("optimizer", part)
    return inner


def common_entry(
    state: RunState, *, master: bool, distributed: bool, expert_optimizer: bool
) -> dict[Any, Any]:
    """The entry ``optimizer`` of ``common.pt`` in a distributed checkpoint.

    ``master``: of a run with master weights. ``distributed``: spread over data-parallel processes.
    """
    kinds: list[bool | None] = [False, True] if expert_optimizer else [None]
    entries: list[dict[str, Any]] = []
    for experts in kinds:
        groups = state.groups_of(experts=experts)
        entry: dict[str, Any] = {"param_groups": groups}
        if distributed or experts:
            # A stage without experts counts in the group.
            for group in groups:
                group["step"] = state.step
        if not distributed:
            entry["state"] = {"common_step": torch.tensor(state.step, dtype=torch.float32)}
        if master or distributed:
            entry = {"optimizer": entry}
            if state.grad_scaler is not None:
                entry["grad_scaler"] = dict(state.grad_scaler)
        if distributed:
            entry["param_state_sharding_type"] = "fully_sharded_model_space"
        entries.append(entry)
    return dict(enumerate(entries)) if expert_optimizer else entries[0]


def _decayed_first(group: Mapping[str, Any]) -> tuple[float, bool]:
    return -float(group.get("wd_mult", 1.0)), not group.get("is_decoupled_lr")


def _steps(part: Mapping[str, Any]) -> Iterator[float]:
    inner = inner_of(part)
    state = inner.get("state", {})
    counted = [state["common_step"]] if state.get("common_step") is not None else []
    counted += [each["step"] for each in state.values() if isinstance(each, Mapping) and "step" in each]
    if not counted:
        counted = [group["step"] for group in inner.get("param_groups", ()) if "step" in group]
    yield from (float(each) for each in counted)
