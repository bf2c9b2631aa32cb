"""``moe_ffn_hidden_size``: experts as wide as it says, while dense layers keep ``ffn_hidden_size``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.layers.mlp_width import of_width
from mt_megatron.patching.spec import Patch

_EXPERTS = "megatron.core.transformer.moe.experts"


def _mlp(
    original: Callable[..., None],
    self: Any,
    config: Any,
    submodules: Any,
    is_expert: bool = False,
    input_size: Any = None,
) -> None:
    with of_width(config, config.moe_ffn_hidden_size if is_expert else None):
        original(self, config, submodules, is_expert, input_size)


def _grouped(
    original: Callable[..., None], self: Any, num_local_experts: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    with of_width(config, config.moe_ffn_hidden_size):
        original(self, num_local_experts, config, *args, **kwargs)


def patches(backend: Backend) -> list[Patch]:
    def wrap(target: str, body: Callable[..., None], digest: str) -> Patch:
        name = target.rpartition(":")[2].partition(".")[0]
        return Patch(
            id=f"moe_ffn.{name}",
            target=target,
            kind="wrap",
            feature="moe",
            reason="it makes every expert as wide as a dense layer's MLP",
            body=body,
            digest=digest,
        )

    return [
        wrap(
            "megatron.core.transformer.mlp:MLP.__init__",
            _mlp,
            "1eed4f28a6b15eea06d9fb6828682ad1ad69091e6b0b4ebf611ad149c30e1a54",
        ),
        wrap(
            f"{_EXPERTS}:GroupedMLP.__init__",
            _grouped,
            "d81137ff87c58bc9c065d1d44ce89a08c8547712d7495f2c9acfac93134f94e4",
        ),
        wrap(
            f"{_EXPERTS}:TEGroupedMLP.__init__",
            _grouped,
            "b712826d711335fcf727576a7458b7ca38df5cd7e50da5895f4e01b184dd127a",
        ),
    ]
