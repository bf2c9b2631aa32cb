"""Anonymous memory that two processes map, and the system calls around it.

The memory has no name anywhere (memfd), is sealed, so that neither side can shrink it under the other, has
all of its pages before it is used, and is not given to forked processes. When both processes are gone, by
whatever signal, so is the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import sys
import weakref
from typing import Any

from mt_megatron.comm.errors import TransportUnavailable
from mt_megatron.host import limits

_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_PROT_READ_WRITE, _MAP_SHARED, _MAP_POPULATE = 0x3, 0x01, 0x8000
_MADV_DONTFORK = 10


def create(nbytes: int) -> int:
    """Descriptor of new, zeroed memory of ``nbytes``, a multiple of the page size.

    Raises TransportUnavailable where the kernel has no memfd or no memory for it.
    """
    if not hasattr(os, "memfd_create"):
        raise TransportUnavailable(
            "shm", f"{sys.platform} has no memfd_create", "use --p2p-transport collective"
        )
    try:
        descriptor = os.memfd_create("mt_megatron_p2p", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise TransportUnavailable(
            "shm",
            f"the kernel refuses memfd_create ({error.strerror})",
            "allow that system call in the container's seccomp profile, or use --p2p-transport collective",
        ) from error
    available = limits.memory().available
    if nbytes > available:
        os.close(descriptor)
        raise _too_large(nbytes, f"{available / 2**20:.0f} MiB are available")
    try:
        # Allocates every page now: later a full machine would end the process with SIGBUS.
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise _too_large(nbytes, str(error.strerror)) from error
    return descriptor


def _too_large(nbytes: int, why: str) -> TransportUnavailable:
    return TransportUnavailable(
        "shm",
        f"{nbytes / 2**20:g} MiB for a channel cannot be had ({why})",
        "free memory, raise the container's limit, or use --p2p-transport collective",
    )


def check(descriptor: int, nbytes: int) -> None:
    """Raise TransportUnavailable unless ``descriptor``, which another process sent, is sealed memory of
    ``nbytes``: otherwise that process could end this one with SIGBUS."""
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    size = os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or size != nbytes:
        raise TransportUnavailable(
            "shm",
            f"the peer sent memory of {size} bytes with seals {seals:#x}; expected {nbytes} and {_SEALS:#x}",
            "run the same version of mt_megatron on both ranks",
        )


class Mapping:
    """The memory of a descriptor in this process. The descriptor may be closed afterwards; tensors made of
    ``view`` keep the memory."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        address = _libc.mmap(None, nbytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_POPULATE, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            raise TransportUnavailable(
                "shm",
                f"{nbytes / 2**20:g} MiB for a channel cannot be mapped ({os.strerror(code)})",
                "raise the limit of address space (ulimit -v), or use --p2p-transport collective",
            )
        if _libc.madvise(address, nbytes, _MADV_DONTFORK) != 0:
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTFORK)")
        self.address: int = address
        self.nbytes = nbytes
        self._bytes: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        ending = weakref.finalize(self._bytes, _unmap, address, nbytes, os.getpid())
        # The kernel unmaps a process that ends, and somebody may still read.
        ending.atexit = False

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """``nbytes`` at ``offset``, writable; keeps the memory mapped."""
        whole = memoryview(self._bytes).cast("B")
        return whole[offset:] if nbytes is None else whole[offset : offset + nbytes]


def _unmap(address: int, nbytes: int, owner: int) -> None:
    # A forked process has nothing mapped there, or something else.
    if os.getpid() == owner:
        _libc.munmap(address, nbytes)


def _load_libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    with contextlib.suppress(AttributeError):
        libc.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.mmap.restype = pointer
        libc.munmap.argtypes = [pointer, size]
        libc.madvise.argtypes = [pointer, size, ctypes.c_int]
        libc.syscall.restype = ctypes.c_long
    return libc


_libc = _load_libc()


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # x86-64


def futex_wait(address: int, seen: int, seconds: float) -> None:
    """Sleep until woken or for ``seconds``, if the 32-bit word at ``address`` is still ``seen``. x86-64."""
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    code = _libc.syscall(
        ctypes.c_long(_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAIT),
        ctypes.c_uint32(seen),
        ctypes.byref(limit),
        None,
        ctypes.c_int(0),
    )
    if code < 0:
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(number, f"futex: {os.strerror(number)}")


def futex_wake(address: int) -> None:
    """Wake everybody who sleeps on the word at ``address``. x86-64."""
    _libc.syscall(
        ctypes.c_long(_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAKE),
        ctypes.c_int(2**31 - 1),
        None,
        None,
        ctypes.c_int(0),
    )
