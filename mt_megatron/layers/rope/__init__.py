"""Rotary position embedding.

embedding  Megatron's RotaryEmbedding with the frequencies of a configuration
scaling    scaled frequencies: linear, Llama 3.1, YaRN
yarn       YaRN's formulas
rotation   the rotation in three passes over memory
"""
