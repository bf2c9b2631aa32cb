"""Choice of the weights of a model that compute in FP8, and their recipe objects."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch

from mt_megatron.backends.current import current_backend
from mt_megatron.errors import ConfigError, MtMegatronError
from mt_megatron.fp8.extra_state import keep
from mt_megatron.fp8.kernels import chosen
from mt_megatron.fp8.layers import FEATURES, OUTPUT_LAYER, layer_reason
from mt_megatron.fp8.linear import Fp8Linear
from mt_megatron.fp8.recipe import Recipe, recipe_of
from mt_megatron.fp8.state import Fp8State, Options, states_of
from mt_megatron.fp8.telemetry import Telemetry
from mt_megatron.seams import widened

_log = logging.getLogger("mt_megatron")
_EXPERT = re.compile(r"\.local_experts\.\d+\.")
_GROUPED = {"weight1": "linear_fc1", "weight2": "linear_fc2"}


def recipe_of_config(config: Any) -> Recipe | None:
    """The recipe that a ``TransformerConfig`` asks for; None for none."""
    if config.fp8_recipe is None:
        return None
    delayed = config.fp8_recipe == "delayed"
    given: dict[str, Any] = {
        "margin": config.fp8_margin,
        "history": config.fp8_amax_history_len,
        "algorithm": config.fp8_amax_compute_algo,
    }
    defaults = {"margin": 0, "history": 1, "algorithm": "most_recent"}
    if not delayed:
        given = {name: value for name, value in given.items() if value != defaults[name]}
    if config.tp_only_amax_red:
        given["amax_group"] = "tp-cp"
    return recipe_of(config.fp8_recipe, format=config.fp8_recipe_format, wgrad=config.fp8_wgrad, **given)


def state_of(config: Any, names: Collection[str] = ()) -> Fp8State | None:
    """The state that the FP8 linears of one model of ``config`` share, made when it is asked for first; None
    where the configuration names no recipe. A second model of the same configuration, which has linears of
    the same ``names``, gets a state of its own, as do linears that are built when others have histories.

    Raises ConfigError for a recipe that this device cannot train with.
    """
    recipe = recipe_of_config(config)
    if recipe is None:
        return None
    states = [each for each in getattr(config, "fp8_states", ()) if isinstance(each, Fp8State) and each.alive]
    for state in states:
        shares = state.recipe == recipe and state.takes_more
        if shares and not any(name in state.linears for name in names):
            return state
    device = current_backend()
    kernels = chosen(
        config.fp8_backend, recipe.name, device, bf16=config.params_dtype is torch.bfloat16 or config.bf16
    )
    state = Fp8State(
        recipe,
        Options(
            save_activations=config.fp8_save_activations,
            telemetry_interval=config.fp8_telemetry_interval,
            demote_underflow=config.fp8_demote_underflow,
            demote_saturation=config.fp8_demote_saturation,
            demote_snr=config.fp8_demote_snr,
        ),
    )
    state.kernels = kernels
    if not state.native:
        by_fp32 = device.device_type == "cpu" and widened.serves_processor()
        _log.info(
            "fp8: recipe %s is emulated on the %s: codes and scales are exact, products are bf16 GEMMs of "
            "decoded values%s",
            recipe.name,
            device.name,
            ", by fp32 kernels: torch has none for bf16 on this processor" if by_fp32 else "",
        )
    if state.options.telemetry_interval:
        state.telemetry = Telemetry()
    config.fp8_states = [*states, state]
    return state


def attach(layer: Any) -> None:
    """Give the weights of a built ``TransformerLayer`` their recipe; nothing where the configuration names
    none. Raises ConfigError for features that FP8 kernels refuse, and for layers without linears of
    Megatron-Core's own."""
    config = layer.config
    if recipe_of_config(config) is None or layer_reason(layer.layer_number, config) is not None:
        return
    found = [
        (f"layers.{layer.layer_number - 1}.{_EXPERT.sub('.', '.' + name)[1:]}", module, parameter)
        for name, module, parameter in _weights(layer)
    ]
    if not found:
        raise ConfigError(
            f"fp8_recipe {config.fp8_recipe}: layer {layer.layer_number} has no linear of Megatron-Core's "
            "own; expected its local layer specification. Use get_gpt_layer_local_spec (--transformer-impl "
            "local), or leave fp8_recipe out."
        )
    for name, _, parameter in found:
        inputs, outputs = int(parameter.shape[-1]), int(parameter.shape[-2])
        if inputs % FEATURES or outputs % FEATURES:
            raise ConfigError(
                f"fp8_recipe {config.fp8_recipe}: {name} has {inputs} inputs and {outputs} outputs on each "
                f"rank; FP8 products need multiples of {FEATURES}. Change the model's sizes or the tensor "
                "parallel size, or keep the layer in bf16."
            )
    given = _give(config, found)
    if (projection := _projection(layer)) is not None:
        keep(projection, given)


def attach_output_layer(model: Any) -> None:
    """Give the output layer of a built ``GPTModel`` its recipe where ``fp8_output_layer`` asks for it.

    Raises ConfigError for an output layer that is not Megatron-Core's, and for sizes that kernels refuse.
    """
    config = model.config
    if not config.fp8_output_layer or not model.post_process:
        return
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    if not isinstance(model.output_layer, ColumnParallelLinear):
        raise ConfigError(
            f"fp8_output_layer: the output layer is a {type(model.output_layer).__name__}; expected "
            "Megatron-Core's ColumnParallelLinear. Leave fp8_output_layer out."
        )
    tied = model.share_embeddings_and_output_weights
    owner = model.embedding.word_embeddings if tied and model.pre_process else model.output_layer
    weight = owner.weight
    outputs, inputs = map(int, weight.shape)
    if inputs % FEATURES or outputs % FEATURES:
        raise ConfigError(
            f"fp8_output_layer: the output layer has {inputs} inputs and {outputs} outputs on each rank; FP8 "
            f"products need multiples of {FEATURES}. Change --make-vocab-size-divisible-by or the hidden "
            "size, or leave fp8_output_layer out."
        )
    # The layers' state, whatever other models of the configuration there are.
    state = next((each for each in states_of([model]) if OUTPUT_LAYER not in each.linears), None)
    [linear] = _give(config, [(OUTPUT_LAYER, owner, weight)], state)
    # An embedding that is tied to it reads the values themselves.
    linear.gathers = not tied
    layers = getattr(model.decoder, "layers", None)
    if layers and (projection := _projection(layers[-1])) is not None:
        keep(projection, [linear])


def _projection(layer: Any) -> Any:
    """The linear whose extra state keeps FP8 state in scripts' checkpoints; None in another kind of layer."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    found = getattr(getattr(layer, "self_attention", None), "linear_proj", None)
    return found if isinstance(found, RowParallelLinear) else None


class Attached:
    """An attribute of a module whose weights compute in FP8. ``copy.deepcopy`` copies no attribute of a
    parameter: with this, weights of a copied module compute in FP8 too, in a state of the copy's own."""

    def __init__(self, configs: tuple[Any, ...], linears: list[Fp8Linear]) -> None:
        """``configs``: where ``states_of`` looks for the linears' state."""
        self._configs, self._linears = configs, linears

    def __reduce__(self) -> Any:
        # A stored module is loaded without us.
        return _nothing, ()

    def __deepcopy__(self, memo: dict[Any, Any]) -> Attached:
        made = []
        for linear in self._linears:
            # Parameters come before other attributes.
            parameter = memo.get(id(linear.parameter)) if linear.alive else None
            if parameter is None:
                raise MtMegatronError(
                    f"a copy of {linear.name} in FP8 has no weight: it was copied without its module; "
                    "expected copy.deepcopy of the module, the layer or the model"
                )
            key = ("mt_megatron.fp8", id(linear.state))
            if key not in memo:
                memo[key] = linear.state.copied()
            copied = linear.copied(memo[key], parameter)
            memo[key].add(copied)
            parameter.gemm_recipe = copied
            made.append(copied)
        configs = copy.deepcopy(self._configs, memo)
        for config in configs:
            config.fp8_states = list({id(each.state): each.state for each in made}.values())
        return Attached(configs, made)


def _nothing() -> None:
    """Stand-in: what was stored is loaded as None."""


def _give(config: Any, found: list[tuple[str, Any, Any]], state: Fp8State | None = None) -> list[Fp8Linear]:
    """Recipe objects for parameters: name, module and parameter of each. ``state``: theirs; None: that of
    ``config``."""
    state = state_of(config, [name for name, _, _ in found]) if state is None else state
    assert state is not None
    made = []
    of_module: dict[int, tuple[Any, list[Fp8Linear]]] = {}
    for name, module, parameter in found:
        linear = Fp8Linear(state, name, parameter)
        state.add(linear)
        parameter.gemm_recipe = linear
        made.append(linear)
        of_module.setdefault(id(module), (module, []))[1].append(linear)
    for module, linears in of_module.values():
        # Some modules have a configuration of their own.
        module.fp8_attached = Attached((config, getattr(module, "config", config)), linears)
    return made


def _weights(layer: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, module and parameter of every linear."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.moe.experts import GroupedMLP

    from mt_megatron.layers.mla.spec import ReplicatedLinear
    from mt_megatron.layers.moe.experts import is_arranged
    from mt_megatron.layers.te.grouped import TEGroupedLinear

    for name, module in layer.named_modules():
        if isinstance(module, TEGroupedLinear):
            yield from ((name, module, parameter) for parameter in module.weights)
            continue
        if isinstance(module, GroupedMLP):
            if not is_arranged(module):
                raise ConfigError(
                    f"found a {type(module).__name__} with a forward of its own in a layer of an fp8_recipe; "
                    "expected GroupedMLP, whose products are quantised. Leave fp8_recipe out, or its forward"
                )
            for parameter, linear in _GROUPED.items():
                yield f"{name}.{linear}", module, getattr(module, parameter)
            continue
        linear_layer = isinstance(module, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear)
        if linear_layer and getattr(module, "weight", None) is not None:
            yield name, module, module.weight
