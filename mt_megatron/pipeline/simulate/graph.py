"""What every computation, transfer and reduction of a schedule waits for, as nodes in topological order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ConfigError
from ..actions import Action, Call, Kind, Schedule, computations, matching_send, transfer_out, transfers_in
from .costs import Edge

_SENDS = (Kind.SEND_F, Kind.SEND_B)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


@dataclass
class Node:
    """Something that takes time, and what must be over before it begins."""

    action: Action
    rank: int
    after: int = 0
    """The rank's computation before; of a transfer the one that it sends."""

    arrival: int = 0
    """A computation's message; the transfer before on the same edge; the rank's reduction before."""

    arrival_edge: Edge | None = None
    """Edge whose latency comes on top of the end of ``arrival``."""

    posted: int = 0
    """The receiving rank's last node before the RECV of a transfer; 0 where the receiver always has room."""

    edge: Edge | None = None
    """Of a transfer."""

    waits: bool = False
    """Takes no time: the end of one transfer of a blocking exchange."""


def nodes_of(
    schedule: Schedule,
    calls: Sequence[Sequence[Call]] | None,
    *,
    rendezvous: bool,
    reduce_early: bool,
    links: bool,
) -> list[Node]:
    """Nodes so that each comes after those that it waits for; the first is the step's start. ``calls``: what
    the ranks do where exchanges block them; None: the schedule's own actions, SENDs and REDUCEs made for it
    where it has none. Without ``links`` messages are no nodes. Raises ConfigError as ``Program``."""
    if calls is None:
        calls = schedule.ranks if schedule.is_lowered else _sending(schedule)
    graph = _Graph(schedule, links)
    for rank, own in enumerate(calls):
        graph.add_rank(rank, own if _reduces(own) else _reducing(own, reduce_early))
    graph.connect(rendezvous)
    return _ordered(graph.nodes)


def _sending(schedule: Schedule) -> list[list[Call]]:
    """Computations, each with the SEND of its result after it."""
    made: list[list[Call]] = []
    for actions in computations(schedule):
        out: list[Call] = []
        for action in actions:
            out.append(action)
            send = transfer_out(schedule.placement, action)
            if send is not None and not (schedule.forward_only and send.kind is Kind.SEND_B):
                out.append(send)
        made.append(out)
    return made


def _reduces(calls: Sequence[Call]) -> bool:
    return any(isinstance(call, Action) and call.kind is Kind.REDUCE for call in calls)


def _reducing(calls: Sequence[Call], early: bool) -> list[Call]:
    """``calls`` with a REDUCE after the last gradients of each stage, or of the rank."""
    last = {
        call.stage: index
        for index, call in enumerate(calls)
        if isinstance(call, Action) and call.kind in (Kind.B, Kind.W)
    }
    made: list[Call] = []
    for index, call in enumerate(calls):
        made.append(call)
        if early and isinstance(call, Action) and last.get(call.stage) == index:
            made.append(Action(Kind.REDUCE, call.stage, -1))
    if not early:
        made += [Action(Kind.REDUCE, stage, -1) for stage in sorted(last, reverse=True)]
    return made


class _Graph:
    """Nodes while ranks are added one after another."""

    def __init__(self, schedule: Schedule, links: bool) -> None:
        self.nodes = [Node(Action(Kind.F, -1, -1), -1)]
        self._schedule, self._links = schedule, links
        self._computed: set[Action] = set()
        self._sent: dict[Action, int] = {}
        self._waiting: list[tuple[int, Action]] = []
        """Nodes that wait for a message, with its SEND."""
        self._posted: dict[Action, int] = {}
        """Of each SEND the receiver's last node before the RECV."""

    def add_rank(self, rank: int, calls: Sequence[Call]) -> None:
        previous = reduced = 0
        on_edge: dict[Edge, int] = defaultdict(int)
        for call in calls:
            if not isinstance(call, Action):
                previous = self._exchange(rank, call, previous, on_edge)
            elif call.kind.computes:
                self._check_local(rank, call)
                previous = self._add(Node(call, rank, previous))
                self._computed.add(call)
                if (receive := transfers_in(self._schedule.placement, call)) is not None:
                    self._waiting.append((previous, matching_send(receive)))
            elif call.kind in _RECEIVES:
                self._posted[matching_send(call)] = previous
            elif call.kind in _SENDS:
                self._send(rank, call, previous, on_edge)
            else:
                reduced = self._add(Node(call, rank, previous, reduced))

    def connect(self, rendezvous: bool) -> None:
        """Let computations wait for their messages, and with ``rendezvous`` transfers for their RECVs."""
        for index, send in self._waiting:
            node = self.nodes[index]
            if send not in self._sent:
                raise ConfigError(f"{node.action} on rank {node.rank} waits for {send}, which no rank sends")
            node.arrival = self._sent[send]
            node.arrival_edge = self.nodes[node.arrival].edge
        if rendezvous:
            for send, index in self._sent.items():
                self.nodes[index].posted = self._posted.get(send, 0)

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _send(self, rank: int, send: Action, previous: int, on_edge: dict[Edge, int]) -> int:
        if not self._links:
            self._sent[send] = previous
            return previous
        stage = send.stage + (1 if send.kind is Kind.SEND_F else -1)
        edge = rank, self._schedule.placement.rank(stage)
        on_edge[edge] = self._sent[send] = self._add(Node(send, rank, previous, on_edge[edge], edge=edge))
        return on_edge[edge]

    def _exchange(self, rank: int, call: tuple[Action, ...], previous: int, on_edge: dict[Edge, int]) -> int:
        """The end of all transfers of ``call``; those that have not begun begin when both sides have come."""
        ends: list[Node] = []
        for action in call:
            if action.kind in _SENDS:
                begun = self._sent.get(action)
                sent = self._send(rank, action, previous, on_edge) if begun is None else begun
                ends.append(Node(action, rank, arrival=sent, waits=True))
            else:
                self._posted.setdefault(matching_send(action), previous)
                ends.append(Node(action, rank, waits=True))
        for node in ends:
            node.after = previous
            previous = self._add(node)
            if node.action.kind in _RECEIVES:
                self._waiting.append((previous, matching_send(node.action)))
        return previous

    def _check_local(self, rank: int, action: Action) -> None:
        """Raise unless what ``action`` needs of its own rank came before it."""
        kind, stage, microbatch = action
        needs = (
            [Action(Kind.B if kind is Kind.W else Kind.F, stage, microbatch)] if kind is not Kind.F else []
        )
        other = stage - 1 if kind is Kind.F else stage + 1
        if kind is not Kind.W and 0 <= other < self._schedule.placement.stages:
            needs.append(Action(kind, other, microbatch))
        for need in needs:
            if self._schedule.placement.rank(need.stage) == rank and need not in self._computed:
                raise ConfigError(
                    f"rank {rank} of schedule {self._schedule.name}: {action} comes before {need}"
                )


def _ordered(nodes: list[Node]) -> list[Node]:
    """``nodes`` in topological order, with the numbers of what they wait for changed to it."""
    followers: list[list[int]] = [[] for _ in nodes]
    left = [0] * len(nodes)
    for index, node in enumerate(nodes[1:], start=1):
        for other in {node.after, node.arrival, node.posted}:
            followers[other].append(index)
            left[index] += 1
    order, ready = [], [0]
    while ready:
        index = ready.pop()
        order.append(index)
        for follower in followers[index]:
            left[follower] -= 1
            if not left[follower]:
                ready.append(follower)
    if len(order) < len(nodes):
        stuck = nodes[min(index for index, count in enumerate(left) if count)]
        raise ConfigError(
            f"the ranks wait for each other for ever: {len(nodes) - len(order)} actions never begin, among "
            f"them {stuck.action} on rank {stuck.rank}"
        )
    place = [0] * len(nodes)
    for position, index in enumerate(order):
        place[index] = position
    for node in nodes:
        node.after, node.arrival, node.posted = place[node.after], place[node.arrival], place[node.posted]
    return [nodes[index] for index in order]
