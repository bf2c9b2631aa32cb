"""Checks of FP8 recipes that need no device."""

from __future__ import annotations

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.fp8.layers import FEATURES, layer_reason, run_recipe
from mt_megatron.planning.build import model_shape
from mt_megatron.planning.linears import linears
from mt_megatron.planning.shape import padded_shape_of

PARAM_GATHER = ("delayed", "tensorwise")
"""Recipes whose weights have one scale per tensor, so that a gathered one is cast to the same codes."""


def fp8_layer_problems(config: TrainingConfig) -> list[str]:
    """One line per problem: found, expected, what to change."""
    model = config.model
    recipe = run_recipe(model)
    found = []
    if config.ddp.fp8_param_gather and (
        recipe not in PARAM_GATHER or not config.parallel.use_distributed_optimizer or not config.train.bf16
    ):
        found.append(
            f"fp8_param_gather with fp8_recipe {recipe}, bf16 = {config.train.bf16} and "
            f"use_distributed_optimizer = {config.parallel.use_distributed_optimizer}; expected bf16, "
            f"fp8_recipe {' or '.join(PARAM_GATHER)}, whose weights have one scale per tensor, and the "
            "distributed optimizer. Set --bf16, --fp8-recipe and --use-distributed-optimizer, or leave "
            "--fp8-param-gather out."
        )
    if recipe is None:
        if model.tp_only_amax_red:
            found.append(
                "tp_only_amax_red without fp8_recipe; expected fp8_recipe delayed with it. Set --fp8-recipe "
                "delayed or leave --tp-only-amax-red out."
            )
        return found
    if model.transformer_impl == "transformer_engine":
        found.append(
            "transformer_impl is transformer_engine with fp8_recipe, which Megatron-Core's local linears "
            "compute; expected local. Set --transformer-impl local or leave --fp8-recipe out."
        )
    try:
        every = linears(model_shape(config))
    except ConfigError:
        return found  # sizes are missing, which others say
    bad: dict[str, tuple[int, int, list[int]]] = {}
    quantised = 0
    for linear in every:
        if layer_reason(linear.layer, model) is not None:
            continue
        quantised += 1
        inputs, outputs = linear.on_rank(config.parallel.tensor_model_parallel_size)
        if inputs % FEATURES or outputs % FEATURES:
            bad.setdefault(linear.name, (inputs, outputs, []))[2].append(linear.layer)
    for name, (inputs, outputs, layers) in bad.items():
        found.append(
            f"{name} of layer {layers[0]}{f' and {len(layers) - 1} more' if len(layers) > 1 else ''} has "
            f"{inputs} inputs and {outputs} outputs on each rank; expected multiples of {FEATURES} with "
            "fp8_recipe. Change the model's sizes or --tensor-model-parallel-size, or leave --fp8-recipe out."
        )
    tensor_parallel = config.parallel.tensor_model_parallel_size
    if model.fp8_output_layer and padded_shape_of(config).vocab_size // tensor_parallel % FEATURES:
        found.append(
            f"fp8_output_layer with a vocabulary of {padded_shape_of(config).vocab_size} over "
            f"{tensor_parallel} tensor-parallel rank(s); expected a multiple of {FEATURES} on each. Set "
            f"--make-vocab-size-divisible-by {FEATURES} or a multiple, or leave --fp8-output-layer out."
        )
    if not quantised:
        found.append(
            f"fp8_recipe covers no layer: num_layers is {model.num_layers} and "
            f"{model.num_layers_at_start_in_bf16} first and {model.num_layers_at_end_in_bf16} last layers "
            "stay in bf16; expected a layer between them. Set --no-first-last-layers-bf16 or leave "
            "--fp8-recipe out."
        )
    return found
