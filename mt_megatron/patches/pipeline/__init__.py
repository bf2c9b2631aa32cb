"""Pipeline schedules as data in the place of Megatron-Core's, and stages laid out as a V.

schedules  the function that chooses a schedule
transfers  upstream's transfers over another transport
v_shape    first and last stage on one rank
"""
