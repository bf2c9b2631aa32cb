"""Modules that Megatron-Core 0.9.0 lacks or cannot run everywhere, model families, and presets.

linear.py      tensor-parallel linears over the GEMM seam
norm.py        RMSNorm and LayerNorm without Apex or Transformer Engine
attention.py   core attention on torch's scaled_dot_product_attention
swiglu.py      SwiGLU where it is not compiled
llama.py       the Llama family: what to build, a batch, the loss, the cost, Hugging Face's names
weights.py     one row of a table between two naming schemes
parameters.py  exact parameter counts by closed form
presets/       published shapes and their defaults, one YAML file each
"""
