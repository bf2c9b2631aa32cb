"""Output layer and vocabulary-parallel cross-entropy in one: full logits are never stored.

cross_entropy         the autograd function
cross_entropy_blocks  logits, softmax and gradients of a block of tokens
cross_entropy_panels  the same in fp32 on a CPU
"""
