"""Ranks of a run: which rank computes which part of a model and of a batch.

rank_layout       coordinates and process groups of ranks, computed from sizes
stage_order       the way of a token through the ranks: a loop or a V
group_names       names of Megatron-Core's process groups, by parallel axes
stage_layers      transformer layers of each pipeline stage and virtual stage; the text of a layout
gradient_buckets  places of parameters in the buffer of gradients that data-parallel ranks share
context_parallel  tokens of a sequence that a context-parallel rank holds
"""
