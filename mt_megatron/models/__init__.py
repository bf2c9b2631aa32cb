"""Model families, the meaning of their shapes, and presets.

llama.py       the Llama family: what to build, a batch, the loss, the cost, Hugging Face's names
weights.py     one row of a table between two naming schemes
parameters.py  exact parameter counts by closed form
presets/       published shapes and their defaults, one YAML file each
"""
