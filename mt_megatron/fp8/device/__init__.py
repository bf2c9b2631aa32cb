"""Casts by a device's own kernels.

casts         choice of what casts on a device
triton_casts  magnitudes, casts and transpositions, one pass each, by Triton
"""
