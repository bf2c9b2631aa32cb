"""Collectives inside upstream functions that do more than communicate: the event is around the call alone.

A module of upstream's that reduces in the middle of its work sees a ``torch`` whose ``torch.distributed``
announces the call. Gradient and parameter buckets are announced where their collectives are issued together,
and where somebody waits for them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mt_megatron.parallel.group_names import name_of
from mt_megatron.seams import collectives, events

CALLS = ("all_reduce", "broadcast")


class _Announcing(ModuleType):
    """What Megatron's modules see as ``torch``, with ``CALLS`` of its ``distributed`` as events.

    Asked at every access: a backend that redirects gives those modules a view of its own, and may do so
    after this was made.
    """

    def __getattr__(self, name: str) -> Any:
        torch = _seen_by_megatron()
        return self.__dict__["announced"] if name == "distributed" else getattr(torch, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_seen_by_megatron(), name, value)

    def __dir__(self) -> list[str]:
        return dir(_seen_by_megatron())


class _AnnouncingDistributed(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(_seen_by_megatron().distributed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_seen_by_megatron().distributed, name, value)

    def __dir__(self) -> list[str]:
        return dir(_seen_by_megatron().distributed)


def _seen_by_megatron() -> Any:
    # Every module that is given the view imports this one, which communicates nowhere.
    return sys.modules["megatron.core.parallel_state"].__dict__["torch"]


def announcing(torch: Any) -> Any:
    """``torch`` for a module of Megatron's whose blocking ``CALLS`` shall be events."""
    distributed = _AnnouncingDistributed("torch.distributed")
    distributed.__dict__.update({op: _call(op) for op in CALLS})
    view = _Announcing("torch")
    view.__dict__["announced"] = distributed
    return view


def _call(op: str) -> Callable[..., Any]:
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        original = getattr(_seen_by_megatron().distributed, op)
        if not events.listening():
            return original(tensor, *args, **kwargs)
        group = kwargs.get("group")
        with collectives.announced(op, name_of(group), group, tensor):
            return original(tensor, *args, **kwargs)

    return call


_bucket = threading.local()


def start_sync(op: str, data: str) -> Callable[..., Any]:
    """Body for a ``start_..._sync`` of a group of buckets, whose ``data`` is what is exchanged."""

    def body(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if not events.listening():
            return original(self, *args, **kwargs)
        size = collectives.size_of(*(getattr(bucket, data) for bucket in self.buckets))
        # A gather is given the own part.
        _bucket.begins = op, size // (self.data_parallel_world_size if data == "param_data" else 1)
        try:
            return original(self, *args, **kwargs)
        finally:
            _bucket.begins = None

    return body


def announcing_coalesced(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_coalescing_manager`` that announces what a bucket's start issues within it."""

    @contextmanager
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        begins = getattr(_bucket, "begins", None)
        if begins is None or group is None or group.size() == 1 or not events.listening():
            with original(group, device, async_ops) as works:
                yield works
            return
        attrs = collectives.described(begins[0], name_of(group), group, begins[1])
        stage = {"asynchronous": "start"} if async_ops else {}
        with events.span("collective", **attrs, **stage), original(group, device, async_ops) as works:
            yield _Awaited(works, attrs) if async_ops else works

    return manager


class _Awaited:
    """The handle of a bucket's collectives; waiting for it is an event."""

    def __init__(self, works: Any, attrs: dict[str, Any]) -> None:
        self._works = works
        self._attrs = {**attrs, "op": attrs["op"].replace("start", "finish")}

    def wait(self) -> None:
        with collectives.part(self._attrs, "wait"):
            self._works.wait()


_EVEN = ("send_next", "recv_prev", "send_prev", "recv_next")
_ODD = ("recv_prev", "send_next", "recv_next", "send_prev")
"""Order of ``_p2p_ops``'s handles, by the stage's number."""


def awaited_transfers(handles: list[Any], attrs: dict[str, Any]) -> list[Any]:
    """The handles of transfers that were only started; waiting for one is a ``p2p`` event of its own."""
    from megatron.core import parallel_state

    made = [key for key in _EVEN if attrs[key]]
    if len(made) != len(handles) or len(made) != len(attrs["transfers"]):
        return handles  # A stage with several neighbours on one side: which handle is whose is not known.
    of = dict(zip(made, attrs["transfers"], strict=True))
    order = _ODD if parallel_state.get_pipeline_model_parallel_rank() % 2 else _EVEN
    return [
        _AwaitedTransfer(handle, attrs, of[key])
        for handle, key in zip(handles, (key for key in order if key in of), strict=True)
    ]


class _AwaitedTransfer:
    def __init__(self, work: Any, attrs: dict[str, Any], transfer: collectives.Transfer) -> None:
        self._work = work
        self._attrs = {
            "group": attrs["group"],
            "ranks": attrs["ranks"],
            "bytes": transfer[3] if transfer[0] == "send" else 0,
            "transfers": (transfer,),
            "asynchronous": "wait",
        }

    def wait(self, *args: Any) -> Any:
        with events.span("p2p", **self._attrs):
            return self._work.wait(*args)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def before_sum(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Body for a part of the vocabulary-parallel cross-entropy that a sum over the ranks follows."""
    after_sum_ends()
    result = original(*args, **kwargs)
    if len(result) > 2:
        # Logits, labels, and the maximum, which has been reduced by now.
        from mt_megatron.seams.taps import loss as taps

        taps.highest_logits(args[2])
    if events.listening() and not _compiling():
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() > 1:
            # Either the maximum, or the label's logit and the sum, which upstream sums one after another.
            given = (result[1],) if len(result) == 2 else (result[2], result[3])
            size = collectives.size_of(*given)
            _bucket.summing = True
            events.begin("collective", **collectives.described("all_reduce", "tp", group, size))
    return result


def after_sum(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Body for the part after the last of these sums."""
    after_sum_ends()
    result = original(*args, **kwargs)
    from mt_megatron.seams.taps import loss as taps

    taps.summed_exponentials(args[2], result[1])
    return result


def after_sum_ends() -> None:
    """End the event that ``before_sum`` began."""
    if events.listening() and not _compiling() and getattr(_bucket, "summing", False):
        _bucket.summing = False
        events.end("collective")


def _compiling() -> bool:
    import torch

    return torch.compiler.is_compiling()
