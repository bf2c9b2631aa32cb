"""A user's own program whose process groups are in another order than ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

import mt_megatron
from mt_megatron.scan.session import session


def places(folder: str) -> list[list[int]]:
    """Data-parallel and pipeline rank of every rank, by the trace: PP 2 before DP 2."""
    mt_megatron.patch(backend="cpu")
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, order="tp-cp-pp-ep-dp")
    with session(folder, watch=False):
        pass
    dist.barrier()
    facts: dict[str, Any] = json.loads((Path(folder) / "scan" / "run.json").read_text())
    own = parallel_state.get_data_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    found = [[each["dp"], each["pp"]] for each in facts["ranks"]]
    assert found[dist.get_rank()] == list(own)
    return found
