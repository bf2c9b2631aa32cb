"""How evenly the experts of every layer were used since the last report: records, one line, TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mt_megatron.layers.moe.expert_bias import routers_of
from mt_megatron.layers.moe.router import listen
from mt_megatron.layers.moe.router_telemetry import EXTRA, LayerLoad, RouterLoad
from mt_megatron.training.distributed import Job
from mt_megatron.training.model import Trainable

LAYERS = "moe_layers"
"""Key of a record's list of layers; the other keys are numbers over all of them."""


class ExpertLoads:
    """The loads of all routers of a run.

    Routers sum up on the device while training goes on; only ``collect`` reads and communicates.
    """

    def __init__(self, trainable: Trainable, job: Job) -> None:
        """Make the routers listen; nothing at all in a model without experts."""
        self._job = job
        core = trainable.core
        self._experts: int = getattr(core, "num_moe_experts", None) or 0
        # Layers of multi-token prediction are numbered on from the model's own.
        self._rows: int = core.num_layers + (getattr(core, "mtp_num_layers", None) or 0)
        self._loads: list[tuple[int, RouterLoad]] = []
        if self._experts:
            for chunk in trainable.chunks:
                self._loads += [(router.layer_number - 1, listen(router)) for router in routers_of(chunk)]

    def remember(self) -> Callable[[], None]:
        """Keeps the sums since the last ``collect``; what is returned brings them back."""
        restoring = [load.remember() for _, load in self._loads]

        def restore() -> None:
            for each in restoring:
                each()

        return restore

    def collect(self) -> dict[str, Any]:
        """What ``record_of`` makes of the steps since the last call, the same on every rank; collective, one
        all-reduce. Empty without experts."""
        if not self._experts:
            return {}
        width = self._experts + EXTRA
        numbers = [0.0] * (self._rows * width)
        for row, load in self._loads:
            numbers[row * width : (row + 1) * width] = load.take()
        summed = self._job.sum_over_ranks(numbers)
        loads = [LayerLoad.of(summed[row * width : (row + 1) * width]) for row in range(self._rows)]
        return record_of({row: load for row, load in enumerate(loads) if load.imbalance is not None})


def record_of(loads: Mapping[int, LayerLoad]) -> dict[str, Any]:
    """The part of a ``train`` record about experts; ``loads`` by layer, counted from 0. Empty without any.

    Numbers are means over layers; ``moe_imbalance_max`` is the worst layer's, ``moe_dropped`` a share.
    """
    if not loads:
        return {}
    layers: list[dict[str, Any]] = [
        {
            "layer": layer,
            "imbalance": load.imbalance,
            "dropped": load.dropped_share,
            "entropy": load.entropy,
            "balancing_loss": load.balancing_loss,
            "z_loss": load.z_loss,
            "tokens_per_expert": list(load.tokens_per_expert),
        }
        for layer, load in sorted(loads.items())
    ]
    found: dict[str, Any] = {
        "moe_imbalance": _mean(layers, "imbalance"),
        "moe_imbalance_max": max(layer["imbalance"] for layer in layers),
        "moe_dropped": _mean(layers, "dropped"),
        "moe_entropy": _mean(layers, "entropy"),
        "moe_balancing_loss": _mean(layers, "balancing_loss"),
        "moe_z_loss": _mean(layers, "z_loss"),
    }
    return {**found, LAYERS: layers}


def _mean(layers: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [layer[name] for layer in layers if layer[name] is not None]
    return sum(values) / len(values) if values else None


def shown(values: Mapping[str, Any]) -> list[str]:
    """What a line about a step says of its experts; nothing without any."""
    imbalance, dropped = values.get("moe_imbalance"), values.get("moe_dropped")
    if imbalance is None:
        return []
    return [f"busiest expert {imbalance:.2f}x", *([f"dropped {100 * dropped:.1f} %"] if dropped else [])]


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """``moe/layer_N/NAME`` for every number of every layer of a record."""
    return {
        f"moe/layer_{layer['layer']}/{name}": value
        for layer in values.get(LAYERS, ())
        for name, value in layer.items()
        if name not in ("layer", "tokens_per_expert") and value is not None
    }


def histograms(values: Mapping[str, Any]) -> dict[str, list[int]]:
    """``moe/layer_N/tokens_per_expert`` for every layer of a record."""
    return {
        f"moe/layer_{layer['layer']}/tokens_per_expert": layer["tokens_per_expert"]
        for layer in values.get(LAYERS, ())
    }
