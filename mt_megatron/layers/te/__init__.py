"""Layers under the names of Megatron-Core's Transformer Engine classes, where that package is absent.

Upstream's layer specs name these classes. Each is Megatron-Core's local layer, as patched here, with the
other's constructor and parameter names, so that a model from either spec computes the same.

classes    which class stands under which name: the one table
names      the module and version that these stand in for
linears    column, row and replicated linears, and the linear with a norm before it
grouped    the linears of a rank's experts
attention  core attention
others     norm, random states, recomputation, the recipe's settings
"""
