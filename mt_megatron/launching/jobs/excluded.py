"""Hosts that a start does without: those that a run listed because of a straggler."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from mt_megatron.errors import ConfigError
from mt_megatron.launching.jobs.hostfile import Host, parse_hostfile


def read_excluded(path: Path) -> list[Host]:
    """Hosts that ``path`` lists, a hostfile as a traced run writes it (``RUN/scan/excluded-hosts``).

    No file is no host: the run that would write it may not have had a straggler. Raises ``ConfigError``.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the list {path} cannot be read: {error}. Correct --exclude-hosts.") from error
    if all(not line.partition("#")[0].strip() for line in text.splitlines()):
        return []
    return parse_hostfile(text, str(path))


def remaining(hosts: Sequence[Host], excluded: Sequence[Host], nodes: int | None) -> list[Host]:
    """The hosts to use: without the excluded ones, and of those the first ``nodes``, if that is said.

    A name is excluded by its name or by an address that both have. Raises ``ConfigError`` when too few
    are left.
    """
    left = [host for host in hosts if not any(_same(host.name, other.name) for other in excluded)]
    if not left or (nodes is not None and len(left) < nodes):
        raise ConfigError(
            f"{len(left)} of {len(hosts)} hosts are left when {', '.join(host.name for host in excluded)} "
            f"{'is' if len(excluded) == 1 else 'are'} excluded; expected "
            f"{'at least one' if nodes is None else f'{nodes} (--nodes)'}. Add hosts to the hostfile, or "
            "take repaired ones out of the list of --exclude-hosts."
        )
    return left[:nodes] if nodes is not None else left


def _same(name: str, other: str) -> bool:
    if name.casefold() == other.casefold():
        return True
    if name.partition(".")[0].casefold() == other.partition(".")[0].casefold() and not _numeric(name):
        # A run knows a host by its own short or full name, a hostfile by either.
        return "." not in name or "." not in other
    # Two names of one machine are not looked up: that may take seconds each where there is no server.
    return _numeric(name) != _numeric(other) and bool(_addresses(name) & _addresses(other))


def _numeric(name: str) -> bool:
    return name.replace(".", "").isdigit() or ":" in name


def _addresses(name: str) -> set[str]:
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    # Names of a machine for itself lead to its loopback everywhere.
    addresses = {str(address[0]) for _, _, _, _, address in found}
    return {address for address in addresses if not address.startswith("127.") and address != "::1"}
