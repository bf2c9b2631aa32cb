"""Errors of point-to-point channels; each names the peer, the edge and what to change."""

from __future__ import annotations

from mt_megatron.errors import MtMegatronError


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
