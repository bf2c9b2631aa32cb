"""Upstream's layers, collectives, transfers, micro-batches and optimizer steps emit ``seams.events``.

Idle, each of them costs one more call and one check.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.parallel.group_names import megatron_groups, name_of
from mt_megatron.patches.events import inner_collectives
from mt_megatron.patching.spec import Patch
from mt_megatron.seams import collectives, events
from mt_megatron.seams.events import EventName

Attributes = dict[str, Any]
Describe = Callable[..., "Attributes | None"]


# From an upstream call's arguments to the attributes of the event. A function here is called only while
# somebody listens and returns None where the call does nothing.


def layer_attributes(self: Any, *args: Any, **kwargs: Any) -> Attributes:
    return {"number": self.layer_number}


def optimizer_attributes(self: Any) -> Attributes:
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


def experts_attributes(self: Any, permuted_local_hidden_states: Any, tokens_per_expert: Any) -> Attributes:
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


# The patches.


def _around(name: EventName, describe: Describe) -> Callable[..., Any]:
    def body(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not events.heard(name):
            return original(*args, **kwargs)
        attrs = describe(*args, **kwargs)
        if attrs is None:
            return original(*args, **kwargs)
        with events.described(name, attrs):
            return original(*args, **kwargs)

    return body


def _communicate(original: Callable[..., Any], **kwargs: Any) -> Any:
    attrs = transfers(**kwargs) if events.listening() else None
    if attrs is None:
        return original(**kwargs)
    with events.described("p2p", attrs):
        received = original(**kwargs)
    if "asynchronous" not in attrs or not received[2]:
        return received
    return (*received[:2], inner_collectives.awaited_transfers(received[2], attrs))


_REDUCING = (
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "optimizer.distrib_optimizer",
    "distributed.finalize_model_grads",
    "tensor_parallel.data",
    "transformer.moe.moe_utils",
)
"""Modules that sum or broadcast: the gradient norm, an fp16 overflow, FP8 maxima, gradients that tensor
parallel ranks or stages share, the number of tokens, batches, how many tokens experts have."""


def _id(target: str) -> str:
    module, _, name = target.partition(":")
    return f"events.{module.rpartition('.')[2]}.{name}"


# Chunk -> number of the micro-batch that goes backward next, in the order in which they went forward.
_backward: dict[int, int] = {}


def _microbatch(direction: EventName) -> Callable[..., Any]:
    def body(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not events.listening():
            return original(*args, **kwargs)
        from megatron.core import parallel_state

        chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
        if direction == "forward":
            number = kwargs.get("current_microbatch")
            number = -1 if number is None else number
            if number == 0:
                _backward[chunk] = 0
        else:
            # -1 in a step whose beginning nobody heard.
            number = _backward.get(chunk, -1)
            if number >= 0:
                _backward[chunk] = number + 1
        at = {"microbatch": number, "chunk": chunk}
        with events.span("microbatch", direction=direction, **at), events.span(direction, **at):
            return original(*args, **kwargs)

    return body


def patches(backend: Backend) -> list[Patch]:
    def wrap(target: str, body: Callable[..., Any], digest: str, after: tuple[str, ...] = ()) -> Patch:
        return Patch(
            id=_id(target),
            target=f"megatron.core.{target}",
            kind="wrap",
            feature="events",
            reason="it begins and ends something that listeners want to know of",
            body=body,
            digest=digest,
            after=after,
        )

    def seen(target: str, announcing: Callable[[Any], Any]) -> Patch:
        return Patch(
            id=_id(target),
            target=f"megatron.core.{target}",
            kind="value",
            feature="events",
            reason="it communicates in the middle of its work, and the event is around that alone",
            body=announcing,
        )

    def experts(name: str, digest: str, *after: str) -> Patch:
        body = _around("module", experts_attributes)
        return wrap(f"transformer.moe.experts:{name}.forward", body, digest, after)

    mappings = "tensor_parallel.mappings:"
    buckets = "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup."
    cross_entropy = "tensor_parallel.cross_entropy:VocabParallelCrossEntropy."
    optimizer = "optimizer.optimizer:"

    def collective(target: str, describe: Describe, digest: str) -> Patch:
        return wrap(target, _around("collective", describe), digest)

    return [
        wrap(
            "transformer.transformer_layer:TransformerLayer.forward",
            _around("layer", layer_attributes),
            digest="df20efadfd9bd2635171ecb7f45cd7d51af2c30afd7dd1238ed8523f97fca02f",
        ),
        collective(
            f"{mappings}_reduce",
            tensor_parallel("all_reduce"),
            digest="e44b413ed10adfb74ea5d94592da43e5203b73ea9f05b8790d54b6be26806fda",
        ),
        collective(
            f"{mappings}_gather_along_last_dim",
            tensor_parallel("all_gather"),
            digest="ce3c4ccaa56a094d88259b578687f3aa665ee6f8f1cbaac7829a36c20ed59235",
        ),
        collective(
            f"{mappings}_gather_along_first_dim",
            tensor_parallel("all_gather"),
            digest="859fad9fe9961c8536696644643bbc2321b86738d1f9eea6560fb10f58d7f415",
        ),
        collective(
            f"{mappings}_reduce_scatter_along_first_dim",
            tensor_parallel("reduce_scatter"),
            digest="e3d09852eb88b3523e4581fbbde3f64a4fd0cd1e98f28d9ee30379fc90e9aeaf",
        ),
        collective(
            f"{mappings}_gather_along_first_dim_moe",
            expert_parallel("all_gather", "tp-ep"),
            digest="36ad5d20ce616bca0a347760ac099a57a22ece898adf03fbfa342d88779916e9",
        ),
        collective(
            f"{mappings}_reduce_scatter_along_first_dim_moe",
            expert_parallel("reduce_scatter", "tp-ep"),
            digest="1d98684fe3ec0b79f8218805f45dc0a5f3f89526293231908ced28a9f867bdf7",
        ),
        collective(
            f"{mappings}_gather_along_first_dim_expert_parallel",
            expert_parallel("all_gather", "ep"),
            digest="d99f55f17f784db3f6af59307f5770f0efe229880a070d636152cc29f3d307ff",
        ),
        collective(
            f"{mappings}_AllToAll.forward",
            all_to_all,
            digest="453ef529ba97f7a00671d98fc44ff62e79dfc88a8b6508e8930a532e60ce9ca3",
        ),
        wrap(
            f"{buckets}start_grad_sync",
            inner_collectives.start_sync("start_grad_sync", "grad_data"),
            digest="40d7290a3aecd61e6f0d9afb1f3c87c640423e794a8a5602ddc815fc0af03fa6",
        ),
        wrap(
            f"{buckets}start_param_sync",
            inner_collectives.start_sync("start_param_sync", "param_data"),
            digest="8bfb80aeb94b87021efa7908436c2e4de95490132cdb45df68868de4585a1a28",
        ),
        seen(
            "distributed.param_and_grad_buffer:_coalescing_manager",
            inner_collectives.announcing_coalesced,
        ),
        *(seen(f"{module}:torch", inner_collectives.announcing) for module in _REDUCING),
        wrap(
            f"{cross_entropy}calculate_logits_max",
            inner_collectives.before_sum,
            digest="84c77202809d99ef9c744e4e38090b927193e2984f25a38f732e170c2635c8f9",
        ),
        wrap(
            f"{cross_entropy}calculate_predicted_logits",
            inner_collectives.before_sum,
            digest="9238cc977a8a90b6b12eeece86b2d31bfbcdd2ee19edac3a14261bdd985fd06d",
        ),
        wrap(
            f"{cross_entropy}calculate_cross_entropy_loss",
            inner_collectives.after_sum,
            digest="a0978df407009f6f8712d17591182e0782bd5398225de6ce9cd12584f2110b74",
        ),
        experts(
            "GroupedMLP",
            "364ad4513d53c0361d272fc0094666a1c7fbb4cca7e5903c7cb91f151bcf926c",
            "experts.forward",
        ),
        experts("TEGroupedMLP", "6d3870a46a994bf5bc69c821c5436a5bdd53468c2870c4637a2a1461be3dff07"),
        experts("SequentialMLP", "7e93477fcaf261531ad581135512e1a32938846c43ad5501df1a8db975a25580"),
        wrap(
            "pipeline_parallel.p2p_communication:_communicate",
            _communicate,
            digest="06496297fd6b5d6f42f37103dcf5b4c86c9b071ab099ad20b57dc3a218b5b669",
        ),
        wrap(
            "pipeline_parallel.schedules:forward_step",
            _microbatch("forward"),
            digest="f8d0c9fa276cb0da7ba4b09f7024f1fb1aaf1b2b8242bbb2e39f0c9207d6d143",
        ),
        wrap(
            "pipeline_parallel.schedules:backward_step",
            _microbatch("backward"),
            digest="b3d4907e86ce24887e0b03660e449d22cc3c382dcc7cf2bd092e298ff7c43806",
        ),
        wrap(
            f"{optimizer}MixedPrecisionOptimizer.step",
            _around("optimizer", optimizer_attributes),
            digest="5946ee169e29a9102be5507626bfe7abd8bb4de42f207afa973ebf3e81b51418",
        ),
        wrap(
            f"{optimizer}FP32Optimizer.step",
            _around("optimizer", optimizer_attributes),
            digest="5946ee169e29a9102be5507626bfe7abd8bb4de42f207afa973ebf3e81b51418",
        ),
        wrap(
            f"{optimizer}ChainedOptimizer.step",
            _around("optimizer", optimizer_attributes),
            digest="0d1eda221dcfc8d71186231b4c4e3d3e69bec9a7d1d9bfd8e23f88a737b0ec42",
        ),
    ]
