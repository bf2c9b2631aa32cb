"""Taps on single modules: what is told, what is changed, and that nothing of it is left."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mt_megatron.errors import ConfigError
from mt_megatron.seams import events, taps
from tests.launch import run_ranks

HERE = "tests.seams.taps_cases"
Pair = namedtuple("Pair", "first second")


class Scale(nn.Module):
    def __init__(self, by: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(by))

    def forward(self, values: Tensor) -> Tensor:
        return values * self.weight


class Structured(nn.Module):
    def forward(self, values: Tensor, *, more: dict[str, Any]) -> Any:
        return {"pair": Pair(values + 1, None), "list": [more["x"] * 2, "text"]}


def test_unwatched_and_closed_modules_are_untouched() -> None:
    module = Scale()
    before, hooks = dict(vars(module)), len(module._forward_hooks)
    forward = module.forward.__func__
    first = taps.watch(module, after=lambda call, output: None)
    second = taps.change(module, output=lambda call, output: None)
    assert "forward" in vars(module) and events.listening()
    first.close()
    assert "forward" in vars(module)
    second.close()
    first.close()
    assert vars(module) == before and module.forward.__func__ is forward
    assert len(module._forward_hooks) == hooks == 0 and not events.listening()


def test_a_forward_of_ones_own_comes_back_and_a_later_one_stays() -> None:
    module, other = Scale(), Scale()
    own = module.forward = lambda values: values - 1
    watch = taps.watch(module, after=lambda call, output: None)
    with taps.watch(other, after=lambda call, output: pytest.fail("closed")):
        tapped = other.forward
    other.forward = later = lambda values: tapped(values)
    watch.close()
    assert vars(module)["forward"] is own
    assert vars(other)["forward"] is later and other(torch.ones(1)) == 2


def test_structures_come_detached_with_gradients_by_place() -> None:
    seen: dict[str, Any] = {}
    gradients: list[tuple[str, int, Tensor]] = []
    module = Structured()
    values, more = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with taps.watch(
        module,
        before=lambda call, args, kwargs: seen.update(args=args, kwargs=kwargs),
        after=lambda call, output: seen.update(output=output),
        output_gradient=lambda call, gradient, index: gradients.append(("output", index, gradient)),
        input_gradient=lambda call, gradient, index: gradients.append(("input", index, gradient)),
    ):
        output = module(values, more={"x": more})
        (output["pair"].first.sum() * 3 + output["list"][0].sum() * 5).backward()
    assert type(seen["output"]["pair"]) is Pair and seen["output"]["list"][1] == "text"
    for mine, its in (
        (seen["args"][0], values),
        (seen["kwargs"]["more"]["x"], more),
        (seen["output"]["pair"].first, output["pair"].first),
        (seen["output"]["list"][0], output["list"][0]),
    ):
        assert not mine.requires_grad and mine.data_ptr() == its.data_ptr()
    found = {(what, index): gradient.tolist() for what, index, gradient in gradients}
    assert found == {
        ("output", 0): [3, 3],
        ("output", 1): [5, 5],
        ("input", 0): [3, 3],
        ("input", 1): [10, 10],
    }
    assert len(gradients) == 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_call_is_told_once_and_its_gradient_comes(reentrant: bool) -> None:
    module, told = Scale(), []
    values = torch.ones(2, requires_grad=True)
    with taps.watch(
        module,
        before=lambda call, args, kwargs: told.append("before"),
        after=lambda call, output: told.append(f"after {taps.is_recomputing()}"),
        output_gradient=lambda call, gradient, index: told.append("gradient"),
        input_gradient=lambda call, gradient, index: told.append("input"),
    ):
        checkpoint(module, values * 1, use_reentrant=reentrant).sum().backward()
    assert told == ["before", "after False", "gradient", "input"]
    assert not taps.is_recomputing()


def test_parameters_as_arguments_get_no_hooks() -> None:
    module, told = Structured(), []
    weight = nn.Parameter(torch.ones(2))
    with taps.watch(module, input_gradient=lambda call, gradient, index: told.append(index)):
        output = module(torch.ones(2, requires_grad=True), more={"x": weight})
        (output["pair"].first.sum() + output["list"][0].sum()).backward()
    assert told == [0] and not weight._backward_hooks


def test_calls_are_numbered_within_their_micro_batch() -> None:
    module, told = Scale(), []
    watch = taps.watch(
        module,
        recomputed=True,
        after=lambda call, output: told.append(call[1:]),
        output_gradient=lambda call, gradient, index: told.append(("gradient", *call[1:4])),
    )
    assert (taps.current_microbatch(), taps.current_chunk()) == (-1, -1)
    outputs = []
    for number in range(2):
        with events.span("forward", microbatch=number, chunk=1):
            values = torch.ones(1, requires_grad=True)
            for _ in range(2):
                values = checkpoint(module, values, use_reentrant=True)
            outputs.append(values)
            assert (taps.current_microbatch(), taps.current_chunk()) == (number, 1)
    assert told == [(number, 1, at, False) for number in range(2) for at in range(2)]
    told.clear()
    for number, values in enumerate(outputs):
        with events.span("backward", microbatch=number, chunk=1):
            values.backward()
    assert told == [
        each
        for number in range(2)
        for at in (1, 0)
        for each in ((number, 1, at, True), ("gradient", number, 1, at))
    ]
    watch.close()
    assert taps.current_microbatch() == -1


def test_backward_of_a_step_whose_beginning_was_missed_is_unknown() -> None:
    found = []
    with taps.watch(Scale(), after=lambda call, output: None):
        with events.span("forward", microbatch=2, chunk=0):
            found.append(taps.current_microbatch())
        with events.span("backward", microbatch=2, chunk=0):
            found.append(taps.current_microbatch())
    assert found == [2, -1]


@pytest.mark.parametrize("what", ["before", "after", "output_gradient", "input_gradient"])
def test_an_error_closes_that_tap_alone_and_is_told_once(what: str, caplog: pytest.LogCaptureFixture) -> None:
    module, seen = Scale(), []

    def fail(*args: Any) -> None:
        raise ValueError("no good")

    failing = taps.watch(module, **{what: fail})
    other = taps.watch(module, after=lambda call, output: seen.append(output))
    with caplog.at_level(logging.WARNING, "mt_megatron"):
        for _ in range(3):
            values = torch.ones(1, requires_grad=True)
            module(values).sum().backward()
            assert values.grad == 2
    assert failing.closed and failing.failed == "ValueError: no good"
    assert len(seen) == 3 and not other.closed
    assert [each.message for each in caplog.records] == [
        "the tap on Scale is closed and training goes on: ValueError: no good"
    ]
    other.close()
    assert "forward" not in vars(module)
    with taps.watch(module, after=fail, errors="raise"), pytest.raises(ValueError, match="no good"):
        module(torch.ones(1))
    assert "forward" not in vars(module)


def test_values_are_replaced_also_in_recomputation() -> None:
    module, seen = Scale(3.0), []
    calls: list[tuple[bool, str]] = []

    def doubled(call: taps.Call, output: Tensor) -> Tensor:
        calls.append((call.recomputing, "output"))
        return output * 2

    with (
        taps.watch(
            module,
            before=lambda call, args, kwargs: seen.append(args[0].item()),
            after=lambda call, output: seen.append(output.item()),
            output_gradient=lambda call, gradient, index: seen.append(gradient.item()),
        ),
        taps.change(
            module,
            input=lambda call, args, kwargs: ((args[0] + 1,), kwargs),
            output=doubled,
            output_gradient=lambda call, gradient, index: gradient * 10,
        ),
    ):
        values = torch.tensor(4.0, requires_grad=True)
        output = checkpoint(module, values, use_reentrant=True)
        output.backward()
    assert output == 30 and calls == [(False, "output"), (True, "output")]
    # Watches see what was changed; the gradient of 2 * weight * (values + 1) is ten times as large.
    assert seen == [5, 30, 10] and values.grad == 60 and module.weight.grad == 100


def test_a_change_that_raises_changes_nothing() -> None:
    module, told = Scale(), []
    changed = taps.change(module, output=lambda call, output: 1 / 0, told=told.append)
    assert module(torch.ones(1)) == 2 and changed.closed
    assert told == ["ZeroDivisionError: division by zero"] and "forward" not in vars(module)


def test_copies_and_pickles_are_not_watched() -> None:
    module, seen = Scale(), []
    with taps.watch(module, after=lambda call, output: seen.append(1)):
        copied, pickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        with torch.no_grad():
            copied.weight.fill_(7.0)
        assert (copied(torch.ones(1)), pickled(torch.ones(1)), module(torch.ones(1))) == (7, 2, 2)
    assert seen == [1]


def test_paths_are_those_of_the_whole_model() -> None:
    def chunk(*numbers: int) -> nn.Module:
        model = nn.Module()
        model.decoder = nn.Module()
        model.decoder.layers = nn.ModuleList()
        for number in numbers:
            layer = nn.Module()
            layer.layer_number, layer.mlp = number, Scale()
            model.decoder.layers.append(layer)
        model.mtp = nn.Module()
        model.mtp.layers = nn.ModuleList([Scale()])
        return model

    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module.module = chunk(3, 4)
    chunks = [wrapped, chunk(7)]
    found = {id(module): path for path, module in taps.named_modules(chunks)}
    assert [path for path in found.values() if path.endswith("mlp")] == [
        "decoder.layers.2.mlp",
        "decoder.layers.3.mlp",
        "decoder.layers.6.mlp",
    ]
    mlp = chunks[1].decoder.layers[0].mlp
    assert taps.whole_path(chunks, mlp) == "decoder.layers.6.mlp"
    assert taps.layer_of("decoder.layers.6.mlp") == 6 and taps.layer_of("mtp.layers.0") == 0
    assert taps.layer_of("embedding") is None
    with pytest.raises(ConfigError, match="in none of the 2 model chunk"):
        taps.whole_path(chunks, Scale())
    with pytest.raises(ConfigError, match="no core attention"):
        taps.attention_inputs(mlp, lambda inputs: None)
    with pytest.raises(ConfigError, match="no router"):
        taps.router_scores(mlp, lambda scores: None)


def test_paths_number_experts_as_in_the_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_rank", lambda: 1)
    layer, experts = nn.Module(), nn.Module()
    layer.layer_number, experts.num_local_experts = 3, 4
    experts.local_experts = nn.ModuleList([Scale() for _ in range(4)])
    layer.add_module("experts", experts)
    model, decoder = nn.Module(), nn.Module()
    decoder.layers = nn.ModuleList([layer])
    model.decoder = decoder
    found = [path for path, module in taps.named_modules(model) if isinstance(module, Scale)]
    assert found == [f"decoder.layers.2.experts.local_experts.{number}" for number in range(4, 8)]
    experts.config = SimpleNamespace(moe_extended_tp=True)
    found = [path for path, module in taps.named_modules(model) if isinstance(module, Scale)]
    assert found == [f"decoder.layers.2.experts.local_experts.{number}" for number in range(4)]


def test_attention_inputs_make_what_core_attention_returns() -> None:
    (found,) = run_ranks(1, f"{HERE}:attention")
    assert len(found) == 9
    for name, case in found.items():
        assert case["error"] < 1e-5 < case["control"], name
        assert case["calls"] == 1 and not case["grad"] and case["heads"] == [0, 4], name
        assert case["kind"] == ("padding" if "mask" in name else "causal"), name


def test_routers_say_what_they_decide() -> None:
    (found,) = run_ranks(1, f"{HERE}:routers")
    assert len(found) == 8
    for name, case in found.items():
        exact = case["calls"] == 1 and case["same"] and case["map"] and case["counts"] and case["given"]
        assert exact and not case["left"], name
        assert case["logits"] < 1e-4 and case["chances"] < 1e-5, name
        assert (case["assigned"] == 32) == (name not in ("capacity", "padded")), name
        assert case["bias"] == (name == "deepseek"), name


def test_routers_that_gather_tokens_say_what_they_decide_about_their_ranks_own() -> None:
    for rank in run_ranks(2, f"{HERE}:gathered_routers"):
        for name, case in rank.items():
            assert case["map"] and case["counts"] and not case["other rank's"], name
            assert case["logits"] < 1e-4, name
        # Both ranks' 32 tokens, of 2 experts each; padded, as many places for each of 8 experts.
        assert {name: case["decided"] for name, case in rank.items()} == {"by token": 64, "padded": 256}
