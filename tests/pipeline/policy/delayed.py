"""A channel whose messages leave late: a slow link between two processes of one machine."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mt_megatron.comm.collective import CollectiveTransport
from mt_megatron.comm.transport import UNLABELLED, Edge, Label, Receiving


class Delayed:
    """``CollectiveTransport`` in which a message is sent ``seconds(step)`` after it was posted, by a thread
    of its own; steps are counted by ``finish``."""

    name = "delayed"

    def __init__(self, group: Any, device: torch.device, seconds: Callable[[int], float]) -> None:
        self._channel = CollectiveTransport(group, device)
        self._seconds = seconds
        self._step = 0
        self._posted: queue.Queue[tuple[float, Edge, Tensor, bool, _Sending]] = queue.Queue()
        threading.Thread(target=self._send, daemon=True).start()

    def prepare(self, edges: Iterable[Edge]) -> None:
        self._channel.prepare(edges)

    def post_send(
        self, edge: Edge, tensor: Tensor, *, with_shape: bool = False, label: Label = UNLABELLED
    ) -> _Sending:
        sending = _Sending()
        # The storage that was given may be exchanged before the message leaves.
        kept = tensor.detach().clone()
        self._posted.put((time.monotonic() + self._seconds(self._step), edge, kept, with_shape, sending))
        return sending

    def _send(self) -> None:
        while True:
            due, edge, tensor, with_shape, sending = self._posted.get()
            time.sleep(max(0.0, due - time.monotonic()))
            sending.start(self._channel.post_send(edge, tensor, with_shape=with_shape))
            self._posted.task_done()

    def post_recv(
        self,
        edge: Edge,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
        *,
        label: Label = UNLABELLED,
        out: Tensor | None = None,
    ) -> Receiving:
        return self._channel.post_recv(edge, shape, dtype, out=out)

    def finish(self) -> None:
        self._posted.join()
        self._channel.finish()
        self._step += 1

    def abandon(self, cause: BaseException | None = None) -> None:
        self._channel.abandon(cause)

    def require_open(self) -> None:
        self._channel.require_open()

    def close(self) -> None:
        self._channel.close()


class _Sending:
    def __init__(self) -> None:
        self._started = threading.Event()
        self._sending: Any = None

    def start(self, sending: Any) -> None:
        self._sending = sending
        self._started.set()

    def test(self) -> bool:
        return self._started.is_set() and bool(self._sending.test())

    def wait(self, timeout: float | None = None) -> None:
        self._started.wait(timeout)
        self._sending.wait(timeout)
