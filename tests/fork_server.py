"""Python processes that start warm: forks of a server that has imported torch and the patch engine.

A cold interpreter needs more than a second of CPU time to import torch; a fork needs a few
milliseconds. A fork runs the same command line (``-m MODULE``, ``-c CODE`` or a script) as a cold
process would: in a session of its own, with its own environment, folder, files, ``sys.argv``,
``sys.path`` and ``__main__``, and with new seeds of the random generators. The server imports
neither Megatron-Core nor what imports it, patches nothing, starts no thread and runs no tensor
operation, so the fork finds what a cold process finds that has imported the same modules.

For an environment with ``PATCHED`` a fork of the server becomes one itself: it patches Megatron-Core for the
CPU and imports what trainings need, half a second or more of CPU time that no fork spends again. Its forks
find what a process finds after these calls.

Variables that are read while a process starts or imports (``PYTHONPATH``, ``OMP_NUM_THREADS``,
``TORCH_*`` and every other one that ``_READ_LATER`` does not name) cannot be changed by the fork:
each set of their values has servers of its own. For each set there are two, with different hash
seeds, so neighbouring ranks iterate over sets in different orders, as cold ranks do.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
COLD = "MT_MEGATRON_TEST_COLD"
"""Environment variable of the tests; ``1`` starts every process cold."""

PATCHED = "MT_MEGATRON_TEST_PATCHED"
"""Environment variable of the tests; ``1`` asks for a fork of an interpreter that is patched."""

_READ_LATER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|GLOO_\w+"
    r"|PYTEST_\w+|MT_MEGATRON_(?!TEST_PATCHED)\w+|HF_\w+|TOKENIZERS_PARALLELISM|COLUMNS|LINES"
)
"""Variables that nothing reads before the target runs: a fork may change them."""

_HASH_SEEDS = 2
_KEPT_SETS = 5
_HEADER = 8
_MODULES = (
    "torch.distributed",
    "torch.utils.data",
    "numpy",
    "packaging.version",
    "psutil",
    "pydantic",
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


class ColdStart(Exception):
    """This process must be started cold; the message says why."""


class Forked:
    """A process that a server forked: the part of ``subprocess.Popen`` that the tests use."""

    def __init__(self, server: _Server, pid: int, stdin: IO[bytes] | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = stdin
        self.cpu_seconds: float | None = None
        self._server = server
        self._kept = True

    def poll(self) -> int | None:
        """The exit code, None while the process runs. Its pid stays taken until ``wait``."""
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and release the pid. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.001
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
            time.sleep(pause)
            pause = min(0.02, 1.5 * pause)
        if self._kept:
            self._kept = False
            self.cpu_seconds = self._server.ask({"release": self.pid})["cpu"]
            self._server.running -= 1
        return code

    def send_signal(self, number: int) -> None:
        if self._kept:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """One warm interpreter, seen from the process that started it."""

    def __init__(self, environment: Mapping[str, str], plain: _Server | None = None) -> None:
        """``plain``: the server to fork, which is patched then; otherwise a new interpreter."""
        self.running = self.forks = 0
        self._lock = threading.Lock()
        self._log = plain._log if plain else tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            if plain:
                plain.ask({"serve": True}, [theirs.fileno()])
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request and return the answer. Raises ColdStart when the server has ended."""
        with self._lock:
            try:
                _send(self._socket, request, files)
                answer, _ = _receive(self._socket)
            except OSError:
                answer = None
        if answer is None:
            raise ColdStart(f"the fork server has ended: {self.said()}")
        if "cold" in answer:
            # A slow suite would be the only sign of it.
            warnings.warn(f"ranks and commands start cold: {answer['cold']}", stacklevel=2)
            raise ColdStart(answer["cold"])
        return answer

    def said(self) -> str:
        """The end of what the server has printed."""
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace")

    def end(self) -> None:
        self._socket.close()
        if self._process is None:
            return  # It ends by itself, since nobody is at the other end of its connection.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()


_servers: dict[frozenset[tuple[str, str]], list[_Server | None]] = {}
_imported: frozenset[str] = frozenset()
"""Packages and modules that a server has."""
_owner = os.getpid()

forks = 0
"""How many this process has asked for."""


def start(
    command: Sequence[str],
    *,
    slot: int,
    cwd: str | Path,
    env: Mapping[str, str],
    files: Sequence[int],
    feed: IO[bytes] | None = None,
) -> Forked:
    """Start ``command`` (``[sys.executable, "-m", ...]``) as a fork, with ``files`` as its input, output and
    error output. ``slot`` chooses the hash seed; ``feed`` is kept as the process's ``stdin``.
    Raises ColdStart where the command or its environment needs a cold process.
    """
    if os.environ.get(COLD) == "1":
        raise ColdStart(f"{COLD}=1")
    if any(name.startswith("COVERAGE_") for name in env):
        raise ColdStart("coverage is measured")
    warnings, words = _words(command)
    path = _python_path(env, str(cwd))
    server = _server(env, path, slot)
    # What a child would inherit from this process, and a fork does not.
    request = {
        "command": words,
        "warnings": warnings,
        "cwd": str(cwd),
        "path": path,
        "env": dict(env),
        "umask": _umask(),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    answer = server.ask(request, files)
    global forks
    forks += 1
    server.running += 1
    server.forks += 1
    return Forked(server, answer["pid"], feed)


def _words(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options ``-W`` of the interpreter, and the rest of its arguments."""
    warnings, words = [], list(command[1:])
    while words[:1] == ["-W"]:
        warnings.append(words[1])
        del words[:2]
    runs = len(words) > 1 if words[:1] in (["-m"], ["-c"]) else bool(words) and not words[0].startswith("-")
    if command[0] != sys.executable or not runs:
        raise ColdStart(f"no command line that a fork can run: {command}")
    return warnings, words


def _python_path(env: Mapping[str, str], cwd: str) -> list[str]:
    """The folders that ``PYTHONPATH`` puts on ``sys.path``."""
    given = env.get("PYTHONPATH")
    found = [os.path.abspath(os.path.join(cwd, each)) for each in given.split(os.pathsep)] if given else []
    if str(ROOT) not in found and not installed_here():
        raise ColdStart("PYTHONPATH leads to another mt_megatron")
    return list(dict.fromkeys(found))


@cache
def installed_here() -> bool:
    """Whether a process that is started elsewhere, without ``PYTHONPATH``, imports this checkout."""
    code = "from importlib.util import find_spec as f; s = f('mt_megatron'); print(s.origin if s else '')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    origin = done.stdout.strip()
    return bool(origin) and Path(origin).resolve().is_relative_to(ROOT)


def _is_read_at_start(folder: str) -> bool:
    """Whether a server must have ``folder`` on its path: start-up code, entry points, or another module
    of a name that servers have imported."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(
        name.startswith(("sitecustomize", "usercustomize"))
        or name.endswith((".dist-info", ".egg-info", ".egg-link"))
        or name.partition(".")[0] in _imported
        for name in names
    )


def _server(env: Mapping[str, str], path: list[str], slot: int) -> _Server:
    global _owner, _imported
    if os.getpid() != _owner:  # a fork of the process that has the connections
        _servers.clear()
        _owner = os.getpid()
    patched = env.get(PATCHED) == "1"
    others = {name: value for name, value in env.items() if not _READ_LATER.fullmatch(name)}
    others.pop(PATCHED, None)
    others["PYTHONPATH"] = str(ROOT)
    if not _imported:
        first = _servers_for(others)
        for number in range(_HASH_SEEDS):  # they import at the same time
            first[number] = first[number] or _Server(others)
        assert first[0] is not None
        _imported = frozenset(first[0].ask({"imported": True})["names"])
    early = [each for each in path if each != str(ROOT) and _is_read_at_start(each)]
    others["PYTHONPATH"] = os.pathsep.join([*early, str(ROOT)])
    number = slot % _HASH_SEEDS
    if patched:
        servers = _servers_for({**others, PATCHED: "1"})
        if server := servers[number]:
            return server
    plain = _servers_for(others)
    server = plain[number] = plain[number] or _Server(others)
    if patched:
        server = servers[number] = _Server(others, server)
    return server


def _servers_for(environment: Mapping[str, str]) -> list[_Server | None]:
    """One place for each hash seed; servers that were not used for long are ended."""
    key = frozenset(environment.items())
    found = _servers[key] = _servers.pop(key, None) or [None] * _HASH_SEEDS  # the last used is the last
    for one in list(_servers)[: max(0, len(_servers) - _KEPT_SETS)]:
        if not any(server and server.running for server in _servers[one]):
            _end(_servers.pop(one))
    return found


def _end(servers: list[_Server | None]) -> None:
    for server in servers:
        if server is not None:
            server.end()


@atexit.register
def _end_all() -> None:
    if os.getpid() == _owner:
        while _servers:
            _end(_servers.popitem()[1])


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise RuntimeError("/proc/self/status has no Umask")


def _send(connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    header = len(data).to_bytes(_HEADER, "big")
    if files:
        socket.send_fds(connection, [header], list(files))
    else:
        connection.sendall(header)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its files; None at the end of the connection."""
    room = socket.CMSG_SPACE(3 * array.array("i").itemsize)
    header, ancillary, _, _ = connection.recvmsg(_HEADER, room)
    files = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    while 0 < len(header) < _HEADER:
        header += connection.recv(_HEADER - len(header))
    if not header:
        return None, []
    size = int.from_bytes(header, "big")
    body = bytearray()
    while len(body) < size:
        part = connection.recv(size - len(body))
        if not part:
            return None, []
        body += part
    return json.loads(body), list(files)


# From here on: the server's side.


def modules() -> list[str]:
    """What a server imports, in this order."""
    from mt_megatron.patches import CONCERNS

    return [*_MODULES, *(f"mt_megatron.patches.{concern}" for concern in CONCERNS)]


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Answer until the client is gone. Returns in each fork, with the call that it is for."""
    given = dict(
        entry.split("=", 1) for entry in Path("/proc/self/environ").read_text().split("\0") if "=" in entry
    )
    for name in modules():
        importlib.import_module(name)
    upstream = [name for name in sys.modules if name.split(".")[0] == "megatron"]
    refusal = f"Megatron-Core is imported: {upstream[:3]}" if upstream else _threads_refused()
    changed, said = _left_by_imports(given)
    while True:
        request, files = _receive(connection)
        if request is None:
            os._exit(0)
        if "imported" in request:
            _send(connection, {"names": sorted({name.partition(".")[0] for name in sys.modules})})
        elif "poll" in request:
            _send(connection, {"code": _exit_code(request["poll"])})
        elif "release" in request:
            used = os.wait4(request["release"], 0)[2]
            _send(connection, {"cpu": used.ru_utime + used.ru_stime})
        elif refusal:
            for file in files:
                os.close(file)
            _send(connection, {"cold": refusal})
        elif "serve" in request:
            if not os.fork():
                connection.close()
                connection = socket.socket(fileno=files[0])
                _patch()
                refusal = _threads_refused()
                changed, said = _left_by_imports(given)
                continue
            os.close(files[0])
            _send(connection, {})
        else:
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                connection.close()
                os.close(read)
                _separate(request, files, changed, said)
                os.close(write)
                return request
            os.close(write)
            for file in files:
                os.close(file)
            # Once this ends the fork leads its own session, so its group can be signalled.
            os.read(read, 1)
            os.close(read)
            _send(connection, {"pid": pid})


def _threads_refused() -> str | None:
    threads = len(os.listdir("/proc/self/task"))
    return None if threads == 1 else f"imports have started threads: {threads}"


def _left_by_imports(given: dict[str, str]) -> tuple[dict[str, str], bytes]:
    """Variables of the environment that imports have set, and warnings that they have printed: each fork
    gets them too."""
    changed = {name: value for name, value in os.environ.items() if given.get(name) != value}
    return changed, os.pread(2, 1 << 20, 0)


def _patch() -> None:
    import gc

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
    import ctypes
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
    own = _python_path(os.environ, str(ROOT))
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
    sys.modules["tests.fork_server"] = sys.modules["__main__"]
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
    _exit.after(_serve(socket.socket(fileno=int(sys.argv[1]))))
