"""Choice of the transport that carries each edge: ``--p2p-transport auto|shm|rdma|nixl|collective``.

All ranks exchange what each can use, and each computes the same ``Plan`` from it; so a transport that cannot
be used is refused on all of them, before training begins.
"""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.backends.current import current_device
from mt_megatron.comm import kinds
from mt_megatron.comm.bootstrap import Place, own_place
from mt_megatron.comm.collective import library_of
from mt_megatron.comm.errors import PeerLost, TransferTimeout, TransportUnavailable
from mt_megatron.comm.kinds import Setting
from mt_megatron.comm.per_edge import PerEdgeTransport
from mt_megatron.comm.shared_memory import native
from mt_megatron.comm.stage_exchange import StageExchange
from mt_megatron.comm.transport import Edge
from mt_megatron.errors import ConfigError, MtMegatronError
from mt_megatron.parallel import stage_order
from mt_megatron.seams import collectives
from mt_megatron.seams import transport as seam
from mt_megatron.seams.transport import AUTO, COLLECTIVE

_TRIED_BY_AUTO = ("shm", "rdma")
"""In this order. NIXL is taken where it is asked for: an installed wheel says nothing of its fabric."""

_MOST_NAMED = 8
"""Ranks of a refusal."""

_SECONDS = 600.0
"""Longest wait for a peer where the process group says none."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class Failure:
    """Why a rank could not make its channels."""

    kind: str | None
    """The transport that failed, if that is known."""

    why: str
    is_own: bool
    """False where a peer was lost or did not answer: its own failure says more."""


@dataclass(frozen=True)
class Rank:
    """Facts that one rank says of itself."""

    place: Place
    pipelines: tuple[tuple[int, ...], ...]
    """Global ranks of each pipeline that it is part of, in the pipeline's order."""

    loops: bool
    """True where the last stage sends to the first: there are several chunks per rank, and not in a V."""

    device: str
    """Type of the device that its tensors are on."""

    library: str
    """Of the pipeline's process group: ``gloo``, ``nccl`` ..."""

    unusable: dict[str, str] = field(default_factory=dict)
    """Transport -> why this rank cannot use it."""

    has_ring_helper: bool = True
    """True where shared memory's ring is in C here."""

    wish: str = AUTO
    """``--p2p-transport`` here."""

    token: str = ""
    """A name that nobody else has; that of rank 0 names what all ranks make."""


class Plan:
    """Transports of all edges, computed from what all ranks said."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        """Raises ConfigError, the same on all ranks, for a transport that was asked for by name and cannot be
        used, and for ranks that were asked for different ones."""
        self._ranks = ranks
        self._dropped: dict[tuple[int, ...], dict[str, str]] = {}
        wishes = {each.wish: each.place.rank for each in reversed(ranks)}
        if len(wishes) > 1:
            said = ", ".join(f"{wish} on rank {rank}" for wish, rank in sorted(wishes.items()))
            raise ConfigError(
                f"found different values of --p2p-transport ({said}); expected one. Give all ranks the same"
            )
        (self.wish,) = wishes
        self.pipelines = tuple(dict.fromkeys(chain.from_iterable(each.pipelines for each in ranks)))
        if self.wish not in (AUTO, COLLECTIVE):
            self._require()

    def drop(self, rank: int, kind: str | None, why: str) -> None:
        """Use ``kind`` (None: everything but collectives) no longer in the pipelines of ``rank``. Raises
        ConfigError where it was asked for by name."""
        if self.wish != AUTO:
            raise _refused(self.wish, f"rank {rank} on {self._ranks[rank].place.host}: {why}")
        for pipeline in self._ranks[rank].pipelines:
            dropped = self._dropped.setdefault(pipeline, {})
            for name in _TRIED_BY_AUTO if kind is None else (kind,):
                dropped.setdefault(name, f"rank {rank}: {why}")

    @property
    def rounds(self) -> int:
        """Attempts after which nothing but collectives is left in any pipeline, if every one fails."""
        return len(kinds.KINDS) + len(self.pipelines)

    def learn(self, failures: Mapping[int, Failure], attempt: int) -> None:
        """Leave out what ``failures`` of ranks say, in the round ``attempt`` from 0. After as many rounds as
        there are transports a pipeline that fails goes by collectives: pipelines may fail one at a time."""
        for rank, failure in failures.items():
            self.drop(rank, failure.kind if attempt < len(kinds.KINDS) else None, failure.why)

    def kind_of(self, edge: Edge) -> str:
        """The transport of ``edge``; the same for both directions."""
        return self._decided(edge.source, edge.target)[0]

    def is_upstreams(self, rank: int) -> bool:
        """True where collectives carry everything in all pipelines that ``rank`` may exchange with."""
        own = self._ranks[rank].pipelines
        overlap = any(len(each.pipelines) > 1 for each in self._ranks)
        return all(
            self._decided(*pair)[0] == COLLECTIVE
            for pipeline in (self.pipelines if overlap else own)
            for pair in self._pairs(pipeline)
        )

    def pairs(self) -> list[tuple[int, int]]:
        """Neighbouring ranks of all pipelines, each pair once."""
        return list(dict.fromkeys(chain.from_iterable(map(self._pairs, self.pipelines))))

    def counts(self) -> dict[str, int]:
        """Transport -> pairs of neighbouring ranks that it carries."""
        return dict(Counter(self._decided(*pair)[0] for pair in self.pairs()))

    def line(self) -> str:
        """Line for people that says what was decided."""
        found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for pair in self.pairs():
            found.setdefault(self._decided(*pair), []).append(pair)
        reasons: dict[str, list[str]] = {}
        for (kind, why), members in found.items():
            one = f"ranks {members[0][0]} and {members[0][1]}"
            where = one if len(members) == 1 else f"{len(members)} pairs, such as {one}"
            reasons.setdefault(kind, []).append(f"{where}: {why}")
        counts = self.counts()
        parts = [f"{kind} between {counts[kind]} ({'; '.join(whys)})" for kind, whys in reasons.items()]
        return f"p2p transport {self.wish}, neighbouring ranks: {', '.join(parts)}{self._helper()}"

    def _helper(self) -> str:
        """End of the line where ranks have the ring of shared memory in Python alone, three times as slow for
        small messages; else nothing."""
        plain = [each for each in self._ranks if not each.has_ring_helper]
        if not plain or "shm" not in self.counts():
            return ""
        where = f"rank {plain[0].place.rank} on {plain[0].place.host}"
        more = f" and {len(plain) - 1} more" if len(plain) > 1 else ""
        return (
            f"; shm in Python alone on {where}{more}: its C helper is missing, build it with: "
            "python -m mt_megatron.comm.shared_memory.native"
        )

    def _pairs(self, pipeline: tuple[int, ...]) -> list[tuple[int, int]]:
        return _pairs(pipeline, self._ranks[pipeline[0]].loops)

    def _require(self) -> None:
        # All hosts: who installs something on one of them would meet the next at the next start.
        ranks = dict.fromkeys(chain.from_iterable(self.pipelines))
        whys = [why for rank in ranks if (why := self._lacks(self.wish, rank)) is not None]
        if not whys:
            whys = [why for pair in self.pairs() if (why := self._why_not(self.wish, *pair)) is not None][:1]
        if whys:
            more = [f"{len(whys) - _MOST_NAMED} more"] if len(whys) > _MOST_NAMED else []
            raise _refused(self.wish, "; ".join([*whys[:_MOST_NAMED], *more]))

    def _lacks(self, name: str, rank: int) -> str | None:
        """Why ``rank`` cannot use a transport with anybody."""
        found = self._ranks[rank]
        why = found.unusable.get(name)
        return None if why is None else f"rank {found.place.rank} on {found.place.host}: {why}"

    def _decided(self, one: int, other: int) -> tuple[str, str]:
        """Transport of two ranks of a pipeline, and why."""
        if self.wish != AUTO:
            return self.wish, "asked for"
        for rank in (self._ranks[one], self._ranks[other]):
            if rank.device != "cpu" and rank.library != "gloo":
                return COLLECTIVE, f"{rank.library} moves {rank.device} tensors past the host's memory"
        reasons: list[str] = []
        for name in _TRIED_BY_AUTO:
            why = self._why_not(name, one, other)
            if why is None:
                return name, "same host" if name == "shm" else "; ".join(reasons)
            reasons.append(f"no {name}: {why}")
        return COLLECTIVE, "; ".join(reasons)

    def _why_not(self, name: str, one: int, other: int) -> str | None:
        ranks = self._ranks[one], self._ranks[other]
        for rank in (one, other):
            why = self._lacks(name, rank)
            if why is not None:
                return why
        for pipeline in ranks[0].pipelines:
            if other in pipeline and name in self._dropped.get(pipeline, {}):
                return self._dropped[pipeline][name]
        return kinds.KINDS[name].why_not_between(ranks[0].place, ranks[1].place)


def _pairs(pipeline: Sequence[int], loops: bool) -> list[tuple[int, int]]:
    """Neighbours, each pair once; where it ``loops`` the last and the first are neighbours too."""
    way = [*pipeline, pipeline[0]] if loops else pipeline
    return list(dict.fromkeys((min(pair), max(pair)) for pair in zip(way, way[1:], strict=False)))


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"found --p2p-transport {name}, which cannot be used here: {why}; expected a transport that works "
        f"between all neighbouring ranks of each pipeline. Take --p2p-transport {AUTO}, which falls back "
        f"where it must, or {COLLECTIVE}"
    )


def choose(text: str | None, *, say: Say | None = None) -> None:
    """Let transfers of process groups that are made from now on go by ``text``; ``collective``: by
    Megatron-Core's own way, once all ranks agreed on that; None: by that way, without asking the others.

    ``say`` gets the line that tells what was decided, on rank 0; None: it is written to stderr. Raises
    ConfigError for an unknown name. Making process groups then raises ConfigError, on all ranks, where the
    choice cannot be used.
    """
    if text is None:
        seam.choose(None)
    else:
        seam.choose(partial(_open, seam.check(text), _to_stderr if say is None else say))


def _to_stderr(line: str) -> None:
    print(f"mt-megatron: {line}", file=sys.stderr, flush=True)


def _open(text: str, say: Say) -> StageExchange | None:
    """Agree with all ranks and make this rank's channels. Collective over the default group."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        if text in (AUTO, COLLECTIVE):
            return None
        raise ConfigError(
            f"found --p2p-transport {text} without a pipeline; expected a pipeline parallel size above 1, "
            f"since one stage sends nothing. Leave it out, take {AUTO}, or raise "
            "--pipeline-model-parallel-size"
        )
    groups = parallel_state.get_pipeline_model_parallel_group()
    groups = groups if isinstance(groups, list) else [groups]
    device, own = current_device(), dist.get_rank()
    ranks: list[Rank] = _gathered(_this_rank(text, groups, device))
    plan = Plan(ranks)
    if plan.wish == COLLECTIVE:
        seam.decided(plan.counts())
        return None
    failures: dict[int, Failure] = {}
    for attempt in range(plan.rounds):
        made = (
            None if plan.is_upstreams(own) else _Channels(plan, groups, device, f"{ranks[0].token}/{attempt}")
        )
        # A transport that cannot be made is known before anybody waits for a peer's.
        failures = _failures(None if made is None else made.make())
        if not failures:
            failures = _failures(None if made is None else made.prepare())
        if not failures:
            seam.decided(plan.counts())
            if own == 0:
                say(plan.line())
            return None if made is None else made.exchange
        if made is not None:
            made.exchange.abandon()
            made.exchange.close()
        plan.learn(failures, attempt)
    failed = "; ".join(f"rank {rank}: {failure.why}" for rank, failure in failures.items())
    raise MtMegatronError(
        f"channels between neighbouring ranks could not be made ({failed}); take --p2p-transport collective"
    )


class _Channels:
    """Channels of this rank, while they are made."""

    def __init__(self, plan: Plan, groups: list[Any], device: torch.device, name: str) -> None:
        seconds = _seconds(groups[0], device)
        makes = {
            kind: partial(kinds.KINDS[kind].make, Setting(groups, device, f"{kind}/{name}", seconds))
            for kind in kinds.KINDS
        }
        self._transport = PerEdgeTransport(makes, plan.kind_of)
        self.exchange = StageExchange(self._transport, device)

    def make(self) -> Failure | None:
        return self._tried(self._transport.make)

    def prepare(self) -> Failure | None:
        failure = self._tried(self._transport.prepare)
        if failure is not None:
            # Peers that wait for this rank's channels learn of it.
            self.exchange.abandon()
        return failure

    def _tried(self, do: Callable[[set[Edge]], None]) -> Failure | None:
        """Failure of ``do``, and why; None: none."""
        try:
            do(self.exchange.edges())
        except TransportUnavailable as error:
            return Failure(self._transport.preparing, error.reason, is_own=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait to hear of it
            is_own = not isinstance(error, (PeerLost, TransferTimeout))
            return Failure(self._transport.preparing, f"{type(error).__name__}: {error}", is_own)
        return None


def _seconds(group: Any, device: torch.device) -> float:
    """Time-out of ``group``, so that a rank that hangs is noticed no later than by a collective."""
    options = getattr(group._get_backend(device), "options", None)
    limit = getattr(options, "_timeout", None)
    return _SECONDS if limit is None else limit.total_seconds()


def _failures(own: Failure | None) -> dict[int, Failure]:
    """By rank, those of all ranks, without what is a consequence of another's. Collective."""
    found = {rank: each for rank, each in enumerate(_gathered(own)) if each is not None}
    causes = {rank: each for rank, each in found.items() if each.is_own}
    return causes or found


def _this_rank(text: str, groups: Sequence[Any], device: torch.device) -> Rank:
    from megatron.core import parallel_state

    unusable = {name: kinds.why_not(name) for name in kinds.KINDS}
    return Rank(
        place=own_place(dist.get_rank()),
        pipelines=tuple(tuple(dist.get_process_group_ranks(group)) for group in groups),
        loops=parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
        and not stage_order.is_v(),
        device=device.type,
        library=library_of(groups[0], device),
        unusable={name: why for name, why in unusable.items() if why is not None},
        has_ring_helper=not isinstance(native.load(), str),
        wish=text,
        token=uuid.uuid4().hex,
    )


def _gathered(own: Any) -> list[Any]:
    """``own`` of every rank, in their order."""
    every: list[Any] = [None] * dist.get_world_size()
    with collectives.announced("all_gather_object", "world", None):
        dist.all_gather_object(every, own)
    return every
