"""Runs a test function in several processes that find each other over loopback only.

The parent hosts the rendezvous store on a socket that it bound to 127.0.0.1 itself (a store that
torch binds listens on every address), so no port can be lost between choosing and using it. Ranks
see torchrun's variables and use the ordinary ``env://`` rendezvous.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tests import tolerances
from tests.second_lane import DAILY

if TYPE_CHECKING:
    from tests.fork_server import Forked

    Process = subprocess.Popen[bytes] | Forked

ROOT = Path(__file__).resolve().parent.parent
_GRACE_SECONDS = 3.0
_STACK_SECONDS = 0.5
_TAIL_CHARACTERS = 6000
_SLOTS = itertools.count()

_PATCHED = re.compile(
    r"tests\.(checkpoint|comm|convert|data|diverge|fp8|layers|models|parity"
    r"|backends(?=\.refusal_ranks:)|patches\.(device|events|model|optimizer)|patches(?=\.ranks:(?!leak|initialise))"
    r"|pipeline|planning|resume|scan|scope|seams|training)\.(?!(\w+\.)*(((test_swiglu|router_ranks"
    r"|test_stage_layers|test_norm|test_transformer_config|test_param_groups|layer_spec_ranks|mtp\.ranks):)"
    r"|moe_ranks:(?!layer_deviations)|test_linear:(upstream|strided)))"
)
"""Targets whose ranks patch for the CPU with all features at once. Where they are given no environment of
their own they are, in the first lane, forks of an interpreter that is patched already; in the second lane
they patch themselves."""


class RankError(AssertionError):
    """A rank failed or time ran out; the message holds the end of every rank's stderr."""


def run_ranks(
    world_size: int,
    target: str,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cold: bool = False,
) -> list[Any]:
    """Call ``target`` (``"tests.module:function"``) with ``*args`` in ``world_size`` processes.

    Arguments and return values must be JSON-able. Each process finds ``RANK``, ``LOCAL_RANK``,
    ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` set; ``env`` is added to its environment.
    It is the fork of a warm interpreter (tests/fork_server.py), or with ``cold`` a new interpreter.
    Returns the ranks' return values in rank order. Raises ``RankError`` when a rank exits with
    an error, dies, or is not done within ``timeout`` seconds; by then every process is gone.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a positive integer, found {world_size!r}")
    # Here, so that the ranks, which run this file too, import nothing that their target does not.
    from mt_megatron.backends.distributed.rendezvous import loopback_store

    with tempfile.TemporaryDirectory(prefix="mt_megatron_ranks_") as scratch:
        folder = Path(scratch)
        (folder / "call.json").write_text(json.dumps({"target": target, "args": args}))
        store, port = loopback_store()
        patched = not (DAILY or cold or env) and _PATCHED.match(target) is not None
        processes: list[Process] = []
        try:
            for rank in range(world_size):
                processes.append(_start(folder, rank, world_size, port, env or {}, cold, patched))
            problem = _wait(processes, time.monotonic() + timeout, timeout)
        finally:
            for process in processes:
                _end(process)
            del store
        if problem:
            raise RankError(_report(problem, target, processes, folder))
        return [json.loads((folder / f"result.{rank}.json").read_text()) for rank in range(world_size)]


def _start(
    folder: Path, rank: int, world_size: int, port: int, extra: Mapping[str, str], cold: bool, patched: bool
) -> Process:
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    from tests import fork_server

    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **extra,
    }
    if patched:
        environment[fork_server.PATCHED] = "1"
    command = [sys.executable, "-m", "tests.launch", str(folder)]
    with open(folder / f"stderr.{rank}", "wb") as stderr, open(folder / f"stdout.{rank}", "wb") as stdout:
        if not cold:
            with contextlib.suppress(fork_server.ColdStart):
                return _fork(command, rank, environment, stdout.fileno(), stderr.fileno())
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def _fork(command: list[str], rank: int, environment: dict[str, str], stdout: int, stderr: int) -> Forked:
    from tests import fork_server

    read, write = os.pipe()
    feed = open(write, "wb")  # noqa: SIM115
    try:
        return fork_server.start(
            command,
            slot=rank,
            cwd=ROOT,
            env=environment,
            files=(read, stdout, stderr),
            feed=feed,
        )
    except BaseException:
        feed.close()
        raise
    finally:
        os.close(read)


def start_command(
    command: Sequence[str], *, slot: int, cwd: str | Path, env: Mapping[str, str], output: IO[bytes]
) -> Process:
    """Start ``command`` (``[sys.executable, "-m", ...]``) without input, with both outputs to ``output``.

    The process leads a session of its own; it is the fork of a warm interpreter where the command allows it.
    """
    from tests import fork_server

    with open(os.devnull, "rb") as nothing:
        files = (nothing.fileno(), output.fileno(), output.fileno())
        with contextlib.suppress(fork_server.ColdStart):
            return fork_server.start(command, slot=slot, cwd=cwd, env=env, files=files)
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(env),
            stdin=nothing,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def run_command(
    command: Sequence[str | Path],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    check: bool = False,
    cold: bool = False,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with captured text, for a command that starts with ``sys.executable``.

    The process is the fork of a warm interpreter where the command allows it, and always without
    input. When this returns, everything that the command started in its session is gone.
    """
    from tests import fork_server

    words = [str(word) for word in command]
    folder, environment = cwd or os.getcwd(), dict(os.environ if env is None else env)
    with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = [one.fileno() for one in (nothing, out, err)]
        process: Process | None = None
        if not cold:
            with contextlib.suppress(fork_server.ColdStart):
                process = fork_server.start(
                    words, slot=next(_SLOTS), cwd=folder, env=environment, files=files
                )
        if process is None:
            process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdin=nothing,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        printed: list[str] = []
        try:
            code = process.wait(timeout)
        finally:
            _end(process)
            for file in (out, err):
                file.seek(0)
                printed.append(file.read().decode())
            if sys.exc_info()[0] is not None:
                sys.stderr.write("".join(printed))  # pytest shows it beside the error
    done = subprocess.CompletedProcess(words, code, *printed)
    if check:
        done.check_returncode()
    return done


def _wait(processes: list[Process], deadline: float, timeout: float) -> str | None:
    """None when every rank exited with 0, else what went wrong."""
    first_failure: tuple[int, float] | None = None
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return None
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None and first_failure is None:
            first_failure = (failed, time.monotonic())
        if first_failure is not None:
            rank, since = first_failure
            # The other ranks usually fail a moment later, and their stderr says why.
            if None not in codes or time.monotonic() - since > _GRACE_SECONDS:
                return f"rank {rank} ended with exit code {codes[rank]}"
        elif time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            for rank in running:
                processes[rank].send_signal(signal.SIGUSR1)  # writes every thread's stack to stderr
            time.sleep(_STACK_SECONDS)
            return f"ranks {running} were not done after {timeout:g} s"
        time.sleep(0.02)


def _end(process: Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    # Each rank leads a session of its own, so this reaches what it started and nothing else.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _report(problem: str, target: str, processes: list[Process], folder: Path) -> str:
    parts = [f"{target} on {len(processes)} ranks: {problem}"]
    for rank, process in enumerate(processes):
        text = (folder / f"stderr.{rank}").read_text(errors="replace")[-_TAIL_CHARACTERS:]
        parts.append(f"--- rank {rank} (exit code {process.returncode}), end of stderr:\n{text}")
    return "\n".join(parts)


def _leave_when_parent_dies() -> None:
    def watch() -> None:
        if not os.read(0, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _child(folder: Path) -> None:
    import faulthandler

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    _leave_when_parent_dies()
    tolerances.install()
    call = json.loads((folder / "call.json").read_text())
    module, _, name = call["target"].partition(":")
    result = getattr(importlib.import_module(module), name)(*call["args"])
    text = json.dumps(result)
    (folder / f"result.{os.environ['RANK']}.json").write_text(text)
    if "tests.fork_server" in sys.modules:
        # A fork ends without taking its modules apart, so nothing comes late to the interpreter's end:
        # the collections of end_groups, here and at exit, need not visit everything.
        gc.freeze()
    _leave_process_groups()


def _leave_process_groups() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        # A rank that exits first tears down connections its peers may still read from.
        distributed.barrier()
        from mt_megatron.patches.device.process_groups import end_groups

        end_groups()


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
