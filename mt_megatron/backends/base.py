"""What a device is: the protocol every backend implements, and nothing about any one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from mt_megatron.backends.telemetry.readings import Reading


class TimedEvent(Protocol):
    """A mark in a stream of the device's work, as ``torch.cuda.Event(enable_timing=True)`` is."""

    def record(self, stream: Any = None) -> None:
        """Put it behind the work queued on ``stream`` (None: the current one) so far; does not wait."""

    def query(self) -> bool:
        """Whether the device has got there; does not wait."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds on the device from this event to ``end_event``, negative when that was first; the
        device must have got to both."""


@runtime_checkable
class Backend(Protocol):
    """A device family and its collective library, found by the entry point group
    ``mt_megatron.backends`` (the entry point's object is called without arguments).

    A method that names a device takes its index, without a default. The others concern the calling thread's
    current device; ``threads.RankThread`` sets it in every thread of a rank.
    """

    name: str
    """``cpu``, ``cuda``, ``musa`` ...: what ``patch(backend=...)`` takes."""

    device_type: str
    """The ``torch.device`` type string."""

    collective: str
    """The ``torch.distributed`` backend name: ``gloo``, ``nccl``, ``mccl``."""

    needs_redirection: bool
    """Whether Megatron's ``torch.cuda`` must be translated. False for CUDA itself."""

    def available(self) -> tuple[bool, str]:
        """True where it can be used here, and the one-line reason, either way. Uses no device: a process that
        has begun to cannot fork ranks that do."""

    def device_count(self) -> int:
        """Devices this process may use; on ``cpu`` the number of local ranks (at least 1)."""

    def current_device(self) -> int:
        """Index of the calling thread's current device: 0 in a thread that is no ``RankThread``."""

    def set_device(self, index: int) -> None:
        """Make ``index`` the calling thread's current device. Raises ``BackendError`` when out of range."""

    def device(self, index: int) -> torch.device:
        """The torch device of ``index``."""

    def device_name(self, index: int) -> str:
        """Marketing name of device ``index``."""

    def synchronize(self) -> None:
        """Wait until all work queued on the current device is done."""

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's default generator."""

    def get_rng_state(self) -> torch.Tensor:
        """State of the current device's default generator, a uint8 tensor on the host."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what ``get_rng_state`` returned."""

    def memory_allocated(self) -> int | None:
        """Bytes held by tensors (device) or by the process (cpu); None when unknown."""

    def max_memory_allocated(self) -> int | None:
        """Peak of ``memory_allocated`` since the process started; None when unknown."""

    def total_memory(self) -> int | None:
        """Bytes of memory of the current device; None when unknown."""

    def telemetry(self, index: int) -> Reading:
        """Utilization, memory, heat, power and clock of device ``index``; what cannot be told is
        ``Unsupported`` and never an error."""

    def bf16_supported(self) -> bool:
        """Whether bf16 arithmetic works on the current device."""

    def fp8_granularities(self) -> tuple[str, ...]:
        """FP8 GEMM scalings with hardware support, such as ``("tensor", "row")``."""

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense peak FLOP/s from the vendor's table; None when the device is not in it."""

    def collective_environment(self, nodes: int) -> Mapping[str, str]:
        """Environment variables to set before the process group is made, for a job of ``nodes``
        nodes. Only the variables of this backend's own library."""

    def process_group_backend(self, requested: str | None) -> str | None:
        """Translate the backend string of ``init_process_group``/``new_group``: ``nccl`` and
        ``cpu:gloo,cuda:nccl`` become what this device has. None stays None."""

    def adamw(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """The fastest AdamW that torch (or the vendor) has for this device."""

    def fused(self, name: str) -> Callable[..., Any] | None:
        """The vendor's fused operation called ``name``, or None where torch's own has to do.
        ``swiglu``: (..., 2 f) -> (..., f), ``silu(first half) * second half``, differentiable."""

    def pins_host_memory(self) -> bool:
        """Whether host memory can be pinned here, which makes transfers asynchronous."""

    def timed_event(self) -> TimedEvent | None:
        """A new event on the current device; None where the host does the work and its own clock says
        when."""

    def new_stream(self) -> Any | None:
        """A stream of the current device on which nothing else runs; None where there are none."""

    def profiler_activity(self) -> str | None:
        """The ``torch.profiler.ProfilerActivity`` of this device's kernels; None where operators on the
        host are all there is."""

    def torch_overrides(self) -> Mapping[str, Any]:
        """Dotted names below ``torch`` and the object Megatron's modules see there instead, for
        example ``{"cuda": namespace, "zeros": factory}``. Empty without redirection."""
