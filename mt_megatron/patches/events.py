"""Upstream's layers, collectives, transfers, micro-batches and optimizer steps emit ``seams.events``.

Idle, each of them costs one more call and one check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..backends.base import Backend
from ..patching.spec import Patch
from ..seams import events
from ..seams.events import EventName

Describe = Callable[..., "dict[str, Any] | None"]
"""The call's arguments -> the event's attributes; None when nothing happens in this call."""


def _around(name: EventName, describe: Describe) -> Callable[..., Any]:
    def body(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not events.listening():
            return original(*args, **kwargs)
        attrs = describe(*args, **kwargs)
        if attrs is None:
            return original(*args, **kwargs)
        with events.span(name, **attrs):
            return original(*args, **kwargs)

    return body


def _bytes(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _layer(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"number": self.layer_number}


def _tensor_parallel(op: str) -> Describe:
    def describe(input_: Any, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        from megatron.core import parallel_state

        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            return None
        return {"op": op, "group": "tp", "bytes": _bytes(input_)}

    return describe


def _expert(op: str, group: str) -> Describe:
    def describe(input_: Any, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        from megatron.core import parallel_state

        tensor_and_expert = parallel_state.get_tensor_and_expert_parallel_world_size
        expert = parallel_state.get_expert_model_parallel_world_size
        if (tensor_and_expert if group == "tp-ep" else expert)() == 1:
            return None
        return {"op": op, "group": group, "bytes": _bytes(input_)}

    return describe


def _all_to_all(ctx: Any, group: Any, input: Any, *splits: Any) -> dict[str, Any] | None:
    if group.size() == 1:
        return None
    return {"op": "all_to_all", "group": group.group_desc, "bytes": _bytes(input)}


def _bucket(op: str) -> Describe:
    def describe(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        data = "grad_data" if op.endswith("grad_sync") else "param_data"
        size = _bytes(*(getattr(bucket, data) for bucket in self.buckets))
        return {"op": op, "group": "dp", "bytes": size}

    return describe


def _after_backward(op: str, group: str) -> Describe:
    def describe(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"op": op, "group": group}

    return describe


def _p2p(
    *,
    tensor_send_next: Any,
    tensor_send_prev: Any,
    recv_prev: bool,
    recv_next: bool,
    wait_on_reqs: bool = True,
    **others: Any,
) -> dict[str, Any]:
    return {
        "send_next": tensor_send_next is not None,
        "send_prev": tensor_send_prev is not None,
        "recv_prev": recv_prev,
        "recv_next": recv_next,
        "bytes": _bytes(tensor_send_next, tensor_send_prev),
        "waits": wait_on_reqs,
    }


def _microbatch(direction: EventName) -> Callable[..., Any]:
    def body(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not events.listening():
            return original(*args, **kwargs)
        index = kwargs.get("current_microbatch")
        with events.span("microbatch", direction=direction, index=index), events.span(direction):
            return original(*args, **kwargs)

    return body


def _optimizer(self: Any) -> dict[str, Any]:
    return {"optimizer": type(self).__name__}


def patches(backend: Backend) -> list[Patch]:
    def wrap(target: str, body: Callable[..., Any], digest: str) -> Patch:
        module, _, name = target.partition(":")
        return Patch(
            id=f"events.{module.rpartition('.')[2]}.{name}",
            target=f"megatron.core.{target}",
            kind="wrap",
            feature="events",
            reason="it begins and ends something that listeners want to know of",
            body=body,
            digest=digest,
        )

    mappings = "tensor_parallel.mappings:"
    buckets = "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup."
    finalize = "distributed.finalize_model_grads:"
    optimizer = "optimizer.optimizer:"

    def collective(target: str, describe: Describe, digest: str) -> Patch:
        return wrap(target, _around("collective", describe), digest)

    return [
        wrap(
            "transformer.transformer_layer:TransformerLayer.forward",
            _around("layer", _layer),
            digest="df20efadfd9bd2635171ecb7f45cd7d51af2c30afd7dd1238ed8523f97fca02f",
        ),
        collective(
            f"{mappings}_reduce",
            _tensor_parallel("all_reduce"),
            digest="e44b413ed10adfb74ea5d94592da43e5203b73ea9f05b8790d54b6be26806fda",
        ),
        collective(
            f"{mappings}_gather_along_last_dim",
            _tensor_parallel("all_gather"),
            digest="ce3c4ccaa56a094d88259b578687f3aa665ee6f8f1cbaac7829a36c20ed59235",
        ),
        collective(
            f"{mappings}_gather_along_first_dim",
            _tensor_parallel("all_gather"),
            digest="859fad9fe9961c8536696644643bbc2321b86738d1f9eea6560fb10f58d7f415",
        ),
        collective(
            f"{mappings}_reduce_scatter_along_first_dim",
            _tensor_parallel("reduce_scatter"),
            digest="e3d09852eb88b3523e4581fbbde3f64a4fd0cd1e98f28d9ee30379fc90e9aeaf",
        ),
        collective(
            f"{mappings}_gather_along_first_dim_moe",
            _expert("all_gather", "tp-ep"),
            digest="36ad5d20ce616bca0a347760ac099a57a22ece898adf03fbfa342d88779916e9",
        ),
        collective(
            f"{mappings}_reduce_scatter_along_first_dim_moe",
            _expert("reduce_scatter", "tp-ep"),
            digest="1d98684fe3ec0b79f8218805f45dc0a5f3f89526293231908ced28a9f867bdf7",
        ),
        collective(
            f"{mappings}_gather_along_first_dim_expert_parallel",
            _expert("all_gather", "ep"),
            digest="d99f55f17f784db3f6af59307f5770f0efe229880a070d636152cc29f3d307ff",
        ),
        collective(
            f"{mappings}_AllToAll.forward",
            _all_to_all,
            digest="453ef529ba97f7a00671d98fc44ff62e79dfc88a8b6508e8930a532e60ce9ca3",
        ),
        collective(
            f"{buckets}start_grad_sync",
            _bucket("start_grad_sync"),
            digest="40d7290a3aecd61e6f0d9afb1f3c87c640423e794a8a5602ddc815fc0af03fa6",
        ),
        collective(
            f"{buckets}finish_grad_sync",
            _bucket("finish_grad_sync"),
            digest="972ab005b2179f948773c5d63188ce186c946794e4383a9ab8e8e66cb5833e9b",
        ),
        collective(
            f"{buckets}start_param_sync",
            _bucket("start_param_sync"),
            digest="8bfb80aeb94b87021efa7908436c2e4de95490132cdb45df68868de4585a1a28",
        ),
        collective(
            f"{buckets}finish_param_sync",
            _bucket("finish_param_sync"),
            digest="ff44ad2e75eee6a49e4c4355e0c8564c14f6c610a3a1f0c7bfcbc36c09bafc53",
        ),
        collective(
            f"{finalize}_allreduce_layernorm_grads",
            _after_backward("layernorm_grads", "tp"),
            digest="87a5ee4de58aa8007a91d198948efb788e98812a415afee6507e744ac243486b",
        ),
        collective(
            f"{finalize}_allreduce_embedding_grads",
            _after_backward("embedding_grads", "embedding"),
            digest="e2e230761d5627be5a56e746b0dfa761caf6d57fad4ccacb575b1d05bfa6df39",
        ),
        wrap(
            "pipeline_parallel.p2p_communication:_communicate",
            _around("p2p", _p2p),
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
            _around("optimizer", _optimizer),
            digest="5946ee169e29a9102be5507626bfe7abd8bb4de42f207afa973ebf3e81b51418",
        ),
        wrap(
            f"{optimizer}FP32Optimizer.step",
            _around("optimizer", _optimizer),
            digest="5946ee169e29a9102be5507626bfe7abd8bb4de42f207afa973ebf3e81b51418",
        ),
        wrap(
            f"{optimizer}ChainedOptimizer.step",
            _around("optimizer", _optimizer),
            digest="0d1eda221dcfc8d71186231b4c4e3d3e69bec9a7d1d9bfd8e23f88a737b0ec42",
        ),
    ]
