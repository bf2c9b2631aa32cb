"""Generators of schedules.

capped       list scheduling under a cap of activations, by simulated times
catalogue    ``generate``: a schedule by name
looping      1F1B, interleaved, depth-first, hybrid and breadth-first, over Megatron-Core's placement
v_shape      ZBV and DualPipeV, over the V placement
zero_bubble  ZB-H1 and its interleaved form: weight gradients split off and deferred
"""
