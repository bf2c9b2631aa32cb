"""``python -m mt_megatron.scope.sidecar``: the process beside a node's ranks. Local rank 0 starts it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mt_megatron.errors import ScopeError
from mt_megatron.scan.format.permissions import open_private
from mt_megatron.scan.monitor.child_process import hear_signals, is_alive
from mt_megatron.scope.recording.files import scope_files, this_host
from mt_megatron.scope.sidecar.process import END, TOLD
from mt_megatron.scope.sidecar.sidecar import Options, run_sidecar
from mt_megatron.scope.sidecar.sinks.base import FORM

_MOST_LOG_BYTES = 2**20


def main(arguments: list[str] | None = None) -> int:
    """Run until the parent, the ranks or a signal end it. Returns 0, or ``TOLD`` where it could not begin and
    has said why."""
    options = parsed(arguments)
    say = _speaker(options)
    logging.getLogger().addHandler(_Log(options))
    with contextlib.suppress(OSError):
        os.nice(10)
    try:
        asyncio.run(_run(options, say))
    except ScopeError as error:
        say(f"scope: nothing is recorded on this node; training goes on: {error}")
        return TOLD
    except Exception:
        logging.exception("the sidecar ends")
        raise
    return 0


def parsed(arguments: list[str] | None = None) -> Options:
    """Options of the command line. Ends the process with 2 for wrong ones."""
    parser = argparse.ArgumentParser(prog="python -m mt_megatron.scope.sidecar", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to make for the ranks")
    parser.add_argument("--node", type=int, required=True, help="number of this node; 0 has global rank 0")
    parser.add_argument("--parent", type=int, help="end when this process is gone")
    parser.add_argument("--ranks", type=int, default=0, help="ranks of this node; 0: not known")
    parser.add_argument("--retain-mib", type=int, default=512, help="bound of the recording (%(default)s)")
    parser.add_argument("--serve", action="store_true", help="serve the live page")
    parser.add_argument("--port", type=int, default=0, help="of the page, on loopback; 0: a free one")
    parser.add_argument("--token-file", type=Path, help="write the page's address with its token here, too")
    parser.add_argument(
        "--sink", action="append", default=[], metavar="SINK", help=f"{FORM}; may be repeated"
    )
    given = parser.parse_args(arguments)
    if given.node < 0 or given.retain_mib < 1 or given.ranks < 0 or not 0 <= given.port < 65536:
        parser.error("expected a node and ranks of 0 or more, a bound of 1 MiB or more, a port below 65536")
    return Options(
        run=given.run,
        socket=given.socket,
        node=given.node,
        parent=given.parent,
        retain_mib=given.retain_mib,
        ranks=given.ranks,
        serve=given.serve,
        port=given.port,
        token_file=given.token_file,
        sinks=tuple(given.sink),
    )


async def _run(options: Options, say: Callable[[str], None]) -> None:
    stop, asked = asyncio.Event(), asyncio.Event()

    def ended() -> None:
        """End with the ranks, at the second signal at once."""
        if asked.is_set() or options.parent is None or not is_alive(options.parent):
            stop.set()
        asked.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(END, stop.set)
    # Schedulers send it to all processes of a job; ranks end after their step by it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ended)
    hear_signals(END)
    await run_sidecar(options, say, stop)


def _speaker(options: Options) -> Callable[[str], None]:
    """Lines to the error output, which the parent relays, and to the log in the run's folder."""

    def say(text: str) -> None:
        line = " ".join(text.splitlines())
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
        _write(options, line)

    return say


def _write(options: Options, text: str) -> None:
    log = scope_files(options.run).log(this_host(), options.node)
    with contextlib.suppress(OSError):
        handle = open_private(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            if os.fstat(handle).st_size < _MOST_LOG_BYTES:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                os.write(handle, f"{stamp} {text}\n".encode(errors="replace"))
        finally:
            os.close(handle)


class _Log(logging.Handler):
    """Warnings and tracebacks to the same log: of the error output the ranks show the last line alone."""

    def __init__(self, options: Options) -> None:
        super().__init__(logging.WARNING)
        self._options = options

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            _write(self._options, self.format(record))


if __name__ == "__main__":
    sys.exit(main())
