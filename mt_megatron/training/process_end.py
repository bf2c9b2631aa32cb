"""Ends this process although its main thread does not answer, with everything that it started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from typing import NoReturn


def end_process(code: int, message: str) -> NoReturn:
    """Write ``message`` to stderr, kill child processes, and leave with ``code``.

    Callable from any thread. Nothing is cleaned up: a thread that waits in a collective would wait on.
    """
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"{message}\n".encode(errors="replace"))
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, ValueError):
            child.kill()
    os._exit(code)
