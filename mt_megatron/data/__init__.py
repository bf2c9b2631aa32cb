"""Data: text becomes Megatron's indexed files, and those become micro-batches.

loader/   from indexed files to micro-batches
prepare/  from text to indexed files: the commands ``preprocess`` and ``prepare``
"""
