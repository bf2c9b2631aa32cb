"""What the families of decoders have in common: what to build, what a batch is, the loss, its cost.

Every choice of the architecture is a configuration value: dense layers and experts, grouped-query and
latent attention, rotary positions of all kinds. A family only adds Hugging Face's names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.layers.attention.packed_sequences import document_mask, document_positions, positions_restart
from mt_megatron.models.layer_spec import gpt_layer_spec
from mt_megatron.models.weights import TensorRow
from mt_megatron.parallel.context_parallel import part_of_sequence
from mt_megatron.parallel.rank_layout import RankLayout
from mt_megatron.parallel.stage_layers import stage_layers
from mt_megatron.planning.build import transformer_config
from mt_megatron.planning.flops import training_flops
from mt_megatron.planning.parameters import padded_vocab_size
from mt_megatron.seams.loss_gradient import announced_loss_gradient
from mt_megatron.seams.schedule import LossFunction, microbatches_of_this_step
from mt_megatron.seams.taps.loss import tokens_lost


def masked_loss(
    model: torch.nn.Module, loss_mask: Tensor, counted_tokens: Tensor, losses: Tensor
) -> tuple[Any, ...]:
    """What ``LlamaFamily.loss`` promises of ``losses`` float32 [b, s]: a mean or a sum, and a report."""
    from megatron.core.utils import get_model_config

    tokens_lost(losses, loss_mask)
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum()
    report = {"loss": total.detach(), "tokens": tokens}
    config = get_model_config(model)
    if config.calculate_per_token_loss:
        return total, tokens.to(torch.int), report
    return total / _denominator(config, counted_tokens), report


def loss_gradient(model: torch.nn.Module, loss_mask: Tensor, counted_tokens: Tensor) -> Tensor | None:
    """What backward is going to bring for each token of ``masked_loss``, float32 [b, s].

    To the bit, since the factors are applied as autograd does: the loss scale, the number of
    micro-batches that the schedule divides by, the counted tokens, the mask. None where there will
    be no backward, and outside of a step.
    """
    from megatron.core.utils import get_model_config

    microbatches = microbatches_of_this_step()
    if microbatches is None or not torch.is_grad_enabled():
        return None
    config = get_model_config(model)
    gradient: Tensor = torch.ones((), device=loss_mask.device)
    if config.grad_scale_func is not None:
        gradient = config.grad_scale_func(gradient).detach().reshape(()).float()
    if not config.calculate_per_token_loss:
        gradient = gradient / microbatches
        gradient = gradient / _denominator(config, counted_tokens)
    return gradient * loss_mask.float()


def _denominator(config: Any, counted_tokens: Tensor) -> Tensor:
    # A micro-batch without a single counted token has loss 0, not 0/0.
    tokens: Tensor = counted_tokens.clamp(min=1.0) / config.context_parallel_size
    return tokens


_log = logging.getLogger("mt_megatron")


class DecoderFamily:
    """The five functions of ``mt_megatron.seams.family``; ``config`` is a ``TrainingConfig``."""

    published: str
    """Which module of ``mt_megatron.models.tables`` knows the published names."""

    def build_model(self, config: Any, layout: RankLayout) -> list[torch.nn.Module]:
        """This rank's model chunks (one per virtual pipeline stage), in the parameters' dtype.

        The process groups of ``layout`` must exist and the RNG tracker must be seeded. Raises
        ``ConfigError`` when the layers do not divide over the stages.
        """
        from megatron.core import parallel_state

        _say_documents(config)
        chunks = layout.vpp if layout.interleaved and layout.vpp else 1
        transformer = transformer_config(config)
        stage_layers(transformer)
        built = []
        for index in range(chunks):
            if layout.interleaved:
                parallel_state.set_virtual_pipeline_model_parallel_rank(index)
            built.append(self._chunk(config, transformer))
        return built

    def _chunk(self, config: Any, transformer: Any) -> torch.nn.Module:
        from megatron.core import parallel_state

        model = config.model
        chunk = self._model(
            config,
            transformer,
            vocab_size=_padded_vocab_size(config),
            max_sequence_length=model.max_position_embeddings or _seq_length(config),
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
            rotary_percent=model.rotary_percent,
            seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        )
        if model.mask_padded_vocabulary:
            # Read by the patches of the loss; not a parameter, nor in any checkpoint.
            chunk.unpadded_vocab_size = _vocab_size(config)  # type: ignore[assignment]
        return chunk

    def _model(self, config: Any, transformer: Any, **place: Any) -> torch.nn.Module:
        """One chunk; ``place`` is what all models of Megatron-Core take."""
        from megatron.core.models.gpt.gpt_model import GPTModel

        model: torch.nn.Module = GPTModel(
            config=transformer,
            transformer_layer_spec=gpt_layer_spec(config, transformer),
            rotary_base=config.model.rotary_base,
            **place,
        )
        return model

    def get_batch(self, iterator: Iterator[dict[str, Tensor]], device: torch.device) -> dict[str, Any]:
        """The next micro-batch on ``device``: ``tokens``, ``labels``, ``position_ids`` int64 [b, s],
        ``loss_mask`` float32 [b, s], and ``attention_mask`` bool [b, 1, s, s] (True = masked) or None
        (causal).

        Where documents are kept apart and the loader made no mask, ``cu_seqlens`` (int32 [documents +
        1], on the host) says where they begin in the micro-batch read row by row; else it is None.

        Under context parallelism these are the tokens that this rank holds, [b, n], and the rows of
        the mask for them, [b, 1, n, s]. ``counted_tokens`` float32 [] says how many tokens of the
        whole micro-batch, on all context-parallel ranks, count towards the loss.
        """
        from megatron.core import parallel_state

        size = parallel_state.get_context_parallel_world_size()
        rank = parallel_state.get_context_parallel_rank()
        host = dict(next(iterator))
        # How long documents are decides which kernels run: that is asked on the host.
        borders, _ = host.pop("cu_seqlens", None), host.pop("max_seqlen", None)
        batch: dict[str, Any] = {"attention_mask": None, "counted_tokens": host["loss_mask"].sum()}
        if borders is not None and size > 1:
            host["attention_mask"] = document_mask(borders, len(host["tokens"]), torch.device("cpu"))
        for name, value in host.items():
            # Rows of the mask are queries, which a rank has its own of; columns are all the keys.
            dim = 2 if name == "attention_mask" else 1
            batch[name] = value if size == 1 else part_of_sequence(value, dim, rank, size)
        moved = {
            name: None if value is None else value.to(device, non_blocking=True)
            for name, value in batch.items()
        }
        return moved if size > 1 else {**moved, "cu_seqlens": borders}

    def loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> tuple[Tensor, LossFunction]:
        """Run one chunk forward: its output, and the last stage's loss function.

        That function takes the last stage's output, one cross-entropy per token (float32 [b, s]), and
        returns the mean over the tokens that ``loss_mask`` counts and a report; or, when the
        configuration weighs tokens over the global batch (``calculate_per_token_loss``), their sum,
        their number and the report. The report holds ``loss`` (the sum) and ``tokens``, both float32.

        Under context parallelism sum, number and report are of the tokens that this rank holds; the
        mean is their sum over the mean number of all its ranks, so that the average of the
        gradients over them is the gradient of the micro-batch's mean.

        With ``cu_seqlens`` each document attends to itself alone, its rotary positions begin at 0,
        and there is no mask; our core attention takes the borders in the mask's place.
        """
        mask, borders = batch["attention_mask"], batch.get("cu_seqlens")
        positions = None
        if borders is not None:
            mask, positions = borders, document_positions(borders, len(batch["tokens"]))
        gradient = loss_gradient(model, batch["loss_mask"], batch["counted_tokens"])
        # Multi-token prediction moves it along; other models do not know the argument.
        further = {"loss_mask": batch["loss_mask"]} if _predicts_further(model) else {}
        with positions_restart(_rotary(model), positions), announced_loss_gradient(gradient):
            output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"], **further)
        return output, partial(masked_loss, model, batch["loss_mask"], batch["counted_tokens"])

    def flops(self, config: Any) -> float:
        """Floating-point operations per token of one training step, forward and backward."""
        return training_flops(config)

    def convert_table(self, config: Any) -> dict[str, TensorRow]:
        """How the published checkpoint names and packs the parameters."""
        module = import_module(f"mt_megatron.models.tables.{self.published}")
        rows: dict[str, TensorRow] = module.table(config)
        return rows


def _say_documents(config: Any) -> None:
    if not config.data.reset_attention_mask:
        return
    size = config.parallel.context_parallel_size
    why = "packed_sequences is off" if config.data.packed_sequences is False else ""
    why = why or (f"context_parallel_size is {size}" if size > 1 else "")
    used = f"one mask of the whole sequence, since {why}" if why else "each document by itself (packed)"
    _log.info("reset_attention_mask: %s", used)


def _predicts_further(model: torch.nn.Module) -> bool:
    from megatron.core.utils import get_model_config

    return bool(get_model_config(model).mtp_num_layers)


def _rotary(model: torch.nn.Module) -> torch.nn.Module | None:
    while not hasattr(model, "rotary_pos_emb") and hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return getattr(model, "rotary_pos_emb", None)


def _padded_vocab_size(config: Any) -> int:
    return padded_vocab_size(
        _vocab_size(config),
        divisible_by=config.model.make_vocab_size_divisible_by,
        tensor_parallel=config.parallel.tensor_model_parallel_size,
    )


def _vocab_size(config: Any) -> int:
    if config.model.vocab_size is None:
        raise ConfigError("vocab_size is not set; give --vocab-size or a tokenizer")
    return int(config.model.vocab_size)


def _seq_length(config: Any) -> int:
    if config.train.seq_length is None:
        raise ConfigError("seq_length is not set; give --seq-length")
    return int(config.train.seq_length)
