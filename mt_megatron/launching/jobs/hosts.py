"""Hosts of a job: hostfiles of Open MPI, MPICH and people, this machine's place, excluded hosts."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mt_megatron.errors import ConfigError

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_USER = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]*")
_SLOTS = re.compile(r"slots\s*=\s*(\S*)", re.IGNORECASE)
_EXPECTED = "expected HOST, HOST slots=N, HOST:N, [IPv6]:N or any of them with USER@ before it"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine."""

    name: str
    """A name, an IPv4 address, or an IPv6 address without brackets, its zone included."""

    slots: int | None = None
    """Processes to start on it; None when the file does not say."""

    user: str | None = None
    """Who to be there; for tools that log in, this package does not."""

    line: int = 0
    """Where it stands in its file, from 1."""

    @property
    def endpoint(self) -> str:
        """The name as it stands before a port: IPv6 addresses in brackets."""
        return f"[{self.name}]" if ":" in self.name else self.name


def read_hostfile(path: Path) -> list[Host]:
    """The hosts that ``path`` lists, in its order.

    Raises ``ConfigError`` when it cannot be read, and as ``parse_hostfile`` does.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the hostfile {path} cannot be read: {error}. Correct --hostfile.") from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str = "hostfile") -> list[Host]:
    """Hosts of ``text``, which messages call ``source``.

    Blank lines, ``#`` comments and spaces anywhere are left aside. A host may stand there once: twice is
    more often a slip than a wish. Raises ``ConfigError`` naming every wrong line.
    """
    hosts: list[Host] = []
    problems: list[str] = []
    first: dict[str, int] = {}
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            host = _host(entry, number)
        except ValueError as error:
            problems.append(f"{source}:{number}: found {entry!r}: {error}; {_EXPECTED}")
            continue
        before = first.setdefault(host.name.casefold(), number)
        if before != number:
            problems.append(
                f"{source}:{number}: found {host.name} again, first on line {before}; expected each host "
                "once, with slots=N for several processes"
            )
        hosts.append(host)
    if problems:
        raise ConfigError("\n".join(problems))
    if not hosts:
        raise ConfigError(f"{source} lists no host; {_EXPECTED}, one a line")
    return hosts


def _host(entry: str, number: int) -> Host:
    slots: int | None = None
    rest = entry
    said = _SLOTS.search(entry)
    if said is not None:
        if said.start() == 0 or not entry[said.start() - 1].isspace() or entry[said.end() :].strip():
            raise ValueError("slots= stands at the end, after a space")
        slots, rest = _count(said[1]), entry[: said.start()].rstrip()
    user = None
    if "@" in rest:
        user, rest = rest.split("@", 1)
        if not _USER.fullmatch(user):
            raise ValueError(f"{user!r} is no user name")
    name, colon = _split(rest)
    if colon is not None:
        if slots is not None:
            raise ValueError("the number of processes is given twice")
        slots = _count(colon)
    return Host(name=name, slots=slots, user=user, line=number)


def _split(text: str) -> tuple[str, str | None]:
    """The host's name and what follows its colon, if there is one."""
    if text.startswith("["):
        inner, closed, after = text[1:].partition("]")
        if not closed:
            raise ValueError("a bracket is not closed")
        if after and not after.startswith(":"):
            raise ValueError(f"{after!r} follows the bracket")
        return _ipv6(inner), after[1:] if after else None
    if text.count(":") > 1:
        return _ipv6(text), None
    name, colon, count = text.partition(":")
    if re.fullmatch(r"[0-9.]+", name):
        return str(ipaddress.IPv4Address(name)), count if colon else None
    labels = name.removesuffix(".").split(".")
    if not name or len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{name!r} is no host name")
    return name.removesuffix("."), count if colon else None


def _ipv6(text: str) -> str:
    address, percent, zone = text.partition("%")
    if percent and not re.fullmatch(r"[A-Za-z0-9_.-]+", zone):
        raise ValueError(f"{zone!r} is no zone of an IPv6 address")
    return str(ipaddress.IPv6Address(address)) + percent + zone


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise ValueError(f"{text!r} is no number of processes")
    return int(text)


# Which of a job's machines this one is, and how many processes it should run.


def node_rank(hosts: Sequence[Host]) -> int:
    """The index of this machine in ``hosts``: the one whose address a socket can be bound to here.

    Raises ``ConfigError`` when none or several are this machine.
    """
    own = [index for index, host in enumerate(hosts) if _is_here(host.name)]
    if len(own) == 1:
        return own[0]
    names = ", ".join(hosts[index].name for index in own) if own else "none"
    raise ConfigError(
        f"of the {len(hosts)} hosts in the hostfile {names} belong to this machine ({socket.gethostname()}); "
        "expected exactly one. Set --node-rank to its place in the file, from 0."
    )


def slots_of(hosts: Sequence[Host]) -> int | None:
    """How many processes each host is to run; None when the file does not say.

    Raises ``ConfigError`` when they differ: every rank's place follows from one number.
    """
    counts = {host.slots for host in hosts}
    if len(counts) == 1:
        return counts.pop()
    said = ", ".join(f"line {host.line}: {host.slots or 'nothing'}" for host in hosts[:8])
    raise ConfigError(
        f"the hosts have different numbers of processes ({said}); expected one number for all. Give the same "
        "slots= to each, or set --gpus-per-node."
    )


def _is_here(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_binds(family, address) for family, _, _, _, address in found)


def _binds(family: socket.AddressFamily, address: tuple[str | int, ...] | tuple[int, bytes]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


# Hosts that a start does without: those that a run listed because of a straggler.


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
        names = ", ".join(host.name for host in excluded) or "none"
        raise ConfigError(
            f"{len(left)} of {len(hosts)} hosts are left when {names} {'is' if len(excluded) < 2 else 'are'} "
            f"excluded; expected {'at least one' if nodes is None else f'{nodes} (--nodes)'}. Add hosts to "
            "the hostfile, or take repaired ones out of the list of --exclude-hosts."
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
