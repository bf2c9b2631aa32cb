"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

self_attention      MLASelfAttention: latents, rotation, recomputation in backward, checks
spec                MLA in Megatron-Core's layer specs; the replicated down projection
transformer_config  MLATransformerConfig of Megatron-Core 0.12
"""
