"""Which module these classes stand in for, and of which version."""

MODULE = "megatron.core.extensions.transformer_engine"
"""Whose names these are; classes bear it, so that pickle finds them there."""

VERSION = "1.9.0"
"""Of the Transformer Engine whose classes these are shaped like: the first with grouped linears, and the last
before BERT's layer spec changes its mask."""
