"""Weights that are not drawn: marks of tensor-parallel parts, and the router's weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_LAYERS = "megatron.core.tensor_parallel.layers:"


def _marking(**dimensions: int) -> Callable[..., None]:
    """Body of a constructor whose weights ``dimensions`` are parts along these dimensions."""

    def build(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        for name, dimension in dimensions.items():
            weight = getattr(self, name)
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, True, dimension, kwargs.get("stride", 1))

    return build


def _router(original: Callable[..., None], self: Any, config: Any) -> None:
    """Upstream draws with the tracker's stream, or where nothing is to be drawn."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    given = copy.copy(config)
    if not config.perform_initialization:
        given.init_method = lambda weight: weight
    # Without a tracker upstream then draws as the host does.
    given.perform_initialization = config.perform_initialization and get_cuda_rng_tracker().is_initialized()
    original(self, given)
    self.config = config


def patches(backend: Backend) -> list[Patch]:
    def marks(name: str, target: str, digest: str, **dimensions: int) -> Patch:
        return Patch(
            id=f"errata.parts_of_{name}",
            target=f"{target}.__init__",
            kind="wrap",
            feature="errata",
            reason="without perform_initialization the gradient norm leaves out the weights of all "
            "tensor-parallel ranks but the first (NVIDIA/Megatron-LM !4312)",
            body=_marking(**dimensions),
            digest=digest,
        )

    return [
        marks(
            "embedding",
            f"{_LAYERS}VocabParallelEmbedding",
            "a4c82d51441f527f43eef3e7c35520050be475e0c220ecf362599d84cb55cbce",
            weight=0,
        ),
        marks(
            "column",
            f"{_LAYERS}ColumnParallelLinear",
            "687a4019533af8e7e224ae513e0f0e3526985f556d39e4d8cbc7d329287c0d1c",
            weight=0,
        ),
        marks(
            "row",
            f"{_LAYERS}RowParallelLinear",
            "264de43013806cf1d5a91b9dc729b2f82de74935fe4d85771b0fa950899928e8",
            weight=1,
        ),
        marks(
            "experts",
            "megatron.core.transformer.moe.experts:GroupedMLP",
            "d81137ff87c58bc9c065d1d44ce89a08c8547712d7495f2c9acfac93134f94e4",
            weight1=1,
            weight2=0,
        ),
        Patch(
            id="errata.router_weight",
            target="megatron.core.transformer.moe.router:Router.__init__",
            kind="wrap",
            feature="errata",
            reason="a router's weight stays unset memory without an initialised RNG tracker, and is drawn "
            "without perform_initialization (NVIDIA/Megatron-LM !2238)",
            body=_router,
            digest="ef415293ddea3e837f08eb095004c7125e435c3981c31a6cfea9052f2de83aba",
        ),
    ]
