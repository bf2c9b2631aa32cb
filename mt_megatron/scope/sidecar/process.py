"""Sidecar process of a node, as its local rank 0 starts and ends it."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mt_megatron.backends.threads import RankThread
from mt_megatron.scan.monitor.child_process import end_child, relay_lines, start_child

SECONDS_FOR_OTHERS = 5.0
"""At the end, for ranks that have not ended yet; then it is told to end."""

SECONDS_TO_END = 25.0
"""For what waits to be written after the ranks' bye; then the process is killed."""

TOLD = 3
"""Exit code of a sidecar that could not begin and has said why."""

END = signal.SIGRTMIN + 1
"""Signal that tells a sidecar that its ranks have ended. SIGTERM and SIGUSR1 do not, as long as its parent
lives: a scheduler that ends a job sends them to all processes, and the ranks have still a step and a
checkpoint to make."""

PAGE_MODULES = ("starlette", "uvicorn", "websockets")
"""What the live page needs: the extra ``scope``."""

_log = logging.getLogger("mt_megatron")


def missing_for_page() -> list[str]:
    """Packages that the live page needs and that are not installed."""
    return [name for name in PAGE_MODULES if importlib.util.find_spec(name) is None]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The live page."""

    port: int
    """On loopback; 0: a free one."""

    token_file: Path | None = None


class SidecarProcess:
    """The process. That it cannot start, or has ended too early, is said once; training goes on."""

    def __init__(
        self,
        run: Path,
        node: int,
        *,
        say: Callable[[str], None],
        ranks: int = 0,
        retain_mib: int = 512,
        serve: Serving | None = None,
        sinks: Sequence[str] = (),
        socket: Path | None = None,
    ) -> None:
        """``say`` gets its lines, from a thread. ``socket``: where ranks connect, in a folder that does not
        exist or is private; by default in a new private folder under TMPDIR."""
        self._say = say
        self._ranks = ranks
        self._folder: Path | None = None
        if socket is None:
            self._folder = Path(tempfile.mkdtemp(prefix="mtscope-"))
            socket = self._folder / "s"
        self.socket = socket
        """Path of the Unix socket; ranks can connect once it exists."""

        self._command = [
            *(sys.executable, "-m", "mt_megatron.scope.sidecar", "--run", str(run), "--socket", str(socket)),
            *("--node", str(node), "--parent", str(os.getpid()), "--ranks", str(ranks)),
            *("--retain-mib", str(retain_mib), *(f"--sink={sink}" for sink in sinks)),
        ]
        if serve is not None:
            self._command += ["--serve", "--port", str(serve.port)]
            self._command += [] if serve.token_file is None else ["--token-file", str(serve.token_file)]
        self._closing = False
        self._told = False
        self._relay: RankThread | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns at once."""
        try:
            self.process = start_child(self._command, held={END})
        except OSError as error:
            self._say(f"scope: no sidecar, so nothing is recorded ({error}); training goes on")
            self._told = True
            self._leave_folder()
            return
        self._relay = RankThread(target=self._read, args=(self.process,), daemon=True)
        self._relay.start()

    def has_told(self, seconds: float) -> bool:
        """Whether it has ended by an error, and said so, or does within ``seconds``; any thread."""
        if self._relay is not None:
            self._relay.join(seconds)
        return self._told

    def close(self) -> None:
        """End it, with what it still has to write, within ``SECONDS_FOR_OTHERS`` and
        ``SECONDS_TO_END``."""
        self._closing = True
        if self.process is not None:
            if self._ranks > 1:
                # The node's other ranks may still send: it ends by itself when all have said so.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(SECONDS_FOR_OTHERS)
            end_child(self.process, SECONDS_TO_END, by=END)
        if self._relay is not None:
            self._relay.join(1.0)
        self._leave_folder()

    def _leave_folder(self) -> None:
        # Ranks that still try to connect see by this that nobody will listen.
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        last = ""

        def relay(text: str) -> None:
            nonlocal last
            if text.startswith("scope: "):
                self._say(text)
            elif text:
                # Of a traceback the last line says most.
                last = text
                _log.info("sidecar: %s", text)

        with contextlib.suppress(ValueError):
            relay_lines(process, relay)
        code = process.wait()
        if self._closing:
            return
        if code not in (0, TOLD):
            why = f" ({last})" if last else ""
            self._say(
                f"scope: the sidecar ended with code {code}{why}: nothing more is recorded; training goes on"
            )
        self._told = bool(code)
        self._leave_folder()


def sidecar_process(
    run: Path,
    node: int,
    *,
    ranks: int,
    retain_mib: int,
    port: int | None,
    sinks: Sequence[str],
    say: Callable[[str], None],
) -> SidecarProcess:
    """A ``scope.interfaces.MakeSidecar``: the process of ``node``, not yet started; ``port`` None serves no
    page."""
    serve = None if port is None else Serving(port=port)
    return SidecarProcess(run, node, say=say, ranks=ranks, retain_mib=retain_mib, serve=serve, sinks=sinks)
