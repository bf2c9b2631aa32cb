"""Two network namespaces and a link between them: a veth pair, or one that delays every packet.

Linux delays packets with the queueing discipline ``netem``. Where its kernel has none, the link is a pair
of TUN devices, one in each namespace, and a process that holds each packet for the delay before it hands it
on. What goes through is the kernel's own TCP either way. Needs root."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 65000
"""Of every link: few packets, so that the process that delays them uses little of the processor."""


@dataclass(frozen=True)
class Link:
    """A link between the namespaces of rank 0 and rank 1."""

    namespaces: tuple[str, str]
    devices: tuple[str, str]
    addresses: tuple[str, str]
    how: str
    """Cause of the delay."""


def _do(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True)


def netem_problem() -> str | None:
    """Output of ``tc`` where it refuses a delay; None where it makes one."""
    name = f"mtprobe{os.getpid()}"
    _do("ip", "netns", "add", name)
    try:
        _do("ip", "-n", name, "link", "set", "lo", "up")
        command = [
            "ip",
            "netns",
            "exec",
            name,
            "tc",
            "qdisc",
            "add",
            "dev",
            "lo",
            "root",
            "netem",
            "delay",
            "1ms",
        ]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return None if found.returncode == 0 else found.stderr.strip()
    finally:
        _do("ip", "netns", "del", name)


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with their loopback up, deleted at the end."""
    names = (f"mt0x{os.getpid()}", f"mt1x{os.getpid()}")
    made: list[str] = []
    try:
        for name in names:
            _do("ip", "netns", "add", name)
            made.append(name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            _do("ip", "netns", "del", name)


@contextmanager
def linked(names: tuple[str, str], seconds: float, subnet: int) -> Iterator[Link]:
    """A link whose packets arrive ``seconds`` later, each way; 10.77.``subnet``.0/24."""
    addresses = (f"10.77.{subnet}.1", f"10.77.{subnet}.2")
    by_netem = seconds and netem_problem() is None
    if seconds and not by_netem:
        devices = (f"tun{subnet}a", f"tun{subnet}b")
        with _tunnel(names, devices, seconds):
            _up(names, devices, addresses)
            yield Link(
                names, devices, addresses, f"packets held for {seconds * 1e3:g} ms between two TUN devices"
            )
        return
    devices = (f"veth{subnet}a", f"veth{subnet}b")
    ends = ["netns", names[0], "type", "veth", "peer", "name", devices[1], "netns", names[1]]
    _do("ip", "link", "add", devices[0], *ends)
    _up(names, devices, addresses)
    if by_netem:
        delay = ["root", "netem", "delay", f"{seconds * 1e3:g}ms"]
        for name, device in zip(names, devices, strict=True):
            _do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, *delay)
    yield Link(names, devices, addresses, "tc netem" if by_netem else "a veth pair")


def _up(names: tuple[str, str], devices: tuple[str, str], addresses: tuple[str, str]) -> None:
    for name, device, address in zip(names, devices, addresses, strict=True):
        _do("ip", "-n", name, "link", "set", device, "mtu", str(_MTU), "up")
        _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)


@contextmanager
def _tunnel(names: tuple[str, str], devices: tuple[str, str], seconds: float) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, __file__, *names, *devices, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            raise RuntimeError("the process between the TUN devices did not start; see its messages above")
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def _enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}", "rb") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _tun(namespace: str, device: str) -> int:
    """A TUN device in ``namespace``; its file."""
    _enter(namespace)
    number = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(number, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
    return number


def _hold(files: tuple[int, int], seconds: float) -> None:
    """Hand every packet of one device to the other, ``seconds`` later."""
    waiting: dict[int, deque[tuple[float, bytes]]] = {number: deque() for number in files}
    other = {files[0]: files[1], files[1]: files[0]}
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        now = time.monotonic()
        readable, _, _ = select.select(files, [], [], None if due is None else max(0.0, due - now))
        now = time.monotonic()
        for number in readable:
            while True:
                try:
                    packet = os.read(number, _MTU + 1)
                except BlockingIOError:
                    break
                waiting[other[number]].append((now + seconds, packet))
        for number, queue in waiting.items():
            while queue and queue[0][0] <= now:
                # A full or closed device drops a packet, as a network does.
                try:
                    os.write(number, queue.popleft()[1])
                except OSError:
                    continue


def _main() -> None:
    first, second, one, other, seconds = sys.argv[1:]
    files = _tun(first, one), _tun(second, other)
    print("up", flush=True)
    _hold(files, float(seconds))


if __name__ == "__main__":
    _main()
