"""Published weights <-> Megatron's, as tables.

* ``table``: whole tensors packed and unpacked by a family's conversion table.
"""
