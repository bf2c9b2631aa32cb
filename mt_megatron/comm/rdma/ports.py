"""Choice of a device, a port and a GID, read from sysfs: no library is needed to say why there is none.

``MT_MEGATRON_IB_HCA`` (or ``NCCL_IB_HCA``) names devices: ``mlx5`` all whose names begin so, ``=mlx5_0:1``
one port exactly, ``^mlx5_2`` all but these, several by commas. ``MT_MEGATRON_IB_GID_INDEX`` (or
``NCCL_IB_GID_INDEX``) names the entry of the GID table.
"""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mt_megatron.errors import ConfigError

SYSFS = Path("/sys/class/infiniband")
DEVICES = Path("/dev/infiniband")

_HCA = ("MT_MEGATRON_IB_HCA", "NCCL_IB_HCA")
_GID_INDEX = ("MT_MEGATRON_IB_GID_INDEX", "NCCL_IB_GID_INDEX")

_LEAST_MEMLOCK = 64 << 20
"""Bytes: the rings and the staging memory of two neighbours with two lanes each."""


@dataclass(frozen=True)
class Port:
    """One port with the GID that packets carry."""

    device: str
    number: int
    gid_index: int
    gid: str
    """As IPv6 text, eight groups of four digits."""

    link: str
    """``InfiniBand`` or ``Ethernet``."""

    gid_type: str
    """``RoCE v2``, ``RoCE v1`` or ``InfiniBand``."""

    def __str__(self) -> str:
        return f"{self.device} port {self.number} ({self.gid_type}, GID {self.gid_index}: {self.gid})"


class Unusable(Exception):
    """No port can be used; the message is the reason, ``change`` what to do."""

    def __init__(self, reason: str, change: str) -> None:
        super().__init__(reason)
        self.change = change


def find_port(
    environ: Mapping[str, str] = os.environ,
    *,
    sysfs: Path = SYSFS,
    devices: Path = DEVICES,
    local_rank: int | None = None,
) -> Port:
    """The port for this process: of all that are active and wanted, in the order of their names, the one of
    number ``local_rank`` (None: ``LOCAL_RANK``), counted in a circle.

    Raises Unusable, and ConfigError for variables that cannot be read.
    """
    wanted = _Wanted(environ)
    index = _gid_index(environ)
    names = sorted(path.name for path in sysfs.iterdir()) if sysfs.is_dir() else []
    if not names:
        raise Unusable(
            f"{sysfs} lists no RDMA device",
            "load the driver of the adapter (or rdma_rxe for soft-RoCE), or use another transport",
        )
    found: list[Port] = []
    refused: list[str] = []
    for name in names:
        for number in _ports(sysfs / name):
            if not wanted.includes(name, number):
                refused.append(f"{name} port {number} is excluded by {wanted}")
                continue
            port = _usable_port(sysfs, devices, name, number, index)
            if isinstance(port, Port):
                found.append(port)
            else:
                refused.append(port)
    if not found:
        raise Unusable("; ".join(refused), "bring one up, allow it, or use another transport")
    if local_rank is None:
        local_rank = int(environ.get("LOCAL_RANK", "0"))
    return found[local_rank % len(found)]


def usable(
    environ: Mapping[str, str] = os.environ, *, sysfs: Path = SYSFS, devices: Path = DEVICES
) -> str | None:
    """None if RDMA can be used in this process, else the reason why not. Opens nothing."""
    try:
        why_unusable(environ, sysfs=sysfs, devices=devices)
    except Unusable as error:
        return f"{error}; {error.change}"
    return None


def why_unusable(
    environ: Mapping[str, str] = os.environ, *, sysfs: Path = SYSFS, devices: Path = DEVICES
) -> Port:
    """The port that would be used. Raises Unusable with the first reason of: no pyverbs, no device, no active
    port, no permission for the device, no permission to lock memory."""
    if importlib.util.find_spec("pyverbs") is None:
        raise Unusable(
            "the module pyverbs is not installed",
            "install it (pip: pyverbs, with libibverbs-dev and a C compiler; Debian's own python3: "
            "python3-pyverbs)",
        )
    port = find_port(environ, sysfs=sysfs, devices=devices)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_MEMLOCK and not _may_lock_memory():
        raise Unusable(
            f"this process may lock {soft >> 10} KiB of memory, less than {_LEAST_MEMLOCK >> 10} KiB",
            "raise the limit (ulimit -l unlimited, or memlock in limits.conf)",
        )
    return port


class _Wanted:
    """``MT_MEGATRON_IB_HCA``."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._variable, text = _first(environ, _HCA)
        self._text = text
        self._excludes = text.startswith("^")
        text = text.removeprefix("^")
        self._exact = text.startswith("=")
        self._names: list[tuple[str, int | None]] = []
        for part in filter(None, text.removeprefix("=").split(",")):
            name, _, number = part.strip().partition(":")
            if not name or (number and not number.isdigit()):
                raise ConfigError(
                    f"found {self._text!r} in {self._variable}; expected names of devices such as mlx5_0 or "
                    "mlx5_0:1, separated by commas"
                )
            self._names.append((name, int(number) if number else None))

    def includes(self, name: str, number: int) -> bool:
        if not self._names:
            return True
        return self._excludes != any(
            (name == each if self._exact else name.startswith(each)) and port in (None, number)
            for each, port in self._names
        )

    def __str__(self) -> str:
        return f"{self._variable}={self._text}"


def _usable_port(sysfs: Path, devices: Path, name: str, number: int, index: int | None) -> Port | str:
    """The port, or the reason against it."""
    base = sysfs / name / "ports" / str(number)
    state = _read(base / "state").partition(": ")[2] or "in an unknown state"
    if state != "ACTIVE":
        return f"{name} port {number} is {state}, not ACTIVE"
    files = [devices / entry.name for entry in _uverbs(sysfs, name)]
    if not files:
        return f"{name} has no uverbs device: the kernel module ib_uverbs is not loaded"
    if not any(os.access(file, os.R_OK | os.W_OK) for file in files):
        return f"{name}: no permission to read and write {files[0]}"
    link = _read(base / "link_layer")
    entries = list(_gids(base, link))
    if index is not None:
        entries = [entry for entry in entries if entry[0] == index]
    if not entries:
        return f"{name} port {number} has no GID" + ("" if index is None else f" {index}")
    best = min(entries, key=_preference)
    return Port(name, number, best[0], best[1], link, best[2])


def _uverbs(sysfs: Path, name: str) -> list[Path]:
    folder = sysfs / name / "device" / "infiniband_verbs"
    if folder.is_dir():
        return sorted(folder.iterdir())
    # A software device has no parent: the class of uverbs devices says which is whose.
    parent = sysfs.parent / "infiniband_verbs"
    found = sorted(parent.iterdir()) if parent.is_dir() else []
    return [each for each in found if _read(each / "ibdev") == name]


def _ports(folder: Path) -> list[int]:
    ports = folder / "ports"
    return sorted(int(path.name) for path in ports.iterdir() if path.name.isdigit()) if ports.is_dir() else []


def _gids(base: Path, link: str) -> Iterator[tuple[int, str, str]]:
    """Index, GID and type of each entry that is in use."""
    folder = base / "gids"
    for path in sorted(folder.iterdir(), key=lambda each: int(each.name)) if folder.is_dir() else []:
        gid = _read(path)
        if gid.strip("0:"):
            kind = _read(base / "gid_attrs" / "types" / path.name)
            yield int(path.name), gid, "InfiniBand" if link == "InfiniBand" else kind or "RoCE v1"


def _preference(entry: tuple[int, str, str]) -> tuple[int, int, int]:
    """RoCE v2 first: it can be routed; of these, addresses that are not link-local, IPv4 before IPv6."""
    index, gid, kind = entry
    family = 0 if gid.startswith("0000:0000:0000:0000:0000:ffff:") else 1
    return (0 if kind in ("RoCE v2", "InfiniBand") else 1, 2 if gid.startswith("fe80:") else family, index)


def _gid_index(environ: Mapping[str, str]) -> int | None:
    variable, text = _first(environ, _GID_INDEX)
    if not text or text == "-1":
        return None
    if not text.isdigit():
        raise ConfigError(f"found {text!r} in {variable}; expected the number of an entry of the GID table")
    return int(text)


def _first(environ: Mapping[str, str], names: tuple[str, str]) -> tuple[str, str]:
    """The first variable that is set, and its value; the first one and nothing if none is."""
    return next(((name, environ[name]) for name in names if environ.get(name)), (names[0], ""))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        # An entry of the GID table that is not in use cannot be read.
        return ""


def _may_lock_memory() -> bool:
    """Whether this process has CAP_IPC_LOCK, to which the limit does not apply."""
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 14 & 1)
    return False
