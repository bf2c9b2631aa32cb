"""Stages laid out as a V: the first and the last one are on the first rank of a pipeline.

``parallel.stage_order`` says whether they are; nothing changes elsewhere. Which layers a chunk holds is
``patches.model.stage_layers``' business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.parallel import stage_order
from mt_megatron.patching.spec import Patch

_STATE = "megatron.core.parallel_state:"
_TORCH_DIST = "megatron.core.dist_checkpointing.strategies.torch:"
_VIRTUAL_SIZE = 2
"""Place of ``virtual_pipeline_model_parallel_size`` among the arguments."""


def _initialize(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if stage_order.is_v():
        name = "virtual_pipeline_model_parallel_size"
        stage_order.require_two_chunks(args[_VIRTUAL_SIZE] if len(args) > _VIRTUAL_SIZE else kwargs.get(name))
        kwargs["get_embedding_ranks"] = _first_of
    original(*args, **kwargs)


def _first_of(ranks: list[int], split_rank: int | None = None) -> list[int]:
    return ranks[:1]


def _is_last_stage(original: Callable[..., bool], ignore_virtual: bool = False) -> bool:
    if not stage_order.is_v():
        return original(ignore_virtual)
    from megatron.core import parallel_state

    chunk = parallel_state.get_virtual_pipeline_model_parallel_rank()
    is_first_rank: bool = parallel_state.get_pipeline_model_parallel_rank() == 0
    return is_first_rank and (ignore_virtual or chunk == 1)


def _last_rank(original: Callable[[], Any]) -> Any:
    if not stage_order.is_v():
        return original()
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_first_rank()


def _setup_embeddings(original: Callable[[Any], None], self: Any) -> None:
    original(self)
    if not stage_order.is_v() or self.pre_process == self.post_process:
        return
    from mt_megatron.layers import shared_embedding

    if self.pre_process:
        shared_embedding.remember_first(self)
    elif self.share_embeddings_and_output_weights:
        first = shared_embedding.first_chunk().shared_embedding_or_output_weight()
        shared_embedding.copy_weights([(first.data, self.output_layer.weight.data)])


def _embedding_gradients(original: Callable[..., None], model: list[Any], config: Any) -> None:
    original(model, config)
    if not stage_order.is_v():
        return
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model

    if not parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        return
    first, last = (
        get_attr_wrapped_model(model[index], "pre_process", return_model_obj=True) for index in (0, -1)
    )
    if first.share_embeddings_and_output_weights:
        from mt_megatron.layers import shared_embedding

        shared_embedding.sum_gradients(
            [(first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight())]
        )


_TWICE = "_mt_megatron_places"
"""Attribute of a tensor to be read: for each place that wants it, which of its shards belongs there."""


def _shards_to_read(
    original: Callable[..., Any], state_dict: Any, is_loading: bool = False, *args: Any, **options: Any
) -> Any:
    """A shard that this rank wants twice, for both copies of a shared weight, is read once."""
    if not is_loading:
        return original(state_dict, is_loading, *args, **options)
    places: dict[str, list[int]] = {}
    for key, shards in state_dict.items():
        first: dict[Any, int] = {}
        kept: list[Any] = []
        found: list[int] = []
        for shard in shards:
            at = _place(shard)
            if at not in first:
                first[at] = len(kept)
                kept.append(shard)
            found.append(first[at])
        if len(kept) < len(shards):
            state_dict[key], places[key] = kept, found
    made = original(state_dict, is_loading, *args, **options)
    for key, found in places.items():
        setattr(made[key], _TWICE, found)
    return made


def _place(shard: Any) -> Any:
    """Equal for shards of one tensor that are the same part of it; objects are no such parts."""
    offset = getattr(shard, "global_offset", None)
    if offset is None or not hasattr(shard, "flattened_range"):
        return id(shard)
    flat = shard.flattened_range
    return offset, None if flat is None else (flat.start, flat.stop)


def _read_shards(original: Callable[[Any], list[Any]], sh_ten: Any) -> list[Any]:
    found = original(sh_ten)
    places: list[int] | None = getattr(sh_ten, _TWICE, None)
    if places is None:
        return found
    # Each copy has memory of its own: both are going to be updated.
    return [found[at].clone() if at in places[:index] else found[at] for index, at in enumerate(places)]


def patches(backend: Backend) -> list[Patch]:
    def wrap(name: str, target: str, reason: str, body: Callable[..., Any], digest: str) -> Patch:
        return Patch(
            id=f"v_shape.{name}",
            target=target,
            kind="wrap",
            feature="pipeline",
            reason=reason,
            body=body,
            digest=digest,
        )

    return [
        wrap(
            "initialize",
            f"{_STATE}initialize_model_parallel",
            "in a V the first rank has the embedding and the output layer, which share a group of it alone",
            _initialize,
            "35db5de0f1a2cad23ad9ae97e8c4b8f6acc2c6c8d34316a038493d626f1773e1",
        ),
        wrap(
            "is_last_stage",
            f"{_STATE}is_pipeline_last_stage",
            "in a V the last stage is the first rank's second chunk",
            _is_last_stage,
            "b0ce54389dfdee5bfa9e7f4b98d2ed6bb80fb977631adad734934cb0afb4d4f5",
        ),
        wrap(
            "last_rank",
            f"{_STATE}get_pipeline_model_parallel_last_rank",
            "in a V the last stage is on the first rank",
            _last_rank,
            "b700e0a51cacface3f11a7205ffa96ae42ee95505457cd6e3aebc2c1ef93a5c9",
        ),
        wrap(
            "tied_weights",
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer",
            "in a V tied weights are copied from the same rank's first chunk, not over the embedding group",
            _setup_embeddings,
            "03341fd680f2d60dd745db3fc2dfb2429f1fb549a3ebae9889936459eedf36b1",
        ),
        wrap(
            "tied_gradients",
            "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
            "in a V the gradients of tied weights are added up on their rank",
            _embedding_gradients,
            "db63be9ea6c709a5923174322b25664d191b3ec50d61ea896596e9b5f3597290",
        ),
        wrap(
            "shards_to_read",
            f"{_TORCH_DIST}mcore_to_pyt_state_dict",
            "in a V one rank reads a shared weight for two chunks, which torch takes for shards that overlap",
            _shards_to_read,
            "0e4f13a70d0a653999bf5fa4c266750627c5cc15bba2a946022f319171367178",
        ),
        wrap(
            "read_shards",
            f"{_TORCH_DIST}_unwrap_pyt_sharded_tensor",
            "in a V what was read once goes to both chunks that share the weight",
            _read_shards,
            "e3b9ecf04a2089a9ffc0f052d383ba08f9dd5ca828baa195e13c80f0a2626a84",
        ),
    ]
