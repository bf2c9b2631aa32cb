"""``GroupedMLP`` without the grouped_gemm package, with checkpoints that are ``SequentialMLP``'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.errors import ConfigError
from mt_megatron.patching.spec import Patch

_EXPERTS = "megatron.core.transformer.moe.experts"


def assert_grouped_gemm_is_available() -> None:
    """Nothing has to be there: the products are torch's."""


def _grouped_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    from mt_megatron.layers.moe.experts import arrange_weights

    arrange_weights(self)


def _grouped_forward(self: Any, permuted_local_hidden_states: Any, tokens_per_expert: Any) -> Any:
    from mt_megatron.layers.moe.experts import forward

    return forward(self, permuted_local_hidden_states, tokens_per_expert)


# Wrappers of it take it over; a function in its place does not have it.
_grouped_forward.takes_linears = True  # type: ignore[attr-defined]


def _grouped_sharded_state_dict(
    original: Callable[..., Any],
    self: Any,
    prefix: str = "",
    sharded_offsets: tuple[Any, ...] = (),
    metadata: Any = None,
) -> Any:
    from mt_megatron.layers.moe.experts import is_arranged

    if not is_arranged(self):
        return original(self, prefix, sharded_offsets, metadata)
    from mt_megatron.layers.moe.experts_checkpoint import sharded_state_dict

    return sharded_state_dict(self, prefix, sharded_offsets)


def _layer_init(
    original: Callable[..., None],
    self: Any,
    config: Any,
    submodules: Any = None,
    layer_number: int | None = None,
) -> None:
    _require_agreement(config, submodules)
    original(self, config, submodules, layer_number)
    from mt_megatron.layers.moe.token_dispatch import connect

    connect(self)


def _require_agreement(config: Any, submodules: Any) -> None:
    """Raise ConfigError when the layer's specification and ``moe_grouped_gemm`` mean different experts."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    if not config.moe_grouped_gemm:
        if submodules is None:
            raise ConfigError(
                "the layer specification was made for grouped experts and the configuration has "
                "moe_grouped_gemm=False; set it to True, or make the specification with "
                "get_gpt_layer_local_spec(..., moe_grouped_gemm=False)"
            )
        return
    linear = getattr(submodules, "linear_fc1", None)
    linear = getattr(linear, "module", linear)
    if isinstance(linear, type) and issubclass(linear, ColumnParallelLinear):
        raise ConfigError(
            f"the configuration has moe_grouped_gemm=True and the layer specification has {linear.__name__} "
            "for each expert; set it to False, or make the specification with "
            "get_gpt_layer_local_spec(..., moe_grouped_gemm=True)"
        )


def patches(backend: Backend) -> list[Patch]:
    def capability(target: str, digest: str) -> Patch:
        return Patch(
            id=f"experts.{target.rpartition(':')[2]}",
            target=target,
            kind="constant",
            feature="moe",
            reason="--moe-grouped-gemm asks for CUDA's compute capability 8, which the package needs",
            body={8: 0},
            digest=digest,
            optional=True,
            dispensable=True,
        )

    return [
        capability(
            "megatron.training.arguments:validate_args",
            "06806e1a2b96475d1d610f4d0e46a41d2aa676377f525fd89661592ed2cfcff6",
        ),
        capability(
            "megatron.training.yaml_arguments:validate_yaml",
            "686f7b3859ed8b610fea25fff0e1098503ad4fbea89bdd483c6e29182feea2f2",
        ),
        Patch(
            id="experts.no_package",
            target="megatron.core.transformer.moe.grouped_gemm_util:assert_grouped_gemm_is_available",
            kind="replace",
            feature="moe",
            reason="GroupedMLP's constructor refuses to run without a package that only CUDA has",
            body=assert_grouped_gemm_is_available,
            digest="f6f5a06d83eeb9d6b872e62a1176adba05c8ca26081bfb9fcdd4e30eee73b2b5",
        ),
        Patch(
            id="experts.weights",
            target=f"{_EXPERTS}:GroupedMLP.__init__",
            kind="wrap",
            feature="moe",
            reason="each expert's matrices lie as a linear's do, so that slices of the parameter are slices "
            "of a SequentialMLP checkpoint",
            body=_grouped_init,
            digest="d81137ff87c58bc9c065d1d44ce89a08c8547712d7495f2c9acfac93134f94e4",
        ),
        Patch(
            id="experts.forward",
            target=f"{_EXPERTS}:GroupedMLP.forward",
            kind="replace",
            feature="moe",
            reason="torch's products instead of the package's, weight gradients straight into main_grad",
            body=_grouped_forward,
            digest="364ad4513d53c0361d272fc0094666a1c7fbb4cca7e5903c7cb91f151bcf926c",
        ),
        Patch(
            id="experts.checkpoint",
            target=f"{_EXPERTS}:GroupedMLP.sharded_state_dict",
            kind="wrap",
            feature="moe",
            reason="upstream cannot save the distributed optimizer's state of grouped experts",
            body=_grouped_sharded_state_dict,
            digest="6bf297c8133497fe2c095d4c2eec3065486b91b10aa2a32cf39989f159d47cf7",
        ),
        Patch(
            id="experts.layer",
            target="megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
            kind="wrap",
            feature="moe",
            reason="a specification that contradicts moe_grouped_gemm is refused by name, and grouped "
            "experts take their tokens' routing from the dispatcher",
            body=_layer_init,
            digest="b270b7fd88abdf9fd3c31142c2a385f20d2adf149905732ca8a82c1ac0ac6eb1",
        ),
    ]
