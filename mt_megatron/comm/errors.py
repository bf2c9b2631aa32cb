"""Errors of point-to-point channels; each names the peer, the edge and what to change."""

from __future__ import annotations

from mt_megatron.errors import MtMegatronError

_LONGEST = 300
"""Characters of an error's text that other errors repeat."""


def given_up(cause: BaseException | None) -> str:
    """State of a transport that was abandoned because of ``cause``, and what to do, for a sentence about it.
    Text alone: an error that is kept would keep the tensors of its frames."""
    why = "" if cause is None else f" ({told(cause)})"
    return (
        f"was given up after an error{why}; start the processes anew, or destroy the model parallel groups "
        "and make them again"
    )


def told(cause: BaseException) -> str:
    """Type and first line of an error."""
    line = next(iter(str(cause).splitlines()), "")
    return f"{type(cause).__name__}: {line}"[:_LONGEST].removesuffix(": ")


class TransportError(MtMegatronError):
    """A channel between two ranks cannot be made, or a transfer did not come to its end."""


class TransportUnavailable(TransportError):
    """A transport cannot work between these ranks; nothing was sent. ``auto`` takes another instead."""

    def __init__(self, transport: str, reason: str, change: str) -> None:
        """``transport``: its name as in ``--p2p-transport``. ``reason``: what was found. ``change``: what
        makes it usable, or what to use in its place."""
        super().__init__(f"transport {transport} cannot be used: {reason}; {change}")
        self.transport = transport
        self.reason = reason
        self.change = change


class PeerLost(TransportError):
    """The process at the other end is gone, or its connection is. The edges to it cannot be used again."""

    def __init__(self, rank: int, host: str, pid: int, seen: str) -> None:
        """``rank``: global. ``seen``: the evidence, such as ``its process ended``."""
        super().__init__(f"rank {rank} (process {pid} on {host}) is lost: {seen}; see what that process said")
        self.rank = rank
        self.host = host
        self.pid = pid
        self.seen = seen


class TransferTimeout(TransportError):
    """A transfer, or a peer's answer while a channel is made, took longer than its limit."""


class MessageMismatch(TransportError):
    """A message arrived that is not the one expected: another shape, dtype, label, sequence or checksum."""
