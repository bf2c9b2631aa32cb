"""What the ranks of ``test_wrong_results`` run: the random numbers of a model's passes, by position."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layers.mtp import small_model as mtp_model
from tests.patches import small_gpt

MICROBATCHES = 2


class Draws(TorchDispatchMode):
    """Checksums of the generator's state before each operation that moved it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(before, torch.get_rng_state()):
            self.seen.append(zlib.crc32(before.numpy().tobytes()))
        return result


def everything(cases: dict[str, dict[str, Any]], without: list[str]) -> dict[str, Any]:
    """For each case (layout and options): the draws of forward and backward passes and the gradients' sum."""
    found = {}
    for name, case in cases.items():
        layout = {each: case.pop(each) for each in ("tp", "cp") if each in case}
        small_gpt.start(**layout, features=features_without(without))
        found[name] = passes(mtp=case.pop("mtp", False), **case)
    return found


def features_without(without: list[str]) -> set[str]:
    from mt_megatron.backends import registry
    from mt_megatron.patches import collect

    return {patch.feature for patch in collect(registry.get("cpu"))} - set(without)


def passes(mtp: bool, **options: Any) -> dict[str, Any]:
    """Two micro-batches through a small model, twice from equal random states."""
    from megatron.core import parallel_state, tensor_parallel

    import mt_megatron

    dropouts = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
    cp = parallel_state.get_context_parallel_world_size()
    config = (mtp_model.config if mtp else small_gpt.transformer_config)(
        **{**dropouts, "context_parallel_size": cp, **options}
    )
    if mtp:
        [model] = mtp_model.build(config)
        mtp_model.set_weights([model])
    else:
        model = small_gpt.build(config)
    model.train()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    backend = mt_megatron.backend()
    states = torch.get_rng_state(), backend.get_rng_state(), dict(tracker.get_states())
    first = _run(model)
    torch.set_rng_state(states[0])
    backend.set_rng_state(states[1])
    tracker.set_states(dict(states[2]))
    again = _run(model)
    return {**first, "resumed": first == again}


def _run(model: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    cp = parallel_state.get_context_parallel_world_size()
    tokens = (
        torch.arange(small_gpt.SEQUENCE * small_gpt.BATCH).view(small_gpt.BATCH, -1) % small_gpt.VOCABULARY
    )
    positions = torch.arange(small_gpt.SEQUENCE).expand_as(tokens)
    tokens, positions = (each[:, : small_gpt.SEQUENCE // cp] for each in (tokens, positions))
    found: dict[str, Any] = {"forward": [], "backward": []}
    model.zero_grad()
    for _ in range(MICROBATCHES):
        with Draws() as draws:
            loss = model(tokens, positions, None, labels=tokens)
        found["forward"].append(draws.seen)
        with Draws() as draws:
            loss.sum().backward()
        found["backward"].append(draws.seen)
    found["gradients"] = [float(p.grad.double().norm()) for p in model.parameters() if p.grad is not None]
    return found
