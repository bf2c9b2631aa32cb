"""The BERT family: encoders that learn to fill in masked words and to tell the order of sentences
(arXiv:1810.04805), with the norms before the layers (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.models.decoder import DecoderFamily, masked_loss
from mt_megatron.models.layer_spec import uses_transformer_engine
from mt_megatron.models.weights import TensorRow
from mt_megatron.seams import family
from mt_megatron.seams.schedule import LossFunction

_BATCH = {
    "tokens": "text",
    "token_types": "types",
    "labels": "labels",
    "loss_mask": "loss_mask",
    "is_token": "padding_mask",
    "swapped": "is_random",
}
"""Name in a micro-batch -> name in a sample of Megatron-Core's ``BERTMaskedWordPieceDataset``."""


class BertFamily(DecoderFamily):
    """Megatron-Core's ``BertModel`` on samples of its ``BERTMaskedWordPieceDataset``."""

    def _model(self, config: Any, transformer: Any, **place: Any) -> torch.nn.Module:
        from megatron.core.models.bert import bert_layer_specs
        from megatron.core.models.bert.bert_model import BertModel

        spec = bert_layer_specs.bert_layer_local_spec
        if uses_transformer_engine(config):
            spec = bert_layer_specs.bert_layer_with_transformer_engine_spec
        order = config.model.sentence_order
        model: torch.nn.Module = BertModel(
            transformer,
            transformer_layer_spec=spec,
            num_tokentypes=2 if order else 0,
            add_binary_head=order,
            **place,
        )
        return model

    def get_batch(self, iterator: Iterator[dict[str, Tensor]], device: torch.device) -> dict[str, Any]:
        """The next micro-batch on ``device``, int64: ``tokens`` (some of them masked), ``token_types`` (0 in
        the first half of a sample, 1 in the second), ``labels`` (-1 where nothing was masked), ``is_token``
        (0 where a sample is padded), each [b, s]; ``swapped`` [b], 1 where the halves were swapped.

        ``loss_mask`` float32 [b, s] is 1 where a token was masked; ``counted_tokens`` float32 [] is its sum.
        """
        host = next(iterator)
        batch = {name: host[key].to(device, non_blocking=True) for name, key in _BATCH.items()}
        batch["loss_mask"] = batch["loss_mask"].float()
        return {**batch, "counted_tokens": batch["loss_mask"].sum()}

    def loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> tuple[Tensor, LossFunction]:
        """Run one chunk forward: its output, and the last stage's loss function.

        That function takes the last stage's output, one cross-entropy per token (float32 [b, s]), and
        returns the mean over the masked tokens plus the mean cross-entropy of the order of halves over the
        samples, and a report of the masked tokens alone (``DecoderFamily.loss``). Its ``order`` are the sum
        and the number of the samples' losses, float32 [2]; samples without a masked token are left out there.
        With ``calculate_per_token_loss`` the order counts in proportion to a micro-batch's masked tokens.
        """
        from megatron.core.utils import get_attr_wrapped_model

        types = batch["token_types"] if get_attr_wrapped_model(model, "add_binary_head") else None
        output = model(batch["tokens"], batch["is_token"], types, lm_labels=batch["labels"])
        # Stages but the last give hidden states alone.
        losses, logits = output if isinstance(output, tuple) else (output, None)
        return losses, partial(_loss, model, batch, logits)

    def convert_table(self, config: Any) -> dict[str, TensorRow]:
        """Raises ``ConfigError``: the family is not converted."""
        raise ConfigError(
            "the family bert has no conversion; expected llama, mixtral, deepseek or qwen. Its checkpoints "
            "are read by --load and --resume, under any layout"
        )


def _loss(
    model: torch.nn.Module, batch: dict[str, Any], logits: Tensor | None, losses: Tensor
) -> tuple[Any, ...]:
    mask = batch["loss_mask"]
    total, *tokens, report = masked_loss(model, mask, batch["counted_tokens"], losses)
    if logits is None:
        return total, *tokens, report
    each = F.cross_entropy(logits.float(), batch["swapped"], reduction="none")
    counts = mask.any(dim=1).float()
    report["order"] = torch.stack([(each.detach() * counts).sum(), counts.sum()])
    return total + each.mean() * (tokens[0] if tokens else 1), *tokens, report


family.register("bert", BertFamily())
