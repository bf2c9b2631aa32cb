"""The musa backend on the emulated device: what Megatron's modules see, and what stays as it was."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from mt_megatron.backends.cuda import CudaBackend
from mt_megatron.backends.distributed import namespace as collectives
from mt_megatron.backends.musa.backend import MusaBackend
from mt_megatron.errors import BackendError
from tests.emulators import environment, needs_emulated_musa
from tests.launch import run_command

HERE = Path(__file__).parent
pytestmark = needs_emulated_musa()


def run(code: str, *, patched: bool = True, **extra: str) -> str:
    """Run ``code`` in a fresh process that finds the emulator; returns its output."""
    env: Mapping[str, str] = {**os.environ, **environment(), **extra}
    # Not by PYTHONPATH: warm interpreters of a path with a part of Megatron are others.
    start = f"import sys; sys.path.append({str(HERE / 'namespace')!r})\n"
    start += "import mt_megatron; mt_megatron.patch('musa')\n" if patched else ""
    done = run_command(
        [sys.executable, "-W", "ignore", "-c", start + textwrap.dedent(code)],
        env=env,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_megatron_sees_musa_and_nobody_else_does() -> None:
    run("""
        import torch, otherlib
        from megatron.probe import torch as seen
        assert not torch.cuda.is_available() and not otherlib.torch.cuda.is_available()
        assert seen.cuda.is_available() and seen.cuda.device_count() == 1
        for spelling in ("cuda", "cuda:0", 0, seen.device("cuda"), torch.device("cuda", 0)):
            assert seen.zeros(2, device=spelling).device == torch.device("musa", 0), spelling
        assert seen.device("cuda", 0) == torch.device("musa", 0)
        assert seen.cuda.get_device_name("cuda:0") == "MTT S4000 (emulated)"
        assert seen.cuda.FloatTensor([1.5]).type() == "torch.musa.FloatTensor"
        assert isinstance(seen.cuda.LongTensor(3), seen.cuda.LongTensor)
        assert not isinstance(torch.zeros(1), seen.cuda.FloatTensor)
        assert not hasattr(seen.cuda, "caching_allocator_alloc")
    """)


def test_every_factory_takes_every_spelling_of_the_device() -> None:
    out = run("""
        import megatron.probe as probe
        import torch
        spellings = ["cuda", "cuda:0", 0, probe.torch.device("cuda", 0), probe.torch.cuda.current_device()]
        left = []
        for name, make in probe.FACTORIES.items():
            for spelling in spellings:
                try:
                    made = make(spelling)
                except (NotImplementedError, RuntimeError) as error:
                    # A window, sparse and quantized layouts: kernels that the emulator has not.
                    assert "musa" in str(error) or "PrivateUse1" in str(error), (name, error)
                    left.append(name)
                    continue
                assert made.device == torch.device("musa", 0), (name, spelling, made.device)
        print(len(probe.FACTORIES), sorted(set(left)))
    """)
    total, left = out.split(" ", 1)
    assert int(total) >= 30 and left.count("'") // 2 <= 8, out


def test_libraries_are_translated() -> None:
    backend = MusaBackend()
    for requested, expected in (
        ("nccl", "mccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,musa:mccl"),
        ("cuda:nccl", "musa:mccl"),
        ("gloo", "gloo"),
        ("fake", "fake"),
        (None, None),
    ):
        assert backend.process_group_backend(requested) == expected


def test_groups_of_both_devices_work() -> None:
    run("""
        import torch.distributed as dist, torch
        from megatron.probe import torch as seen
        seen.distributed.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.get_backend() == "mccl"
        both = seen.distributed.new_group([0], backend="cpu:gloo,cuda:nccl")
        for device in ("cpu", "musa"):
            value = torch.ones(2, device=device)
            dist.all_reduce(value, group=both)
        try:
            dist.all_reduce(torch.ones(2))
        except RuntimeError as error:
            assert "cpu" in str(error)
        else:
            raise AssertionError("mccl took a tensor of the host")
    """)


@pytest.mark.parametrize(
    ("backend", "kept", "dropped"),
    [
        (MusaBackend(), "MCCL_IB_HCA", ["NCCL_IB_HCA", "TORCH_NCCL_BLOCKING_WAIT"]),
        (CudaBackend(), "NCCL_IB_HCA", ["MCCL_IB_HCA"]),
    ],
    ids=["musa", "cuda"],
)
def test_one_vendors_settings_do_not_reach_the_others_library(
    backend: MusaBackend | CudaBackend,
    kept: str,
    dropped: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in (kept, *dropped):
        monkeypatch.setenv(name, "1")
    collectives.prepare_environment(backend, nodes=2)
    assert kept in os.environ and not [name for name in dropped if name in os.environ]
    assert all(name in caplog.text for name in dropped) and kept not in caplog.text


def test_initialising_from_megatron_drops_them_too() -> None:
    out = run(
        """
        import os, torch.distributed as dist
        from megatron.probe import torch as seen
        seen.distributed.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        print(sorted(n for n in os.environ if "CCL_" in n))
        """,
        NCCL_DEBUG="INFO",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="1",  # torchrun sets it for every run: nothing to tell the user
        MCCL_DEBUG="WARN",
    )
    assert "['MCCL_DEBUG']" in out and "taken out of this process: NCCL_DEBUG;" in out


def test_states_written_before_the_device_starts_are_not_lost() -> None:
    """Older torch_musa leaves ``torch.cuda._lazy_call`` alone: what is queued there waits for CUDA for
    ever. The control queues one there."""
    run("""
        import torch
        from torch.cuda import _lazy_call as real
        ran = []
        real(lambda: ran.append("cuda"))
        from megatron.core.tensor_parallel import random
        assert not torch.musa.is_initialized()
        wanted = torch.Generator().manual_seed(77).get_state()
        random._set_cuda_rng_state(wanted)
        assert torch.equal(torch.musa.get_rng_state(), wanted) and torch.musa.is_initialized()
        assert ran == [], "the control ran: the real queue does not wait here"
        random._set_cuda_rng_state(torch.Generator().manual_seed(78).get_state(), "cuda:0")
        assert torch.equal(torch.musa.get_rng_state(), torch.Generator().manual_seed(78).get_state())
    """)


def test_the_host_keeps_its_own_random_numbers() -> None:
    run("""
        import torch
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        tracker = CudaRNGStatesTracker()
        tracker.add("a", 5)
        with tracker.fork("a"):
            first = torch.rand(4, device="musa")
        with tracker.fork("a"):
            second = torch.rand(4, device="musa")
        assert torch.equal(torch.rand(3), expected)
        assert not torch.equal(first.cpu(), second.cpu())
        torch.musa.manual_seed(5)
        assert torch.equal(torch.rand(4, device="musa").cpu(), first.cpu())
    """)


def test_parameters_keep_their_marks_and_ties_on_the_way_to_the_device() -> None:
    code = """
        import torch
        class Tied(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
                self.second.weight = self.first.weight
                self.first.weight.sequence_parallel = True
                self.first.weight.grad = torch.ones(3, 3)
        model = Tied().to("musa")
        marked = getattr(model.first.weight, "sequence_parallel", False)
        tied = model.first.weight is model.second.weight
        print(marked, tied, model.first.weight.grad.device, len(list(model.parameters())))
    """
    assert run(code).split() == ["True", "True", "musa:0", "3"]
    unpatched = run("import torch_musa\n" + textwrap.dedent(code), patched=False).split()
    assert unpatched[:2] == ["False", "False"], "torch itself keeps them: the patch is not needed any more"


def test_unpatch_gives_everything_back() -> None:
    run("""
        import torch
        import megatron.core.tensor_parallel.random as random
        assert random.torch is not torch
        mt_megatron.unpatch()
        assert random.torch is torch and random._lazy_call is torch.cuda._lazy_call
        assert torch.nn.Module._apply.__module__ == "torch.nn.modules.module"
        assert not hasattr(torch.nn.Module._apply, "__wrapped__")
    """)


def test_adam_is_the_vendors_fused_one() -> None:
    run("""
        import torch, torch_musa
        from megatron.core import optimizer
        made = optimizer.Adam([torch.nn.Parameter(torch.ones(2, device="musa"))], lr=0.1, weight_decay=0.0)
        assert type(made) is torch_musa.optim.FusedAdamW and isinstance(made, optimizer.Adam)
        made.param_groups[0]["params"][0].grad = torch.ones(2, device="musa")
        made.step()
        left = made.param_groups[0]["params"][0]
        assert left.device.type == "musa" and torch.allclose(left.cpu(), torch.tensor([0.9, 0.9])), left
    """)


def test_the_vendors_swiglu_is_used_where_it_exists() -> None:
    run("""
        import torch
        calls = []
        def swish_glu(x):
            calls.append(x.shape)
            a, b = x.chunk(2, -1)
            return torch.nn.functional.silu(a) * b
        from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
        x = torch.randn(4, 6, device="musa")
        ours = bias_swiglu_impl(x, None)
        assert not calls
        mt_megatron.unpatch()
        torch.nn.functional.swish_glu = swish_glu
        mt_megatron.patch("musa")
        from megatron.core.fusions import fused_bias_swiglu
        theirs = fused_bias_swiglu.bias_swiglu_impl(x, torch.zeros(6, device="musa"))
        assert calls and torch.allclose(ours.cpu(), theirs.cpu(), atol=1e-6)
    """)


def test_pinning_that_fails_is_said_once() -> None:
    out = run("""
        from megatron.probe import torch as seen
        for _ in range(3):
            assert seen.zeros(2, pin_memory=True).tolist() == [0, 0]
    """)
    assert out.count("cannot pin it") == 1


def test_telemetry_that_is_not_there_is_not_a_number() -> None:
    run("""
        import math
        from megatron.probe import torch as seen
        for name in ("utilization", "temperature", "power_draw", "clock_rate"):
            assert math.isnan(getattr(seen.cuda, name)()), name
        asked = []
        backend = mt_megatron.backend()
        telemetry = backend.telemetry
        type(backend).telemetry = lambda self, index: asked.append(index) or telemetry(index)
        for device in (None, -1, 0, "cuda:0", seen.device("cuda:0"), "cuda"):
            seen.cuda.utilization(device)
        assert asked == [0] * 6, asked  # "cuda" is the current one
        assert seen.cuda.get_device_properties().name == seen.cuda.get_device_properties(0).name
        assert seen.cuda.memory_allocated() == 0
        kept = seen.ones(1024, device="cuda")
        assert seen.cuda.memory_allocated() == 4096 == mt_megatron.backend().memory_allocated()
        assert seen.cuda.memory_stats()["allocated_bytes.all.current"] == 4096
    """)


def test_the_straggler_detector_reports_on_the_device() -> None:
    run("""
        import torch, torch.distributed as dist
        from megatron.core import utils
        utils.torch.distributed.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        detector = utils.StragglerDetector()
        detector.configure(1, 0, mmcnt=1, port=0)
        assert detector.dev == 0, detector.dev
    """)


def test_the_visible_devices_of_musa_are_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    out = run("print(mt_megatron.report().why)", CUDA_VISIBLE_DEVICES="0,1,2,3", MUSA_VISIBLE_DEVICES="0")
    assert "1 MUSA device(s), MCCL" in out and "no effect" not in out
    monkeypatch.delenv("MUSA_VISIBLE_DEVICES", raising=False)
    code = """
        import os, torch, torch_musa
        del os.environ["MUSA_VISIBLE_DEVICES"]
        def refuse(*device):
            raise AssertionError("the parent of ranks that are to be forked begins to use MUSA")
        torch.musa.get_device_name = torch.musa.get_device_properties = refuse
        import mt_megatron
        print(mt_megatron.patch("musa").why)
        assert not torch.musa.is_initialized()
    """
    said = run(code, patched=False, CUDA_VISIBLE_DEVICES="0,1")
    assert "CUDA_VISIBLE_DEVICES has no effect" in said


def test_a_card_without_mccl_is_refused_with_the_reason() -> None:
    run(
        """
        import torch, torch_musa
        torch.distributed.is_mccl_available = lambda: False
        import mt_megatron
        try:
            mt_megatron.patch("musa")
        except mt_megatron.errors.BackendError as error:
            assert "1 MUSA device(s), but without MCCL" in str(error), error
        else:
            raise AssertionError("patched without MCCL")
        """,
        patched=False,
    )


class _Counted:
    name = "musa"

    def __init__(self, count: int) -> None:
        self._count = count

    def device_count(self) -> int:
        return self._count


def test_a_process_without_a_device_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("MUSA_VISIBLE_DEVICES", raising=False)
    assert collectives.local_device(_Counted(4)) == 2  # type: ignore[arg-type]
    for count in (1, 2):
        with pytest.raises(BackendError, match=rf"{count} musa device.*4 processes.*local rank 2"):
            collectives.local_device(_Counted(count))  # type: ignore[arg-type]
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "2")
    assert collectives.local_device(_Counted(1)) == 0  # type: ignore[arg-type]


def test_without_torch_musa_its_patches_can_be_listed_and_not_used() -> None:
    code = """
        import sys
        sys.path[:] = [p for p in sys.path if not p.endswith("emulators")]
        from mt_megatron.backends import registry
        from mt_megatron.patches import collect
        backend = registry.get("musa")
        assert backend.available() == (False, "torch_musa is not installed")
        patches = collect(backend)
        assert len(patches) > 60
        import mt_megatron
        try:
            mt_megatron.patch("musa")
        except mt_megatron.errors.BackendError as error:
            assert "torch_musa is not installed" in str(error)
        else:
            raise AssertionError("patched without a device")
    """
    run(code, patched=False)


def test_the_loss_scale_is_inverted_without_float64() -> None:
    run("""
        from megatron.core.optimizer.grad_scaler import ConstantGradScaler
        import torch
        from torch_musa import refusals
        for scale in (3.0, 1000.0, 2.0**20, 65537.0):
            found = ConstantGradScaler(scale).inv_scale
            wanted = torch.tensor([1 / scale])
            assert found.device.type == "musa" and found.cpu().equal(wanted), (scale, found)
        assert not refusals.counts
        mt_megatron.unpatch()
        from megatron.core.optimizer import grad_scaler
        made = object.__new__(ConstantGradScaler)
        made._scale = wanted.to("musa")
        try:
            made.inv_scale
        except refusals.RefusedByCards:
            pass
        else:
            raise AssertionError("upstream's own is not refused: the patch is not needed any more")
    """)


def test_a_router_in_float64_is_refused_before_it_computes() -> None:
    run("""
        import torch, types
        from mt_megatron.layers.moe.router import logits_of
        router = types.SimpleNamespace(
            config=types.SimpleNamespace(moe_router_dtype="fp64"), weight=torch.ones(2, 3, device="musa")
        )
        try:
            logits_of(router, torch.ones(1, 3, device="musa"))
        except mt_megatron.errors.ConfigError as error:
            assert "found moe_router_dtype fp64 on musa" in str(error) and "expected fp32" in str(error)
        else:
            raise AssertionError("not refused")
    """)
