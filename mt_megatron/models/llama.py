"""The Llama family: dense decoders with grouped-query attention and SwiGLU (arXiv:2407.21783)."""

from __future__ import annotations

from mt_megatron.models.decoder import DecoderFamily
from mt_megatron.seams import family


class LlamaFamily(DecoderFamily):
    """Published by Hugging Face as ``LlamaForCausalLM``."""

    published = "llama"


family.register("llama", LlamaFamily())
