"""``mt-megatron run`` in one rank, with the device number that a launcher would give it."""

from __future__ import annotations

import os
import sys

from mt_megatron.cli.main import main
from tests.upstream.job import ONE_DEVICE

if __name__ == "__main__":
    if os.environ.get(ONE_DEVICE):
        os.environ["LOCAL_RANK"] = "0"
    raise SystemExit(main(["run", *sys.argv[1:]]))
