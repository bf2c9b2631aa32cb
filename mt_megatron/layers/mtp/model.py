"""Multi-token prediction in a ``GPTModel``: its modules, the shared embedding, forward, losses.

The depths are on the last pipeline stage, which needs the embedding too. Where that is another stage than
the first, it holds a copy: equal at the beginning, and the gradients of both are summed before every
update, as upstream does for tied embeddings. With tied embeddings the copy is the output layer's weight
as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_megatron.backends.current import current_device
from mt_megatron.backends.dtypes import wide_float
from mt_megatron.errors import ConfigError
from mt_megatron.layers.attention.packed_sequences import are_borders
from mt_megatron.layers.shared_embedding import copy_weights, first_chunk, sum_gradients
from mt_megatron.parallel import stage_order
from mt_megatron.parallel.group_names import name_of
from mt_megatron.seams import collectives
from mt_megatron.seams.loss_gradient import announced, announced_loss_gradient


def add_depths(model: Any, block_spec: Any, layer_spec: Any) -> None:
    """Complete ``model``, a ``GPTModel`` that upstream has built; collective over its embedding group.

    ``block_spec`` None: made from ``layer_spec``, the spec that ``model`` was given.
    """
    config = model.config
    if model.post_process:
        from mt_megatron.layers.mtp.layer import MultiTokenPredictionBlock
        from mt_megatron.layers.mtp.spec import mtp_block_spec

        model.mtp = MultiTokenPredictionBlock(config, block_spec or mtp_block_spec(config, layer_spec))
        if len(model.mtp.layers) != config.mtp_num_layers:
            raise ConfigError(
                f"found mtp_num_layers {config.mtp_num_layers} and an mtp_block_spec of "
                f"{len(model.mtp.layers)} layers; expected the same. Change one of them"
            )
    _share_embedding(model)


def holds_copy(model: Any) -> bool:
    """Whether ``model`` is a last stage with a copy of the first stage's embedding."""
    return getattr(model, "mtp", None) is not None and not model.pre_process


def _share_embedding(model: Any) -> None:
    if model.pre_process == model.post_process:
        return  # One stage has both, or a stage between them none.
    if model.post_process:
        _copy_embedding(model)
    if stage_order.is_v() and model.post_process:
        copy_weights(zip(_shared_parameters(first_chunk()), _shared_parameters(model), strict=True))
    for parameter in _shared_parameters(model):
        parameter.shared_embedding = True
        if dist.is_initialized() and not stage_order.is_v():
            from megatron.core import parallel_state

            value = parameter.detach().to(current_device())
            dist.all_reduce(value, group=parallel_state.get_embedding_group())
            with torch.no_grad():
                parameter.copy_(value)


def _copy_embedding(model: Any) -> None:
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

    model.embedding = LanguageModelEmbedding(
        config=model.config,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        position_embedding_type=model.position_embedding_type,
    )
    words = model.embedding.word_embeddings
    if model.share_embeddings_and_output_weights:
        # One parameter of both modules, which upstream has made equal to the first stage's embedding.
        words.weight = model.output_layer.weight
        # Its gradient as an embedding counts beside what the output layer adds to main_grad.
        words.weight.zero_out_wgrad = True
        model.register_load_state_dict_pre_hook(_complete_tied_state)
    words.weight.is_embedding_or_output_parameter = True
    with torch.no_grad():
        for parameter in _shared_parameters(model):
            parameter.zero_()
            parameter.shared = True


def _shared_parameters(model: Any) -> list[Any]:
    """Parameters of the embedding that are on the first and the last stage, less those that upstream ties."""
    tied = model.share_embeddings_and_output_weights
    words = model.embedding.word_embeddings.weight
    return [each for each in model.embedding.parameters() if not (tied and each is words)]


def sum_embedding_gradients(chunks: list[Any], config: Any) -> None:
    """Add up the embedding's gradients on the first and the last stage; collective over their group."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model

    if not config.mtp_num_layers or parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return
    if stage_order.is_v():
        if parallel_state.is_pipeline_first_stage(ignore_virtual=True):
            ends = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in chunks]
            sum_gradients(zip(_shared_parameters(ends[0]), _shared_parameters(ends[-1]), strict=True))
        return
    if parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        chunk = chunks[0]
    elif parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        chunk = chunks[-1]
    else:
        return
    for parameter in _shared_parameters(get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)):
        group = parallel_state.get_embedding_group()
        with collectives.announced("all_reduce", name_of(group), group, parameter.main_grad):
            dist.all_reduce(parameter.main_grad, group=group)


def forward(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Any,
    labels: Tensor,
    loss_mask: Tensor | None,
) -> Tensor:
    """The main losses, float32 [b, s], as ``original`` computes them; backward trains the depths too.

    ``input_ids`` may be missing, as in Megatron-LM's batches on the last stage: labels are the same tokens,
    one position on. Raises ``ConfigError`` for labels that are no tokens then, on an accelerator in the
    first pass alone, since looking at them waits for the device.
    """
    if input_ids is None:
        _require_tokens(model, labels)
    with _noting_decoder(model.decoder) as decoder:
        losses: Tensor = original()
    hidden, attention = decoder["output"], decoder["attention"]
    documents = document_numbers(labels, position_ids, attention_mask, attention.get("packed_seq_params"))
    joint = DepthLosses(model.mtp, loss_mask, documents)
    main = announced()
    coming = [None] * len(joint.depths) if main is None else joint.gradients(main)
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    found = []
    for depth, gradient in zip(joint.depths, coming, strict=True):
        tokens = shifted(labels, depth - 1) if input_ids is None else shifted(input_ids, depth)
        embedding = model.embedding(input_ids=tokens, position_ids=_positions(model, position_ids, tokens))
        hidden = model.mtp(depth, embedding, hidden, **attention)
        # The two together or not at all: the output layer's gradient is in one place for all its uses.
        with announced_loss_gradient(gradient):
            logits, _ = model.output_layer(hidden, weight=weight)
            found.append(model.compute_language_model_loss(shifted(labels, depth), logits))
    return joint.join(losses, found)


def _require_tokens(model: Any, labels: Tensor) -> None:
    if labels.device.type != "cpu" and model.mtp.has_seen_labels:
        return
    model.mtp.has_seen_labels = True
    low, high = torch.stack(labels.aminmax()).tolist()
    if low < 0 or high >= model.vocab_size:
        raise ConfigError(
            f"found labels from {low} to {high} and no input_ids on the last pipeline stage; expected 0 to "
            f"{model.vocab_size - 1}, since multi-token prediction then takes the tokens from the labels. "
            "Pass input_ids on the last stage too, or leave positions out by loss_mask instead"
        )


def _positions(model: Any, position_ids: Tensor | None, tokens: Tensor) -> Tensor | None:
    if position_ids is None and model.embedding.add_position_embedding:
        return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return position_ids


@contextmanager
def _noting_decoder(decoder: Any) -> Iterator[dict[str, Any]]:
    """What goes into ``decoder``'s layers and comes out of it, from its next call."""
    noted: dict[str, Any] = {}

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        noted["attention"] = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        noted["output"] = output

    handle = decoder.register_forward_hook(note, with_kwargs=True)
    try:
        yield noted
    finally:
        handle.remove()


def _complete_tied_state(model: Any, state: dict[str, Any], prefix: str, *ignored: Any) -> None:
    """A distributed checkpoint has a weight once, also where two modules hold it."""
    names = [f"{prefix}{name}.weight" for name in ("embedding.word_embeddings", "output_layer")]
    for name, other in (names, names[::-1]):
        if name not in state and other in state:
            state[name] = state[other]


def mark_copy_in_checkpoint(model: Any, state: dict[str, Any], prefix: str) -> None:
    """The copy of the embedding is a replica of the first stage's, which alone is written."""
    if model.share_embeddings_and_output_weights:
        # Upstream has described the parameter as the output layer's; twice, it could not be read.
        del state[f"{prefix}embedding.word_embeddings.weight"]
    for name, sharded in state.items():
        if name.startswith(f"{prefix}embedding."):
            sharded.replica_id = (1, *sharded.replica_id[1:])


# Losses: which token each depth predicts, which positions count, and their gradient.
#
# With ``labels[i]`` the token after position i, depth k predicts ``labels[i + k]`` at i. It counts where the
# model's own prediction counts at i + k, and where i, i + k and the target are in one document.
#
# The loss of a micro-batch is main + factor / D x the sum of the depths' losses, each the mean over its own
# counted tokens. The main loss is made outside of the model, by any loss function that adds up tokens'
# losses. Its gradient says with what weight: the sum of it over the tokens is what the mean loss is
# multiplied with, by the loss scale, the number of micro-batches, or the counted tokens where every token
# weighs the same (``calculate_per_token_loss``). The depths' means get the same weight.


def shifted(tokens: Tensor, by: int) -> Tensor:
    """``tokens`` [b, s] moved ``by`` positions to the front; zeros move in at the end."""
    result = torch.zeros_like(tokens)
    if by < tokens.shape[1]:
        result[:, : tokens.shape[1] - by] = tokens[:, by:]
    return result


def counted_positions(mask: Tensor, documents: Tensor | None, depth: int) -> Tensor:
    """Weight of every position in the loss of ``depth``, float32 [b, s].

    ``mask`` [b, s] is the main loss's. ``documents`` int64 [b, s] numbers the document of every input
    token; the target of the last position is beyond them, and counts with that position.
    """
    length = mask.shape[1]
    counted = shifted(mask.float(), depth)
    if documents is None or depth >= length:
        return counted
    here = length - depth
    counted[:, :here] *= documents[:, :here] == documents[:, depth:]
    counted[:, : here - 1] *= documents[:, : here - 1] == documents[:, depth + 1 :]
    return counted


def document_numbers(
    labels: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None, packed: Any
) -> Tensor | None:
    """The number of the document of each token, int64 [b, s] like ``labels``; None when no input shows them.

    Borders are where a packed sequence begins, where a bool mask [b or 1, 1, s, s] hides the token before
    (Megatron's ``reset_attention_mask``; a mask of padding, [b, 1, 1, s], shows none), and where positions
    do not go on (``reset_position_ids``).
    """
    borders = attention_mask if are_borders(attention_mask) else getattr(packed, "cu_seqlens_q", None)
    # One more, for borders that repeat the end.
    flat = torch.zeros(labels.numel() + 1, dtype=torch.bool, device=labels.device)
    starts = flat[:-1].view(labels.shape)
    known_borders = borders is not None
    if borders is not None:
        flat[borders[1:].to(labels.device).long()] = True
    elif _is_square(attention_mask):
        assert attention_mask is not None
        starts[:, 1:] |= torch.diagonal(attention_mask[:, 0], offset=-1, dim1=1, dim2=2)
        known_borders = True
    if position_ids is not None and position_ids.shape == labels.shape:
        # All zeros stand for no positions, from scripts whose model does not look at them.
        known = position_ids.any(dim=1, keepdim=True)
        starts[:, 1:] |= (position_ids[:, 1:] != position_ids[:, :-1] + 1) & known
        known_borders = True
    return starts.cumsum(dim=1) if known_borders else None


def _is_square(mask: Tensor | None) -> bool:
    if mask is None or mask.dtype is not torch.bool or mask.dim() != 4:
        return False
    return mask.shape[2] == mask.shape[3]


class DepthLosses:
    """The losses of all depths for one micro-batch, and how they enter the gradient."""

    def __init__(self, block: Any, mask: Tensor | None, documents: Tensor | None) -> None:
        """``mask`` [b, s] is the main loss's; None: a token counts where its loss gets a gradient."""
        config = block.config
        self.block = block
        self.depths = range(1, len(block.layers) + 1)
        self._mask, self._documents = mask, documents
        self._weight = float(config.mtp_loss_scaling_factor) / len(block.layers)

    def gradients(self, main: Tensor) -> list[Tensor]:
        """The gradient of each depth's per-token losses, float32 [b, s], from ``main``, the main losses'."""
        weight = main.float().sum() * self._weight
        return [weight / counted.sum().clamp(min=1.0) * counted for counted in self._counted(main)]

    def join(self, losses: Tensor, depths: Sequence[Tensor]) -> Tensor:
        """``losses`` [b, s] as they are; backward brings gradients to ``depths``, each [b, s], as well."""
        joined: Tensor = _Join.apply(losses, self, *depths)  # type: ignore[no-untyped-call]
        return joined

    def report(self, main: Tensor, depths: Sequence[Tensor]) -> None:
        """Tell the block how large the losses are."""
        wide = wide_float(main.device)
        rows = [
            torch.stack(((losses * counted).to(wide).sum(), counted.to(wide).sum()))
            for losses, counted in zip(depths, self._counted(main), strict=True)
        ]
        self.block.report(torch.stack(rows))

    def _counted(self, main: Tensor) -> list[Tensor]:
        mask = main != 0 if self._mask is None else self._mask
        return [counted_positions(mask, self._documents, depth) for depth in self.depths]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, joint: DepthLosses, *depths: Tensor) -> Tensor:
        ctx.joint = joint
        ctx.save_for_backward(*depths)
        return losses.view_as(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        joint: DepthLosses = ctx.joint
        joint.report(gradient, ctx.saved_tensors)
        return gradient, None, *joint.gradients(gradient)
