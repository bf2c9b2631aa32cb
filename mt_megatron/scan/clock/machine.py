"""Which machine this is, as far as clocks are concerned, and by which address others reach it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"


def boot_id() -> str:
    """Text that is equal in processes that share ``CLOCK_MONOTONIC``: one boot of one machine and, in
    containers, one time namespace. Falls back on the host's name where Linux does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        return boot
    return f"{boot} {namespace}"


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


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches ``address``."""
    return address.startswith("127.") or address == "::1"
