"""Finding a backend: built in, by entry point, by name, and automatically."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

from mt_megatron.backends import registry
from mt_megatron.backends.cpu.backend import CpuBackend
from mt_megatron.backends.cuda import CudaBackend
from mt_megatron.backends.distributed.namespace import translate_process_group_backend
from mt_megatron.errors import BackendError


class ThirdParty(CpuBackend):
    name = "thirdparty"


def test_built_in_backends_are_there() -> None:
    assert {"cpu", "cuda"} <= set(registry.names())
    assert registry.get("cpu") is registry.get("cpu")


def test_unknown_name_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(BackendError, match="did you mean 'cuda'"):
        registry.get("cudaa")


def test_an_entry_point_brings_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("thirdparty", f"{__name__}:ThirdParty", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.GROUP else [])
    monkeypatch.setattr(registry, "_instances", {})
    assert registry.get("thirdparty").name == "thirdparty"
    backend, why = registry.select("auto")
    if not torch.cuda.is_available():
        assert backend.name == "thirdparty" and why.startswith("auto: ")


def test_an_entry_point_may_not_take_a_built_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("cpu", f"{__name__}:ThirdParty", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    with pytest.raises(BackendError, match="belongs to"):
        registry.names()


def test_an_object_that_is_no_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("nonsense", "builtins:object", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    with pytest.raises(BackendError, match="does not implement"):
        registry.get("nonsense")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here auto picks the GPU")
def test_auto_without_an_accelerator_is_cpu_and_says_why() -> None:
    backend, why = registry.select("auto")
    assert backend.name == "cpu" and "no accelerator" in why and "cuda:" in why


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA can be used")
def test_a_named_backend_without_its_device_is_an_error_not_a_fallback() -> None:
    with pytest.raises(BackendError, match="cannot be used here"):
        registry.select("cuda")


@pytest.mark.parametrize(
    ("requested", "cpu", "musa"),
    [
        ("nccl", "gloo", "mccl"),
        ("NCCL", "gloo", "mccl"),
        ("gloo", "gloo", "gloo"),
        ("mpi", "mpi", "mpi"),
        (None, None, None),
        ("cpu:gloo,cuda:nccl", "cpu:gloo", "cpu:gloo,musa:mccl"),
        ("cuda:nccl,cpu:gloo", "cpu:gloo", "musa:mccl,cpu:gloo"),
        ("cuda:nccl", "cpu:gloo", "musa:mccl"),
        ("cpu:gloo", "cpu:gloo", "cpu:gloo"),
    ],
)
def test_process_group_backend_strings(requested: str | None, cpu: str | None, musa: str | None) -> None:
    assert translate_process_group_backend(requested, collective="gloo", device_type="cpu") == cpu
    assert translate_process_group_backend(requested, collective="mccl", device_type="musa") == musa


def test_cuda_peak_flops_are_from_the_table_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend()
    for name, known in (
        ("NVIDIA H200", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA GTX 1080", False),
        ("NVIDIA H100 NVL", False),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None, name=name: name)
        assert (backend.peak_flops(torch.bfloat16) is not None) is known
        assert backend.peak_flops(torch.int8) is None
