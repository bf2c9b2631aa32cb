"""How the tensors of published models map to Megatron's, one module per family.

Each has ``table(config)``: the name in an unsharded Megatron model, as its modules name it, to the
``TensorRow`` that says which published tensors it is packed from. Experts have the names of
``SequentialMLP``, which checkpoints of every kind of experts share.

* ``decoder``: the rows that families have in common.
* ``llama``, ``mixtral``, ``deepseek``, ``qwen``: the families.
"""
