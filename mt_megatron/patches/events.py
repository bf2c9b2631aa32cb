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
            digest="fd6b59b5cc9d3febb7bd20822f26e93177f5e6df625c18607726f3bb180aa2f7",
        ),
        collective(
            f"{mappings}_reduce",
            _tensor_parallel("all_reduce"),
            digest="7912e1ffbccfe74308b46ef2360e8e37bd2b7c364ff92080d78fb4752b298dc2",
        ),
        collective(
            f"{mappings}_gather_along_last_dim",
            _tensor_parallel("all_gather"),
            digest="08c25af28a73a09eb7b559f3c72b6ec1795484bfeede77d5cf1ce6a12621922e",
        ),
        collective(
            f"{mappings}_gather_along_first_dim",
            _tensor_parallel("all_gather"),
            digest="5aaba1d295355d5d135baa4d675f0eaa60b630c2e77cf43d23fb5b1a5dc6575b",
        ),
        collective(
            f"{mappings}_reduce_scatter_along_first_dim",
            _tensor_parallel("reduce_scatter"),
            digest="74342eaceb6e2f0100b7e22f4dffb56eb8c04326881601004bf2b13be9225198",
        ),
        collective(
            f"{mappings}_gather_along_first_dim_moe",
            _expert("all_gather", "tp-ep"),
            digest="063bbf3c4b99e31220cb24f78481fd9d8415d377ab9d328ee429fba2ad51138e",
        ),
        collective(
            f"{mappings}_reduce_scatter_along_first_dim_moe",
            _expert("reduce_scatter", "tp-ep"),
            digest="58f024d2a7d2fade8a03802669d8cd7bb5b776d1538ec62fb805ae4bbaf39d26",
        ),
        collective(
            f"{mappings}_gather_along_first_dim_expert_parallel",
            _expert("all_gather", "ep"),
            digest="c018ed898461169f9091e5fb33b479b41738ed452c7b87198070b25fb492ae04",
        ),
        collective(
            f"{mappings}_AllToAll.forward",
            _all_to_all,
            digest="4e5ffbee168e2f3f20672f42e29e05d977851471503feb70eb2d9bfac1bccd18",
        ),
        collective(
            f"{buckets}start_grad_sync",
            _bucket("start_grad_sync"),
            digest="313a4bc55e2545ab96b8936f280c977be42e29b0af6cd550161859bd97239a03",
        ),
        collective(
            f"{buckets}finish_grad_sync",
            _bucket("finish_grad_sync"),
            digest="28e6f8bd043e2dc62ed509b159123e99e846160e6440ade33f8ba6a84e9b90eb",
        ),
        collective(
            f"{buckets}start_param_sync",
            _bucket("start_param_sync"),
            digest="cee3df4c826bf93c95f8a3c83daf6bbe80d0449050a2b34e3905f9202af207a7",
        ),
        collective(
            f"{buckets}finish_param_sync",
            _bucket("finish_param_sync"),
            digest="e1a5734e83d2f7b7227a4325106d0aadb5dea90783690e0b16d7b239cd08451d",
        ),
        collective(
            f"{finalize}_allreduce_layernorm_grads",
            _after_backward("layernorm_grads", "tp"),
            digest="d7ad1816fcf2c864b0d9459a6ff04ae6b5f85ee002cf46dd4cc6e0b5741a006b",
        ),
        collective(
            f"{finalize}_allreduce_embedding_grads",
            _after_backward("embedding_grads", "embedding"),
            digest="df53f62bd35910e1473972574841493518ba7d295efccc47589018530e9b6de3",
        ),
        wrap(
            "pipeline_parallel.p2p_communication:_communicate",
            _around("p2p", _p2p),
            digest="51f8c7e91c5ed933bbe91f5cf2b156a1ce6110921ca192588b370dc0ca9560cf",
        ),
        wrap(
            "pipeline_parallel.schedules:forward_step",
            _microbatch("forward"),
            digest="3671b70c03f77b31508c02b6c9fd703e91584a8749cde44a3bb41f460ad88157",
        ),
        wrap(
            "pipeline_parallel.schedules:backward_step",
            _microbatch("backward"),
            digest="fb28f134d32de759b2fa1acbb59c54584277b4d5723f7356a546a551b1f63e0b",
        ),
        wrap(
            f"{optimizer}MixedPrecisionOptimizer.step",
            _around("optimizer", _optimizer),
            digest="f196016306cac2922867450548af557abdcd4cfe19ae506d5925649b83f83e3c",
        ),
        wrap(
            f"{optimizer}FP32Optimizer.step",
            _around("optimizer", _optimizer),
            digest="f196016306cac2922867450548af557abdcd4cfe19ae506d5925649b83f83e3c",
        ),
        wrap(
            f"{optimizer}ChainedOptimizer.step",
            _around("optimizer", _optimizer),
            digest="2f08a4271a8faf95847a39158d37ec9ca718810b63112da2a0ff6751117849ca",
        ),
    ]
