"""The optimizer.

fused_adam        Adam and the distributed optimizer on torch's fused AdamW
expert_optimizer  an optimizer for experts on every rank under expert parallelism
param_groups      one order of parameter groups on all pipeline stages
"""
