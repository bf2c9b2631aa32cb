"""Output layer and vocabulary-parallel cross-entropy in one: full logits are never stored.

cross_entropy         the autograd function; the blocks in fp32 on a CPU
cross_entropy_blocks  logits, softmax and gradients of a block of tokens
"""
