"""The ring through the C helper ``ring.c``, loaded with ctypes: the table ``NATIVE`` of ``protocol.py``.

The helper is built when the package is installed and a compiler is found (``setup.py``), or by
``python -m mt_megatron.comm.shared_memory.native`` into a checkout.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from mt_megatron.comm.message import HEADER_BYTES
from mt_megatron.comm.shared_memory.memory import Mapping
from mt_megatron.comm.shared_memory.ring import NO_LIMIT, RingSize
from mt_megatron.host import limits

SOURCE = Path(__file__).with_name("ring.c")
STEM = "_ring"
"""Name of the library in this folder, before the interpreter's suffix."""

_VERSION = 5
_KEEPS_LOCK_BYTES = 1 << 15
"""Messages up to this size are copied without releasing Python's global lock: about a microsecond."""

_LEAST_SPIN_NS, _FIRST_SPIN_NS, _MOST_SPIN_NS = 2_000, 30_000, 100_000
"""A sleep and its wake-up cost about 50 us; what does not come in that time is worth a sleep."""


_USUAL_CACHE_BYTES = 32 << 20
"""Where the kernel does not tell the size of the last cache."""

_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
"""In guests too it is what the cores share; ``sysconf`` tells that of the whole processor there."""


@lru_cache(maxsize=1)
def last_cache_bytes() -> int:
    """Bytes of the last cache of the processor. A message of that size does not stay in it."""
    try:
        return int(_LAST_CACHE.read_text().strip().removesuffix("K")) << 10 or _USUAL_CACHE_BYTES
    except (OSError, ValueError):
        return _USUAL_CACHE_BYTES


class _EndState(ctypes.Structure):
    """``struct end`` of ``ring.c``."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("payload", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("other", ctypes.c_uint64),
        ("chunk", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("given", ctypes.c_uint64),
        ("spin_ns", ctypes.c_uint64),
        ("spin_least_ns", ctypes.c_uint64),
        ("spin_most_ns", ctypes.c_uint64),
        ("sleeps", ctypes.c_uint64),
        ("stream_bytes", ctypes.c_uint64),
        ("guard", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


@lru_cache(maxsize=1)
def load() -> tuple[Any, Any] | str:
    """The helper's functions, (releasing Python's global lock, keeping it); or why there are none."""
    found = [SOURCE.with_name(STEM + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    path = next((each for each in found if each.exists()), None)
    if path is None:
        return f"it was not built when mt_megatron was installed; build it with: {build_command()}"
    try:
        libraries = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        for library in libraries:
            _declare(library)
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded ({error}); build it again with: {build_command()}"
    found_version, found_bytes = libraries[0].mtc_version(), libraries[0].mtc_end_bytes()
    if found_version != _VERSION or found_bytes != ctypes.sizeof(_EndState):
        return f"{path} is of another version; build it again with: {build_command()}"
    return libraries


def build_command() -> str:
    return f"{Path(sys.executable).name} -m {__package__}.native"


def _declare(library: Any) -> None:
    end, address, count = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64
    for name, arguments, result in (
        ("mtc_send", [end, ctypes.c_char_p, address, count, count], ctypes.c_int),
        ("mtc_peek", [end, address, count], ctypes.c_int),
        ("mtc_take", [end, address, count, count], ctypes.c_int),
        ("mtc_receive", [end, address, ctypes.c_char_p, count, address, count, count], ctypes.c_int),
        ("mtc_arrived", [end, count, address, count], ctypes.c_int),
        ("mtc_hold", [end, count], ctypes.c_uint64),
        ("mtc_limit", [end, count], None),
        ("mtc_starved", [end, count], ctypes.c_int),
        ("mtc_version", [], ctypes.c_uint32),
        ("mtc_end_bytes", [], ctypes.c_uint32),
    ):
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = result


class _End:
    def __init__(self, mapping: Mapping, size: RingSize) -> None:
        libraries = load()
        if isinstance(libraries, str):
            raise RuntimeError(libraries)
        self._free, self._quick = libraries
        self._mapping = mapping  # Kept as long as this end.
        # One that spins on a core where the other end has to run waits for nothing.
        spins = limits.processors() > 1
        self._state = _EndState(
            base=mapping.address,
            payload=mapping.address + size.payload_offset,
            slot_bytes=size.slot_bytes,
            slots=size.slots,
            limit=NO_LIMIT,
            spin_ns=_FIRST_SPIN_NS if spins else 0,
            spin_least_ns=_LEAST_SPIN_NS if spins else 0,
            spin_most_ns=_MOST_SPIN_NS if spins else 0,
            stream_bytes=last_cache_bytes(),
        )
        self._end = ctypes.addressof(self._state)

    @property
    def sleeps(self) -> int:
        return int(self._state.sleeps)

    def _library(self, nbytes: int, wait: float) -> Any:
        return self._free if wait or nbytes > _KEEPS_LOCK_BYTES else self._quick


class NativeProducer(_End):
    """See ``ring.Producer``."""

    def send(self, header: bytes, address: int, nbytes: int, wait: float) -> bool:
        if wait or nbytes > _KEEPS_LOCK_BYTES:
            return bool(self._free.mtc_send(self._end, header, address, nbytes, int(wait * 1e9)))
        return bool(self._quick.mtc_send(self._end, header, address, nbytes, 0))


class NativeConsumer(_End):
    """See ``ring.Consumer``."""

    def __init__(self, mapping: Mapping, size: RingSize) -> None:
        super().__init__(mapping, size)
        self._header = ctypes.create_string_buffer(HEADER_BYTES)
        self._header_at = ctypes.addressof(self._header)
        self._address = ctypes.c_uint64()
        self._address_at = ctypes.addressof(self._address)

    def peek(self, wait: float) -> bytes | None:
        if self._quick.mtc_peek(self._end, self._header_at, 0):
            return self._header.raw
        if wait and self._free.mtc_peek(self._end, self._header_at, int(wait * 1e9)):
            return self._header.raw
        return None

    def receive(self, description: bytes, number: int, address: int, nbytes: int, wait: float) -> int:
        given = self._end, self._header_at, description, number, address, nbytes
        code: int = self._quick.mtc_receive(*given, 0)
        if code or not wait:
            return code
        code = self._free.mtc_receive(*given, int(wait * 1e9))
        return code

    def take(self, address: int, nbytes: int, wait: float) -> bool:
        # A small message's only chunk came with the header.
        if nbytes <= _KEEPS_LOCK_BYTES and self._quick.mtc_take(self._end, address, nbytes, 0):
            return True
        return bool(self._free.mtc_take(self._end, address, nbytes, int(wait * 1e9)))

    def arrived(self, nbytes: int, wait: float) -> int | None:
        library = self._library(0, wait)
        if not library.mtc_arrived(self._end, nbytes, self._address_at, int(wait * 1e9)):
            return None
        return self._address.value - self._mapping.address

    def hold(self, nbytes: int) -> int:
        return int(self._quick.mtc_hold(self._end, nbytes))

    def limit(self, counter: int) -> None:
        self._free.mtc_limit(self._end, counter)

    def starved(self, wait: float) -> bool:
        return bool(self._free.mtc_starved(self._end, int(wait * 1e9)))


def build(target: Path | None = None) -> Path:
    """Compile the helper into this folder, or as ``target``. Raises RuntimeError with the compiler's words.

    Needs a C compiler (``CC``, or the interpreter's own, or cc, gcc, clang) and the kernel's headers; no
    headers of Python.
    """
    configured = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    compiler = next(
        (path for path in map(shutil.which, (configured[0], "cc", "gcc", "clang")) if path is not None), None
    )
    if compiler is None:
        raise RuntimeError("no C compiler was found; install gcc or clang, or set CC")
    target = target or SOURCE.with_name(STEM + importlib.machinery.EXTENSION_SUFFIXES[0])
    # Moved into its place when whole: another process may look for it now.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, "-shared", "-o", str(made), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        made.replace(target)
    return target


FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden")


def why_not_plain() -> str | None:
    """Why the ring in Python alone cannot be used on this machine; None where it can."""
    if sys.platform != "linux":
        return f"{sys.platform} has no futex"
    if platform.machine() != "x86_64" or sys.maxsize < 2**32:
        return f"{platform.machine()} orders memory too weakly for a channel without the native helper"
    return None


def describe() -> dict[str, Any]:
    """For ``doctor``: ``uses`` (native, python or none), ``why`` in one line."""
    loaded = load()
    if not isinstance(loaded, str):
        return {"uses": "native", "why": "the C helper is there"}
    refused = why_not_plain()
    if refused is None:
        return {"uses": "python", "why": f"the C helper is missing: {loaded}"}
    return {"uses": "none", "why": f"{refused}, and the C helper is missing: {loaded}"}


if __name__ == "__main__":
    print(build())
