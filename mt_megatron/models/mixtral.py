"""The Mixtral family: Llama with experts in every layer, of which a token uses two (arXiv:2401.04088)."""

from __future__ import annotations

from mt_megatron.models.decoder import DecoderFamily
from mt_megatron.seams import family


class MixtralFamily(DecoderFamily):
    """Published by Hugging Face as ``MixtralForCausalLM``."""

    published = "mixtral"


family.register("mixtral", MixtralFamily())
