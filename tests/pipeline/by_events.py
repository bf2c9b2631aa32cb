"""A second simulator, one event after another: slow, with its own idea of ranks and links.

Ranks are little programs that run until they wait for a message; links take one message after another.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from mt_megatron.pipeline.actions import Action, Kind, Schedule, computations
from mt_megatron.pipeline.simulate.costs import Costs


class _Line:
    """One directed edge."""

    def __init__(self, latency: float, bandwidth: float, window: int | None) -> None:
        self.latency, self.bandwidth, self.window = latency, bandwidth, window
        self.queue: deque[tuple[Action, float]] = deque()
        self.sending, self.in_flight = False, 0


def simulate(schedule: Schedule, costs: Costs) -> dict[Action, tuple[float, float]]:
    """Begin and end of each computation. Costs are numbers for all stages or lists by stage."""
    placement = schedule.placement

    def of(value: object, stage: int) -> float:
        return float(value[stage]) if isinstance(value, list) else float(value)  # type: ignore[arg-type]

    def seconds(action: Action) -> float:
        if action.kind is Kind.F:
            return of(costs.forward, action.stage)
        if action.kind is Kind.W:
            return of(costs.weight, action.stage)
        whole = of(costs.backward, action.stage)
        split = (
            Action(Kind.W, action.stage, action.microbatch) in schedule.ranks[placement.rank(action.stage)]
        )
        return whole - of(costs.weight, action.stage) if split else whole

    lines: dict[tuple[int, int], _Line] = {}
    here: set[tuple[Kind, int, int]] = set()  # Inputs and gradients that have arrived, by their taker.
    todo = [deque(actions) for actions in computations(schedule)]
    busy = [False] * placement.ranks
    times: dict[Action, tuple[float, float]] = {}
    events: list[tuple[float, int, str, object]] = []
    counter = 0

    def at(time: float, what: str, about: object) -> None:
        nonlocal counter
        counter += 1
        heappush(events, (time, counter, what, about))

    def start(line: _Line, time: float) -> None:
        if line.queue and not line.sending and (line.window is None or line.in_flight < line.window):
            taker, size = line.queue.popleft()
            line.sending = True
            line.in_flight += 1
            at(time + size / line.bandwidth, "sent", (line, taker))

    def wake(rank: int, time: float) -> None:
        if busy[rank] or not todo[rank]:
            return
        action = todo[rank][0]
        first = action.kind is Kind.W or (action.kind is Kind.F and action.stage == 0)
        if action.kind is Kind.B and action.stage == placement.stages - 1:
            first = True
        if first or action in here:
            todo[rank].popleft()
            busy[rank] = True
            times[action] = time, time + seconds(action)
            at(time + seconds(action), "computed", (rank, action))

    for rank in range(placement.ranks):
        wake(rank, 0.0)
    while events:
        time, _, what, about = heappop(events)
        if what == "computed":
            rank, action = about  # type: ignore[misc]
            busy[rank] = False
            step = {Kind.F: 1, Kind.B: -1, Kind.W: 0}[action.kind]
            other = action.stage + step
            if step and 0 <= other < placement.stages:
                taker = action._replace(stage=other)
                target = placement.rank(other)
                if target == rank:
                    here.add(taker)
                else:
                    link = costs.link_of((rank, target))
                    line = lines.setdefault((rank, target), _Line(link.latency, link.bandwidth, link.window))
                    line.queue.append((taker, of(costs.message, min(other, action.stage))))
                    start(line, time)
            wake(rank, time)
        elif what == "sent":
            line, taker = about  # type: ignore[misc]
            line.sending = False
            at(time + line.latency, "arrived", (line, taker))
            start(line, time)
        else:
            line, taker = about  # type: ignore[misc]
            line.in_flight -= 1
            here.add(taker)
            start(line, time)
            wake(placement.rank(taker.stage), time)
    assert not any(todo), "ranks wait for ever"
    return times
