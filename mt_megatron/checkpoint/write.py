"""The files one rank writes into a checkpoint, in this thread or in one beside the training."""

from __future__ import annotations

import io
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_megatron.backends.base import Backend
from mt_megatron.backends.threads import RankThread
from mt_megatron.checkpoint.files import reached, sync_folder
from mt_megatron.checkpoint.items import pieces

_NICENESS = 5


@dataclass(kw_only=True)
class Written:
    """What became of one rank's part."""

    rank: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Size and CRC-32 of each file by name, relative to the checkpoint's folder."""

    error: str | None = None
    """Why it is not complete, naming file and reason."""

    not_finite: bool = False
    """Whether that is a tensor that is not finite, rather than a file."""


class NotFiniteError(ValueError):
    """A tensor that is to be saved holds NaN or infinity."""


FileParts = tuple[str, Callable[[], Iterable[Any]]]
"""A file's name, and what makes the buffers it consists of."""


def write_files(
    folder: Path, files: Iterable[FileParts], rank: int, wrote: Callable[[], None] = lambda: None
) -> Written:
    """Write every file durably below ``folder``. Does not raise: what went wrong is in the result. ``wrote``
    is called after each buffer."""
    written = Written(rank=rank)
    path = folder
    try:
        for name, parts in files:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            written.files[name] = _write(path, parts(), wrote)
        for path in {(folder / name).parent for name in written.files}:
            sync_folder(path)
    except NotFiniteError as error:
        written.error, written.not_finite = f"rank {rank}: {error}", True
    except Exception as error:  # noqa: BLE001 (all ranks have to hear of it, whatever it is)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        written.error = f"rank {rank} cannot write {path}: {reason}"
    return written


def _write(path: Path, parts: Iterable[Any], wrote: Callable[[], None]) -> dict[str, Any]:
    size, crc = 0, 0
    with open(path, "wb", buffering=1 << 18) as stream:
        reached("writing")
        for part in parts:
            stream.write(part)
            crc = zlib.crc32(part, crc)
            size += len(part)
            wrote()
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": size, "crc32": f"{crc:08x}"}


def tensor_file(tensors: Sequence[Tensor], names: Sequence[str], objects: Iterable[bytes]) -> Iterator[Any]:
    """The buffers of a torch_dist file. A tensor on a device comes to the host when it is its turn.

    Raises ``NotFiniteError`` before the first buffer: such a checkpoint would take the place of a sound one.
    """
    for tensor, name in zip(tensors, names, strict=True):
        require_finite(tensor, name)
    for tensor in tensors:
        yield from pieces(tensor.to("cpu").contiguous())
    yield from objects


def require_finite(tensor: Tensor, name: str) -> None:
    """Raise ``NotFiniteError`` when ``tensor`` holds NaN or infinity."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    values = tensor.detach()
    if values.element_size() == 1:
        values = values.float()  # FP8 has no reductions.
    # One pass and no memory: NaN goes through both, infinity is one of them.
    ends = torch.stack(torch.aminmax(values))
    if not bool(torch.isfinite(ends).all()):
        raise NotFiniteError(f"{name} is not finite (smallest {float(ends[0])}, largest {float(ends[1])})")


def saved(value: Any) -> bytes:
    """``torch.save`` into memory."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Snapshot:
    """Host memory of its own for every tensor that is saved, kept from one save to the next.

    New memory would have to be faulted in each time, which costs more than the copy. On a device that
    can use it the memory is pinned.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._copies: list[Tensor] = []

    def take(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of ``tensors`` as they are now; the copies of the call before become invalid."""
        shapes = [(each.shape, each.dtype) for each in tensors]
        if shapes != [(each.shape, each.dtype) for each in self._copies]:
            pinned = self._backend.pins_host_memory()
            self._copies = [torch.empty(s, dtype=d, device="cpu", pin_memory=pinned) for s, d in shapes]
        with torch.no_grad():
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
        self._backend.synchronize()
        return self._copies


class Task:
    """Work in a thread of low priority. It dies with the process: nothing is left behind."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = RankThread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return not self._thread.is_alive()

    def result(self) -> Any:
        """Wait for the work; returns what it returned or raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        if sys.platform == "linux":
            # There threads have priorities of their own; elsewhere it would be the whole process's.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 (raised again by result)
            self._error = error
