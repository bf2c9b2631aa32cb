"""Layers that take the place of Megatron-Core's own when it is patched; they build on the seams alone.

linear.py      tensor-parallel linears over the GEMM seam
norm.py        RMSNorm and LayerNorm without Apex or Transformer Engine
attention.py   core attention on torch's scaled_dot_product_attention
swiglu.py      SwiGLU where it is not compiled
"""
