"""The cuda backend object against a recording stand-in of ``torch.cuda``: what it calls, and with what.

The stand-in refuses names that the real module lacks and arguments that the real function would not
take. No GPU is involved; tests/device asks a real one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mt_megatron.backends.base import Backend
from mt_megatron.backends.cpu.backend import CpuBackend
from mt_megatron.backends.cuda import CudaBackend
from mt_megatron.backends.musa.backend import MusaBackend
from mt_megatron.errors import BackendError
from tests.fake_cuda.stand_in import GIB, Event, RecordingCuda, Stream

STATE = torch.zeros(16, dtype=torch.uint8)


@pytest.fixture
def cuda() -> Iterator[RecordingCuda]:
    with RecordingCuda(devices=4, current=2).installed() as installed:
        yield installed


def _fused_adamw(backend: CudaBackend) -> bool:
    # On a host tensor: torch has a fused kernel for those as well, and no GPU is here.
    optimizer = backend.adamw([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    return bool(optimizer.defaults["fused"]) and type(optimizer) is torch.optim.AdamW


# Method -> (how it is called, what it returns, what it calls on torch.cuda).
METHODS: dict[str, tuple[Callable[[CudaBackend], Any], Any, list[str]]] = {
    "available": (
        lambda b: b.available(),
        (True, "4 CUDA device(s), NCCL"),
        ["device_count"],  # of these torch says that it leaves processes to be forked as they are
    ),
    "device_count": (lambda b: b.device_count(), 4, ["device_count"]),
    "current_device": (lambda b: b.current_device(), 2, ["current_device"]),
    "set_device": (lambda b: b.set_device(3), None, ["device_count", "set_device"]),
    "device": (lambda b: b.device(2), torch.device("cuda", 2), []),
    "device_name": (lambda b: b.device_name(1), "NVIDIA H100 80GB HBM3", ["get_device_name"]),
    "synchronize": (lambda b: b.synchronize(), None, ["synchronize"]),
    "manual_seed": (lambda b: b.manual_seed(7), None, ["manual_seed"]),
    "get_rng_state": (lambda b: b.get_rng_state().tolist(), [0] * 16, ["get_rng_state"]),
    "set_rng_state": (
        lambda b: b.set_rng_state(STATE),
        None,
        ["set_rng_state", "default_generators.set_state"],
    ),
    "memory_allocated": (lambda b: b.memory_allocated(), 3 * GIB, ["memory_stats_as_nested_dict"]),
    "max_memory_allocated": (lambda b: b.max_memory_allocated(), 5 * GIB, ["max_memory_allocated"]),
    "total_memory": (lambda b: b.total_memory(), 80 * GIB, ["current_device", "get_device_properties"]),
    "telemetry": (
        lambda b: b.telemetry(1).source.partition(" ")[0].strip(":,").lower(),
        "nvml",
        ["get_device_properties"],
    ),
    "bf16_supported": (lambda b: b.bf16_supported(), True, ["is_bf16_supported"]),
    "fp8_granularities": (lambda b: b.fp8_granularities(), ("tensor", "row"), ["get_device_capability"]),
    "peak_flops": (lambda b: b.peak_flops(torch.bfloat16), 989.5e12, ["get_device_name"]),
    "collective_environment": (lambda b: dict(b.collective_environment(2)), {}, []),
    "process_group_backend": (lambda b: b.process_group_backend("nccl"), "nccl", []),
    "adamw": (_fused_adamw, True, []),
    "fused": (lambda b: b.fused("swiglu"), None, []),
    "pins_host_memory": (lambda b: b.pins_host_memory(), True, []),
    "timed_event": (lambda b: type(b.timed_event()), Event, []),
    "profiler_activity": (lambda b: b.profiler_activity(), "CUDA", []),
    "new_stream": (lambda b: type(b.new_stream()), Stream, []),
    "torch_overrides": (lambda b: dict(b.torch_overrides()), {}, []),
}


def test_every_method_of_the_protocol_is_called_here() -> None:
    protocol = {name for name, value in vars(Backend).items() if inspect.isfunction(value)}
    assert {name for name in protocol if not name.startswith("_")} == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_calls_what_torch_cuda_has(cuda: RecordingCuda, method: str) -> None:
    call, expected, names = METHODS[method]
    assert call(CudaBackend()) == expected
    # torch itself asks for the device when an optimizer is made, and the like.
    assert [name for name in cuda.names() if method != "adamw"] == names


def test_arguments_arrive_where_torch_expects_them(cuda: RecordingCuda) -> None:
    backend = CudaBackend()
    backend.set_device(3)
    backend.manual_seed(11)
    backend.bf16_supported()
    backend.device_name(1)
    arguments = {call.name: call.arguments for call in cuda.calls}
    assert arguments["set_device"] == {"device": 3} and cuda.current == 3
    assert arguments["manual_seed"] == {"seed": 11}
    # bf16 that is emulated would train slower than fp32.
    assert arguments["is_bf16_supported"] == {"including_emulation": False}
    assert arguments["get_device_name"] == {"device": 1}
    assert torch.cuda.default_generators[3].seed == 11


def test_without_redirection_torch_is_what_megatron_sees(cuda: RecordingCuda) -> None:
    assert CudaBackend.needs_redirection is False and CudaBackend.collective == "nccl"


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_out_of_range_is_refused_before_torch_is_asked(cuda: RecordingCuda, index: int) -> None:
    with pytest.raises(
        BackendError, match=f"invalid device index {index}.*4 CUDA device.*CUDA_VISIBLE_DEVICES"
    ):
        CudaBackend().set_device(index)
    assert "set_device" not in cuda.names()


@pytest.mark.parametrize(
    ("name", "capability", "granularities", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), (), 312e12),
        ("NVIDIA L40S", (8, 9), ("tensor",), None),
        ("NVIDIA H100 PCIe", (9, 0), ("tensor", "row"), 756e12),
        ("NVIDIA H200", (9, 0), ("tensor", "row"), 989.5e12),
    ],
)
def test_cards_are_known_by_capability_and_name(
    name: str, capability: tuple[int, int], granularities: tuple[str, ...], bf16: float | None
) -> None:
    with RecordingCuda(name=name, capability=capability).installed():
        backend = CudaBackend()
        assert backend.fp8_granularities() == granularities
        assert backend.peak_flops(torch.bfloat16) == bf16
        assert backend.peak_flops(torch.int8) is None


def test_it_is_honest_about_a_machine_without_gpus() -> None:
    with RecordingCuda(available=False).installed():
        usable, why = CudaBackend().available()
        assert not usable and "no device or driver" in why


@pytest.mark.parametrize(
    ("version", "status", "why"),
    [
        (12_040, 0, None),
        (13_000, 0, None),
        (11_080, 0, "the driver serves CUDA 11.8, this torch was built for CUDA 12.8; update the driver"),
        (0, 34, "gives no version (CUDA driver error 34)"),
        (None, 0, "the library of NVIDIA's driver cannot be used (no such file)"),
    ],
)
def test_a_device_without_a_driver_for_this_torch_is_not_available(
    monkeypatch: pytest.MonkeyPatch, version: int | None, status: int, why: str | None
) -> None:
    """NVML counts the device all the same; nothing begins to use CUDA, of which a fork could not go on."""

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"
            if version is None:
                raise OSError("no such file")

        def cuDriverGetVersion(self, into: Any) -> int:  # noqa: N802 - NVIDIA's name
            into._obj.value = version
            return status

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr("mt_megatron.backends.cuda.ctypes.CDLL", Driver)
    with RecordingCuda().installed():
        usable, text = CudaBackend().available()
    assert usable == (why is None) and (why or "CUDA device(s), NCCL") in text


def test_the_stand_in_refuses_what_torch_cuda_has_not(cuda: RecordingCuda) -> None:
    """Negative control of this file's own instrument."""
    with pytest.raises(TypeError):
        torch.cuda.manual_seed(1, 2)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        cuda._recorded("musa_only", lambda: None)


def test_the_stand_in_leaves_torch_as_it_was() -> None:
    before = {name: getattr(torch.cuda, name) for name in (*RecordingCuda().behaviour(), "Stream", "Event")}
    with RecordingCuda().installed():
        assert torch.cuda.is_available()
    assert all(getattr(torch.cuda, name) is value for name, value in before.items())


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_collective_library_gets_its_own_variables_alone(nodes: int) -> None:
    for backend, foreign in (
        (CudaBackend(), ("MCCL_", "GLOO_")),
        (CpuBackend(), ("NCCL_", "MCCL_")),
        (MusaBackend(), ("NCCL_", "GLOO_")),
    ):
        names = list(backend.collective_environment(nodes))
        assert not [name for name in names if name.startswith(foreign)], names
