"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

self_attention      MLASelfAttention
rope                queries and keys from a part without position and a rotated part
recompute           latents recomputed in backward instead of saved
replicated_linear   down projection that every tensor-parallel rank holds whole
spec                MLA in Megatron-Core's layer specs
checks              unsupported configurations and arguments
transformer_config  MLATransformerConfig of Megatron-Core 0.12
"""
