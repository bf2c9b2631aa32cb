"""A NIXL agent in the form of ``comm.rdma.verbs``.

A write with immediate value is a NIXL write with a notification that holds the value. NIXL promises that a
notification follows its own write, not that notifications keep the order of their posts: each has a number
and is held back until those before it have come.
"""

from __future__ import annotations

import base64
import importlib
import os
import select
import struct
import threading
import time
import uuid
from collections import deque
from typing import Any

from mt_megatron.backends.threads import RankThread
from mt_megatron.comm.bootstrap import own_place
from mt_megatron.comm.errors import told
from mt_megatron.comm.rdma import completions
from mt_megatron.comm.rdma.ports import Unusable
from mt_megatron.comm.rdma.verbs import Bytes, Completion, Region, anonymous_memory

_BACKEND = "UCX"

_NOTIFICATION = struct.Struct("<QIQ")
"""Number, immediate value, bytes of the write."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
"""Seconds between two questions for news; doubled while there is none."""

_KEEPALIVE = "UCX_KEEPALIVE_INTERVAL"
"""UCX asks a silent peer after 20 s by default."""


def open_agent() -> NixlDevice:
    """A new agent with the UCX backend. Raises Unusable."""
    os.environ.setdefault(_KEEPALIVE, "500ms")
    try:
        api = importlib.import_module("nixl._api")
    except (ImportError, OSError) as error:
        raise Unusable(
            f"nixl cannot be imported: {error}", "install it with pip install --no-deps nixl nixl-cu12"
        ) from error
    name = f"mt_megatron-{uuid.uuid4().hex}"
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=[_BACKEND]))
    except Exception as error:
        raise Unusable(
            f"no NIXL agent with the backend {_BACKEND} can be made: {error}",
            "see that the wheel's libraries can be loaded, or use another transport",
        ) from error
    if _BACKEND not in agent.backends:
        raise Unusable(
            f"NIXL has the backends {', '.join(agent.get_plugin_list())}, not {_BACKEND}",
            "install a wheel of NIXL with UCX, or use another transport",
        )
    return NixlDevice(agent)


class NixlDevice:
    """See ``verbs.Device``. ``agent``: NIXL's, all of whose calls are made under ``lock``."""

    most_requests = 1024
    event_fd: int | None = None

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.where = f"NIXL ({_BACKEND})"
        self.lock = threading.RLock()
        self.pairs: dict[str, NixlQueuePair] = {}
        self._stops = False
        self._thread = RankThread(target=self._ask, name="mt_megatron nixl", daemon=True)
        self._thread.start()

    def region(self, nbytes: int) -> NixlRegion:
        return NixlRegion(self, nbytes)

    def register_dmabuf(self, descriptor: int, nbytes: int) -> Any:
        raise Unusable("NIXL takes no dmabuf of ours", "unset MT_MEGATRON_GPU_DIRECT")

    def queue_pair(self, send_depth: int, receive_depth: int) -> NixlQueuePair:
        return NixlQueuePair(self)

    def port_is_active(self) -> bool:
        return True

    def next_event(self) -> int | None:
        return None

    def close(self) -> None:
        self._stops = True
        self._thread.join()
        with self.lock:
            # The agent ends its own threads when it is collected.
            del self.agent

    def news(self) -> bool:
        """Hand what has arrived and what is complete to the queue pairs; whether there was anything."""
        with self.lock:
            found = False
            for name, messages in self.agent.get_new_notifs(backends=[_BACKEND]).items():
                if name in self.pairs:
                    found |= self.pairs[name].take(messages)
            for pair in list(self.pairs.values()):
                found |= pair.look()
            return found

    def note(self, error: Exception) -> None:
        """Keep the library's own words: statuses, which links make their errors from, have none."""
        self.where = f"NIXL ({_BACKEND}; {told(error)})"

    def _ask(self) -> None:
        pause = _SHORTEST_PAUSE
        while not self._stops:
            try:
                found = self.news()
            except Exception as error:  # noqa: BLE001 - nobody asks from now on: all links have failed
                self.note(error)
                with self.lock:
                    for pair in self.pairs.values():
                        pair.fail()
                return
            pause = _SHORTEST_PAUSE if found else min(2 * pause, _LONGEST_PAUSE)
            time.sleep(pause)


class NixlRegion:
    """See ``verbs.Region``."""

    local_key = remote_key = 0

    def __init__(self, device: NixlDevice, nbytes: int) -> None:
        self._device = device
        _memory, self._view = anonymous_memory(nbytes)
        self.nbytes = nbytes
        self.address = self._view.ctypes.data
        with device.lock:
            agent = device.agent
            self._registered = agent.register_memory(
                [(self.address, nbytes, 0, "")], "DRAM", backends=[_BACKEND]
            )
            metadata = agent.get_partial_agent_metadata(self._registered, True, [_BACKEND])
        self.extra = base64.b64encode(metadata).decode()

    @property
    def bytes(self) -> Bytes:
        return self._view

    def close(self) -> None:
        with self._device.lock:
            self._device.agent.deregister_memory(self._registered, backends=[_BACKEND])


class NixlQueuePair:
    """See ``verbs.QueuePair``: what this agent and one other exchange."""

    def __init__(self, device: NixlDevice) -> None:
        self._device = device
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        place = own_place(0)
        with device.lock:
            metadata = device.agent.get_agent_metadata()
        self.address: dict[str, Any] = {
            "link": f"NIXL {_BACKEND}",
            "metadata": base64.b64encode(metadata).decode(),
            "process": [place.boot, place.processes, place.pid],
        }
        self._peer = ""
        self._process: select.poll | None = None
        self._pidfd: int | None = None
        self._completions: deque[Completion] = deque()
        self._under_way: deque[tuple[int, Any]] = deque()
        self._sent = 0
        self._arrived = 0
        self._early: dict[int, Completion] = {}

    def connect(self, remote: dict[str, Any]) -> None:
        with self._device.lock:
            self._peer = _text(self._device.agent.add_remote_agent(base64.b64decode(remote["metadata"])))
            self._device.pairs[self._peer] = self
            if remote["process"][1] and remote["process"][:2] == self.address["process"][:2]:
                # UCX does not notice the end of a process with which it shares memory; the kernel does.
                self._pidfd = os.pidfd_open(int(remote["process"][2]))
                self._process = select.poll()
                self._process.register(self._pidfd, select.POLLIN)

    def learn(self, extra: str) -> None:
        with self._device.lock:
            self._device.agent.add_remote_agent(base64.b64decode(extra))

    def post_receives(self, count: int) -> None:
        """Nothing: notifications need no requests."""

    def write(
        self,
        request: int,
        region: Region,
        offset: int,
        nbytes: int,
        remote_address: int,
        remote_key: int,
        immediate: int | None,
    ) -> None:
        with self._device.lock:
            agent = self._device.agent
            message = b""
            if immediate is not None:
                message = _NOTIFICATION.pack(self._sent, immediate, nbytes)
                self._sent += 1
            handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs([(region.address + offset, nbytes, 0)], "DRAM"),
                agent.get_xfer_descs([(remote_address, nbytes, 0)], "DRAM"),
                self._peer,
                message,
                backends=[_BACKEND],
            )
            self._under_way.append((request, handle))
            if agent.transfer(handle) != "PROC":
                self.look()

    def poll(self, most: int) -> list[Completion]:
        self._device.news()
        with self._device.lock:
            return [self._completions.popleft() for _ in range(min(most, len(self._completions)))]

    def take(self, messages: list[bytes]) -> bool:
        """Notifications of the peer, in any order; with the lock."""
        for message in messages:
            if len(message) == _NOTIFICATION.size:
                number, immediate, nbytes = _NOTIFICATION.unpack(message)
                self._early[number] = Completion(0, completions.SUCCESS, True, immediate, nbytes)
        found = False
        while self._arrived in self._early:
            self._complete(self._early.pop(self._arrived))
            self._arrived += 1
            found = True
        return found

    def look(self) -> bool:
        """See which writes are complete, and whether the peer's process is; with the lock."""
        found = False
        for _ in range(len(self._under_way)):
            request, handle = self._under_way.popleft()
            status = self._status(handle)
            if status is None:
                self._under_way.append((request, handle))
            else:
                found = True
                self._release(handle)
                self._complete(Completion(request, status, False, 0, 0))
        if self._process is not None and self._process.poll(0):
            self._process = None
            found = True
            self._complete(Completion(0, completions.PROCESS_ENDED, False, 0, 0))
        return found

    def clear_event(self) -> None:
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return

    def fail(self) -> None:
        """Report a failure of the agent; with the lock."""
        self._complete(Completion(0, completions.FAILED, False, 0, 0))

    def close(self) -> None:
        with self._device.lock:
            self._device.pairs.pop(self._peer, None)
            for _, handle in self._under_way:
                self._release(handle)
            self._under_way.clear()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._process = self._pidfd = None
            os.close(self.event_fd)

    def _status(self, handle: Any) -> int | None:
        """Of a write, as of a completion; None: it is under way."""
        try:
            state = self._device.agent.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001 - classes of the library, which may not be there to name
            self._device.note(error)
            disconnected = "DISCONNECT" in str(error).upper()
            return completions.RETRIES_EXCEEDED if disconnected else completions.FAILED
        return {"DONE": completions.SUCCESS, "PROC": None}.get(state, completions.FAILED)

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except Exception:  # noqa: BLE001 - a write to a peer that is gone cannot be cancelled; the agent keeps it
            return

    def _complete(self, completion: Completion) -> None:
        self._completions.append(completion)
        os.eventfd_write(self.event_fd, 1)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
