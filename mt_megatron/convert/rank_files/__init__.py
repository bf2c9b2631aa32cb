"""Checkpoints of one file a rank: mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt.

arguments  Megatron-LM's args to options and back
names      names in a rank's model chunk to those of the whole model
optimizer  optimizer of a rank, its tensors by number
reader     whole tensors from rank files
writer     rank files for any layout; order of the tensors in Megatron's modules
"""
