"""The rank's side of the test of runs whose bf16 products go to fp32 kernels."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mt_megatron
from mt_megatron.seams import widened
from mt_megatron.training.distributed import joined
from mt_megatron.training.preflight import product_notes
from tests.fp8.cases import Run, begin, config_of


def trained(flags: dict[str, str], steps: int) -> dict[str, Any]:
    """Losses, products that went to fp32 kernels and what is said, for each configuration, as on a processor
    for which torch has no bf16 kernels."""
    begin()
    found: dict[str, Any] = {}
    with (
        mock.patch.object(widened, "serves_processor", lambda: True),
        mock.patch.object(widened, "matmul", wraps=widened.matmul) as counted,
    ):
        for name, options in flags.items():
            config = config_of(options)
            counted.reset_mock()
            with joined(config, mt_megatron.backend()) as job:
                run = Run(options, job)
                losses = [run.step() for _ in range(steps)]
            found[name] = {
                "losses": losses,
                "products": counted.call_count,
                "notes": product_notes(config, mt_megatron.backend()),
                "afterwards": widened.everywhere(),
            }
    return found
