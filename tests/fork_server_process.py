"""The server's side of tests/fork_server.py: a process that imports once and is forked for every call."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fork_server import PATCHED, ROOT, locked, python_path, receive, send

_MODULES = (
    "torch.distributed",
    "torch.utils.data",
    "numpy",
    "packaging.version",
    "psutil",
    "pydantic",
    "pytest",
    "tokenizers",
    "yaml",
    "mt_megatron._session",
    "mt_megatron.backends.cpu",
    "mt_megatron.backends.registry",
    "mt_megatron.patches.device.scope",
    "mt_megatron.patching.engine",
    "mt_megatron.patching.plan",
    "mt_megatron.training.loop",
    "torch._dynamo",
    "torch.distributed.checkpoint",
)
"""Imported before the modules that declare the patches; none of them imports Megatron-Core.

Where one of them holds a patched object (tables of torch._dynamo do), ``patch()`` rebinds it in the
fork. A cold process imports torch._dynamo after ``patch()``, with the first optimizer, or never.
"""


_MODULES_OF_TRAININGS = (
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "mt_megatron.models.llama",
    "mt_megatron.training.validate",
    "torch.distributed.tensor",
)
"""Imported after ``patch()``."""


def modules() -> list[str]:
    """Modules that a server imports, in this order."""
    from mt_megatron.patches import CONCERNS

    return [*_MODULES, *(f"mt_megatron.patches.{concern}" for concern in CONCERNS)]


class _Connections:
    """The processes that are connected, and the forks that each has asked for."""

    def __init__(self, address: Path, listener: socket.socket) -> None:
        self._address, self._listener = address, listener
        self._forks: dict[socket.socket, set[int]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def forks(self, connection: socket.socket) -> set[int]:
        return self._forks[connection]

    def asking(self) -> Iterator[socket.socket]:
        """Connections with a request, as they come. Ends this process when nobody is connected."""
        while True:
            if not self._forks:
                self._accept_or_end()
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._listener:
                    self._add(self._listener.accept()[0])
                elif key.fileobj in self._forks:
                    yield key.fileobj

    def _accept_or_end(self) -> None:
        with locked(self._address):
            self._listener.settimeout(0.0)
            try:
                self._add(self._listener.accept()[0])
            except BlockingIOError:
                self._address.unlink(missing_ok=True)
                os._exit(0)
            self._listener.settimeout(None)

    def _add(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._forks[connection] = set()
        self._selector.register(connection, selectors.EVENT_READ)

    def end(self, connection: socket.socket) -> None:
        """End a connection and the forks that were asked for over it."""
        self._selector.unregister(connection)
        connection.close()
        running = self._forks.pop(connection)
        for pid in running:
            # Each leads a session of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in running:
            os.waitpid(pid, 0)

    def leave_to_server(self) -> None:
        """Close everything in a fork: ended connections are noticed when no process holds them open."""
        self._selector.close()
        for each in (self._listener, *self._forks):
            each.close()


def _serve(address: Path, listener: socket.socket) -> dict[str, Any]:
    """Answer until every client is gone. Returns in each fork, with the call that it is for."""
    given = dict(
        entry.split("=", 1) for entry in Path("/proc/self/environ").read_text().split("\0") if "=" in entry
    )
    # Objects that imports make stay: one collection here replaces many, and one in each fork. (Frozen, they
    # would be invisible to ``patch()``.)
    gc.disable()
    for name in modules():
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    upstream = [name for name in sys.modules if name.split(".")[0] == "megatron"]
    refusal = f"Megatron-Core is imported: {upstream[:3]}" if upstream else _threads_refused()
    while True:
        changed, said = _left_by_imports(given)
        connections = _Connections(address, listener)
        for connection in connections.asking():
            try:
                request, files = receive(connection)
            except OSError:
                request, files = None, []
            if request is None:
                connections.end(connection)
                continue
            answer: dict[str, Any] = {}
            if "imported" in request:
                answer["names"] = sorted({name.partition(".")[0] for name in sys.modules})
            elif "poll" in request:
                answer["code"] = _exit_code(request["poll"])
            elif "release" in request:
                used = os.wait4(request["release"], 0)[2]
                connections.forks(connection).discard(request["release"])
                answer["cpu"] = used.ru_utime + used.ru_stime
            elif refusal:
                answer["cold"] = refusal
            elif "serve" in request:
                if not os.fork():
                    connections.leave_to_server()
                    address, listener = Path(request["serve"]), socket.socket(fileno=files[0])
                    break
            else:
                read, write = os.pipe()
                pid = os.fork()
                if not pid:
                    connections.leave_to_server()
                    os.close(read)
                    _separate(request, files, changed, said)
                    os.close(write)
                    return request
                os.close(write)
                # Once this ends the fork leads its own session, so its group can be signalled.
                os.read(read, 1)
                os.close(read)
                connections.forks(connection).add(pid)
                answer["pid"] = pid
            for file in files:
                os.close(file)
            with contextlib.suppress(OSError):
                send(connection, answer)
        # In a fork that becomes a server itself.
        _patch()
        refusal = _threads_refused()


def _threads_refused() -> str | None:
    threads = len(os.listdir("/proc/self/task"))
    return None if threads == 1 else f"imports have started threads: {threads}"


def _left_by_imports(given: dict[str, str]) -> tuple[dict[str, str], bytes]:
    """Variables of the environment that imports have set, and warnings that they have printed: each fork
    gets them too."""
    changed = {name: value for name, value in os.environ.items() if given.get(name) != value}
    return changed, os.pread(2, 1 << 20, 0)


def _patch() -> None:
    import mt_megatron

    mt_megatron.patch("cpu")
    for name in _MODULES_OF_TRAININGS:
        importlib.import_module(name)
    gc.collect()
    # Modules stay for good: no fork's collector looks through them again.
    gc.freeze()


def _exit_code(pid: int) -> int | None:
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _separate(call: dict[str, Any], files: list[int], changed: dict[str, str], said: bytes) -> None:
    """Give this fork everything of its own that a new process has."""
    import random

    import numpy
    import torch

    os.setsid()
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if call["warnings"]:
        sys.warnoptions += call["warnings"]
        warnings._processoptions(call["warnings"])  # type: ignore[attr-defined]
    else:
        os.write(2, said)
    os.umask(call["umask"])
    os.sched_setaffinity(0, call["cores"])
    os.chdir(call["cwd"])
    own = python_path(os.environ, str(ROOT))
    sys.path[1 : 1 + len(own)] = call["path"]
    os.environ.clear()
    os.environ.update({**call["env"], **changed})
    os.environ.pop(PATCHED, None)
    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()
    tempfile.tempdir = None


class _Exit:
    """Ends a fork after its exit handlers. Taking apart every module that torch has loaded, as the
    interpreter does afterwards, would take half a second of CPU time. Cold processes do it."""

    def __init__(self) -> None:
        self.code: int | None = None
        # Handlers run in the opposite order: this one, before all imports, is the last.
        atexit.register(self._now)

    def _now(self) -> None:
        if self.code is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(self.code)

    def after(self, call: dict[str, Any]) -> None:
        try:
            _become(call)
            self.code = 0
        except SystemExit as end:
            plain = end.code is None or isinstance(end.code, int)
            self.code = (end.code or 0) & 0xFF if plain else 1  # type: ignore[operator]
            raise
        except Exception:
            self.code = 1
            raise


def _become(call: dict[str, Any]) -> None:
    """Run the command line of ``call`` as ``__main__``."""
    import runpy
    import types

    command: list[str] = call["command"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    sys.orig_argv = [sys.executable, *command]
    if command[0] == "-m":
        sys.argv = ["-m", *command[2:]]
        sys.path[0] = call["cwd"]
        runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path[0] = ""
        exec(compile(command[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = list(command)
        sys.path[0] = os.path.dirname(os.path.realpath(command[0]))
        vars(main)["__file__"] = command[0]
        exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), vars(main))


if __name__ == "__main__":
    _exit = _Exit()
    _exit.after(_serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))))
