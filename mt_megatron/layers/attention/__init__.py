"""Core attention on torch's scaled_dot_product_attention.

core              DotProductAttention for Megatron's layer specs; the causal kernel for a CPU
packed_sequences  packed documents: borders, positions, mask, attention
context_parallel  attention over a sequence that is divided over ranks: blocks, merge, all-gather or ring
"""
