"""Which machine this is, as far as clocks are concerned, and by which address others reach it."""

from __future__ import annotations

import socket

from mt_megatron.host.machine import machine

LOOPBACK = "127.0.0.1"


def boot_id() -> str:
    """Text that is equal in processes that share ``CLOCK_MONOTONIC``: one boot of one machine and, in
    containers, one time namespace. Falls back on the host's name where Linux does not say."""
    return machine("time")


def address_towards(host: str) -> str | None:
    """The address of this machine on the way to ``host``; nothing is sent. None when there is no way."""
    try:
        ways = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in ways:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                found = str(probe.getsockname()[0])
        except OSError:
            continue
        return found
    return None
