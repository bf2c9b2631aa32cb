"""The CPU backend's device draws random numbers from a stream of its own, as a GPU does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks

HERE = "tests.backends.test_cpu_random"


def test_every_device_has_a_generator_however_late_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from mt_megatron.backends.cpu.backend import CpuBackend
    from mt_megatron.backends.cpu.namespace import _rng

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    generators = _rng(CpuBackend())["default_generators"]
    assert len(generators) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert len(generators) == 3 and generators[2] is generators[0] is generators[-1]
    with pytest.raises(IndexError):
        generators[3]


def streams() -> dict[str, Any]:
    """Two ranks: what moves what."""
    import torch
    import torch.distributed as dist

    from mt_megatron.backends.cpu.rng import device_generator
    from tests.patches import small_gpt

    small_gpt.start(tp=2)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from torch.utils.checkpoint import checkpoint

    found: dict[str, Any] = {"rank": dist.get_rank()}
    config = small_gpt.transformer_config()

    def weight(size: int, device_seed: int) -> Any:
        torch.manual_seed(42)
        tensor_parallel.model_parallel_cuda_manual_seed(device_seed)
        layer = ColumnParallelLinear(6, 8 // size, config=config, init_method=config.init_method, bias=False)
        return layer.weight.detach()

    torch.manual_seed(42)
    tensor_parallel.model_parallel_cuda_manual_seed(41)
    whole = torch.empty(8, 6)
    config.init_method(whole)
    rank = parallel_state.get_tensor_model_parallel_rank()
    found["slices"] = torch.equal(weight(1, 43), whole[4 * rank : 4 * rank + 4])
    found["device apart"] = device_generator().initial_seed() != torch.initial_seed()

    config = small_gpt.transformer_config(hidden_dropout=0.3, attention_dropout=0.3)
    model = small_gpt.build(config).train()
    tokens = torch.arange(small_gpt.SEQUENCE).expand(2, -1)

    def passed(host_draws: int = 0, recomputed: bool = False) -> list[float]:
        torch.manual_seed(5)
        tensor_parallel.model_parallel_cuda_manual_seed(6)
        losses = []
        for _ in range(2):
            torch.rand(host_draws)
            model.zero_grad()
            if recomputed:
                loss = checkpoint(model, tokens, tokens, None, labels=tokens, use_reentrant=False)
            else:
                loss = model(tokens, tokens, None, labels=tokens)
            loss.sum().backward()
            losses += [float(loss.sum())] + [float(p.grad.double().norm()) for p in model.parameters()]
        return losses

    found["host draws move dropout"] = passed(0) != passed(7)
    host = torch.get_rng_state()
    model(tokens, tokens, None, labels=tokens)
    found["dropout moves the host"] = not torch.equal(host, torch.get_rng_state())
    # torch replays the device's stream alone, not the tracker's: attention draws nothing here.
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.attention_dropout.p = 0.0
    found["torch recomputes"] = passed() == passed(recomputed=True)
    torch.manual_seed(9)
    first = float(model(tokens, tokens, None, labels=tokens).sum())
    other = float(model(tokens, tokens, None, labels=tokens).sum())
    torch.manual_seed(9)
    tensor_parallel.get_cuda_rng_tracker().reset()
    tensor_parallel.model_parallel_cuda_manual_seed(9)
    torch.manual_seed(9)
    third = float(model(tokens, tokens, None, labels=tokens).sum())
    found["seeds"] = [first == other, third != other]

    # Megatron's modules tell the two apart inside of a fork as well.
    from megatron.core.tensor_parallel import random

    seen = random.torch
    before = device_generator().get_state(), torch.get_rng_state()
    with tensor_parallel.get_cuda_rng_tracker().fork():
        inside = seen.get_rng_state(), seen.cuda.get_rng_state()
        drawn = torch.rand(())
        found["host state in a fork"] = torch.equal(inside[0], before[1])
        found["device state in a fork"] = torch.equal(inside[1], torch.get_rng_state()) is False
        seen.set_rng_state(torch.Generator().manual_seed(3).get_state())
    found["host set in a fork"] = torch.initial_seed() == 3
    found["device after a fork"] = torch.equal(device_generator().get_state(), before[0])
    found["drawn"] = float(drawn)
    with device_generator().in_use():
        torch.manual_seed(8)
        both = [torch.rand(())]
    both.append(torch.rand(()))
    found["seeded in a fork"] = [float(each) for each in both]
    state = torch.get_rng_state()
    seen.rand(3, device="cuda")
    found["a device's factory moves the host"] = not torch.equal(state, torch.get_rng_state())
    seen.rand(3)
    found["a host's factory moves the host"] = not torch.equal(state, torch.get_rng_state())
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, f"{HERE}:streams")


def test_weights_made_on_the_host_are_slices_of_one_rank_s(ranks: list[dict[str, Any]]) -> None:
    assert all(found["slices"] and found["device apart"] for found in ranks)


def test_host_and_dropout_do_not_move_each_other(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert not found["host draws move dropout"] and not found["dropout moves the host"]
        assert not found["a device's factory moves the host"] and found["a host's factory moves the host"]


def test_torchs_own_recomputation_replays_dropout(ranks: list[dict[str, Any]]) -> None:
    assert all(found["torch recomputes"] for found in ranks)


def test_a_seed_of_torch_is_the_devices_too(ranks: list[dict[str, Any]]) -> None:
    assert all(found["seeds"] == [False, True] for found in ranks)


def test_a_seed_of_torch_is_both_streams_within_device_work_too(ranks: list[dict[str, Any]]) -> None:
    import torch

    first = float(torch.rand((), generator=torch.Generator().manual_seed(8)))
    assert all(found["seeded in a fork"] == [first, first] for found in ranks)


def test_a_fork_knows_host_and_device(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["host state in a fork"] and found["device state in a fork"]
        assert found["host set in a fork"] and found["device after a fork"]
    assert ranks[0]["drawn"] != ranks[1]["drawn"]


def old_checkpoint(folder: str) -> dict[str, Any]:
    """States saved with both streams and, as before there were two, with one."""
    import logging
    from pathlib import Path
    from types import SimpleNamespace

    import torch

    import mt_megatron

    mt_megatron.patch("cpu")
    from megatron.core import tensor_parallel

    from mt_megatron.checkpoint import rng

    tensor_parallel.get_cuda_rng_tracker().reset()
    backend = mt_megatron.backend()
    job: Any = SimpleNamespace(backend=backend, rank=0)
    torch.manual_seed(1)
    backend.manual_seed(2)
    path = Path(folder) / rng.rng_file_name(0)
    path.parent.mkdir(parents=True)
    state = rng.capture_rng(job)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    rng.log.addHandler(handler)
    found: dict[str, Any] = {}
    one = {**state, "device": state["torch"]}
    del one["device_is_separate"]
    for name, saved in (("two", state), ("one", one)):
        torch.save(saved, path)
        torch.manual_seed(3)
        rng.load_rng(Path(folder), job)
        found[name] = [
            torch.initial_seed(),
            torch.equal(backend.get_rng_state(), saved["device"]),
            len(lines),
        ]
    found["line"] = lines[-1]
    return found


def test_a_checkpoint_of_one_stream_resumes_and_says_so(tmp_path: Any) -> None:
    [found] = run_ranks(1, f"{HERE}:old_checkpoint", str(tmp_path))
    assert found["two"] == [1, True, 0] and found["one"] == [1, True, 1]
    assert "one stream" in found["line"]
