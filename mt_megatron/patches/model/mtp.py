"""``mtp_num_layers``: multi-token prediction in ``GPTModel``, with Megatron-Core 0.12's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.errors import ConfigError
from mt_megatron.patching.spec import Patch

_GPT = "megatron.core.models.gpt.gpt_model:GPTModel"


def _init(
    original: Callable[..., None],
    self: Any,
    config: Any,
    transformer_layer_spec: Any,
    *args: Any,
    mtp_block_spec: Any = None,
    **kwargs: Any,
) -> None:
    depths = getattr(config, "mtp_num_layers", None)
    if depths:
        from mt_megatron.layers.mtp.checks import check_prediction

        check_prediction(config)
    elif mtp_block_spec is not None:
        raise ConfigError(
            "found an mtp_block_spec and no mtp_num_layers in the TransformerConfig; expected both or "
            "neither. Set mtp_num_layers or leave mtp_block_spec out"
        )
    original(self, config, transformer_layer_spec, *args, **kwargs)
    if depths:
        from mt_megatron.layers.mtp.model import add_depths

        add_depths(self, mtp_block_spec, transformer_layer_spec)


def _forward(
    original: Callable[..., Any],
    self: Any,
    input_ids: Any,
    position_ids: Any,
    attention_mask: Any,
    decoder_input: Any = None,
    labels: Any = None,
    *args: Any,
    loss_mask: Any = None,
    **kwargs: Any,
) -> Any:
    import torch

    call = partial(
        original, self, input_ids, position_ids, attention_mask, decoder_input, labels, *args, **kwargs
    )
    has_depths = getattr(self, "mtp", None) is not None
    if not has_depths or labels is None or not self.training or not torch.is_grad_enabled():
        return call()
    from mt_megatron.layers.mtp.model import forward

    return forward(call, self, input_ids, position_ids, attention_mask, labels, loss_mask)


def _sharded_state_dict(
    original: Callable[..., Any], self: Any, prefix: str = "", *args: Any, **kwargs: Any
) -> Any:
    from mt_megatron.layers.mtp.model import holds_copy, mark_copy_in_checkpoint

    state = original(self, prefix, *args, **kwargs)
    if holds_copy(self):
        mark_copy_in_checkpoint(self, state, prefix)
    return state


def _embedding_gradients(original: Callable[..., None], model: list[Any], config: Any) -> None:
    original(model, config)
    if getattr(config, "mtp_num_layers", None):
        from mt_megatron.layers.mtp.model import sum_embedding_gradients

        sum_embedding_gradients(model, config)


def _block_spec(config: Any, spec: Any, use_transformer_engine: bool) -> Any:
    """As in Megatron-Core 0.12: what ``GPTModel`` takes as ``mtp_block_spec``."""
    from mt_megatron.layers.mtp.spec import gpt_mtp_block_spec

    return gpt_mtp_block_spec(config, spec, use_transformer_engine)


def _track(
    original: Callable[..., None],
    name: str,
    loss: Any,
    layer_number: int | None,
    num_layers: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    # Every pipeline stage keeps num_layers losses and they are added up: there is no place for more.
    if layer_number is None or layer_number <= num_layers:
        original(name, loss, layer_number, num_layers, *args, **kwargs)


def patches(backend: Backend) -> list[Patch]:
    rows: tuple[tuple[str, str, str, Any, str], ...] = (
        (
            "init",
            f"{_GPT}.__init__",
            "it builds no layers for tokens beyond the next",
            _init,
            "5e0d533836dbda291a928289a0fc1b9afb9fc6b44c0d8bdb899e29c45a728fa0",
        ),
        (
            "forward",
            f"{_GPT}.forward",
            "the depths learn with the loss of the next token",
            _forward,
            "a7c84e89c7aed7c2bdca7ae23ecec23444c4cfdb0c8dea1bb86c0955a85093fa",
        ),
        (
            "sharded_state_dict",
            f"{_GPT}.sharded_state_dict",
            "the last stage's copy of the embedding is written by the first stage",
            _sharded_state_dict,
            "b9dd372197d80d5f54ccdba21fb7ccd5a9172024f4e12ae687d2e015febcd1c1",
        ),
        (
            "embedding_gradients",
            "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
            "the copy of the embedding has a share of its gradient, also where weights are not tied",
            _embedding_gradients,
            "db63be9ea6c709a5923174322b25664d191b3ec50d61ea896596e9b5f3597290",
        ),
        (
            "aux_losses",
            "megatron.core.transformer.moe.moe_utils:save_to_aux_losses_tracker",
            "its table has a place for each of the model's layers and none for further ones",
            _track,
            "1b7996641ea524097eed2712bfb340eb13b22ed3813a6130c4215a361104ae94",
        ),
    )
    return [
        Patch(
            id=f"mtp.{name}", target=target, kind="wrap", feature="mtp", reason=why, body=body, digest=digest
        )
        for name, target, why, body, digest in rows
    ] + [
        Patch(
            id="mtp.block_spec",
            target="megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec",
            kind="add",
            feature="mtp",
            reason="scripts written for later versions ask for it",
            body=_block_spec,
        )
    ]
