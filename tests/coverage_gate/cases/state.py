"""Process groups, buffers, timers, norms and the straggler detector."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from pathlib import Path

from tests.coverage_gate.case import case
from tests.coverage_gate.target import COLLECTIVE, DEVICE, torch


@case(world=2, bare=True)
def communicator_options_for_nccl_are_set_aside() -> None:
    from megatron.core import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "communicators.yaml"
        path.write_text("dp:\n  cga_cluster_size: 2\n  max_ctas: 8\n  min_ctas: 1\n")
        parallel_state.initialize_model_parallel(nccl_communicator_config_path=str(path))
    group = parallel_state.get_data_parallel_group()
    assert torch.distributed.get_backend(group) == COLLECTIVE
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=group)
    assert total.item() == 2
    parallel_state.destroy_model_parallel()


@case(world=2, bare=True)
def sharp_falls_back_to_a_plain_barrier() -> None:
    from megatron.core import parallel_state

    before = os.environ.pop("NCCL_COLLNET_ENABLE", None)
    try:
        parallel_state.initialize_model_parallel(use_sharp=True)
        assert parallel_state.get_data_parallel_world_size() == 2
    finally:
        parallel_state.destroy_model_parallel()
        os.environ.pop("NCCL_COLLNET_ENABLE", None)
        if before is not None:
            os.environ["NCCL_COLLNET_ENABLE"] = before


@case(world=1)
def global_memory_buffer_is_made_once_on_the_device() -> None:
    from megatron.core.utils import GlobalMemoryBuffer

    buffer = GlobalMemoryBuffer()
    first = buffer.get_tensor([4, 3], torch.bfloat16, "x")
    second = buffer.get_tensor([2, 3], torch.bfloat16, "x")
    assert first.shape == (4, 3) and first.dtype == torch.bfloat16 and first.device.type == DEVICE
    assert second.data_ptr() == first.data_ptr()


@case(world=1)
def multi_tensor_l2_norm() -> None:
    from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_l2_norm

    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [12.0]])]
    norm, per_tensor = local_multi_tensor_applier(
        local_multi_tensor_l2_norm, torch.zeros(1), [tensors], False
    )
    assert norm.device.type == DEVICE and norm.shape == (1,) and per_tensor is None
    assert math.isclose(norm.item(), 13.0, rel_tol=1e-6)


@case(world=2, tp=2)
def timers_of_all_ranks() -> None:
    from megatron.core.timers import Timers

    timers = Timers(log_level=2, log_option="minmax")
    timers("work").start(barrier=True)
    time.sleep(0.02)
    timers("work").stop(barrier=True)
    times = timers._get_elapsed_time_all_ranks(["work", "absent"], reset=False, barrier=True)
    assert times.shape == (2, 2) and times.device.type == DEVICE
    assert (times[:, 0] >= 0.02).all() and (times[:, 0] < 60).all()
    assert (times[:, 1] == 0).all()


@case(world=1)
def straggler_detector_measures_with_events() -> None:
    """Configured as rank 1 of 2, which starts no control port; only rank 0 has one."""
    from megatron.core.utils import StragglerDetector

    StragglerDetector._configured = False
    detector = object.__new__(StragglerDetector)
    detector.__init__()
    try:
        detector.configure(world=2, rank=1, prefill=2, enabled=True)
        assert detector.enabled and torch.device(detector.dev).type == DEVICE and detector.sock is None
        for _ in range(2):  # The second pair of events no longer comes out of the prefilled queue.
            with detector:
                time.sleep(0.01)
        with detector(bdata=True):
            time.sleep(0.005)
        elapsed, batch, temperature, power, utilization, clock = detector.elapsed()
        assert 20 <= elapsed < 60_000 and 5 <= batch < 60_000, (elapsed, batch)
        for reading in (temperature, power, utilization, clock):
            assert math.isnan(reading) or reading >= 0, "a figure that nobody measured must be NaN"
        # Of the devices here only NVIDIA's library measures power.
        assert temperature != 0 and (power > 0 if DEVICE == "cuda" else math.isnan(power))
    finally:
        StragglerDetector._configured = False
        logging.getLogger("megatron.core.utils").debug("straggler detector done")
