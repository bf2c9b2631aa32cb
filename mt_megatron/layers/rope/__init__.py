"""Rotary position embedding.

embedding  Megatron's RotaryEmbedding with the frequencies of a configuration
scaling    frequencies of stretched positions: linear, Llama 3.1, YaRN
rotation   the rotation in three passes over memory
"""
