"""Distributed checkpoints (torch_dist), without process groups.

metadata   the .metadata file, unpickled to plain descriptions
flattened  flattened tensors of a distributed optimizer
reader     whole tensors from any layout; offsets of tensor data in an archive of torch.save
writer     files and metadata for any layout
"""
