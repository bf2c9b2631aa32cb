"""Identity of the machine, as far as processes share what the caller needs of it."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine(*namespaces: str) -> str:
    """Text that is equal in processes under one kernel since its boot that also share ``namespaces``, names
    in ``/proc/self/ns``: ``time`` (``CLOCK_MONOTONIC``), ``pid`` (process numbers). Containers of one machine
    may share its host name and neither. Falls back on the host name where Linux does not say."""
    try:
        found = [_BOOT.read_text(encoding="ascii").strip()]
    except OSError:
        return socket.gethostname()
    for name in namespaces:
        with contextlib.suppress(OSError):  # kernels before 5.6 have no time namespace
            found.append(os.readlink(f"/proc/self/ns/{name}"))
    return " ".join(found)


def place_of(folder: str | Path) -> str:
    """Text that is equal in processes of one machine to which the path ``folder`` is the same folder: they
    reach each other's sockets and files in it. Containers may each have their own. Raises ``OSError``."""
    found = os.stat(folder)
    return f"{found.st_dev}:{found.st_ino} {folder}"
