"""Checkpoint files are written by threads, not by processes forked out of a threaded one.

Upstream forks a process per file, also for a synchronous save, and collects results through a
spawned ``Manager``. Gloo keeps threads, and a lock held by one of them at the moment of a fork
stays locked in the child for ever; the Manager needs an importable ``__main__``.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mt_megatron.backends.base import Backend
from mt_megatron.backends.threads import RankThread
from mt_megatron.patching.spec import Patch


def _get_write_results_queue() -> queue.Queue[Any]:
    return queue.Queue()


def _write_with_threads(write_buckets: Sequence[Any], global_results_queue: queue.Queue[Any]) -> None:
    """Write every bucket in a thread of its own and put ``{bucket: results}``, or the first
    exception, into ``global_results_queue``."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    results: queue.Queue[Any] = queue.Queue()
    pending: queue.Queue[Any] = queue.Queue()
    writers = []
    for index, bucket in enumerate(write_buckets):
        pending.put(index)
        writers.append(
            RankThread(
                target=FileSystemWriterAsync.write_preloaded_data,
                args=(index, bucket, results, pending, True),
                name=f"checkpoint-writer-{index}",
            )
        )
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    # A writer that could not even report (a crash outside its own try) leaves its place empty.
    collected = dict(results.get_nowait() for _ in range(results.qsize()))
    failures = [value for value in collected.values() if isinstance(value, Exception)]
    if not failures and len(collected) != len(writers):
        missing = sorted(set(range(len(writers))) - set(collected))
        failures = [RuntimeError(f"checkpoint writers {missing} ended without a result")]
    global_results_queue.put(failures[0] if failures else collected)


class _Task(RankThread):
    """A thread with the two methods the caller needs of a process; keeps what went wrong."""

    def __init__(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        super().__init__(target=self._work, name="checkpoint-save")
        self._call = function, args
        self.error: BaseException | None = None

    def _work(self) -> None:
        function, args = self._call
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001 (raised again where the save is finalised)
            self.error = error

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self.error is not None:
            raise RuntimeError("an asynchronous checkpoint save failed") from self.error


def _own_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)(_own_copy(v) for v in value)
    return value


def _schedule_in_thread(backend: Backend) -> Callable[..., None]:
    def schedule_async_call(
        self: Any, async_fn: Callable[..., None] | None, save_args: tuple[Any, ...]
    ) -> None:
        """Start ``async_fn`` in a thread, on tensors of its own.

        A forked child had its own copy of the memory. A thread shares it, and "moved to the CPU"
        is the same storage when the device is the CPU, so training would write into what is
        being saved.
        """
        if async_fn is None:
            return
        backend.synchronize()
        self.start_time = time.time()
        self.process = _Task(async_fn, _own_copy(save_args) if backend.device_type == "cpu" else save_args)
        self.process.start()

    return schedule_async_call


def patches(backend: Backend) -> list[Patch]:
    module = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    caller = "megatron.core.dist_checkpointing.strategies.async_utils:DistributedAsyncCaller"
    reason = "forking a process that has Gloo's threads can deadlock, and a Manager needs __main__"
    return [
        Patch(
            id=f"checkpoint.{name}",
            target=target,
            kind="replace",
            feature="compat",
            reason=reason,
            body=body,
            digest=digest,
        )
        for name, target, body, digest in (
            (
                "results_queue",
                f"{module}:_get_write_results_queue",
                _get_write_results_queue,
                "9d19df883de78705d96d3f30492e6d61d91df53799601fd646d4be073882458a",
            ),
            (
                "writers",
                f"{module}:FileSystemWriterAsync.write_preloaded_data_multiproc",
                _write_with_threads,
                "f7dcde60a4b762365623bdf7cf5a3a2b587e20eabbcd20542034fad5b93eef6c",
            ),
            (
                "async_caller",
                f"{caller}.schedule_async_call",
                _schedule_in_thread(backend),
                "4ddff30d2ba2e4da9980104e3cf593243459175dbb04c9b8031b45a973320f85",
            ),
        )
    ]
