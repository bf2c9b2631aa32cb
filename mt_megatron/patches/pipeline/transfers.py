"""Transfers between stages go over the transport that ``seams.transport`` has, if it has one.

A transport is opened when process groups were made and closed before they end, so that ranks agree on it
before training begins. Without one, upstream's functions are called after one check.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch
from mt_megatron.seams import transport

_P2P = "megatron.core.pipeline_parallel.p2p_communication:"
_STATE = "megatron.core.parallel_state:"


def _communicate(original: Callable[..., Any], **kwargs: Any) -> Any:
    exchange = transport.installed()
    if exchange is None:
        return original(**kwargs)
    return exchange.communicate(**kwargs)


def _communicate_shapes(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    exchange = transport.installed()
    if exchange is None:
        return original(*args, **kwargs)
    return exchange.communicate_shapes(*args, **kwargs)


def _get_forward_backward_func(original: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    upstream = original()
    return upstream if transport.installed() is None else partial(_one_step, upstream)


def _one_step(upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Of now: groups may have been made again since the function was asked for.
    exchange = transport.installed()
    if exchange is None:
        return upstream(*args, **kwargs)
    try:
        reports = upstream(*args, **kwargs)
        exchange.finish()
    except BaseException as error:
        # The peers learn of it at once, and wait no longer.
        exchange.abandon(error)
        raise
    return reports


def _initialize_model_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)
    transport.groups_made()


def _destroy_model_parallel(original: Callable[[], None]) -> None:
    transport.close()
    original()


def patches(backend: Backend) -> list[Patch]:
    def wrap(
        name: str, target: str, reason: str, body: Callable[..., Any], digest: str, *after: str
    ) -> Patch:
        return Patch(
            id=f"transfers.{name}",
            target=target,
            kind="wrap",
            feature="pipeline",
            reason=reason,
            body=body,
            digest=digest,
            after=after,
        )

    return [
        wrap(
            "communicate",
            f"{_P2P}_communicate",
            "upstream sends by collectives alone; without a chosen transport it does as before",
            _communicate,
            "06496297fd6b5d6f42f37103dcf5b4c86c9b071ab099ad20b57dc3a218b5b669",
        ),
        wrap(
            "communicate_shapes",
            f"{_P2P}_communicate_shapes",
            "shapes go the way of the tensors; without a chosen transport it does as before",
            _communicate_shapes,
            "95486e2c8a32668b5548a252594c57d59154b7fe67ff4f7b699bfcfa7d5e3c87",
        ),
        wrap(
            "step",
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            "a step of upstream's ends when the transport has sent everything",
            _get_forward_backward_func,
            "821ba5e9d88d38b49d4dec08c9f75fe77b3811de48678917a2f14df8a4794230",
        ),
        wrap(
            "open",
            f"{_STATE}initialize_model_parallel",
            "all ranks are here: the one moment at which they can agree on a transport before training",
            _initialize_model_parallel,
            "35db5de0f1a2cad23ad9ae97e8c4b8f6acc2c6c8d34316a038493d626f1773e1",
        ),
        wrap(
            "close",
            f"{_STATE}destroy_model_parallel",
            "a transport ends before the process groups whose ranks it connects",
            _destroy_model_parallel,
            "2e17a04aa396c4f23415e19ad10a3f6ac5a2d4b855c40dce8bb565e841395bd4",
        ),
    ]
