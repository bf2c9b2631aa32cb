"""Submodules at level full: both directions, properly nested, nothing left behind and nothing changed."""

from __future__ import annotations

import threading
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mt_megatron.scan.record.module_spans import ModuleHooks, watched
from mt_megatron.seams import events


class Layer(nn.Module):
    def __init__(self, number: int, recompute: bool) -> None:
        super().__init__()
        self.layer_number = number
        self.recompute = recompute
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self._inner, hidden, use_reentrant=True)
        return self._inner(hidden)

    def _inner(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.norm(hidden))


class Decoder(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(3, recompute), Layer(4, recompute)])
        self.final_layernorm = nn.LayerNorm(8)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.final_layernorm(hidden)


class Chunk(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.decoder = Decoder(recompute)
        self.output_layer = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output_layer(self.decoder(self.embedding(hidden)))


def step(chunk: nn.Module) -> dict[str, Tensor]:
    for parameter in chunk.parameters():
        parameter.grad = None
    torch.manual_seed(1)
    with events.span("forward"):
        output = chunk(torch.randn(3, 8))
    with events.span("backward"):
        output.square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in chunk.named_parameters()}


def recorded(chunk: nn.Module) -> list[tuple[str, str, dict[str, Any]]]:
    hooks = ModuleHooks([chunk])
    found: list[Any] = []
    stop = events.subscribe(lambda phase, name, attrs: found.append((phase, name, dict(attrs))))
    hooks.attach()
    try:
        step(chunk)
    finally:
        hooks.detach()
        stop()
    assert hooks.failed is None
    return found


def nested(found: list[tuple[str, str, dict[str, Any]]]) -> list[tuple[str, str, int, str]]:
    """Direction, path, layer and what is around, in the order of begins; asserts the nesting."""
    spans, open_ = [], []
    for phase, name, attrs in found:
        if phase == "end":
            assert open_.pop()[0] == name
            continue
        if name == "module":
            spans.append((attrs["direction"], attrs["module"], attrs["number"], open_[-1][1]))
        open_.append((name, attrs.get("module", name)))
    assert open_ == []
    return spans


def test_what_is_watched() -> None:
    assert [(path, number) for path, _, number in watched(Chunk())] == [
        ("embedding", -1),
        ("decoder.layers.0", 3),
        ("decoder.layers.0.norm", 3),
        ("decoder.layers.0.mlp", 3),
        ("decoder.layers.0.mlp.0", 3),
        ("decoder.layers.0.mlp.2", 3),
        ("decoder.layers.1", 4),
        ("decoder.layers.1.norm", 4),
        ("decoder.layers.1.mlp", 4),
        ("decoder.layers.1.mlp.0", 4),
        ("decoder.layers.1.mlp.2", 4),
        ("decoder.final_layernorm", -1),
        ("output_layer", -1),
    ]


def test_an_output_layer_that_is_fused_with_the_loss_is_left_alone() -> None:
    chunk = Chunk()
    chunk.config = SimpleNamespace(cross_entropy_loss_fusion=True)
    paths = [path for path, _, _ in watched(chunk)]
    assert "output_layer" not in paths and paths[-1] == "decoder.final_layernorm"
    chunk.config.cross_entropy_loss_fusion = False
    assert "output_layer" in [path for path, _, _ in watched(chunk)]


def test_wrapped_chunks_are_watched_all_the_same() -> None:
    wrapped = nn.Module()
    wrapped.module = Chunk()
    assert [each[::2] for each in watched(wrapped)] == [each[::2] for each in watched(Chunk())]


def test_backward_mirrors_forward() -> None:
    spans = nested(recorded(Chunk()))
    forward = [(path, number) for direction, path, number, _ in spans if direction == "forward"]
    layers = ["decoder.layers.0", "decoder.layers.1"]
    assert [each[0] for each in forward] == [path for path, *_ in watched(Chunk()) if path not in layers]
    backward = [(path, around) for direction, path, _, around in spans if direction == "backward"]
    inside = [
        (f"decoder.layers.{n}{part}", around)
        for n in (1, 0)
        for part, around in (
            ("", "backward"),
            (".mlp", f"decoder.layers.{n}"),
            (".mlp.2", f"decoder.layers.{n}.mlp"),
            (".mlp.0", f"decoder.layers.{n}.mlp"),
            (".norm", f"decoder.layers.{n}"),
        )
    ]
    # The embedding's input needs no gradient: when its backward ends cannot be seen.
    assert backward == [("output_layer", "backward"), ("decoder.final_layernorm", "backward"), *inside]


def test_recomputation_is_seen_as_forward_within_backward() -> None:
    found = recorded(Chunk(recompute=True))
    nested(found)
    directions, within = {"forward": 0, "backward": 0}, []
    for phase, name, attrs in found:
        if name in ("forward", "backward"):
            within = [name] if phase == "begin" else []
        if (phase, name, attrs.get("module")) == ("begin", "module", "decoder.layers.0.mlp"):
            directions[attrs["direction"]] += 1
            assert attrs["direction"] in within or within == ["backward"]
    assert directions == {"forward": 2, "backward": 1}


def test_gradients_are_the_same_to_the_bit() -> None:
    chunk = Chunk()
    plain, hooks = step(chunk), ModuleHooks([chunk])
    hooks.attach()
    hooked = step(chunk)
    hooks.detach()
    assert all(torch.equal(plain[name], hooked[name]) for name in plain)


def test_nothing_is_left() -> None:
    chunk, hooks = Chunk(), ModuleHooks([Chunk()])
    assert not hooks.on
    hooks = ModuleHooks([chunk])
    hooks.attach()
    hooks.attach()
    watched_ones = len(list(watched(chunk)))
    assert sum("forward" in vars(module) for module in chunk.modules()) == watched_ones
    hooks.detach()
    assert not hooks.on and not events.listening()
    for module in chunk.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks


def test_another_forward_of_a_module_stays_its_own() -> None:
    chunk = Chunk()
    norm, mlp = chunk.decoder.layers[0].norm, chunk.decoder.layers[0].mlp
    before = norm.forward = lambda hidden, plain=norm.forward: plain(hidden)
    hooks = ModuleHooks([chunk])
    hooks.attach()
    inside = mlp.forward
    mlp.forward = after = lambda hidden: inside(hidden)
    hooks.detach()
    assert vars(norm)["forward"] is before and vars(mlp)["forward"] is after
    found: list[str] = []
    stop = events.subscribe(lambda phase, name, attrs: found.append(name))
    step(chunk)
    stop()
    assert "module" not in found


def test_two_may_watch_one_model() -> None:
    chunk = Chunk()
    first, second, found = ModuleHooks([chunk]), ModuleHooks([chunk]), []
    stop = events.subscribe(lambda phase, name, attrs: found.append((phase, name, attrs.get("direction"))))
    first.attach()
    second.attach()
    chunk.embedding(torch.ones(1, 8))
    second.detach()
    first.detach()
    stop()
    assert found.count(("begin", "module", "forward")) == 2
    assert all("forward" not in vars(module) for module in chunk.modules())


def test_a_copy_made_meanwhile_has_weights_of_its_own() -> None:
    chunk = Chunk()
    hooks = ModuleHooks([chunk])
    hooks.attach()
    copied = deepcopy(chunk)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(torch.ones(1, 8)).any() and chunk(torch.ones(1, 8)).any()
    hooks.detach()
    assert not copied(torch.ones(1, 8)).any()


def test_an_error_in_a_module_ends_its_span() -> None:
    chunk = Chunk()
    chunk.decoder.layers[1].mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(ValueError("no")))
    hooks, found = ModuleHooks([chunk]), []
    stop = events.subscribe(lambda phase, name, attrs: found.append((phase, name, dict(attrs))))
    hooks.attach()
    with pytest.raises(ValueError, match="no"):
        step(chunk)
    hooks.detach()
    stop()
    nested(found)


def test_backward_in_another_thread_keeps_begin_and_end_together() -> None:
    chunk, hooks = Chunk(), None
    seen: list[tuple[str, int]] = []
    stop = events.subscribe(lambda phase, name, attrs: seen.append((phase, threading.get_ident())))
    hooks = ModuleHooks([chunk])
    hooks.attach()
    output = chunk(torch.randn(3, 8)).sum()
    seen.clear()
    thread = threading.Thread(target=output.backward)
    thread.start()
    thread.join()
    hooks.detach()
    stop()
    own = {ident for _, ident in seen}
    assert len(own) == 1 and own != {threading.get_ident()}
    assert len([1 for phase, _ in seen if phase == "begin"]) == len(
        [1 for phase, _ in seen if phase == "end"]
    )
