"""Data on the way between two ranks: attempts that are lost and made again, values that arrive changed.

While a wire is open, torch's communication functions are wrapped wherever Megatron-Core and this package
hold them, and so are the transports of ``comm``; when the last one is closed, every name is bound to the
original again.

Which operations lose an attempt follows from the wire's seed and the number of the operation on its edge
or in its group, which all sides count alike: they agree without a message.

Left alone: control figures (float64), integers and objects, whose loss would be of the program and not of
the model.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_megatron.parallel.group_names import megatron_groups
from mt_megatron.scope.lab.random_numbers import key_of
from mt_megatron.seams import transport as seam

Source = int | None
"""Global rank that a part of a result came from; None: a sum over all."""


@dataclass(kw_only=True)
class Wire:
    """One perturbed link, as one rank sees it. Members of a group that are no end take part in
    repetitions."""

    rank: int
    ends: tuple[int, int]
    group: str | None = None
    """As ``specification.Perturbation.group``."""

    offset: float | None = None
    """Added to what arrives at either end from the other; of sums, to the sum."""

    lost: int = 0
    """Attempts that are lost before the one that arrives."""

    rate: float = 0.0
    """Share of the operations that lose any."""

    timeout: float = 0.0
    """Seconds until a lost attempt is noticed."""

    seed: int = 0
    name: str = ""
    on: bool = False
    dropped: int = 0
    """Attempts that were lost so far."""

    arrived: int = 0
    """Tensors that arrived changed so far."""

    _counts: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    @property
    def peer(self) -> int | None:
        """The other end; None for a rank that is no end."""
        return self.ends[1 - self.ends.index(self.rank)] if self.rank in self.ends else None

    def joins(self, ranks: Sequence[int]) -> bool:
        """Whether collectives of a group of these ranks go over the link."""
        if set(ranks) == set(self.ends):
            return True
        if self.group is None or not set(self.ends) <= set(ranks):
            return False
        if self.group == "world":
            return len(ranks) == dist.get_world_size()
        held = megatron_groups().get(self.group)
        return held is not None and dist.get_process_group_ranks(held) == list(ranks)

    def attempts_lost(self, *edge: Any) -> int:
        """How many attempts the next operation on ``edge`` loses; counts it."""
        if not self.lost:
            return 0
        number = self._counts[edge]
        self._counts[edge] += 1
        drawn = key_of(self.seed, "lost", self.name, *edge, number) >> 11
        lost = self.lost if drawn < round(self.rate * 2**53) else 0
        self.dropped += lost
        return lost

    def add_to(self, tensor: Tensor) -> None:
        """Change what has arrived, where there is an offset."""
        if self.offset is not None:
            self.arrived += 1
            with torch.no_grad():
                tensor.data.add_(self.offset)


_wires: tuple[Wire, ...] = ()
_changing = threading.Lock()
_inside = threading.local()
_bound: list[tuple[dict[str, Any], str, Any, Any]] = []
"""Namespace, name, original, what stands there now."""


def open_wire(wire: Wire) -> Callable[[], None]:
    """Let ``wire`` perturb what goes over it from now on (while it is ``on``); what is returned ends it."""
    global _wires
    with _changing:
        if not _wires:
            _wrap_all()
        _wires = (*_wires, wire)
    left = [wire]

    def close() -> None:
        global _wires
        with _changing:
            if not left:
                return
            left.clear()
            _wires = tuple(each for each in _wires if each is not wire)
            if not _wires:
                _unwrap_all()

    return close


# What stands in torch's functions' place.

_COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "_all_gather_base",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "all_to_all_single",
)


def _wrap_all() -> None:
    c10d = dist.distributed_c10d
    wrapped: dict[int, tuple[Any, Any]] = {}
    for name in _COLLECTIVES:
        original = getattr(dist, name, None)
        if original is not None and id(original) not in wrapped:
            wrapped[id(original)] = original, _collective(name, original)
    for name, make in (("isend", _isend), ("irecv", _irecv), ("batch_isend_irecv", _batch)):
        original = getattr(dist, name)
        wrapped[id(original)] = original, make(original)
    for key, module in sys.modules.copy().items():
        if (
            module is not c10d
            and module is not dist
            and key.partition(".")[0] not in ("megatron", "mt_megatron")
        ):
            continue
        names = vars(module)
        if names.get("__name__") == __name__:
            continue
        for name, value in list(names.items()):
            found = wrapped.get(id(value))
            if found is not None and found[0] is value:
                _bind(names, name, found[1])
            elif name == "_coalescing_manager" and key.startswith("megatron."):
                _bind(names, name, _coalescing(value))
    exchange = seam.installed()
    if exchange is not None:
        _bind(vars(exchange), "transport", _Transport(exchange.transport))


def _bind(names: dict[str, Any], name: str, value: Any) -> None:
    _bound.append((names, name, names[name], value))
    names[name] = value


def _unwrap_all() -> None:
    while _bound:
        names, name, original, value = _bound.pop()
        if names.get(name) is value:
            names[name] = original


def _acting() -> list[Wire]:
    return [wire for wire in _wires if wire.on] if not getattr(_inside, "deep", False) else []


@contextmanager
def _within() -> Iterator[None]:
    """Within it the wrapped functions do what the original ones do: torch's call one another."""
    before = getattr(_inside, "deep", False)
    _inside.deep = True
    try:
        yield
    finally:
        _inside.deep = before


def _collective(name: str, original: Any) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        wires = _acting()
        if not wires:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        group = given.arguments.get("group") or dist.group.WORLD
        if dist.get_rank(group) < 0:
            return original(*args, **kwargs)
        ranks = dist.get_process_group_ranks(group)
        values = list(given.arguments.values())
        is_data = _is_data(values[0]) and not _is_flag(values[0], given.arguments.get("op"))
        wires = [wire for wire in wires if is_data and wire.joins(ranks)]
        if not wires:
            return original(*args, **kwargs)
        coalesced = group in dist.distributed_c10d._world.pg_coalesce_state
        with _within():
            for wire in wires:
                for _ in range(wire.attempts_lost(name, *ranks)):
                    if not coalesced:
                        _lost_attempt(original, signature, args, kwargs)
                    time.sleep(wire.timeout)
            result = original(*args, **kwargs)

        def arrived() -> None:
            for wire in wires:
                if wire.offset is not None and wire.peer is not None:
                    for part, source in _arrivals(name, given.arguments, values, ranks):
                        if source in (None, wire.peer):
                            wire.add_to(part)

        collected = getattr(_inside, "collected", None)
        if coalesced and collected is not None:
            collected.append(arrived)
            return result
        return _after(result, arrived)

    return call


def _lost_attempt(original: Any, signature: inspect.Signature, args: Any, kwargs: Any) -> None:
    """The operation on copies, whose results nobody sees."""
    given = signature.bind(*args, **kwargs)
    for key, value in given.arguments.items():
        if isinstance(value, Tensor):
            given.arguments[key] = value.detach().clone()
        elif isinstance(value, list) and value and isinstance(value[0], Tensor):
            given.arguments[key] = [each.detach().clone() for each in value]
    if "async_op" in signature.parameters:
        given.arguments["async_op"] = False
    original(*given.args, **given.kwargs)


def _arrivals(
    name: str, arguments: dict[str, Any], values: list[Any], ranks: Sequence[int]
) -> Iterator[tuple[Tensor, Source]]:
    """Parts of a collective's result and the ranks that they came from."""
    output = values[0]
    if name == "broadcast":
        source = arguments.get("src")
        source = ranks[arguments["group_src"]] if source is None else source
        yield output, source
    elif name == "all_gather":
        yield from zip(output, ranks, strict=True)
    elif name in ("all_gather_into_tensor", "all_gather_single", "_all_gather_base"):
        yield from zip(output.view(-1).chunk(len(ranks)), ranks, strict=True)
    elif name == "all_to_all_single":
        sizes = arguments.get("output_split_sizes")
        sizes = [output.shape[0] // len(ranks)] * len(ranks) if not sizes else list(sizes)
        yield from zip(output.split(sizes), ranks, strict=True)
    else:
        yield output, None


def _isend(original: Any) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def isend(*args: Any, **kwargs: Any) -> Any:
        wires = _acting()
        given = signature.bind(*args, **kwargs).arguments if wires else {}
        target = _peer(given, "dst") if wires else -1
        wires = [wire for wire in wires if wire.peer == target and _is_data(given["tensor"])]
        lost = []
        with _within():
            for wire in wires:
                for _ in range(wire.attempts_lost("edge", wire.rank, target, given.get("tag", 0))):
                    lost.append(original(*args, **kwargs))
            work = original(*args, **kwargs)
        return work if not lost else _Then(work, lambda: [each.wait() for each in lost if each is not None])

    return isend


def _irecv(original: Any) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def irecv(*args: Any, **kwargs: Any) -> Any:
        wires = _acting()
        given = signature.bind(*args, **kwargs) if wires else None
        source = -1 if given is None else _peer(given.arguments, "src")
        wires = [wire for wire in wires if wire.peer == source and _is_data(given.arguments["tensor"])]  # type: ignore[union-attr]
        if not wires or given is None:
            return original(*args, **kwargs)
        tensor, lost, until = given.arguments["tensor"], [], 0.0
        with _within():
            for wire in wires:
                count = wire.attempts_lost("edge", source, wire.rank, given.arguments.get("tag", 0))
                until = max(until, time.perf_counter() + count * wire.timeout if count else 0.0)
                for _ in range(count):
                    given.arguments["tensor"] = torch.empty_like(tensor)
                    lost.append((original(*given.args, **given.kwargs), given.arguments["tensor"]))
            work = original(*args, **kwargs)

        def arrived() -> None:
            for attempt, _ in lost:
                if attempt is not None:
                    attempt.wait()
            time.sleep(max(0.0, until - time.perf_counter()))
            for wire in wires:
                wire.add_to(tensor)

        batch = getattr(_inside, "batch", None)
        if batch is not None:
            batch.append(arrived)
        return _Then(work, arrived)

    return irecv


def _batch(original: Any) -> Callable[..., Any]:
    def batch_isend_irecv(operations: Any) -> Any:
        if not _acting():
            return original(operations)
        outer, _inside.batch = getattr(_inside, "batch", None), []
        try:
            works = original(operations)
            arrivals = _inside.batch
        finally:
            _inside.batch = outer
        if not arrivals or any(isinstance(work, _Then) for work in works):
            return works
        # A library that starts them together has one handle for all.
        first, *others = works
        return [_Then(first, lambda: [each() for each in arrivals]), *others]

    return batch_isend_irecv


def _coalescing(original: Any) -> Callable[..., Any]:
    """A manager for gradients' and parameters' buckets, whose operations begin when it ends."""

    @contextmanager
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        if not _acting():
            with original(group, device, async_ops) as works:
                yield works
            return
        outer, _inside.collected = getattr(_inside, "collected", None), []
        try:
            with original(group, device, async_ops) as works:
                arrivals = _inside.collected
                yield _Then(works, lambda: [each() for each in arrivals]) if async_ops else works
        finally:
            _inside.collected = outer
        if not async_ops:
            for each in arrivals:
                each()

    return manager


class _Then:
    """The handle of an operation, and what is left to do once it is over."""

    def __init__(self, work: Any, then: Callable[[], Any]) -> None:
        self._work = work
        self._then: Callable[[], Any] | None = then

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._work.wait(*args, **kwargs) if self._work is not None else None
        then, self._then = self._then, None
        if then is not None:
            then()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Transport:
    """A transport whose messages over perturbed links are sent again or arrive changed."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def post_send(self, edge: Any, tensor: Tensor, **options: Any) -> Any:
        wires = [wire for wire in _acting() if wire.peer == edge.target and _is_data(tensor)]
        # Some edges are carried by torch's functions, which are wrapped as well.
        with _within():
            for wire in wires:
                for _ in range(wire.attempts_lost("edge", edge.source, edge.target, edge.lane)):
                    self._transport.post_send(edge, tensor, **options)
            return self._transport.post_send(edge, tensor, **options)

    def post_recv(self, edge: Any, shape: Any, dtype: torch.dtype, **options: Any) -> Any:
        wires = [wire for wire in _acting() if wire.peer == edge.source and _is_type(dtype)]
        lost, until = [], 0.0
        with _within():
            for wire in wires:
                count = wire.attempts_lost("edge", edge.source, edge.target, edge.lane)
                until = max(until, time.perf_counter() + count * wire.timeout if count else 0.0)
                without = {key: value for key, value in options.items() if key != "out"}
                lost += [self._transport.post_recv(edge, shape, dtype, **without) for _ in range(count)]
            receiving = self._transport.post_recv(edge, shape, dtype, **options)
        return receiving if not wires else _Receiving(receiving, lost, until, wires)


class _Receiving:
    def __init__(self, receiving: Any, lost: list[Any], until: float, wires: list[Wire]) -> None:
        self._receiving = receiving
        self._lost = lost
        self._until = until
        self._wires = wires

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiving, name)

    def wait(self, timeout: float | None = None) -> Tensor:
        with _within():
            for each in self._lost:
                each.wait(timeout)
            self._lost = []
            time.sleep(max(0.0, self._until - time.perf_counter()))
            tensor: Tensor = self._receiving.wait(timeout)
        for wire in self._wires:
            wire.add_to(tensor)
        return tensor

    def lease(self, timeout: float | None = None) -> Any:
        from mt_megatron.comm.transport import Owned

        # Changed in memory of its own: what lies in a ring is the sender's.
        return Owned(self.wait(timeout))


def _peer(arguments: dict[str, Any], name: str) -> int:
    peer = arguments.get(name)
    if peer is None:
        group: Any = arguments.get("group") or dist.group.WORLD
        return int(dist.get_global_rank(group, arguments[f"group_{name}"]))
    return int(peer)


def _is_data(value: Any) -> bool:
    tensor = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(tensor, Tensor) and _is_type(tensor.dtype)


def _is_flag(value: Any, operation: Any) -> bool:
    """True for a maximum of one number, as which optimizers agree on infinite gradients."""
    of_one = isinstance(value, Tensor) and value.numel() == 1
    return of_one and operation in (dist.ReduceOp.MAX, dist.ReduceOp.MIN)


def _is_type(dtype: torch.dtype) -> bool:
    return bool(dtype.is_floating_point) and dtype is not torch.float64


def _after(result: Any, then: Callable[[], None]) -> Any:
    if result is None:
        then()
        return None
    return _Then(result, then)
