"""Hostfiles: one machine a line, as Open MPI, MPICH and people write them."""

from __future__ import annotations

import ipaddress
import re
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
        before = first.setdefault(_same(host.name), number)
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


def _same(name: str) -> str:
    return name.casefold()
