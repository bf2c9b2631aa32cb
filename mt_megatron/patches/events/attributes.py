"""What an upstream call means as an event: from its arguments to the attributes of ``seams.events``.

A function here is called only while somebody listens and returns None where nothing happens in the call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from mt_megatron.parallel.group_names import megatron_groups, name_of
from mt_megatron.seams import collectives

Attributes = dict[str, Any]
Describe = Callable[..., "Attributes | None"]


def layer(self: Any, *args: Any, **kwargs: Any) -> Attributes:
    return {"number": self.layer_number}


def optimizer(self: Any) -> Attributes:
    return {"optimizer": type(self).__name__}


def tensor_parallel(op: str) -> Describe:
    """Of the functions of ``mappings`` that take the tensor first and know their group."""

    def describe(input_: Any, *args: Any, **kwargs: Any) -> Attributes | None:
        group = _state().get_tensor_model_parallel_group()
        if group.size() == 1:
            return None
        return collectives.described(op, "tp", group, input_.nbytes)

    return describe


def expert_parallel(op: str, name: str) -> Describe:
    """The same of the groups ``ep`` and ``tp-ep``."""

    def describe(input_: Any, *args: Any, **kwargs: Any) -> Attributes | None:
        state = _state()
        both = state.get_tensor_and_expert_parallel_group
        group = (both if name == "tp-ep" else state.get_expert_model_parallel_group)()
        if group.size() == 1:
            return None
        return collectives.described(op, name, group, input_.nbytes)

    return describe


def _state() -> Any:
    # A statement that imports would take longer than all else here.
    return sys.modules["megatron.core.parallel_state"]


def all_to_all(ctx: Any, group: Any, input: Any, *splits: Any) -> Attributes | None:
    if group.size() == 1:
        return None
    # It may have the members of another group; what is exchanged like this are the experts' tokens.
    name = "ep" if group is megatron_groups().get("ep") else name_of(group)
    return collectives.described("all_to_all", name, group, collectives.size_of(input))


def experts(self: Any, permuted_local_hidden_states: Any, tokens_per_expert: Any) -> Attributes:
    """``work``: rows that this rank's experts compute, known without asking the device."""
    handed = getattr(vars(getattr(self, "token_dispatcher", self)).get("_mt_dispatch"), "handover", None)
    rows = permuted_local_hidden_states.shape[0] if handed is None else handed.routing.order.numel()
    return {"module": "experts", "direction": "forward", "work": rows}


def transfers(
    *,
    tensor_send_next: Any,
    tensor_send_prev: Any,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Any = None,
    config: Any = None,
    wait_on_reqs: bool = True,
) -> Attributes | None:
    """Of ``_communicate``, in the order in which both sides of an edge count: what flows to the next stage
    before what flows to the previous one, with two stages and chunks the same edge."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    following = parallel_state.get_pipeline_model_parallel_next_rank()
    before = parallel_state.get_pipeline_model_parallel_prev_rank()
    expected = _expected(tensor_shape, config)
    made: list[collectives.Transfer] = []
    # Lists where a stage of an encoder feeds several decoders.
    for after in following if isinstance(following, list) else (following,):
        if tensor_send_next is not None:
            made.append(collectives.sent(after, collectives.size_of(tensor_send_next)))
    for ahead in before if isinstance(before, list) else (before,):
        if recv_prev:
            made.append(collectives.received(ahead, expected))
        if tensor_send_prev is not None:
            made.append(collectives.sent(ahead, collectives.size_of(tensor_send_prev)))
    for after in following if isinstance(following, list) else (following,):
        if recv_next:
            made.append(collectives.received(after, expected))
    if not made:
        return None
    found: Attributes = {
        "group": "pp",
        "ranks": collectives.group_of("pp", group[0] if isinstance(group, list) else group).ranks,
        "bytes": collectives.size_of(tensor_send_next, tensor_send_prev),
        "transfers": tuple(made),
        "send_next": tensor_send_next is not None,
        "send_prev": tensor_send_prev is not None,
        "recv_prev": recv_prev,
        "recv_next": recv_next,
    }
    if not wait_on_reqs:
        found["asynchronous"] = "start"
    return found


def _expected(shape: Any, config: Any) -> int:
    dtype = getattr(config, "pipeline_dtype", None)
    if shape is None or dtype is None or getattr(config, "variable_seq_lengths", False):
        return -1
    return int(math.prod(shape)) * int(dtype.itemsize)
