"""``cross_entropy_loss_fusion`` fuses GPT's output layer with the loss: no logits of a whole micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch
from mt_megatron.seams.loss_gradient import announced

_log = logging.getLogger("mt_megatron")


@dataclass(frozen=True, kw_only=True)
class _Head:
    """What the output layer was asked for, in place of its logits."""

    hidden: Any
    weight: Any
    sequence_parallel: bool
    gradient_accumulation_fusion: bool


def _gpt_forward(
    original: Callable[..., Any],
    self: Any,
    input_ids: Any,
    position_ids: Any,
    attention_mask: Any,
    decoder_input: Any = None,
    labels: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = partial(original, self, input_ids, position_ids, attention_mask, decoder_input, labels)
    if labels is None or not self.post_process or not self.config.cross_entropy_loss_fusion:
        return call(*args, **kwargs)
    obstacle = _obstacle(self)
    if obstacle:
        _say(obstacle)
        return call(*args, **kwargs)
    with _withholding(self.output_layer):
        return call(*args, **kwargs)


@cache
def _say(obstacle: str) -> None:
    _log.warning("cross_entropy_loss_fusion: the whole micro-batch's logits are made, since %s", obstacle)


def _obstacle(model: Any) -> str:
    """Why the logits have to exist; empty when they need not."""
    from megatron.core.models.common.language_module import language_module
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import ColumnParallelLinear, layers

    from mt_megatron.seams.taps import modules as taps

    loss = getattr(model.compute_language_model_loss, "__func__", None)
    if loss is not LanguageModule.compute_language_model_loss:
        return f"the loss of a {type(model).__name__} is its own (compute_language_model_loss)"
    if not _is_upstreams(getattr(loss, "__wrapped__", None), language_module):
        return "LanguageModule's loss was replaced (compute_language_model_loss)"
    layer = model.output_layer
    if type(layer) is not ColumnParallelLinear:
        return f"the output layer is a {type(layer).__name__}"
    forward = getattr(taps.untapped(layer, "forward"), "__func__", None)
    if forward is not ColumnParallelLinear.forward or not _is_upstreams(forward, layers):
        return "the output layer's forward was replaced"
    if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return "the output layer has hooks, which want to see them"
    if taps.wants_output(layer):
        return "a tap on the output layer asks for them"
    if layer.gather_output:
        return "they are gathered (parallel_output=False)"
    if layer.bias is not None:
        return "the output layer has a bias"
    if model.config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute keeps their gradients"
    if model.config.config_logger_dir:
        return "config_logger_dir dumps them"
    return ""


def _is_upstreams(function: Any, module: ModuleType) -> bool:
    """True for a function that upstream's ``module`` defines; False where somebody put another in its place,
    before ``patch()`` or after."""
    return getattr(function, "__module__", None) == module.__name__ and not hasattr(function, "__wrapped__")


@contextmanager
def _withholding(layer: Any) -> Iterator[None]:
    def forward(hidden: Any, weight: Any = None) -> tuple[_Head, None]:
        head = _Head(
            hidden=hidden,
            weight=layer.weight if weight is None else weight,
            sequence_parallel=layer.sequence_parallel,
            gradient_accumulation_fusion=layer.gradient_accumulation_fusion,
        )
        return head, None

    from mt_megatron.seams.taps import modules as taps

    with taps.replaced(layer, "forward", forward):
        yield


@contextmanager
def _unfused(config: Any) -> Iterator[None]:
    """Upstream's fused loss rounds the gradient to bf16, whatever the model's dtype."""
    before, config.cross_entropy_loss_fusion = config.cross_entropy_loss_fusion, False
    try:
        yield
    finally:
        config.cross_entropy_loss_fusion = before


def _language_model_loss(original: Callable[..., Any], self: Any, labels: Any, logits: Any) -> Any:
    # Only our model families say it; Megatron's own scripts keep Megatron's softmax over the padding.
    vocab_size = getattr(self, "unpadded_vocab_size", None)
    if not isinstance(logits, _Head):
        from megatron.core.models.gpt import GPTModel

        from mt_megatron.seams.taps.loss import whole_logits

        place = _leave_padding_out(logits, vocab_size)
        if self.config.cross_entropy_loss_fusion and not isinstance(self, GPTModel):
            _say(f"a {type(self).__name__}'s output layer is not fused with its loss")
        with _unfused(self.config), whole_logits(logits, labels.transpose(0, 1), **place):
            return original(self, labels, logits)
    from mt_megatron.layers.loss.cross_entropy import linear_cross_entropy

    gradient = announced()
    losses = linear_cross_entropy(
        logits.hidden,
        logits.weight,
        labels.transpose(0, 1).contiguous(),
        vocab_size=vocab_size,
        announced=None if gradient is None else gradient.transpose(0, 1).contiguous(),
        sequence_parallel=logits.sequence_parallel,
        gradient_accumulation_fusion=logits.gradient_accumulation_fusion,
    )
    return losses.transpose(0, 1).contiguous()


def _leave_padding_out(logits: Any, vocab_size: int | None) -> dict[str, int]:
    """The id of the first of this rank's words, how many of them are no padding, and the whole number."""
    from megatron.core import parallel_state

    from mt_megatron.layers.loss.cross_entropy_blocks import leave_out, padding_from

    size = logits.shape[-1]
    first = size * parallel_state.get_tensor_model_parallel_rank()
    words = padding_from(vocab_size, first, size)
    if vocab_size is not None:
        leave_out(logits, words)
    whole = size * parallel_state.get_tensor_model_parallel_world_size()
    return {"first": first, "words": words, "whole": whole if vocab_size is None else vocab_size}


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="cross_entropy.gpt_forward",
            target="megatron.core.models.gpt.gpt_model:GPTModel.forward",
            kind="wrap",
            feature="loss",
            reason="it makes the logits of the whole micro-batch before it asks for the loss",
            body=_gpt_forward,
            digest="a7c84e89c7aed7c2bdca7ae23ecec23444c4cfdb0c8dea1bb86c0955a85093fa",
        ),
        Patch(
            id="cross_entropy.language_model_loss",
            target="megatron.core.models.common.language_module.language_module:"
            "LanguageModule.compute_language_model_loss",
            kind="wrap",
            feature="loss",
            reason="the loss is computed with the output layer's product, a block of tokens at a time",
            body=_language_model_loss,
            digest="40b7307b2d0e406b173059cff87b93a2569e858c19e8f7fec4cdf6dec2445435",
        ),
    ]
