"""Data: text becomes Megatron's indexed files, and those become micro-batches.

loader/   from indexed files to micro-batches
prepare/  from text to indexed files: ``mt-megatron preprocess`` for any amount, ``mt-megatron prepare`` for a small corpus
"""
