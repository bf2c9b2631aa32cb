"""The DeepSeek-V2 and V3 family: latent attention, many small experts, some shared, dense first layers
(arXiv:2405.04434, arXiv:2412.19437).
"""

from __future__ import annotations

from mt_megatron.models.decoder import DecoderFamily
from mt_megatron.seams import family


class DeepSeekFamily(DecoderFamily):
    """Published by Hugging Face as ``DeepseekV2ForCausalLM`` and ``DeepseekV3ForCausalLM``."""

    published = "deepseek"


family.register("deepseek", DeepSeekFamily())
