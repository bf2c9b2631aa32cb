"""Rotary embeddings, the causal mask, tied embeddings, BERT's pooled output and the CLIP tower."""

from __future__ import annotations

from tests.coverage_gate import models
from tests.coverage_gate.case import case
from tests.coverage_gate.target import DEVICE, torch


@case(world=1)
def rotary_frequencies_made_on_the_device_or_moved_to_it() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    inverse = 1.0 / (500000 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8))
    expected = torch.outer(torch.arange(5.0), inverse).repeat(1, 2)[:, None, None, :]
    for on_cpu in (False, True):
        rotary = RotaryEmbedding(8, 1.0, rotary_base=500000, use_cpu_initialization=on_cpu)
        assert torch.allclose(rotary(5), expected, atol=1e-6) and rotary.inv_freq.device.type == DEVICE


@case(world=2, cp=2)
def rotary_embedding_of_a_context_parallel_rank() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import get_pos_emb_on_this_cp_rank

    whole = torch.arange(8.0)[:, None, None, None].expand(8, 1, 1, 4)
    mine = get_pos_emb_on_this_cp_rank(whole, 0)
    # Rank r takes the r-th and the (2n - 1 - r)-th quarter, so that causal work is shared evenly.
    expected = [0, 1, 6, 7] if torch.distributed.get_rank() == 0 else [2, 3, 4, 5]
    assert mine[:, 0, 0, 0].tolist() == expected and mine.device.type == DEVICE


@case(world=1)
def default_causal_mask() -> None:
    from megatron.core.transformer.utils import get_default_causal_mask

    get_default_causal_mask.cache_clear()
    mask = get_default_causal_mask(7)
    assert mask.dtype == torch.bool and mask.device.type == DEVICE
    assert all(bool(mask[i, j]) == (j > i) for i in range(7) for j in range(7))


@case(world=2, pp=2)
def embeddings_tied_across_stages_start_equal() -> None:
    from megatron.core import parallel_state

    config = models.config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    model = models.gpt(
        config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    weight = model.shared_embedding_or_output_weight()
    assert weight.device.type == DEVICE and weight.abs().sum() > 0
    both = [torch.empty_like(weight) for _ in range(2)]
    torch.distributed.all_gather(both, weight.detach())
    assert torch.equal(both[0], both[1])


@case(world=1)
def bert_returns_mean_embeddings() -> None:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    model = BertModel(
        models.config(),
        num_tokentypes=0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=models.VOCABULARY,
        max_sequence_length=16,
    ).to(DEVICE)
    # The constructor's own argument fails on an attribute that upstream has not set yet.
    model.return_embeddings = True
    tokens = torch.arange(16).reshape(2, 8)
    mask = torch.ones(2, 8, dtype=torch.int64)
    output = model(tokens, mask)
    assert output.shape == (2, 16) and output.dtype == torch.float32 and output.device.type == DEVICE
    model.return_embeddings = False
    hidden: list[torch.Tensor] = []
    model.encoder.register_forward_hook(lambda _, __, result: hidden.append(result))
    model(tokens, mask)
    # The mean leaves out the first and the last token of the sequence.
    assert torch.allclose(output, hidden[0].transpose(0, 1)[:, 1:7].mean(dim=1), atol=1e-5)


@case(world=1)
def clip_tower_places_its_position_ids() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.transformer.torch_layer_norm import WrappedTorchLayerNorm

    model = CLIPViTModel(
        models.config(),
        get_gpt_layer_local_spec(),
        ln_pre_impl=WrappedTorchLayerNorm,
        patch_dim=4,
        img_h=8,
        img_w=8,
    ).to(DEVICE)
    assert model.position_ids.tolist() == [[0, 1, 2, 3, 4]] and model.position_ids.device.type == DEVICE
    output = model(torch.randn(2, 3, 8, 8), torch.zeros(1, 1, 5, 5, dtype=torch.bool))
    assert output.shape == (2, 5, 16) and torch.isfinite(output).all()
