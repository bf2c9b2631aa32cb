"""Defects of Megatron-Core 0.9.0.

wrong_results      wrong numbers without a message
gradient_buckets   shared parameters and gathers of the gradient buffer's buckets
encoder_decoder    copies of T5's embeddings on two pipeline stages
weights            marks and values of weights that are not drawn
blends             samples of weighted blends
loopback_listener  a listener on all interfaces, pinned to 127.0.0.1
"""
