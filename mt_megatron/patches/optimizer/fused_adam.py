"""Adam and the distributed optimizer on torch's fused AdamW, without Apex and Transformer Engine.

Their FusedAdam keeps ``step`` in the parameter groups, torch's AdamW keeps one per parameter. Upstream
tells them apart by one flag, ``HAVE_APEX_OR_TE``, that also refuses the distributed optimizer, so
the flag stays as it is and is set aside only where its answer is the wrong one. In checkpoints
``step`` is in the parameter groups either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.errors import CheckpointError
from mt_megatron.patching.spec import Patch

_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def _adam(original: Any, *, backend: Backend, made: set[type]) -> Any:
    """``made``: classes of the optimizers that it has made."""
    import torch

    if original not in (torch.optim.AdamW, torch.optim.Adam):
        return original  # Apex's or Transformer Engine's, which is fused already

    class Fused(type):
        """Calling makes the backend's optimizer; type checks answer for torch's class and the backend's,
        which need not be derived from it."""

        def __call__(cls, params: Any, **options: Any) -> Any:
            # Apex's and Transformer Engine's take None for a rate (``OptimizerConfig.lr`` by default): a
            # scheduler replaces it before the first step. torch's check compares the rate with 0.
            if unset := "lr" in options and options["lr"] is None:
                options["lr"] = math.inf
            optimizer = backend.adamw(params, **options)
            made.add(type(optimizer))
            for group in (optimizer.defaults, *optimizer.param_groups) if unset else ():
                if group["lr"] == math.inf:
                    group["lr"] = None
            return optimizer

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, *made))

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, (original, *made))

    return Fused(original.__name__, (), {"__doc__": original.__doc__, "__module__": original.__module__})


def _step_is_per_parameter() -> bool:
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE


@contextmanager
def _as_if_available() -> Iterator[None]:
    from megatron.core.optimizer import distrib_optimizer

    before = distrib_optimizer.HAVE_APEX_OR_TE
    distrib_optimizer.HAVE_APEX_OR_TE = True
    try:
        yield
    finally:
        distrib_optimizer.HAVE_APEX_OR_TE = before


def _init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    per_parameter = _step_is_per_parameter()
    with _as_if_available():
        original(self, *args, **kwargs)
    if per_parameter and not any(group["params"] for group in self.optimizer.param_groups):
        # This rank owns no shard and so no state to count in, yet what it saves must agree.
        self.optimizer.register_step_post_hook(_count_step)


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["step"] = group.get("step", 0.0) + 1.0


def _state_dict(original: Callable[..., Any], self: Any) -> Any:
    """Upstream's own extraction of ``step`` fails before the first step and on a rank without a shard."""
    if not _step_is_per_parameter():
        return original(self)
    with _as_if_available():
        state_dict = original(self)
    step = _common_step(self.optimizer)
    for group in state_dict["optimizer"]["param_groups"]:
        group["step"] = step
    return state_dict


def _common_step(optimizer: Any) -> float:
    steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    if len(steps) > 1:
        raise CheckpointError(
            f"parameters of one optimizer have taken different numbers of steps ({sorted(steps)}), and a "
            "checkpoint of Megatron's holds a single one; step all parameters together"
        )
    counted = (group["step"] for group in optimizer.param_groups if "step" in group)
    return steps.pop() if steps else float(next(counted, 0.0))


def _load_state_dict(original: Callable[..., None], self: Any, state_dict: Any) -> None:
    if not _step_is_per_parameter():
        original(self, state_dict)
        return
    # FusedAdam has no step in its groups until it has taken one. Where it has, its place among the entries
    # stays: a checkpoint of what was loaded is the one that it was loaded from, byte by byte.
    groups = [{**group, "step": group.get("step", 0.0)} for group in state_dict["optimizer"]["param_groups"]]
    original(self, {**state_dict, "optimizer": {**state_dict["optimizer"], "param_groups": groups}})
    for state in self.optimizer.state.values():
        # Upstream gives all parameters one tensor, which then counts once for each of them.
        state["step"] = state["step"].clone()


def _without_step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """These treat every entry of a parameter's state as a tensor of the shard's shape, and one of
    them copies into parameters with autograd watching."""
    import torch

    states = [state for state in self.optimizer.state.values() if "step" in state]
    steps = [state.pop("step") for state in states]
    try:
        with torch.no_grad():
            return original(self, *args, **kwargs)
    finally:
        for state, step in zip(states, steps, strict=True):
            state["step"] = step
        # Asking for the state of a parameter that has none yet left an empty one.
        for parameter in [p for p, state in self.optimizer.state.items() if not state]:
            del self.optimizer.state[parameter]


def _inverse_scale(self: Any) -> Any:
    # A quotient in float32 is rounded once, which is as close to 1 / scale as float32 gets.
    return self._scale.float().reciprocal()


def patches(backend: Backend) -> list[Patch]:
    def wrap(name: str, body: Callable[..., Any], reason: str, digest: str) -> Patch:
        return Patch(
            id=f"optimizer.distributed_{name.strip('_')}",
            target=f"{_CLASS}.{name}",
            kind="wrap",
            feature="optimizer",
            reason=reason,
            body=body,
            digest=digest,
        )

    made: set[type] = set()
    shape = "a per-parameter step is no tensor of the shard's shape; it travels in the parameter groups"
    return [
        Patch(
            id="optimizer.adam",
            target="megatron.core.optimizer:Adam",
            kind="value",
            feature="optimizer",
            reason="the backend's fused AdamW instead of torch's loop over parameters",
            body=partial(_adam, backend=backend, made=made),
        ),
        Patch(
            id="optimizer.distributed_adam",
            target="megatron.core.optimizer.distrib_optimizer:Adam",
            kind="value",
            feature="optimizer",
            reason="it refuses optimizers of other classes, such as torch_musa's and AdamW before torch 2.6",
            body=partial(_adam, backend=backend, made=made),
        ),
        Patch(
            id="optimizer.inverse_loss_scale",
            target="megatron.core.optimizer.grad_scaler:MegatronGradScaler.inv_scale",
            kind="replace",
            feature="optimizer",
            backends=frozenset({"musa"}),
            reason="it computes in float64 on the device, which Moore Threads cards refuse",
            body=_inverse_scale,
            digest="6fb7ede4a6edf0ba67192301478077d0a925aa8c0968205089ceadcfda67c899",
        ),
        wrap(
            "__init__",
            _init,
            "it asserts that Apex or Transformer Engine is installed",
            digest="6d0a440eec9c5652c09a099906cc312572a7fb53665f9eee6e846de4b95a54cb",
        ),
        wrap(
            "state_dict",
            _state_dict,
            "Adam's step, also before the first and without a shard",
            digest="d0146834c7f3e981d0890d0bbb998cc61ff7d3aa2a4e68d7c9fa3343a362fa9a",
        ),
        wrap(
            "load_state_dict",
            _load_state_dict,
            "every parameter needs a step tensor of its own",
            digest="b1502ed8411bddeaefe838453f00f5c9d8e6ef73b2e9c56a283daf13f29559f0",
        ),
        wrap(
            "get_parameter_state_fs_bucket_space",
            _without_step,
            shape,
            digest="f159bfbd7cb75e4a6228e763bfad5b8b3b269614704c987d6260ff8767705d97",
        ),
        wrap(
            "sharded_param_state_fs_model_space",
            _without_step,
            shape,
            digest="5b10c19ee4633343eceb38084517631a2d1bfb3cf86498d90a64b68ef111bbc9",
        ),
        wrap(
            "load_parameter_state_from_fs_bucket_space",
            _without_step,
            shape,
            digest="8dfbb0063484f580740ed55412fabc22ff19f117e27f4f401b979acace8af5c9",
        ),
        wrap(
            "load_parameter_state_from_fs_model_space",
            _without_step,
            shape,
            digest="26f693d03490a87426e582ea2f9a44cb9fbcc8153ac3cd4df15d4a8ad6a3af20",
        ),
    ]
