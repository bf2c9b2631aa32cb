"""Statuses of completions and asynchronous events, as errors that name the peer and what to change."""

from __future__ import annotations

from mt_megatron.comm.bootstrap import Place
from mt_megatron.comm.errors import PeerLost, TransportError

SUCCESS = 0
PROCESS_ENDED = -1
"""No status of verbs: the peer's process, on the same host, is known to be gone."""

FLUSHED = 5
RETRIES_EXCEEDED = 12
RECEIVER_NOT_READY = 13
FAILED = 21

_STATUSES = {
    1: ("LOC_LEN_ERR", "a request was longer than its memory", "report this with the adapter's model"),
    2: ("LOC_QP_OP_ERR", "the queue pair is inconsistent", "report this with the adapter's model"),
    4: ("LOC_PROT_ERR", "local memory was not registered for the transfer", "report this"),
    FLUSHED: ("WR_FLUSH_ERR", "the queue pair had failed before", "see the first error of this link"),
    7: ("BAD_RESP_ERR", "the peer's adapter gave an answer that cannot be", "update both adapters' firmware"),
    8: ("LOC_ACCESS_ERR", "a write came for local memory that does not allow it", "report this"),
    9: ("REM_INV_REQ_ERR", "the peer's adapter refused the request as invalid", "report this"),
    10: (
        "REM_ACCESS_ERR",
        "the peer's memory is not registered for the write, or no more",
        "see what that process said",
    ),
    11: ("REM_OP_ERR", "the peer's adapter could not carry out the write", "see the peer's kernel log"),
    RETRIES_EXCEEDED: ("RETRY_EXC_ERR", "the peer's adapter acknowledges nothing", "see that process"),
    RECEIVER_NOT_READY: (
        "RNR_RETRY_EXC_ERR",
        "the peer had no receive request left for a write",
        "see whether its process hangs or is stopped; report this if it is not",
    ),
    19: ("FATAL_ERR", "the adapter failed", "see the kernel log of this machine"),
    20: ("RESP_TIMEOUT_ERR", "the peer's adapter did not answer", "see the network between the two"),
    FAILED: (
        "GENERAL_ERR",
        "the adapter reported an error without a kind",
        "see the kernel log of this machine",
    ),
}
"""``ibv_wc_status``: name, meaning, what to do."""

_STATUSES_OF_A_PORT_DOWN = (2, RETRIES_EXCEEDED, 20, FAILED)
"""Soft-RoCE reports packets that it cannot send as LOC_QP_OP_ERR."""

_EVENTS = {
    0: ("CQ_ERR", "its completion queue overflowed or failed"),
    1: ("QP_FATAL", "a queue pair failed"),
    2: ("QP_REQ_ERR", "a queue pair received an invalid request"),
    3: ("QP_ACCESS_ERR", "a queue pair received a request that its memory does not allow"),
    8: ("DEVICE_FATAL", "the adapter failed"),
}
"""``ibv_event_type`` of the events after which a link cannot work."""

PORT_ACTIVE_EVENT = 9
PORT_DOWN_EVENT = 10
"""``IBV_EVENT_PORT_ACTIVE`` and ``IBV_EVENT_PORT_ERR``: retries may outlast a short loss of the port."""


class RdmaError(TransportError):
    """An RDMA link failed for a reason that is not the peer's end."""

    def __init__(self, port: str, place: Place, status: str, meaning: str, change: str) -> None:
        """``status``: the verbs' name, such as ``REM_ACCESS_ERR``."""
        super().__init__(
            f"the RDMA link over {port} to rank {place.rank} (process {place.pid} on {place.host}) failed "
            f"with {status}: {meaning}; {change}"
        )
        self.rank = place.rank
        self.status = status


def failure_of_status(status: int, port: str, place: Place, *, port_is_active: bool) -> TransportError:
    """The error of a link whose completion has ``status`` (``ibv_wc_status``, not success).

    ``port_is_active``: of the own port: if it is down, the peer is not to blame that packets cannot be sent
    or are not acknowledged.
    """
    if status in _STATUSES_OF_A_PORT_DOWN and not port_is_active:
        return RdmaError(
            port,
            place,
            _STATUSES[status][0],
            "the port of this machine is down",
            "see its cable, its switch and its network interface",
        )
    if status == RETRIES_EXCEEDED:
        return PeerLost(
            place.rank,
            place.host,
            place.pid,
            f"its adapter stopped to acknowledge ({_STATUSES[status][0]} over {port}): the process ended, or "
            "the network between the two is cut",
        )
    if status == PROCESS_ENDED:
        return PeerLost(place.rank, place.host, place.pid, "its process ended")
    name, meaning, change = _STATUSES.get(
        status, (f"status {status}", "this kind of error is not known", "see the kernel log of this machine")
    )
    return RdmaError(port, place, name, meaning, change)


def failure_of_event(event: int, port: str, place: Place) -> TransportError | None:
    """The error of a link after the asynchronous ``event`` (``ibv_event_type``); None: it can go on."""
    if event not in _EVENTS:
        return None
    name, meaning = _EVENTS[event]
    return RdmaError(port, place, name, meaning, "see the kernel log of this machine")
