"""Layers that take the place of Megatron-Core's own when it is patched; they build on the seams alone.

linear.py      tensor-parallel linears over the GEMM seam
norm.py        RMSNorm and LayerNorm without Apex or Transformer Engine
attention.py   core attention on torch's scaled_dot_product_attention
context_parallel.py           the same over a sequence that is spread over ranks
context_parallel_blocks.py    its kernels: some queries, some keys, and how to merge
context_parallel_exchange.py  how keys and values travel: all-gather or a ring
swiglu.py      SwiGLU where it is not compiled
"""
