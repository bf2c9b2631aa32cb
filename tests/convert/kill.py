"""A conversion that dies when it has written so many buffers, for ``test_kill``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from mt_megatron.convert import output_folder as output
from tests.convert.recorded_run import converted

source, destination, form, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
written = 0
original = output._Sink.write


def write(self: Any, buffer: Any) -> int:
    """As ever, until the process is gone without a word."""
    global written
    written += 1
    if written > count:
        os._exit(9)
    return original(self, buffer)


output._Sink.write = write  # type: ignore[method-assign]
converted(Path(source), Path(destination), form, max_shard_size=30_000, workers=2)
print(written)
