"""Hosts that are network namespaces of this machine, a cable between every two, and ways to spoil one cable.

Root only. A slow cable is real: its packets are routed through a pair of TUN devices whose user-space
forwarder holds each one back, or through the kernel's token bucket (``tbf``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import combinations

MTU = 9000
_SET_INTERFACE = 0x400454CA
_TUN, _NO_HEADER = 0x0001, 0x1000
_NEW_NETWORK = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """Namespaces by number, and the state of their cables."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._tag = f"mtl{os.getpid() % 100_000}"
        self._forwarders: list[subprocess.Popen[bytes]] = []

    def namespace(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def address(self, host: int) -> str:
        return f"10.214.77.{host + 1}"

    def cable(self, host: int, other: int) -> str:
        """The interface in ``host`` that leads to ``other``."""
        return f"c{host}to{other}"

    def interface(self, host: int) -> str:
        """One that has the host's address."""
        return self.cable(host, 1 if host == 0 else 0)

    def make(self) -> None:
        for host in range(self.count):
            _ip("netns", "add", self.namespace(host))
            _ip("-n", self.namespace(host), "link", "set", "lo", "up")
        for a, b in combinations(range(self.count), 2):
            _ip(
                *("link", "add", self.cable(a, b), "mtu", str(MTU), "netns", self.namespace(a)),
                *("type", "veth", "peer", "name", self.cable(b, a), "mtu", str(MTU)),
                *("netns", self.namespace(b)),
            )
            for own, other in ((a, b), (b, a)):
                inside, device = ("-n", self.namespace(own)), self.cable(own, other)
                _ip(*inside, "addr", "add", f"{self.address(own)}/32", "dev", device)
                _ip(*inside, "link", "set", device, "up")
            self._route(a, b, self.cable(a, b))
            self._route(b, a, self.cable(b, a))

    def _route(self, host: int, other: int, device: str) -> None:
        _ip(
            *("-n", self.namespace(host), "route", "replace", f"{self.address(other)}/32"),
            *("dev", device, "src", self.address(host)),
        )

    @contextlib.contextmanager
    def delayed(self, a: int, b: int, seconds: float) -> Iterator[None]:
        """Every packet between the two takes so much longer, each way."""
        descriptors = []
        forwarder: subprocess.Popen[bytes] | None = None
        try:
            for own, other in ((a, b), (b, a)):
                device = f"t{own}to{other}"
                descriptors.append(_tun(self.namespace(own), device))
                inside = ("-n", self.namespace(own))
                _ip(*inside, "link", "set", device, "mtu", str(MTU), "up")
            forwarder = subprocess.Popen(
                [sys.executable, "-S", "-E", __file__, *map(str, descriptors), str(seconds)],
                pass_fds=descriptors,
                stdout=subprocess.PIPE,
            )
            assert forwarder.stdout is not None
            forwarder.stdout.readline()  # it forwards from now on
            self._route(a, b, f"t{a}to{b}")
            self._route(b, a, f"t{b}to{a}")
            yield
        finally:
            self._route(a, b, self.cable(a, b))
            self._route(b, a, self.cable(b, a))
            time.sleep(2 * seconds + 0.1)  # what is on its way arrives
            if forwarder is not None:
                forwarder.kill()
                forwarder.communicate()
            for descriptor in descriptors:
                os.close(descriptor)

    @contextlib.contextmanager
    def narrow(self, a: int, b: int, megabits: float) -> Iterator[None]:
        """The cable between the two carries so much and no more, each way."""
        sides = ((a, b), (b, a))
        done = []
        try:
            for own, other in sides:
                where = ("tc", "-n", self.namespace(own), "qdisc")
                device = ("dev", self.cable(own, other), "root")
                limits = ("tbf", "rate", f"{megabits}mbit", "burst", "32kb", "latency", "500ms")
                subprocess.run([*where, "add", *device, *limits], check=True, timeout=30)
                done.append([*where, "del", *device])
            yield
        finally:
            for command in done:
                subprocess.run(command, check=False, timeout=30)

    def remove(self) -> None:
        for host in range(self.count):
            with contextlib.suppress(RuntimeError):
                _ip("netns", "delete", self.namespace(host))


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """``count`` hosts; nothing of them stays."""
    found = Hosts(count)
    try:
        found.make()
        yield found
    finally:
        found.remove()


def _tun(namespace: str, name: str) -> int:
    """A TUN device of ``namespace``; it lasts as long as the descriptor."""
    back = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if _libc.setns(there, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER)
        fcntl.ioctl(descriptor, _SET_INTERFACE, request)
        return descriptor
    finally:
        _libc.setns(back, _NEW_NETWORK)
        os.close(back)
        os.close(there)


def forward(first: int, second: int, seconds: float) -> None:
    """Move packets between two TUN devices, each held back for ``seconds``, until killed. A cable needs no
    processor: it goes before all others."""
    os.nice(-15)
    waiting: deque[tuple[float, int, bytes]] = deque()
    poll = select.poll()
    other = {first: second, second: first}
    for descriptor in other:
        poll.register(descriptor, select.POLLIN)
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, target, packet = waiting.popleft()
            with contextlib.suppress(BlockingIOError):  # a full queue drops, as a cable does
                os.write(target, packet)
        pause = None if not waiting else max(0.0, waiting[0][0] - time.monotonic()) * 1e3
        for descriptor, _ in poll.poll(pause):
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(descriptor, 65536)
                    waiting.append((time.monotonic() + seconds, other[descriptor], packet))


if __name__ == "__main__":
    forward(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
