"""T5: embeddings that two pipeline stages hold a copy of, and a head with a weight of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_EMBEDDINGS = ("embedding", "position_embeddings")
_HEADS = ("lm_head", "output_layer")
"""Modules of a T5Model; each has two names for what it holds."""


def _copies(model: Any) -> list[Any]:
    """Word embedding, then position embedding if any, where another stage has the same, by the groups that
    the script asked for; else none."""
    import torch
    from megatron.core import parallel_state

    # Of Megatron-Core's models T5 alone has the attribute.
    embeds = (
        getattr(model, "xattn_needed", False) and model.pre_process and torch.distributed.is_initialized()
    )
    if not (embeds and parallel_state.is_rank_in_position_embedding_group()):
        return []
    several = parallel_state.get_position_embedding_group().size() > 1
    return list(model.embedding.parameters()) if several else []


def _setup(backend: Backend, original: Callable[[Any], None], self: Any) -> None:
    """Upstream adds the copies of a tied word embedding up, for which all but one have to be zero; it does
    nothing for other copies. Marks: ``shared_embedding`` keeps the same part of a copy on the same rank of
    the distributed optimizer, ``zero_out_wgrad`` adds the embedding's gradient to the head's where that is
    fused, ``shared`` leaves a copy out of the gradient norm."""
    import torch
    from megatron.core import parallel_state

    copies = _copies(self)
    for weight in copies:
        weight.shared_embedding = weight.zero_out_wgrad = True
        weight.shared = not parallel_state.is_pipeline_first_stage()
        if weight.shared:
            weight.data.zero_()
    original(self)
    for weight in copies[1:] if self.share_embeddings_and_output_weights else copies:
        weight.data = weight.data.to(backend.device(backend.current_device()))
        torch.distributed.all_reduce(weight.data, group=parallel_state.get_position_embedding_group())


def _word_gradients(original: Callable[..., None], model: list[Any], config: Any) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model, get_model_xattn

    original(model, config)
    if get_model_xattn(model[0]):
        module = get_attr_wrapped_model(model[0], "xattn_needed", return_model_obj=True)
        for word in [] if module.share_embeddings_and_output_weights else _copies(module)[:1]:
            torch.distributed.all_reduce(word.main_grad, group=parallel_state.get_position_embedding_group())


def _head(original: Callable[..., Any], self: Any, hidden_states: Any, word_embeddings_weight: Any) -> Any:
    """Upstream hands over the word embedding, tied or not; a head that has a weight takes that."""
    return original(self, hidden_states, word_embeddings_weight if self.output_layer.weight is None else None)


def _sharded_state_dict(
    self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
) -> Any:
    """The encoder's first stage saves the embeddings, the decoder's last stage the head. Upstream thinks of
    one of the head's two names alone, where tied weights and padded vocabularies need care."""
    from megatron.core import parallel_state
    from megatron.core.models.common.language_module.language_module import LanguageModule

    found = LanguageModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
    tied = f"{prefix}output_layer.weight"
    if self.share_embeddings_and_output_weights and tied in found:
        found[f"{prefix}lm_head.output_layer.weight"] = found[tied]
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    for name, part in found.items():
        module = name.removeprefix(prefix).split(".")[0]
        if (module in _EMBEDDINGS and not first) or (module in _HEADS and not last):
            part.replica_id = (1, *part.replica_id[1:])
        if module in _HEADS and hasattr(part, "allow_shape_mismatch"):
            part.allow_shape_mismatch = True
    return found


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="errata.t5_embeddings",
            target="megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer",
            kind="wrap",
            feature="errata",
            reason="a T5 over pipeline stages starts from the sum of two word embeddings and two different "
            "position embeddings, counts both copies' gradients in its norm, and with fused gradients loses "
            "those of the decoder's inputs (no issue upstream)",
            body=partial(_setup, backend),
            digest="03341fd680f2d60dd745db3fc2dfb2429f1fb549a3ebae9889936459eedf36b1",
        ),
        Patch(
            id="errata.t5_embedding_gradients",
            target="megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
            kind="wrap",
            feature="errata",
            reason="with untied embeddings the two copies of a T5 over pipeline stages drift apart (no issue "
            "upstream)",
            body=_word_gradients,
            digest="db63be9ea6c709a5923174322b25664d191b3ec50d61ea896596e9b5f3597290",
        ),
        Patch(
            id="errata.t5_untied_head",
            target="megatron.core.models.T5.t5_model:T5LMHead.forward",
            kind="wrap",
            feature="errata",
            reason="with untied embeddings a T5 computes its logits with the word embedding, and its head "
            "stays as drawn (no issue upstream)",
            body=_head,
            digest="140e24f9f8716e5f01d67cbeeb7bfff6c2719a5182638eb0f7c025e206baf912",
        ),
        Patch(
            id="errata.t5_checkpoint",
            target="megatron.core.models.T5.t5_model:T5Model.sharded_state_dict",
            kind="add",
            feature="errata",
            reason="over pipeline stages a T5's embeddings and head are saved twice or not, and a padded "
            "head is not loaded under another tensor-parallel size (no issue upstream)",
            body=_sharded_state_dict,
        ),
    ]
