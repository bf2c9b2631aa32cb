"""The Qwen2.5 and Qwen3 family, dense and with experts (arXiv:2412.15115, arXiv:2505.09388)."""

from __future__ import annotations

from mt_megatron.models.decoder import DecoderFamily
from mt_megatron.seams import family


class QwenFamily(DecoderFamily):
    """Published by Hugging Face as ``Qwen2ForCausalLM``, ``Qwen3ForCausalLM`` and ``Qwen3MoeForCausalLM``."""

    published = "qwen"


family.register("qwen", QwenFamily())
