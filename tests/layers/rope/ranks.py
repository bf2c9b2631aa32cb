"""What one process finds out about models with stretched rotary positions."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.layers.mla.ranks import start

VOCABULARY, TOKENS = 61, 70
HIDDEN, HEADS, GROUPS, FFN, THETA = 48, 4, 2, 64, 7000.0
SIZE = HIDDEN // HEADS

STRETCHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rope": ({}, {"rope_type": "default"}),
    "linear": (
        {"rope_type": "linear", "rotary_scaling_factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "rotary_scaling_factor": 8.0,
            "original_max_position_embeddings": 32,
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "yarn": (
        {"rope_type": "yarn", "rotary_scaling_factor": 8.0, "original_max_position_embeddings": 256},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
    ),
}
"""Fields of our config, and transformers' ``rope_parameters``."""


def config(**more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "num_query_groups": GROUPS,
            "ffn_hidden_size": FFN,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "use_cpu_initialization": True,
            **more,
        }
    )


def gpt(of: Any, **more: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(1)
    arguments = {"position_embedding_type": "rope", **more}
    return GPTModel(of, get_gpt_layer_local_spec(), VOCABULARY, TOKENS, **arguments)


def llama(rope: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            max_position_embeddings=2048,
            rope_parameters={**rope, "rope_theta": THETA},
        )
    )
    # Larger than they begin, so that where a token stands matters.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def load(ours: Any, theirs: Any) -> Any:
    state = theirs.state_dict()
    found = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for layer in range(2):
        source, target = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (state[f"{source}self_attn.{name}_proj.weight"].chunk(GROUPS) for name in "qkv")
        mlp = [state[f"{source}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found |= {
            f"{target}self_attention.linear_qkv.weight": torch.cat(
                [part for group in zip(q, k, v, strict=True) for part in group]
            ),
            f"{target}self_attention.linear_proj.weight": state[f"{source}self_attn.o_proj.weight"],
            f"{target}mlp.linear_fc1.weight": torch.cat(mlp),
            f"{target}mlp.linear_fc2.weight": state[f"{source}mlp.down_proj.weight"],
            f"{target}input_layernorm.weight": state[f"{source}input_layernorm.weight"],
            f"{target}pre_mlp_layernorm.weight": state[f"{source}post_attention_layernorm.weight"],
        }
    for name, parameter in ours.named_parameters():
        parameter.data.copy_(found.pop(name))
    assert not found
    return ours


def logits(model: Any) -> Tensor:
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found: Tensor = model(tokens, torch.arange(TOKENS).expand(2, -1), None)
    return found


def difference(fields: dict[str, Any], rope: dict[str, Any]) -> float:
    theirs = llama(rope)
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = theirs(tokens).logits
    found = logits(load(gpt(config(**fields), rotary_base=THETA), theirs))
    return float((found - wanted).abs().max() / wanted.abs().max())


def without_factor() -> float:
    """YaRN's frequencies and not its factor, as a kernel gives that knows no factor."""
    from mt_megatron.layers.rope import embedding as rope_embedding

    fields, rope = STRETCHED["yarn"]
    kept = rope_embedding.apply_stretched
    rope_embedding.apply_stretched = lambda *_: None  # type: ignore[assignment]
    try:
        return difference(fields, rope)
    finally:
        rope_embedding.apply_stretched = kept


def packed(**fields: Any) -> float:
    """Rotated one after another against each by itself."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import apply_rotary_pos_emb

    of, lengths = config(**fields), [20, 3, 30]
    angles = gpt(of).rotary_pos_emb(TOKENS)
    t = torch.randn(sum(lengths), HEADS, SIZE)
    borders = torch.tensor([0, 20, 23, 53], dtype=torch.int32)
    alone = [
        apply_rotary_pos_emb(part.unsqueeze(1), angles[: len(part)], of).squeeze(1)
        for part in t.split(lengths)
    ]
    return float((apply_rotary_pos_emb(t, angles, of, borders) - torch.cat(alone)).abs().max())


def arguments() -> dict[str, bool]:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    fields = {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    wanted = gpt(config(**fields, rotary_scaling_factor=6.0)).rotary_pos_emb.inv_freq
    of_model = gpt(config(), rope_scaling=True, rope_scaling_factor=6.0).rotary_pos_emb.inv_freq
    of_embedding = RotaryEmbedding(SIZE, 1.0, rope_scaling=True, rope_scaling_factor=6.0).inv_freq
    default = gpt(config(), rope_scaling=True).rotary_pos_emb.inv_freq
    eight = gpt(config(**fields, rotary_scaling_factor=8.0)).rotary_pos_emb.inv_freq
    return {
        "model": torch.equal(of_model, wanted),
        "embedding": torch.equal(of_embedding, wanted),
        "default": torch.equal(default, eight) and not torch.equal(default, wanted),
    }


def bases() -> dict[str, bool]:
    from mt_megatron.layers.rope.scaling import RopeScaling, inverse_frequencies

    wanted = inverse_frequencies(SIZE, 5000.0, RopeScaling())
    latent = {"num_query_groups": None, "multi_latent_attention": True, "qk_pos_emb_head_dim": 6}
    of_latent = gpt(config(**latent, rotary_base=5000.0)).rotary_pos_emb.inv_freq
    llama3 = RopeScaling(rope_type="llama3", rotary_scaling_factor=6.0, original_max_position_embeddings=8192)
    by_argument = {"rope_scaling": True, "rope_scaling_factor": 6.0}
    stretched = gpt(config(rotary_base=5000.0), **by_argument).rotary_pos_emb.inv_freq
    latent_too = gpt(config(**latent, rotary_base=5000.0), **by_argument).rotary_pos_emb.inv_freq
    return {
        "config": torch.equal(gpt(config(rotary_base=5000.0)).rotary_pos_emb.inv_freq, wanted),
        "argument": torch.equal(gpt(config(), rotary_base=5000).rotary_pos_emb.inv_freq, wanted),
        "latent": torch.equal(of_latent, inverse_frequencies(6, 5000.0, RopeScaling())),
        "stretched": torch.equal(stretched, inverse_frequencies(SIZE, 5000.0, llama3)),
        "stretched latent": torch.equal(latent_too, inverse_frequencies(6, 5000.0, llama3)),
        "another": not torch.equal(stretched, wanted),
    }


class StackStub(torch.nn.Module):
    """A stub of Mamba's layers, which need kernels that are not here."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()


def others() -> dict[str, bool]:
    """BERT's, T5's and Mamba's rotary embeddings, the models otherwise of GPT's layers or of none."""
    # BERT's own specs can be imported with Transformer Engine only: a stub with the one name of them.
    stub = types.ModuleType("megatron.core.models.bert.bert_layer_specs")
    stub.bert_layer_local_spec = None  # type: ignore[attr-defined]
    sys.modules[stub.__name__] = stub
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mt_megatron.layers.rope.scaling import inverse_frequencies, rope_scaling_of

    class Bert(BertModel):  # type: ignore[misc]
        def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
            return "b1ss"  # it asks for Transformer Engine's version

    of, spec = config(**STRETCHED["llama3"][0]), get_gpt_layer_local_spec()
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding
    rope: dict[str, Any] = {"position_embedding_type": "rope"}
    models = {
        "bert": Bert(of, 0, spec, VOCABULARY, TOKENS, add_binary_head=False, **rope),
        # A later stage: the first fails upstream, looking for learned positions.
        "t5": T5Model(of, of, spec, spec, VOCABULARY, TOKENS, pre_process=False, **rope),
        "mamba": MambaModel(of, ModuleSpec(module=StackStub), VOCABULARY, TOKENS, **rope),
    }
    wanted = inverse_frequencies(SIZE, 10000.0, rope_scaling_of(of))
    return {name: torch.equal(model.rotary_pos_emb.inv_freq, wanted) for name, model in models.items()}


def refusals() -> dict[str, str]:
    from mt_megatron.errors import ConfigError

    linear = STRETCHED["linear"][0]
    tries: dict[str, Callable[[], Any]] = {
        "two bases": lambda: gpt(config(rotary_base=7000.0), rotary_base=5000),
        "twice": lambda: gpt(config(**linear), seq_len_interpolation_factor=2.0),
        "twice by argument": lambda: gpt(config(**linear), rope_scaling=True),
        "no positions": lambda: gpt(config(**linear), position_embedding_type="none"),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = ""
        except ConfigError as error:
            found[name] = str(error)
    return found


def off() -> bool:
    """The same frequencies as upstream's expression gives, to the bit, and the same object's class."""
    rotary = gpt(config(), rotary_base=5000).rotary_pos_emb
    upstream = 1.0 / (5000 ** (torch.arange(0, SIZE, 2, dtype=torch.float32) / SIZE))
    return torch.equal(rotary.inv_freq, upstream) and type(rotary).__name__ == "RotaryEmbedding"


def everything() -> dict[str, Any]:
    start()
    return {
        "logits": {name: difference(*both) for name, both in STRETCHED.items()},
        "not stretched": {
            name: difference({}, rope) for name, (_, rope) in STRETCHED.items() if name != "rope"
        },
        "without factor": without_factor(),
        "packed": packed(**STRETCHED["yarn"][0]),
        "packed interleaved": packed(rotary_interleaved=True),
        "arguments": arguments(),
        "base": bases(),
        **others(),
        "refusals": refusals(),
        "off": off(),
    }
