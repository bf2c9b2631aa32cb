"""Layers that take the place of Megatron-Core's own when it is patched; they build on the seams alone.

linear.py      tensor-parallel linears over the GEMM seam
norm.py        RMSNorm and LayerNorm without Apex or Transformer Engine
attention.py   core attention on torch's scaled_dot_product_attention
context_parallel.py           the same over a sequence that is spread over ranks
context_parallel_blocks.py    its kernels: some queries, some keys, and how to merge
context_parallel_exchange.py  how keys and values travel: all-gather or a ring
swiglu.py      SwiGLU where it is not compiled
transformer_fields.py         the fields that TransformerConfig gains
transformer_checks.py         what they have to fulfil
mla_transformer_config.py     MLATransformerConfig
block_spec.py                 which layer has experts, and which attention
shared_experts.py             the expert that every token passes
mlp_width.py                  how wide an MLP is built
router.py            the router of a mixture of experts, from the parts beside it: router_choice.py (scores,
                     groups, ties), router_capacity.py, router_losses.py, router_passes.py (what counts),
                     router_telemetry.py, router_tracker.py; expert_bias.py is the bias that evens their load
"""
