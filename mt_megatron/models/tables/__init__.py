"""How the tensors of published models map to Megatron's, one module per family.

Each has ``table(config)``: the name in an unsharded Megatron model, as its modules name it, to the
``TensorRow`` that says which published tensors it is packed from. Experts have the names of
``SequentialMLP``, which checkpoints of every kind of experts share.

decoder   rows that families have in common
fused     names of norms in Transformer Engine's layers
llama     the Llama family
mixtral   the Mixtral family
deepseek  the DeepSeek-V2 and V3 family
qwen      the Qwen2.5 and Qwen3 family
"""
