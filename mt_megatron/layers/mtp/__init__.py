"""Multi-token prediction after DeepSeek-V3.

layer   the modules that predict tokens beyond the next one
model   the modules in a GPTModel: shared embedding, forward, losses of the depths
spec    specs from the layer spec of the model
checks  unsupported combinations
"""
