"""What Megatron's modules see of torch.cuda on cpu, and that nobody else sees it."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from tests.fork_server import PATCHED
from tests.launch import run_command
from tests.second_lane import DAILY

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATCH = 'import mt_megatron; mt_megatron.patch("cpu")'


def run(code: str, **environment: str) -> str:
    """Run ``code`` in a fresh process with the probe modules on the path; returns its output. What patches
    before all else is, in the first lane, the fork of an interpreter that is patched."""
    env = {**os.environ, **environment}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    if not DAILY and code.lstrip().startswith(PATCH) and not environment:
        env[PATCHED] = "1"
    # Not by PYTHONPATH: warm interpreters of a path with a part of Megatron are others.
    code = f"import sys; sys.path.insert(1, {str(HERE / 'namespace')!r})\n{textwrap.dedent(code)}"
    done = run_command(
        [sys.executable, "-W", "ignore", "-c", code],
        env=env,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("order", ["patch first", "import first"])
def test_every_factory_takes_every_spelling_of_the_device(order: str) -> None:
    first, second = "import mt_megatron; mt_megatron.patch('cpu')", "import megatron.probe"
    if order == "import first":
        first, second = second, first
    out = run(f"""
        {first}
        {second}
        import megatron.probe as probe
        import torch
        device = probe.torch.device
        spellings = ["cuda", "cuda:0", 0, device("cuda"), device("cuda:0"), device("cuda", 0), device(0),
                     torch.device("cuda", 0), probe.torch.cuda.current_device()]
        for name, make in probe.FACTORIES.items():
            for spelling in spellings:
                made = make(spelling)
                assert made.device == torch.device("cpu"), (name, spelling, made.device)
                assert not made.is_cuda, (name, spelling)
        print(len(probe.FACTORIES) * len(spellings))
    """)
    assert int(out) >= 300


def test_factories_leave_other_devices_and_sizes_alone() -> None:
    run("""
        import mt_megatron; mt_megatron.patch("cpu")
        from megatron.probe import torch
        assert torch.zeros(1, device="meta").device.type == "meta"
        assert torch.zeros(0).shape == (0,) and torch.ones(1, 0).shape == (1, 0)
        assert torch.device("meta").type == "meta"
        assert torch.zeros(3).to(torch.float64).dtype == torch.float64
        assert torch.zeros(3).to(torch.ones(2, dtype=torch.int8)).dtype == torch.int8
    """)


def test_an_index_out_of_range_is_an_error_that_says_how_many_there_are() -> None:
    run(
        """
        import mt_megatron; mt_megatron.patch("cpu")
        from mt_megatron.errors import BackendError
        from megatron.probe import torch
        for bad in ("cuda:7", 7, -3):
            try: torch.zeros(1, device=bad)
            except BackendError as error: assert "2 device(s)" in str(error), error
            else: raise SystemExit(f"{bad} was accepted")
        assert torch.cuda.device_count() == 2 and torch.cuda.current_device() == 0
        torch.cuda.set_device(1); assert torch.cuda.current_device() == 1
        with torch.cuda.device(0): assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 1
    """,
        LOCAL_WORLD_SIZE="2",
    )


def test_other_modules_keep_the_real_torch_cuda() -> None:
    run("""
        import torch
        truth = lambda: (torch.zeros, torch.cuda, torch.device, torch.cuda.is_available,
                         torch.distributed.new_group)
        before = truth()
        import mt_megatron; mt_megatron.patch("cpu")
        import megatron.probe as probe, otherlib
        assert probe.cuda_is_available() and not otherlib.cuda_is_available()
        assert before == truth()
        assert otherlib.torch is torch and probe.torch is not torch
        x = torch.zeros(1)
        for call in (otherlib.zeros_on_cuda, lambda: otherlib.cuda_of(x), lambda: otherlib.to_cuda(x)):
            try: call()
            except (AssertionError, RuntimeError) as error:
                assert "CUDA" in str(error) or "NVIDIA" in str(error), error
            else: raise SystemExit("another library's CUDA call was redirected")
    """)


def test_on_a_machine_with_cuda_an_explicit_cpu_backend_keeps_both_worlds_apart() -> None:
    # Stand-ins for the device: torch says CUDA is there, and .cuda()/.to('cuda') give a marked result.
    run("""
        import torch
        calls = []
        real_to = torch.Tensor.to
        def fake_cuda(self, *a, **k): calls.append("cuda"); return "on the GPU"
        def fake_to(self, *a, **k):
            if a and str(a[0]).startswith("cuda"): calls.append("to"); return "on the GPU"
            return real_to(self, *a, **k)
        torch.Tensor.cuda, torch.Tensor.to = fake_cuda, fake_to
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 4
        import mt_megatron
        report = mt_megatron.patch("cpu")
        assert report.backend == "cpu"
        import megatron.probe as probe, otherlib
        x = torch.zeros(2)
        assert otherlib.cuda_is_available()
        assert otherlib.cuda_of(x) == otherlib.to_cuda(x) == "on the GPU"
        assert calls == ["cuda", "to"]
        to = probe.FACTORIES["to_positional"]
        for moved in (probe.cuda_of(x), probe.cuda_of(x, 0), to("cuda"), probe.module_cuda()):
            assert moved.device.type == "cpu", moved
        assert calls == ["cuda", "to"], "a call from Megatron reached the device"
        assert probe.torch.cuda.device_count() == 1
        mt_megatron.unpatch()
        assert torch.Tensor.cuda is fake_cuda and torch.Tensor.to is fake_to
    """)


def test_device_class_still_is_a_class_to_type_checks() -> None:
    run("""
        import mt_megatron; mt_megatron.patch("cpu")
        import megatron.probe as probe, torch
        assert probe.is_device(torch.device("cpu")) and not probe.is_device("cpu")
        assert isinstance(torch.Generator(), probe.torch.Generator)
        assert probe.torch.Generator("cuda").device.type == "cpu"
        assert isinstance(torch.zeros(1), probe.torch.cuda.FloatTensor)
        assert probe.torch.Tensor is torch.Tensor and probe.torch.nn is torch.nn
    """)


def test_unknown_names_of_torch_cuda_are_named_and_hasattr_works() -> None:
    run("""
        import mt_megatron; mt_megatron.patch("cpu")
        from megatron.probe import torch
        assert not hasattr(torch.cuda, "CUDAGraph")
        try: torch.cuda.make_graphed_callables
        except AttributeError as error:
            assert "cpu backend has no torch.cuda.make_graphed_callables" in str(error)
        else: raise SystemExit("fell through to the real torch.cuda")
    """)


def test_autocast_streams_events_and_load() -> None:
    run("""
        import mt_megatron; mt_megatron.patch("cpu")
        import io, math, pickle
        import megatron.probe as probe, torch as real
        torch = probe.torch
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.get_autocast_gpu_dtype() == torch.bfloat16
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); sum(range(100000)); b.record(); torch.cuda.synchronize()
        assert 0 < a.elapsed_time(b) < 10000 and b.query()
        s = torch.cuda.Stream()
        with torch.cuda.stream(s): assert torch.cuda.current_stream() is s
        assert torch.cuda.current_stream() is torch.cuda.default_stream() is not s
        buffer = io.BytesIO(); real.save({"x": real.ones(2)}, buffer)
        for where in (None, "cuda", "cuda:0", {"cuda:0": "cuda:0"}, lambda storage, location: storage):
            buffer.seek(0); assert torch.load(buffer, map_location=where)["x"].device.type == "cpu"
        assert math.isnan(torch.cuda.power_draw()) and torch.cuda.temperature() != 0, "a made-up reading"
        import time; time.sleep(0.05)  # the kernel counts in hundredths of a second, here from the fork on
        assert 0 <= torch.cuda.utilization() <= 100
        assert torch.zeros(2, pin_memory=True).sum() == 0 and torch.cuda.memory_allocated() > 10**7
        assert pickle.loads(pickle.dumps(torch)) is real
    """)


def test_writes_to_the_view_reach_the_real_module() -> None:
    run("""
        import mt_megatron; mt_megatron.patch("cpu")
        import megatron.probe as probe, torch
        probe.torch.a_new_attribute = 5
        assert torch.a_new_attribute == 5
        torch.another = 6
        assert probe.torch.another == 6
    """)


def test_lazy_call_runs_at_once_and_rng_state_is_the_device_state() -> None:
    run("""
        import mt_megatron; mt_megatron.patch("cpu")
        import megatron.probe as probe
        torch, seen = probe.torch, []
        probe.call_lazily(lambda: seen.append(1))
        assert seen == [1]
        torch.cuda.manual_seed(3); state = torch.cuda.get_rng_state()
        draw = lambda: torch.rand(3, device="cuda")
        first = draw()
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, draw()) and not torch.equal(first, draw())
    """)


def test_rng_tracker_changes_and_restores_dropout_masks() -> None:
    run("""
        import mt_megatron; mt_megatron.patch("cpu")
        import torch
        from megatron.core.tensor_parallel import random as mrandom
        mrandom.initialize_rng_tracker()
        tracker = mrandom.get_cuda_rng_tracker(); tracker.reset()
        torch.manual_seed(1)
        tracker.add("model-parallel-rng", 7)
        mask = lambda: torch.nn.functional.dropout(torch.ones(64), 0.5)
        outside_1 = mask()
        with tracker.fork(): inside_1 = mask()
        outside_2 = mask()
        with tracker.fork(): inside_2 = mask()
        torch.manual_seed(1)
        again = torch.equal(mask(), outside_1) and torch.equal(mask(), outside_2)
        assert again, "fork disturbed the outer stream"
        assert not torch.equal(inside_1, inside_2), "the forked stream does not advance"
        torch.manual_seed(7)
        own = torch.equal(mask(), inside_1) and torch.equal(mask(), inside_2)
        assert own, "fork does not use its own seed"
        state = tracker.get_states()
        with tracker.fork(): third = mask()
        tracker.set_states(state)
        with tracker.fork(): assert torch.equal(mask(), third)
    """)


def test_forking_the_tracker_says_nothing_of_the_cpu_generator_and_other_warnings_still_come() -> None:
    run("""
        import mt_megatron; mt_megatron.patch("cpu")
        import io, logging
        heard = io.StringIO(); logging.basicConfig(stream=heard, level=logging.INFO)
        import torch
        from megatron.core.tensor_parallel import random as mrandom
        tracker = mrandom.CudaRNGStatesTracker(); tracker.reset(); tracker.add("a", 1)
        with tracker.fork("a"): torch.rand(2)
        mrandom.logging.getLogger("x").warning("something else")
        assert "something else" in heard.getvalue() and "RNG" not in heard.getvalue(), heard.getvalue()
        mt_megatron.unpatch(); tracker.reset()
        assert mrandom.logging is logging
    """)


def test_what_overlaps_itself_is_copied_to_the_device() -> None:
    run("""
        import mt_megatron; mt_megatron.patch("cpu")
        import itertools, random
        __name__ = "megatron.here"
        from megatron.probe import torch
        ways = [lambda x: x.cuda(), lambda x: x.cuda(0), lambda x: x.to("cuda"), lambda x: x.to(0),
                lambda x: x.to(device="cuda"), lambda x: x.to(torch.device("cuda")), lambda x: x.pin_memory(),
                lambda x: x.to(torch.ones(1, dtype=x.dtype)), lambda x: x.type("torch.cuda.LongTensor"),
                lambda x: x.type(torch.cuda.LongTensor),
                lambda x: torch.as_tensor(x, device="cuda"), lambda x: torch.asarray(x, device=0)]
        def draw():
            row = torch.arange(8)
            yield from (row.expand(5, 8), row[:1].expand(3), row.unfold(0, 4, 2), row.unfold(0, 2, 2), row)
            yield from (row[::3], row.view(2, 4).T, row[:1].expand(1), row[:0].expand(5, 0))
            yield torch.as_strided(row, (3, 2), (2, 3))
            for _ in range(200):
                shape = [random.randint(0, 4) for _ in range(random.randint(1, 4))]
                yield torch.as_strided(torch.arange(64), shape, [random.randint(0, 6) for _ in shape])
        random.seed(7)
        copied = 0
        for x in draw():
            places = itertools.product(*map(range, x.shape))
            offsets = [sum(i * s for i, s in zip(at, x.stride())) for at in places]
            overlaps = len(set(offsets)) < len(offsets)
            for number, way in enumerate(ways):
                y = way(x)
                assert (y is not x) == overlaps, (number, x.shape, x.stride())
                assert torch.equal(x, y)
                copied += overlaps
            assert x.to("cpu") is x and x.to(torch.int64) is x and x.cpu() is x
        assert copied > 500
        rows = torch.arange(8).expand(5, 8).cuda()
        rows[0] = 9
        assert rows[1].tolist() == list(range(8))
        leaf = torch.ones(4, requires_grad=True)
        assert leaf.cuda() is leaf and leaf.to("cuda") is leaf
        spread = leaf.expand(3, 4)
        assert spread.cuda() is spread
        module = torch.nn.Module()
        module.register_buffer("ids", torch.arange(8).expand(2, 8))
        module.register_buffer("none", None)
        held = module.ids
        assert module.cuda() is module and module.ids is not held and module.ids.stride() == (8, 1)
    """)
