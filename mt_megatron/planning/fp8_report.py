"""Linears of a run that compute in FP8, their formats, and their share of the operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.fp8.layers import ALWAYS_BF16, OUTPUT_LAYER, SENSITIVE, layer_reason, run_recipe
from mt_megatron.fp8.recipe import OPERANDS, ROLES, AmaxGroup, Recipe, recipe_of
from mt_megatron.planning.build import model_shape
from mt_megatron.planning.linears import Casts, linears
from mt_megatron.planning.parameters import ModelShape
from mt_megatron.planning.shape import padded_shape_of


def recipe_of_run(config: TrainingConfig) -> Recipe | None:
    """The recipe that ``config`` asks for; None for none. Raises ConfigError for one that cannot be."""
    model = config.model
    name = run_recipe(model)
    if name is None:
        return None
    group: AmaxGroup | None = "tp-cp" if model.tp_only_amax_red else None
    format = model.fp8 or model.fp8_recipe_format
    if name != "delayed":
        return recipe_of(name, format=format, amax_group=group, wgrad=model.fp8_wgrad)
    return recipe_of(
        name,
        format=format,
        margin=model.fp8_margin,
        history=model.fp8_amax_history_len,
        algorithm=model.fp8_amax_compute_algo,
        amax_group=group,
        wgrad=model.fp8_wgrad,
    )


def fp8_report(config: TrainingConfig, telemetry: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Plain data: ``recipe``; ``roles`` with the casts of both operands; ``linears`` with layer, name, sizes,
    share of the linears' operations and, where one is not quantised, the ``reason``; ``share`` of the
    operations of the decoder's linears that are in FP8; ``output_layer`` with sizes, its operations as a
    multiple of the decoder's linears' and a reason; ``always_bf16``.

    ``telemetry`` are the records of a run: the newest of each linear and operand is beside it, and a
    demotion is a reason. Raises ConfigError when the model is not described completely.
    """
    recipe = recipe_of_run(config)
    newest: dict[str, dict[str, Mapping[str, Any]]] = {}
    demoted: dict[str, str] = {}
    since: dict[str, int] = {}
    for record in telemetry:
        if recipe is None or record.get("recipe", recipe.name) != recipe.name:
            continue  # of an earlier part of the run, with another recipe
        newest.setdefault(record["linear"], {})[f"{record['operand']} of {record['role']}"] = record
        if record.get("demoted"):
            demoted[record["linear"]] = f"demoted after step {record['step']}: {record['demoted']}"
            since[record["linear"]] = record["step"]
        elif record["step"] != since.get(record["linear"], record["step"]):
            # It computes in FP8 again: the step of its demotion was undone, or a resume went back before it.
            del demoted[record["linear"]], since[record["linear"]]
    every = linears(model_shape(config))
    total = sum(each.flops for each in every)
    rows, inside = [], 0.0
    for each in every:
        name = f"layers.{each.layer - 1}.{each.name}"
        reason = "no fp8_recipe" if recipe is None else layer_reason(each.layer, config.model)
        reason = reason or demoted.get(name)
        if recipe is not None and reason is None:
            # The three products of a linear are equally large.
            inside += each.flops * sum(recipe.product(role).quantised for role in ROLES) / len(ROLES)
        rows.append(
            {
                "linear": name,
                "inputs": each.inputs,
                "outputs": each.outputs,
                "share": each.flops / total,
                "reason": reason,
                "telemetry": newest.get(name, {}),
            }
        )
    shape = padded_shape_of(config)
    reason = None if config.model.fp8_output_layer else SENSITIVE
    return {
        "recipe": None if recipe is None else recipe.name,
        "roles": {} if recipe is None else _roles(recipe),
        "share": inside / total if total else 0.0,
        "linears": rows,
        "output_layer": {
            "inputs": shape.hidden_size,
            "outputs": shape.vocab_size,
            "share": _head_flops(shape) / total,
            "reason": "no fp8_recipe" if recipe is None else demoted.get(OUTPUT_LAYER, reason),
            "telemetry": newest.get(OUTPUT_LAYER, {}),
        },
        "always_bf16": dict(ALWAYS_BF16),
    }


def _head_flops(shape: ModelShape) -> int:
    """Of one token's forward pass through the output layer, once for each predicted token."""
    return 2 * shape.hidden_size * shape.vocab_size * (1 + (shape.mtp_num_layers or 0))


def casts_of(config: TrainingConfig, *, on_cpu: bool) -> Casts | None:
    """Bytes of cast weights that a rank keeps; None without a recipe. A device's kernels read them in two
    layouts. The emulation also keeps what they were decoded to, codes of four bits in a byte each, and
    scales in fp32; codes that two products share it keeps once."""
    recipe = recipe_of_run(config)
    if recipe is None:
        return None
    cast, model = recipe.fprop.b, config.model
    emulated = model.fp8_backend == "reference" or (model.fp8_backend == "auto" and on_cpu)
    width = 0.5 if cast.format == "e2m1" and not emulated else 1.0
    if cast.granularity == "block":
        scale = 4.0 if cast.block_scale == "fp32" or emulated else 1.0
        width += scale / (cast.block[0] * cast.block[1])
    layouts = 1 if recipe.shares_weight_codes and emulated else 2
    decoded = 2 if config.train.bf16 or config.train.fp16 else 4
    depths = model.mtp_num_layers or 0
    layers = range(1, (model.num_layers or 0) + depths + 1)
    return Casts(
        bytes_per_weight=layouts * (width + (decoded if emulated else 0)),
        layers=frozenset(layer for layer in layers if layer_reason(layer, model) is None),
        output_layer=model.fp8_output_layer,
    )


def fp8_cost(config: TrainingConfig) -> dict[str, Any] | None:
    """Plain data for a plan: ``recipe``, ``flops_per_token`` of a training step that are in FP8,
    ``share_of_linears``, and in what backward keeps the linears' inputs. None without a recipe."""
    recipe = recipe_of_run(config)
    if recipe is None:
        return None
    inside = [each for each in linears(model_shape(config)) if layer_reason(each.layer, config.model) is None]
    quantised = sum(recipe.product(role).quantised for role in ROLES)
    operations = sum(each.flops for each in inside)
    if config.model.fp8_output_layer:
        operations += _head_flops(padded_shape_of(config))
    in_fp8 = recipe.wgrad.quantised and (recipe.shares_input_codes or config.model.fp8_save_activations)
    return {
        "recipe": recipe.name,
        "flops_per_token": operations * quantised,
        "share_of_linears": fp8_report(config)["share"],
        "saved_inputs": "fp8" if in_fp8 else "params dtype",
    }


def _roles(recipe: Recipe) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for role in ROLES:
        product = recipe.product(role)
        kinds = OPERANDS[role]
        found[role] = {kinds[0]: product.a.text, kinds[1]: product.b.text}
    return found


def require_recipe(config: TrainingConfig) -> None:
    """Raises ConfigError where a run has no recipe to report."""
    if recipe_of_run(config) is None:
        raise ConfigError(
            "the run has no fp8_recipe, so all of it is in its params dtype; expected --fp8-recipe NAME"
        )
