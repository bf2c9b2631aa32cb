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

Processes of one session share the servers: those whose ``FOLDER`` names the same folder. A server answers at
an address in it and ends when nobody is connected any more.

Variables that are read while a process starts or imports (``PYTHONPATH``, ``OMP_NUM_THREADS``,
``TORCH_*`` and every other one that ``_READ_LATER`` does not name) cannot be changed by the fork:
each set of their values has servers of its own. For each set there are two, with different hash
seeds, so neighbouring ranks iterate over sets in different orders, as cold ranks do.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
COLD = "MT_MEGATRON_TEST_COLD"
"""Environment variable of the tests; ``1`` starts every process cold."""

PATCHED = "MT_MEGATRON_TEST_PATCHED"
"""Environment variable of the tests; ``1`` asks for a fork of an interpreter that is patched."""

FOLDER = "MT_MEGATRON_TEST_SERVERS"
"""Environment variable of the tests; the folder in which processes that share servers find them. A process
without it has servers of its own."""

_READ_LATER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|GLOO_\w+"
    r"|PYTEST_\w+|MT_MEGATRON_(?!TEST_PATCHED)\w+|HF_\w+|TOKENIZERS_PARALLELISM|COLUMNS|LINES"
    r"|MUSA_VISIBLE_DEVICES|PYTHONWARNINGS|TORCH_FR_BUFFER_SIZE|XDG_CACHE_HOME"
)
"""Variables that nothing reads before the target runs, or that forks read again: a fork may change them."""

_HASH_SEEDS = 2
_KEPT_SETS = 5
_HEADER = 8


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
    """One warm interpreter, seen from a process that is connected to it."""

    def __init__(self, address: Path, environment: Mapping[str, str], plain: _Server | None = None) -> None:
        """Connect to the server at ``address``. Where none is, start it: with ``plain`` as a fork of that
        server, which is patched then, otherwise as a new interpreter with ``environment``."""
        self.running = self.forks = 0
        self._lock = threading.Lock()
        self._log = plain._log if plain else address.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        # A server looks for late connections under the same lock before it ends.
        with locked(address):
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                self._socket.connect(str(address))
                return
            address.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(address))
                listener.listen()
                # Connected before the server has imported anything: it answers when it has.
                self._socket.connect(str(address))
                if plain:
                    plain.ask({"serve": str(address)}, [listener.fileno()])
                else:
                    self._start(address, listener.fileno(), environment)

    def _start(self, address: Path, listener: int, environment: Mapping[str, str]) -> None:
        with open(self._log, "w+b") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server_process", str(address), str(listener)],
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[listener],
            )

    def ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request and return the answer. Raises ColdStart when the server has ended."""
        with self._lock:
            try:
                send(self._socket, request, files)
                answer, _ = receive(self._socket)
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
        try:
            return self._log.read_bytes()[-2000:].decode(errors="replace")
        except OSError as error:
            return str(error)

    def end(self) -> None:
        """Disconnect. The server ends by itself when it was the last connection, and forks that were started
        over this one end now."""
        self._socket.close()
        if self._process is not None:
            self._process.poll()


@contextlib.contextmanager
def locked(address: Path) -> Iterator[None]:
    """Of all processes this one alone connects to ``address``, or stops to answer there."""
    with open(address.with_suffix(".lock"), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_servers: dict[frozenset[tuple[str, str]], list[_Server | None]] = {}
_imported: frozenset[str] = frozenset()
"""Packages and modules that a server has."""
_owner = os.getpid()
_own_folder: Path | None = None
"""Folder of servers of this process alone."""

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
    warnings = [*filter(None, env.get("PYTHONWARNINGS", "").split(",")), *warnings]
    path = python_path(env, str(cwd))
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


def python_path(env: Mapping[str, str], cwd: str) -> list[str]:
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
    global _owner, _imported, _own_folder
    if os.getpid() != _owner:  # a fork of the process that has the connections
        _servers.clear()
        _owner, _own_folder = os.getpid(), None
    patched = env.get(PATCHED) == "1"
    others = {name: value for name, value in env.items() if not _READ_LATER.fullmatch(name)}
    others.pop(PATCHED, None)
    others["PYTHONPATH"] = str(ROOT)
    if not _imported:
        first = _servers_for(others)
        for number in range(_HASH_SEEDS):  # they import at the same time
            first[number] = first[number] or _Server(_address(others, number), others)
        assert first[0] is not None
        _imported = frozenset(first[0].ask({"imported": True})["names"])
    early = [each for each in path if each != str(ROOT) and _is_read_at_start(each)]
    others["PYTHONPATH"] = os.pathsep.join([*early, str(ROOT)])
    number = slot % _HASH_SEEDS
    changed = {**others, PATCHED: "1"}
    if patched:
        servers = _servers_for(changed)
        if server := servers[number]:
            return server
    plain = _servers_for(others)
    server = plain[number] = plain[number] or _Server(_address(others, number), others)
    if patched:
        server = servers[number] = _Server(_address(changed, number), others, server)
    return server


def _address(environment: Mapping[str, str], number: int) -> Path:
    """Where the server for these variables and this hash seed answers, or is to."""
    global _own_folder
    folder = os.environ.get(FOLDER)
    if folder is None:
        _own_folder = _own_folder or new_folder()
    kind = json.dumps([sys.executable, str(ROOT), sorted(environment.items()), number])
    return Path(folder or str(_own_folder)) / f"{hashlib.sha256(kind.encode()).hexdigest()[:16]}.socket"


def new_folder() -> Path:
    """An empty folder for the addresses of servers."""
    # The address of a socket has at most 107 characters.
    place = None if len(tempfile.gettempdir()) < 50 else "/tmp"
    return Path(tempfile.mkdtemp(prefix="mt_megatron_servers_", dir=place))


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
        if _own_folder is not None:
            shutil.rmtree(_own_folder, ignore_errors=True)


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise RuntimeError("/proc/self/status has no Umask")


def send(connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    header = len(data).to_bytes(_HEADER, "big")
    if files:
        socket.send_fds(connection, [header], list(files))
    else:
        connection.sendall(header)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
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
