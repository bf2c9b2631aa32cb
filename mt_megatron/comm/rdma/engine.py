"""Thread that serves all links of a transport: completions, asynchronous events, probes.

It sleeps in ``epoll`` on the links' completion channels, so nothing is polled while nothing happens. A second
thread, made when a message is first sent from a device, stages fragments where that waits for the device.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time

from mt_megatron.backends.threads import RankThread
from mt_megatron.comm.errors import TransportError
from mt_megatron.comm.rdma import completions
from mt_megatron.comm.rdma.edges import Outgoing
from mt_megatron.comm.rdma.link import Link
from mt_megatron.comm.rdma.verbs import Device

PROBE_SECONDS = 0.25
"""Between probes of a silent link: with the 0.47 s until its retries are over, a peer's end is noticed within
0.8 s where the adapter keeps to the time-outs that it was given."""

_JOIN_SECONDS = 5.0


class Engine:
    """Threads of one transport."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._links: dict[int, Link] = {}
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        if device.event_fd is not None:
            self._epoll.register(device.event_fd, select.EPOLLIN)
        self._stops = False
        self._is_open = True
        self._waking = threading.Lock()
        self._thread = RankThread(target=self._serve, name="mt_megatron rdma", daemon=True)
        self._thread.start()
        self._deferred: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._stager: RankThread | None = None
        self._starting = threading.Lock()

    def add(self, link: Link) -> None:
        """Serve ``link`` from now on."""
        self._links[link.pair.event_fd] = link
        self._epoll.register(link.pair.event_fd, select.EPOLLIN)
        # Completions from before would raise no event.
        link.handle_event()

    def wake(self) -> None:
        """Let the thread look at the links' failures."""
        with self._waking:
            if self._is_open:
                os.eventfd_write(self._wakeup, 1)

    def defer(self, edge: Outgoing) -> None:
        """Call ``edge.await_device`` in the thread that may wait for a device."""
        with self._starting:
            if self._stager is None:
                self._stager = RankThread(target=self._stage, name="mt_megatron rdma staging", daemon=True)
                self._stager.start()
        self._deferred.put(edge)

    def stop(self) -> None:
        """End the threads; links and device can be closed then."""
        self._stops = True
        self.wake()
        self._deferred.put(None)
        self._thread.join(_JOIN_SECONDS)
        if self._stager is not None:
            self._stager.join(_JOIN_SECONDS)
        with self._waking:
            # The number of a closed descriptor may soon be another file's.
            self._is_open = False
            self._epoll.close()
            os.close(self._wakeup)

    def _serve(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - whatever it is, waiting threads must hear of it
            for link in list(self._links.values()):
                link.fail(TransportError(f"the thread that serves RDMA ended with {error!r}; report this"))
                link.tell()

    def _loop(self) -> None:
        next_probe = time.monotonic() + PROBE_SECONDS
        while not self._stops:
            for descriptor, _ in self._epoll.poll(max(0.0, next_probe - time.monotonic())):
                if descriptor == self._wakeup:
                    os.eventfd_read(self._wakeup)
                elif descriptor == self._device.event_fd:
                    self._handle_device_events()
                else:
                    self._links[descriptor].handle_event()
            links = list(self._links.values())
            for link in links:
                link.tell()
            if time.monotonic() >= next_probe:
                next_probe = time.monotonic() + PROBE_SECONDS
                for link in links:
                    link.probe()

    def _handle_device_events(self) -> None:
        while (event := self._device.next_event()) is not None:
            for link in list(self._links.values()):
                failure = completions.failure_of_event(event, self._device.where, link.place)
                if failure is not None:
                    link.fail(failure)

    def _stage(self) -> None:
        while (edge := self._deferred.get()) is not None:
            try:
                edge.await_device()
            except Exception as error:  # noqa: BLE001 - whatever it is, waiting threads must hear of it
                edge.link.fail(
                    TransportError(f"a message to rank {edge.link.peer} could not be staged: {error!r}")
                )
