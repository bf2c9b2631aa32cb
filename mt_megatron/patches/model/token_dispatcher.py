"""Token dispatchers move whole rows by index, and read no more from the device than they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_UTILS = "megatron.core.transformer.moe.moe_utils"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


def permute(tokens: Any, indices: Any, num_out_tokens: Any = None, padded_mode: bool = False) -> Any:
    from mt_megatron.layers.moe import permutation

    return permutation.permute(tokens, indices, num_out_tokens, padded_mode)


def unpermute(
    permuted_tokens: Any,
    sorted_indices: Any,
    probs: Any = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> Any:
    from mt_megatron.layers.moe import permutation

    return permutation.unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape)


def _gather_permutation(self: Any, hidden_states: Any, max_prob: Any, max_ind: Any) -> Any:
    from mt_megatron.layers.moe.token_dispatch import gather_permutation

    return gather_permutation(self, hidden_states, max_prob, max_ind)


def _gather_unpermutation(self: Any, hidden_states: Any, bias: Any = None) -> Any:
    from mt_megatron.layers.moe.token_dispatch import gather_unpermutation

    return gather_unpermutation(self, hidden_states, bias)


def _alltoall_preprocess(original: Callable[..., Any], self: Any, indices: Any) -> Any:
    from mt_megatron.layers.moe.token_dispatch import local_counts, spans_ranks

    if spans_ranks(self.config) or self.config.moe_expert_capacity_factor is not None:
        return original(self, indices)
    return local_counts(self, indices)


def _alltoall_permutation(
    original: Callable[..., Any], self: Any, hidden_states: Any, probs: Any, indices: Any
) -> Any:
    from mt_megatron.layers.moe.token_dispatch import local_permutation, stays_local

    if stays_local(self):
        return local_permutation(self, hidden_states, probs, indices)
    return original(self, hidden_states, probs, indices)


def _alltoall_unpermutation(
    original: Callable[..., Any], self: Any, hidden_states: Any, bias: Any = None
) -> Any:
    from mt_megatron.layers.moe.token_dispatch import local_unpermutation, stays_local

    if stays_local(self):
        return local_unpermutation(self, hidden_states)
    return original(self, hidden_states, bias)


def patches(backend: Backend) -> list[Patch]:
    def rows(name: str, body: Callable[..., Any], digest: str) -> Patch:
        return Patch(
            id=f"token_dispatcher.{name}",
            target=f"{_UTILS}:{name}",
            kind="replace",
            feature="moe",
            reason="rows are copied by index and summed by the inverse index, without an index per element",
            body=body,
            digest=digest,
        )

    def gather(name: str, body: Callable[..., Any], digest: str) -> Patch:
        return Patch(
            id=f"token_dispatcher.allgather_{name}",
            target=f"{_DISPATCHER}:MoEAllGatherTokenDispatcher.token_{name}",
            kind="replace",
            feature="moe",
            reason="one sort instead of masks and gathers, and counts that cannot differ from what is sent",
            body=body,
            digest=digest,
        )

    def alltoall(name: str, body: Callable[..., Any], digest: str) -> Patch:
        return Patch(
            id=f"token_dispatcher.alltoall_{name}",
            target=f"{_DISPATCHER}:MoEAlltoAllTokenDispatcher.{name}",
            kind="wrap",
            feature="moe",
            reason="with nobody to exchange tokens with, nothing is split, waited for or copied twice",
            body=body,
            digest=digest,
        )

    return [
        rows("permute", permute, "84d6d5398b6a66d7ce7a9cfa885254b16e11d4571c31094e663494e6e2602353"),
        rows("unpermute", unpermute, "da18c1169f333543ccc64d1ba2faabe05c8d5c7e8c0623c977ed4b0075da274f"),
        gather(
            "permutation",
            _gather_permutation,
            "03fccb7987153897cbe5cbeca41d38a778312a8f1c162b23cec05ce67b3a65fe",
        ),
        gather(
            "unpermutation",
            _gather_unpermutation,
            "ea3076f51da18b827f4016a74e4a376e59c00f3884d9ffd6c4e8098ff198018a",
        ),
        alltoall(
            "preprocess",
            _alltoall_preprocess,
            "22f2e8aa89b82025430e9cc4c5fff823ad253abf9395babc943d7420955939e3",
        ),
        alltoall(
            "token_permutation",
            _alltoall_permutation,
            "1d3b29df3d5d22b69b2712a10203a50abd3a2c270adc09eb161d38ceba47549c",
        ),
        alltoall(
            "token_unpermutation",
            _alltoall_unpermutation,
            "1a98be8c3c091aee4f62d7fc95c83e838f1edd77015155debe32aef0e2294555",
        ),
    ]
