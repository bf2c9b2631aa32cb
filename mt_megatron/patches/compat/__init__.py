"""Megatron-Core 0.9.0 with newer libraries and with Megatron-LM.

torch_numpy         newer torch and numpy
zarr_v3             the ``zarr`` checkpoint format on zarr 3
megatron_lm         Megatron-LM's ``megatron.training`` and ``megatron.legacy``
dataset_helpers     compiled dataset helpers, without a compiler
loader_workers      DataLoader workers survive the signals to save and end
checkpoint_writers  checkpoint writers are threads, not forked processes
padded_vocabulary   checkpoints load into a model with another padded vocabulary
transformer_engine  its version where it is absent
"""
