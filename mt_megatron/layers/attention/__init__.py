"""Core attention on torch's scaled_dot_product_attention.

core                       DotProductAttention for Megatron's layer specs
causal                     causal attention on a CPU from batched matrix products
packed                     packed documents: borders, positions, mask, attention
context_parallel           attention over a sequence that is divided over ranks
context_parallel_blocks    its kernels: attention of query blocks to key blocks, and their merge
context_parallel_exchange  its communication: all-gather or ring of keys and values
"""
